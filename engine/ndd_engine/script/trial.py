"""A trial of a script that was not written for this program: its change is made without an edit, in scratch copies.

Settings that can be switched while the script trains are measured in one process, the others in pairs of processes, as
in `trial.trial`. The original run, its folder and its working directory are not touched.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.reader import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.text import printable
from ndd_engine.trial.outcome import differences, flatten
from ndd_engine.trial.pausing import alone
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_engine.trial.trial import Tell, Trial
from ndd_watch.changes import KINDS, SWITCHED

from .command import Command
from .contained import check_contained, check_ranks
from .edits import Edit, edit_of
from .sides import ScriptSides
from .starting import Start, is_start, started

# A configuration of ours stands for the script: only the changed keys and those that were seen matter.
_STANDS_IN = ("workload.size=tiny", "run.epochs=1", "loader.workers=0", "log.profile_every_s=0.0")

# Without workers, they have no meaning.
_NEED_WORKERS = frozenset({"loader.prefetch", "loader.persistent"})


def command_of(run: RunDir) -> Command:
    """The command of the run of a script. Raises UsageError if its file is damaged."""
    try:
        body = json.loads(run.command.read_bytes())
        return Command(tuple(map(str, body["command"])), Path(str(body["folder"])))
    except OSError as error:
        raise UsageError(f"{printable(str(run.command))} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{printable(str(run.command))} is damaged") from None


def script_drafts(request: TrialRequest, seen: dict[str, Any]) -> tuple[Draft, Draft]:
    """(script as it is, with the change), as configurations. seen: the run's recorded configuration.

    Raises UsageError for a change that needs an edit of the script, ConfigError for invalid values.
    """
    check_ranks(request.base.name, seen)
    if not request.sets:
        raise UsageError(
            f"no settings to try: add --arg, --env, or --set KEY=VALUE with one of {', '.join(sorted(KINDS))}"
        )
    settings = tuple(item for item in request.sets if not is_start(item))
    for item in settings:
        key = item.partition("=")[0].strip()
        if key not in KINDS:
            allowed = ", ".join(sorted(KINDS))
            raise UsageError(
                f"--set {printable(item)}: this cannot be changed without editing the script; allowed: {allowed}"
            )
    known = {
        key: value
        for key, value in flatten({k: v for k, v in seen.items() if k != "script"}).items()
        if key in KINDS
    }
    was = tuple(f"{key}={_text(value)}" for key, value in known.items() if value is not None)
    kept = was
    if known.get("loader.workers") and any(item.replace(" ", "") == "loader.workers=0" for item in settings):
        kept = tuple(item for item in was if item.partition("=")[0] not in _NEED_WORKERS)
    base, change = read(None, (*_STANDS_IN, *was)), read(None, (*_STANDS_IN, *kept, *settings))
    if settings and base.resolve() == change.resolve():
        raise UsageError(
            f"{', '.join(settings)}: already so in {request.base.name}; there is nothing to compare"
        )
    return base, change


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_script(request: TrialRequest, seen: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`changes_of`. Raises UsageError also for what a scratch copy does not contain, unless the request allows it."""
    found = changes_of(request, seen)
    if not request.outside:
        check_contained(seen)
    return found


def changes_of(request: TrialRequest, seen: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values. Raises UsageError if the request cannot be tried."""
    base, change = script_drafts(request, seen)
    return {**differences(base.resolve(), change.resolve()), **start_of(request).changed}


def edit_for(request: TrialRequest, run: RunEvent) -> Edit:
    """The edit of the script that makes the change. Raises UsageError if a file cannot be read."""
    script = run.config.get("script") or {}
    main = Path(script["main"]) if script.get("main") else None
    changed = {key: new for key, (_, new) in changes_of(request, run.config).items() if not is_start(key)}
    found = edit_of(run.config, changed, run.device, main)
    return replace(found, advice=(*found.advice, *start_of(request).advice))


def start_of(request: TrialRequest) -> Start:
    """How the candidate is started. Raises UsageError for a wrong name."""
    assert request.base.run is not None
    return started(command_of(request.base.run), request.sets, os.environ)


def tried_run(request: TrialRequest) -> RunState:
    """The recorded state of the script's run, which has a `run`.

    Raises UsageError if the script has not trained.
    """
    assert request.base.run is not None
    found = load_state(request.base.run)
    if found.run is None:
        raise UsageError(f"{request.base.name} has not trained: there is nothing to compare with")
    return found


def run_script_trial(
    request: TrialRequest, seen: dict[str, Any], device: str, tell: Tell, stop: threading.Event | None = None
) -> TrialEvent:
    """Measure a change of a script; as `trial.run_trial`. seen, device: of the recorded run."""
    assert request.base.run is not None
    base, change = script_drafts(request, seen)
    command = command_of(request.base.run)
    command.check()

    def waiting(text: str) -> None:
        tell(Progress(text, 0.0, request.budget_s))

    with alone(device, waiting, stop), ScriptTrial(request, base, change, tell, stop, command) as trial:
        return trial.run()


class ScriptTrial(Trial):
    """A trial of a script in progress."""

    def __init__(
        self,
        request: TrialRequest,
        base: Draft,
        change: Draft,
        tell: Tell,
        stop: threading.Event | None,
        command: Command,
    ) -> None:
        self._command = command
        super().__init__(request, base, change, tell, stop)

    def _learn_difference(self) -> None:
        super()._learn_difference()
        self._start = start_of(self.request)
        self._changed += self._start.changed

    def _switches(self) -> bool:
        return SWITCHED.issuperset(self._changed)

    def _make_sides(self, base: Base) -> ScriptSides:
        _, config = self._configs
        wanted = {key: _of(config, key) for key in self._changed if key not in self._start.changed}
        made, request = super()._make_sides(base), self.request
        return ScriptSides(
            self._command, self._start, wanted, request.outside, base, request.sets, request.budget_s, made._left_s,
            made._tick,
        )  # fmt: skip


def _of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
