"""A trial of a script that was not written for this program: its change is made without an edit, in scratch copies.

Settings that can be switched while the script trains are measured in one process, the others, and other arguments or
variables, in pairs of processes. Each rank of a script that has several is led by its own gate; they train the same
steps. The original run, its folder and its working directory are not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ndd_engine.child import ChildError, Json, StoppedError, Tick, Wire, answers, cause_of_exit, tail_of
from ndd_engine.config.loading import COMMAND_LINE, explain, meant, put, shown
from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError, Problem, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.text import printable
from ndd_engine.trial.blocks import common
from ndd_engine.trial.outcome import (
    Parts,
    Progress,
    SideFacts,
    TrialRequest,
    changed_items,
    compare_losses,
    flatten,
    period_of,
    recurs,
    same_steps,
    sentence,
    undecided,
)
from ndd_engine.trial.sides import SHARED_ENVIRONMENT, SIDES, Budget, SideFailedError, Sides, Tell, Trained
from ndd_engine.trial.trial import Trial, alone
from ndd_watch import LINKED, SITE
from ndd_watch.changes import ARGUMENTS, AT_START, OF_SCRIPTS, needs_losses

from .command import (
    OFFLINE,
    SCRATCH,
    UNWRITTEN,
    Command,
    becoming,
    check_contained,
    command_of,
    environment,
    in_copy,
    linked,
    refused_in,
    scratch,
)
from .edits import Edit, digest, edit_of, first_steps, refusal
from .follower import Follower

ARGUMENT, VARIABLE = "arg.", "env."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# NAME=VALUE as a word of its own, as in `python train.py lr=0.1`.
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*=")
# The value of an argument that the command does not have.
DEFAULT = "default"


@dataclass(frozen=True)
class ChangedStart:
    """A changed start. changed: key -> (old, new) value."""

    command: Command
    environment: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]

    @property
    def read_back(self) -> dict[str, str]:
        """The values that the process which trains should have, by key; not those of options of a launcher."""
        words = self.command.words
        script = max(
            (place for place, word in enumerate(words) if word.endswith(".py") or word == "-m"), default=0
        )
        own = replace(self.command, words=words[:script])
        return {
            key: new
            for key, (_, new) in self.changed.items()
            if key.startswith(VARIABLE) or with_argument(own, key[len(ARGUMENT) :], new)[1] != new
        }

    @property
    def advice(self) -> list[str]:
        """How a user makes the change."""
        found = []
        if any(key.startswith(VARIABLE) for key in self.changed):
            found.append(
                "set in the environment: " + " ".join(f"{k}={v}" for k, v in self.environment.items())
            )
        if any(key.startswith(ARGUMENT) for key in self.changed):
            found.append(f"start it as: {self.command.text}")
        return [printable(text) for text in found]


def is_start(item: str) -> bool:
    """Whether "key=value" changes the start."""
    return item.lstrip().startswith((ARGUMENT, VARIABLE))


def started(command: Command, sets: Sequence[str], environment: Mapping[str, str]) -> ChangedStart:
    """The start with the changes among `sets`. environment: of this process. Raises UsageError for a wrong name."""
    more: dict[str, str] = {}
    changed: dict[str, tuple[str, str]] = {}
    for item in sets:
        if not is_start(item):
            continue
        key, found, value = (part.strip() for part in item.partition("="))
        kind, name = key[: len(ARGUMENT)], key[len(ARGUMENT) :]
        if not found or not _NAME.fullmatch(name):
            option = "--arg" if kind == ARGUMENT else "--env"
            raise UsageError(f"{option} {printable(item[len(ARGUMENT) :])}: expected NAME=VALUE")
        if kind == ARGUMENT:
            command, old = with_argument(command, name, value)
        else:
            old, more[name] = environment.get(name, "not set"), value
        if old == value:
            raise UsageError(f"{printable(name)} is {printable(value)} already; there is nothing to compare")
        changed[key] = old, value
    return ChangedStart(command, more, changed)


def with_argument(command: Command, name: str, value: str) -> tuple[Command, str]:
    """(the command with an argument, its old value): --NAME VALUE, --NAME=VALUE, -NAME VALUE or NAME=VALUE.

    An argument that the command does not have is added at its end, in the way in which its others are written.
    """
    words = list(command.words)
    for place, word in enumerate(words):
        option, found, old = word.partition("=")
        if _same(option, name) and (found or option.startswith("-")):
            if found:
                words[place] = f"{option}={value}"
            elif place + 1 < len(words):
                old, words[place + 1] = words[place + 1], value
            else:
                continue
            return replace(command, words=tuple(words)), old
    script = max((place for place, word in enumerate(words) if word.endswith(".py")), default=0)
    rest = words[script + 1 :]
    plain = any(map(_PLAIN.match, rest)) and not any(word.startswith("-") for word in rest)
    added = (f"{name}={value}",) if plain else (f"--{name}", value)
    return replace(command, words=(*words, *added)), DEFAULT


def _same(option: str, name: str) -> bool:
    return option.lstrip("-").replace("_", "-") == name.replace("_", "-")


# Without workers, they have no meaning.
_NEED_WORKERS = frozenset(key for key, kind in ARGUMENTS.items() if kind.needs_workers)
# Observing is the same on both sides: every step is timed by phase, none is profiled, and windows fit into runs.
PLAIN = {"NDD_WATCH_SHARE": "0", "NDD_WATCH_PROFILE_S": "0", "NDD_WATCH_WINDOW_S": "0.25"}
POLL_S = 0.1
# Seconds of the first look for the end of an epoch; each further one is twice as long.
EPOCH_S = 0.5
# The same of the first look for a period of the steps.
PERIOD_S = 0.3
# Seconds in which a launcher notices the end of a rank and says why.
LAUNCHER_S = 5.0
_GUARD = str(Path(__file__).with_name("guard.py"))
# What torchrun says of a rank that was killed: its number, the signal.
_KILLED = re.compile(r"^ +rank +: (\d+) [^[]*?: Signal (\d+) \((\w+)\) received", re.MULTILINE)


def values_of(request: TrialRequest, seen: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the script as it is, and with the change, by key. seen: the run's recorded configuration.

    Raises UsageError for a change that needs an edit of the script, ConfigError for invalid values.
    """
    if not request.sets:
        raise UsageError(
            f"no settings to try: add --arg, --env, or --set KEY=VALUE with one of {', '.join(sorted(OF_SCRIPTS))}"
        )
    settings = tuple(item for item in request.sets if not is_start(item))
    for item in settings:
        key = item.partition("=")[0].strip()
        if key not in OF_SCRIPTS:
            close = meant(key, list(OF_SCRIPTS))
            allowed = close or f"allowed: {', '.join(sorted(OF_SCRIPTS))}"
            why = "unknown" if close else "this cannot be changed without editing the script"
            raise UsageError(f"--set {printable(item)}: {why}; {allowed}")
    kept, both = request.base.sets, (*request.base.sets, *settings)
    base, change = _checked((*_known(seen, kept), *kept)), _checked((*_known(seen, both), *both))
    if settings and base == change:
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


