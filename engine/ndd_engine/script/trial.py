"""A trial of a script that was not written for this program: its change is made without an edit, in scratch copies.

Settings that can be switched while the script trains are measured in one process, the others in pairs of processes, as
in `trial.trial`. The original run, its folder and its working directory are not touched.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.text import printable
from ndd_engine.trial.outcome import differences, flatten
from ndd_engine.trial.pausing import alone
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_engine.trial.trial import Tell, Trial
from ndd_watch.changes import AT_START, OF_SCRIPTS

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
            f"no settings to try: add --arg, --env, or --set KEY=VALUE with one of {', '.join(sorted(OF_SCRIPTS))}"
        )
    settings = tuple(item for item in request.sets if not is_start(item))
    for item in settings:
        key = item.partition("=")[0].strip()
        if key not in OF_SCRIPTS:
            allowed = ", ".join(sorted(OF_SCRIPTS))
            raise UsageError(
                f"--set {printable(item)}: this cannot be changed without editing the script; allowed: {allowed}"
            )
    kept, both = request.base.sets, (*request.base.sets, *settings)
    base = read(None, (*_STANDS_IN, *_known(seen, kept), *kept))
    change = read(None, (*_STANDS_IN, *_known(seen, both), *both))
    if settings and base.resolve() == change.resolve():
        raise UsageError(
            f"{', '.join(settings)}: already so in {request.base.name}; there is nothing to compare"
        )
    return base, change


def _known(seen: dict[str, Any], sets: Sequence[str]) -> Iterator[str]:
    """What was seen of the script, as far as it goes with the settings."""
    alone = any(item.replace(" ", "") == "loader.workers=0" for item in sets)
    for key, value in flatten({name: body for name, body in seen.items() if name != "script"}).items():
        if key in OF_SCRIPTS and value is not None and not (alone and value and key in _NEED_WORKERS):
            yield f"{key}={_text(value)}"


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
        return OF_SCRIPTS.keys() >= set(self._changed) and AT_START.isdisjoint(self._changed)

    def _make_sides(self, base: Base) -> ScriptSides:
        before, config = self._configs
        wanted = {key: config.value(key) for key in self._changed if key not in self._start.changed}
        keys = [item.partition("=")[0].strip() for item in self.request.base.sets]
        kept = {key: before.value(key) for key in keys if key in OF_SCRIPTS}
        made, request = super()._make_sides(base), self.request
        return ScriptSides(
            self._command, self._start, kept, wanted, request.outside, base, request.sets, request.budget_s,
            made._left_s, made._tick,
        )  # fmt: skip
