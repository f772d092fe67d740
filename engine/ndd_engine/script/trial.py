"""A trial of a script that was not written for this program: its change is made from outside, in scratch copies.

Settings that can be switched while the script trains are measured in one process, the others in pairs of processes, as
in `trial.trial`. The original run, its folder and its working directory are not touched.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable
from ndd_engine.trial.outcome import differences, flatten
from ndd_engine.trial.pausing import alone
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_engine.trial.trial import Tell, Trial
from ndd_watch.changes import KINDS, SWITCHED

from .command import Command
from .sides import ScriptSides

# A configuration of ours stands for the script: only the changed keys and those that were seen matter.
_STANDS_IN = ("workload.size=tiny", "run.epochs=1", "loader.workers=0", "log.stacks_hz=0.0")


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

    Raises UsageError for a change that cannot be made from outside, ConfigError for invalid values.
    """
    if not request.sets:
        raise UsageError(f"no settings to try: add --set KEY=VALUE; from outside: {', '.join(sorted(KINDS))}")
    for item in request.sets:
        key = item.partition("=")[0].strip()
        if key not in KINDS:
            allowed = ", ".join(sorted(KINDS))
            raise UsageError(
                f"--set {printable(item)}: this cannot be changed in a script from outside; allowed: {allowed}"
            )
    known = {
        key: value
        for key, value in flatten({k: v for k, v in seen.items() if k != "script"}).items()
        if key in KINDS
    }
    was = tuple(f"{key}={_text(value)}" for key, value in known.items() if value is not None)
    base, change = read(None, (*_STANDS_IN, *was)), read(None, (*_STANDS_IN, *was, *request.sets))
    if base.resolve() == change.resolve():
        raise UsageError(
            f"{', '.join(request.sets)}: already so in {request.base.name}; there is nothing to compare"
        )
    return base, change


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_script(request: TrialRequest, seen: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values. Raises UsageError if the request cannot be tried."""
    base, change = script_drafts(request, seen)
    return differences(base.resolve(), change.resolve())


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

    def _switches(self) -> bool:
        return SWITCHED.issuperset(self._changed)

    def _make_sides(self, base: Base) -> ScriptSides:
        _, config = self._configs
        wanted = {key: _of(config, key) for key in self._changed}
        made = super()._make_sides(base)
        return ScriptSides(
            self._command, wanted, base, self.request.sets, self.request.budget_s, made._left_s, made._tick
        )


def _of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