def _checked(items: Sequence[str]) -> dict[str, Any]:
    """The values of all keys in the sections that a script may have. Raises ConfigError."""
    table: dict[str, Any] = {key.partition(".")[0]: {} for key in sorted(OF_SCRIPTS)}
    problems = [problem for item in items if (problem := put(table, item)) is not None]
    found: dict[str, Any] = {}
    for section, values in table.items():
        model: Any = Config.model_fields[section].annotation
        try:
            found |= flatten({section: model.model_validate(values).model_dump(mode="json")})
        except ValidationError as error:
            for wrong in error.errors():
                message, allowed = explain(wrong)
                key, value = ".".join((section, *map(str, wrong["loc"]))), wrong["input"]
                text = shown(value) if wrong["loc"] else None
                problems.append(Problem(COMMAND_LINE, key, message, text, allowed))
    if problems:
        raise ConfigError(problems)
    return found


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
    return {**changed_items(*values_of(request, seen)), **start_of(request).changed}


def edit_for(request: TrialRequest, run: RunEvent, *trials: TrialEvent) -> Edit:
    """The edit of the script that makes the change, if it trained in a scratch copy during one of the trials.

    Otherwise it is described, with the reason. Raises UsageError if a file cannot be read.
    """
    advice = start_of(request).advice
    found = _planned(request, run.config, run.device)
    if found.path is None or digest(found) in [trial.edit for trial in trials]:
        return replace(found, advice=(*found.advice, *advice))
    same = [trial for trial in trials if sorted(trial.sets) == sorted(request.sets)]
    why = next((trial.edit_refused for trial in same if trial.edit_refused), "")
    why = why or "it has not trained in a scratch copy: measure the change again"
    words = _planned(request, run.config, run.device, described=True)
    return replace(words, advice=(*words.advice, *advice, f"no edit is shown: {why}"))


def _planned(request: TrialRequest, seen: dict[str, Any], device: str, described: bool = False) -> Edit:
    script = seen.get("script") or {}
    main = Path(script["main"]) if script.get("main") else None
    changed = {key: new for key, (_, new) in changes_of(request, seen).items() if not is_start(key)}
    return edit_of(seen, changed, device, main, described)


def start_of(request: TrialRequest) -> ChangedStart:
    """How the candidate is started. Raises UsageError for a wrong name, or if the command cannot be started again."""
    assert request.base.run is not None
    command = command_of(request.base.run)
    command.check_repeatable()
    return started(command, request.sets, os.environ)


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
    values = values_of(request, seen)
    command = command_of(request.base.run)
    command.check()

    def waiting(text: str) -> None:
        tell(Progress(text, 0.0, request.budget_s))

    parallel = seen.get("parallel")
    ranks = int(parallel["ranks"]) if isinstance(parallel, Mapping) and parallel.get("ranks") else 1
    with alone(device, waiting, stop, ranks=ranks, what=request.title):
        sides = ScriptSides(request, command, values, Budget(request.budget_s, tell, stop))
        with Trial(request, sides) as trial:
            event = trial.run()
            if event.verdict == "faster" and sides.has_to_compare(event):
                sides.close()
                try:
                    event = sides.with_losses(event)
                except StoppedError:  # what was measured counts
                    pass
            # What is tried on top of other changes is edited together with them.
            if event.verdict != "faster" or event.in_effect is False or request.base.sets:
                return event
            sides.close()
            try:
                return sides.with_edit(event, _planned(request, seen, device))
            except (UsageError, StoppedError) as error:  # a file is gone, or Ctrl-C: what was measured counts
                return replace(event, edit_refused=str(error))


class ScriptProcess(Trained):
    """The command in a scratch copy of its folder. sides: the changes of each side that it can be.

    outside: whether it may write outside that copy. edited: texts of files of the folder that it has instead; expected:
    the changes that it has to make by itself then, by key. given: arguments and variables to be read back, by key.
    seeded: whether a script that sets no seed gets one.
    """

    def __init__(
        self,
        command: Command,
        sides: Sequence[Mapping[str, Any]],
        extra: Mapping[str, str],
        but: Path,
        outside: bool,
        edited: Mapping[Path, str] | None = None,
        expected: Mapping[str, Any] | None = None,
        given: Mapping[str, str] | None = None,
        seeded: bool = False,
    ) -> None:
        super().__init__()
        self._command = command
        self._temporary = tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._log = self.folder / "log"
        # Of several ranks: what their steps consist of.
        self._follower: Follower | None = None
        self._parts, self._measuring = Parts(), False
        address = str(self.folder / "s")
        try:
            (self.folder / "ranks").mkdir()
            work = scratch(command.folder, self.folder, but)
            if edited:
                _edit(edited, command.folder.resolve(), work)
            own = {**({"PYTHONPATH": command.path} if command.path else {}), **extra}
            values = given or {}
            copied, more = in_copy(command, work, {**os.environ, **own, **values})
            read_back = {key: more.pop(key, text) for key, text in values.items()}
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(address)
            self._listener.listen(128)
            spec = {
                "socket": address, "sides": [dict(side) for side in sides], "expected": dict(expected or {}),
                "given": read_back, "seeded": seeded,
            }  # fmt: skip
            made = environment(
                self.folder / "ranks",
                SITE,
                {**os.environ, **SHARED_ENVIRONMENT, **OFFLINE, **UNWRITTEN, **own, **more},
            )
            kept = {LINKED: "" if outside else linked(self.folder, command.folder)}
            guard = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(self.folder)]
            guarded = [*guard, *becoming(copied.words, 0)]
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    guarded, cwd=work, env={**made, **PLAIN, **kept, "NDD_WATCH_TRY": json.dumps(spec)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                )  # fmt: skip
        except OSError as error:
            self._temporary.cleanup()
            raise ChildError("failed", f"its process cannot be started: {error.strerror}") from None
        except BaseException:
            self._temporary.cleanup()
            raise

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Wait until all ranks train, and for their first steps."""
        deadline = time.monotonic() + limit_s
        self._listener.settimeout(POLL_S)
        tick("waiting for the first step")
        ranks: dict[int, Wire] = {}
        size = 1
        while len(ranks) < size:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                told = _first_line(connection)
                rank, size = int(told["rank"]), int(told["ranks"])
                handle = connection.detach()
                ranks[rank] = Wire(handle, os.dup(handle), partial(self._lost, rank, size))
                self.wires = list(ranks.values())  # to be closed
                if told["here"] is not None and told["here"][1] < size:
                    raise ChildError(
                        "failed", "its ranks are on several machines, and a trial leads those of one"
                    )
                continue
            tick(None)
            if refused_in(self.folder):
                raise self._gone()
            if self._process.poll() is not None:
                raise self._gone()
            if time.monotonic() > deadline:
                raise ChildError("late", _absent(ranks, size))
        self.wires = [ranks[rank] for rank in sorted(ranks)]
        if size > 1:
            folder, machine = self.folder / "ranks", detect(use_torch=False)
            self._follower = Follower(RunDir(self.folder), self._command, machine, self._parts.hear, folder)
        tick("warming up")
        found = answers(self.wires, deadline - time.monotonic(), tick)
        self._know([one["ready"] for one in found])

    def _ask(self, command: Json, limit_s: float, tick: Tick) -> list[Json]:
        found = super()._ask(command, limit_s, tick)
        if refused_in(self.folder):  # a process that the script has started
            raise self._gone()
        if self._follower is not None:
            self._follower.poll()
            if command.get("measured") and not self._measuring:
                self._measuring = True
                self._parts.clear()  # of the warm-up and the first run
        return found

    def _know(self, found: Sequence[Json]) -> None:
        super()._know(found)
        if self._measuring and len(self.both) == 1:  # otherwise they are those of both sides
            self.facts.parts_ns = self._parts.per_step()

    def _lost(self, rank: int, ranks: int) -> ChildError:
        """Why a rank has closed its connection, as far as its launcher says so."""
        if ranks == 1:
            return self._gone()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(LAUNCHER_S) == 0:
                return self._gone()
        with contextlib.suppress(OSError):
            for killed, number, name in _KILLED.findall(self._log.read_text(errors="replace")):
                if int(killed) == rank:
                    usual = ", usually by the kernel's OOM killer" if name == "SIGKILL" else ""
                    kind = "oom" if usual else "failed"
                    return ChildError(kind, f"its process was killed by signal {number}{usual}")
        return ChildError("failed", f"its process has ended: {tail_of(self._log)}")

    def _gone(self) -> ChildError:
        """Why the command has ended, or has to."""
        if told := refused_in(self.folder):
            return ChildError("failed", told)
        if self._process.wait():
            return cause_of_exit(self._process, self._log)
        return ChildError("ended", "the script ended")

    def close(self) -> None:
        """End the processes with everything that they started, and remove what they wrote."""
        self._listener.close()
        for wire in self.wires:
            wire.close()  # a rank exits when its connection closes
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        # The guard ends what the command has started.
        self._process.terminate()
        self._process.wait()
        self._temporary.cleanup()


def _compared(base: SideFacts, change: SideFacts, changed: Sequence[str]) -> tuple[str, str]:
    losses = same_steps(base, change)
    return compare_losses(losses[0], losses[1], changed, (base.items_per_step, change.items_per_step))


def _edit(edited: Mapping[Path, str], folder: Path, work: Path) -> None:
    """Put other texts of files into a copy of a folder. Raises ChildError for a file that is not in it."""
    for path, text in edited.items():
        place = work / os.path.relpath(path.resolve(), folder)
        if not place.resolve().is_relative_to(work):
            raise ChildError("failed", f"{printable(str(path))} is not in the folder that is copied")
        place.write_text(text, encoding="utf-8")


def _first_line(connection: socket.socket) -> Json:
    """What a rank says when it connects; {} if it has ended."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := connection.recv(1)):
            raise ChildError("failed", "its process ended before the first step")
        line += part
    found: Json = json.loads(line)
    return found


def _absent(ranks: Mapping[int, Wire], size: int) -> str:
    missing = [str(rank) for rank in range(size) if rank not in ranks]
    if not ranks:
        return "it did not begin to train within the time limit"
    return f"rank {', '.join(missing)} did not begin to train within the time limit"


class ScriptSides(Sides):
    """The sides of a script. values: the settings of both."""

    def __init__(
        self,
        request: TrialRequest,
        command: Command,
        values: tuple[dict[str, Any], dict[str, Any]],
        budget: Budget,
    ) -> None:
        super().__init__(budget)
        self._command, self._start, self._values = command, start_of(request), values
        self._changes = {key: new for key, (_, new) in changed_items(*values).items()}
        keys = (item.partition("=")[0].strip() for item in request.base.sets)
        kept = {key: values[0][key] for key in keys if key in OF_SCRIPTS}
        self._sides: tuple[dict[str, Any], dict[str, Any]] = (kept, {**kept, **self._changes})
        self.changed = [*self._changes, *self._start.changed]
        self.by_epochs = "loader.persistent" in self._changes and all(one["loader.workers"] for one in values)
        self._outside = request.outside
        self.doubt = "the baseline was started only once: is the script seeded?"
        # Of the first process of the script as it is.
        self._usual: SideFacts | None = None
        run = request.base.run
        self._but = run.path.parent if run is not None else Path(os.devnull)

    @property
    def switches(self) -> bool:
        return OF_SCRIPTS.keys() >= set(self.changed) and AT_START.isdisjoint(self.changed)

    def never_happens(self) -> str:
        known = self.facts[1].settings
        useless = {key for key in self.changed if key in known and known[key][2] is False}
        if "precision.amp" in useless or (useless == set(self.changed) and useless <= ARGUMENTS.keys()):
            return "nothing is measured, since the change cannot take effect in this script"
        missing = self.by_epochs and not all(facts.steps_per_epoch for facts in self.facts)
        why = "no second epoch began in the first steps, and the change acts only between epochs; raise --budget"
        return why if missing else ""

    def period(self, index: int, step_s: float) -> int:
        key = "run.gc_every_steps"
        own = max(int(self._values[index][key]), 1) if key in self._changes else 1
        return common((own, period_of(self.facts[index].lengths_us)))

    def compare_items(self) -> str:
        base, change = self.facts
        if base.item is None or change.item is None or base.item == change.item:
            return ""
        if len(base.item) == len(change.item) == 1 and base.of_tokens and change.of_tokens:
            for facts in self.facts:
                if not facts.unit and facts.item is not None:
                    facts.items_per_step, facts.unit = facts.items_per_step * facts.item[0], "token"
            return ""
        shapes = [" x ".join(map(str, facts.item or ())) or "a single number" for facts in (change, base)]
        return (
            f"items are not comparable: one of the candidate is {shapes[0]}, one of the baseline {shapes[1]}"
        )

    def started(self, index: int) -> ScriptProcess:
        command = self._start.command if index else self._command
        more = {**self.environment(index), **(self._start.environment if index else {})}
        given = self._start.read_back if index else {}
        return ScriptProcess(command, [self._sides[index]], more, self._but, self._outside, given=given)

    def has_to_compare(self, trial: TrialEvent) -> bool:
        """Whether the change may change numbers, and the trial does not tell whether it does."""
        unknown = trial.loss == "not comparable" or (trial.loss == "differs" and bool(self.doubt))
        return needs_losses(self._changes) and unknown and not self.compare_items()

    def with_losses(self, trial: TrialEvent) -> TrialEvent:
        """The result of a trial, with the first losses of two starts, which have the same seed."""
        tick, prepare_s = (
            self.budget.tick("starting both sides for their losses"),
            self.facts[0].prepare_s or 0.0,
        )

        def trained(index: int) -> SideFacts:
            command = self._start.command if index else self._command
            more = {**self.environment(index), **(self._start.environment if index else {})}
            return first_steps(
                ScriptProcess(command, [self._sides[index]], more, self._but, self._outside, seeded=True),
                prepare_s, tick,
            )  # fmt: skip

        try:
            base, change = trained(0), trained(1)
            loss, text = _compared(base, change, self.changed)
            if loss == "differs" and _compared(base, trained(0), ())[0] != "same":
                loss, text = "not comparable", "two starts of the unchanged script differ in their losses"
        except ChildError as error:
            loss, text = "not comparable", f"a start for the losses failed: {printable(str(error))}"
        found = replace(trial, loss=loss, loss_text=text)
        return replace(found, text=sentence(found))

    def with_edit(self, trial: TrialEvent, edit: Edit) -> TrialEvent:
        """The result of a trial, with whether the edit that makes the change trains as the change did."""
        if edit.path is None:
            return trial
        start, made = self._start, {key: self._changes[key] for key in edit.made}

        def process(
            edited: Mapping[Path, str], expected: Mapping[str, Any], change: Mapping[str, Any]
        ) -> ScriptProcess:
            more = {**self.environment(1), **start.environment}
            return ScriptProcess(start.command, [change], more, self._but, self._outside, edited, expected)

        tick = self.budget.tick("trying the edit in a scratch copy")
        why = refusal(edit, made, process, self.facts[0].prepare_s or 0.0, tick)
        return replace(trial, edit="" if why else digest(edit), edit_refused=why)

    def started_for_both(self) -> ScriptProcess:
        return ScriptProcess(self._command, self._sides, self.environment(0), self._but, self._outside)

    def prepare(self, index: int) -> float:
        """As for other sides. Losses that differ between two starts of the unchanged script say nothing."""
        known = bool(self.facts[index].lengths_us)
        found = super().prepare(index)
        if not known and not self._find_period(index):
            self.close(index)
            self.open(index)
            found = super().prepare(index)
        if self.by_epochs:
            self._find_epoch(index)
        if not index:
            now = self._learned(index, "warming up the baseline")
            if self._usual is None:
                self._usual = now
            elif len({tuple(losses) for losses in same_steps(now, self._usual)}) > 1:
                for facts in self.facts:
                    facts.losses, facts.loss_steps = [], []
                self.note = "two starts of the unchanged script differ in their losses (is it seeded?)"
            else:
                self.doubt = ""
        return found

    def open_one(self) -> tuple[float, float]:
        known = bool(self.facts[0].lengths_us)
        found = super().open_one()
        if not known:
            ended = not self._find_period(0)
            lengths = self.facts[0].lengths_us
            if ended:
                self.close()
                found = super().open_one()
            for facts in self.facts:
                facts.lengths_us = lengths
        return found

    def _find_period(self, index: int) -> bool:
        """Train until the period of the steps is known, or until there is none as far as can be seen.

        Returns whether the script still trains; otherwise it has ended.
        """
        stage, facts, left_s = (
            f"looking at the steps of {SIDES[index]}",
            self.facts[index],
            self.budget.left_s,
        )
        spent_s, part_s = 0.0, PERIOD_S
        while undecided(facts.lengths_us):
            limit_s = left_s / (8 if recurs(facts.lengths_us) else 20)
            if spent_s >= limit_s:
                break
            try:
                spent_s += self.train(index, 1 << 40, stage, until_s=min(part_s, limit_s - spent_s))[0]
            except SideFailedError as error:
                if error.kind != "ended":
                    raise
                return False
            part_s *= 2
            facts.lengths_us = self._learned(index, stage).lengths_us
        return True

    def _find_epoch(self, index: int) -> None:
        """Train until the second pass over the data has begun, which tells how many steps an epoch has."""
        stage, facts = f"finding the length of an epoch of {SIDES[index]}", self.facts[index]
        limit_s, spent_s, part_s = self.budget.left_s / 4, 0.0, EPOCH_S
        while not facts.steps_per_epoch and spent_s < limit_s:
            spent_s += self.train(index, 1 << 40, stage, until_s=min(part_s, limit_s - spent_s))[0]
            part_s *= 2
            facts.steps_per_epoch = self._learned(index, stage).steps_per_epoch
