"""The data behind the screens: a run of this process, a run read from its record, and the runs folder."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ndd_profiles
from ndd_console.words.blocks import Block, Text, moment
from ndd_console.words.machine import machine_blocks
from ndd_console.words.run import metrics_text
from ndd_engine.config import DEFAULT_WORKLOAD, WORKLOADS, read
from ndd_engine.errors import INTERRUPTED, NddError, UsageError, error_text
from ndd_engine.files import write_text
from ndd_engine.record.events import Event, RunEvent, TrialEvent
from ndd_engine.record.file import RunReader, damage_text
from ndd_engine.record.rundir import RunDir, all_runs
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.channel import send
from ndd_engine.run.run import Run
from ndd_engine.text import MISSING, number, printable
from ndd_engine.train.started_ranks import StartedRanks

from .folder import StartRow, folder_rows
from .log_tail import LogTail
from .trials import RunTrials, ScriptTrials

# "interrupt" is a stop by Ctrl-C: the run ends as interrupted, with that exit status.
Action = Literal["pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "interrupt", "kill"]
# Time limit for a run to pause, which it does after its current step or evaluation.
PAUSE_PATIENCE_S = 60.0
# And until its record says that it has resumed. Until then the next trial would take the old pause for its own.
RESUME_PATIENCE_S = 10.0
DAMAGE_SHOWN_S = 20.0

RUN_COLUMNS = ("run", "status", "step", "best", "started", "workload")
TITLES = {
    "antispoof": "spoofed or real speech: SE-ResNet on spectrograms",
    "chartext": "character-level text model: the Python manual",
    "finetune": "small language model on few long texts",
    "eeg": "EEG forecasters: the next sample of each channel",
    "summarise": "pointer-generator that summarises source code",
}


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. started_t: unix seconds. best: "loss 1.482", empty without an evaluation.

    training_s: seconds of training, evaluations and checkpoints included; None if unknown.
    """

    name: str
    workload: str
    status: str
    step: int
    total_steps: int
    started_t: float | None
    best: str
    live: bool
    training_s: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The cells of its row in a list, in the order of `RUN_COLUMNS`."""
        step = number(self.step) + (f" of {number(self.total_steps)}" if self.total_steps else "")
        # A run that ended while it was prepared has no steps; where a script ends is not known.
        step = step if self.step or self.total_steps else "not started"
        return self.name, self.status, step, self.best or MISSING, moment(self.started_t), self.workload


class RunSource:
    """A run on the screen. name: as for `ndd-console attach`. script: whether it is a script that is only observed."""

    owned: bool  # whether this process trains the run; leaving the screen then needs a decision

    def __init__(self, directory: RunDir) -> None:
        self.directory = directory
        self.name = directory.name
        self.script = directory.command.exists()
        self._trials = ScriptTrials(self) if self.script else RunTrials(self)

    @property
    def live(self) -> bool:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """The latest state, without blocking; the same object while nothing changes."""
        raise NotImplementedError

    def command(self, action: Action) -> None:
        """Send a command to the run. Never blocks or raises; failures are reported by `notice`."""
        raise NotImplementedError

    def notice(self) -> str | None:
        """A short message for the user, such as "the run did not answer"."""
        raise NotImplementedError

    def log(self) -> LogTail:
        return LogTail(self.directory.console_log)

    def trials(self) -> RunTrials:
        return self._trials

    def close(self) -> None:
        """Stop a running trial and resume the run. Whoever opened the run closes it."""
        self._trials.close()

    def _request(self, action: str) -> None:
        """Pause or resume the run, which resumes by itself if this process dies. Raises UsageError."""
        raise NotImplementedError

    @contextmanager
    def paused(self, report: Callable[[str], None], stop: threading.Event) -> Iterator[None]:
        """Inside, the run is paused. report: tells what is waited for. stop: set to stop waiting. Raises UsageError."""
        from ndd_engine.trial.outcome import Base
        from ndd_engine.trial.trial import to_pause

        if not self.script:
            to_pause(Base.of_run(self.directory), self.directory.path.parent, others=False)
        if not self.live:
            yield
            return
        before = self.snapshot().status
        self._request("pause")
        try:
            report("waiting for the run to pause after its step")
            deadline = time.monotonic() + PAUSE_PATIENCE_S
            while self.live and not stop.is_set() and self.snapshot().status != "paused":
                if time.monotonic() > deadline:
                    raise UsageError(f"the run did not pause within {PAUSE_PATIENCE_S:.0f} s")
                stop.wait(0.05)
            yield
            if self.live and self.snapshot().status != "paused":
                report("the run was resumed during the measurement and disturbed it: measure again")
        finally:
            with suppress(UsageError):  # it has ended
                self._request("resume")
                deadline = time.monotonic() + RESUME_PATIENCE_S
                while before != "paused" and self.live and self.snapshot().status == "paused":
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)

    def keep(self, trial: TrialEvent) -> None:
        from ndd_engine.trial.trial import record_trial

        record_trial(self.directory, trial)


class EngineSource(RunSource):
    """A run that this process trains, or a script that it observes."""

    owned = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self._refused: str | None = None
        super().__init__(run.directory)

    @property
    def live(self) -> bool:
        return not self.run.finished.is_set()

    def snapshot(self) -> Snapshot:
        return self.run.recorder.snapshot()

    def command(self, action: Action) -> None:
        control, self._refused = self.run.control, None
        if action in ("interrupt", "kill"):
            command = "stop" if action == "interrupt" else "kill"
            control.request(command, INTERRUPTED, "interrupted")
            return
        try:
            control.request(action, "stopped from the console")
        except UsageError as error:
            self._refused = str(error)

    def notice(self) -> str | None:
        return self._refused or self.run.recorder.trouble

    def keep(self, trial: TrialEvent) -> None:
        if isinstance(self.run.executor, StartedRanks):  # one of the ranks writes the record
            super().keep(trial)
        else:
            self.run.put(trial)

    def _request(self, action: str) -> None:
        # Directly: the folder may not support sockets.
        self.run.control.request(action, holder=os.getpid())


class AttachedSource(RunSource):
    """A run of another process or a finished run, read from its record in a thread.

    listener: called in that thread with every new event.
    """

    owned = False

    def __init__(
        self,
        directory: RunDir,
        period_s: float = 0.25,
        listener: Callable[[float, Event], None] | None = None,
    ) -> None:
        super().__init__(directory)
        self._reader = RunReader(directory, listener)
        self._notice: str | None = None
        self._failure = ""
        self._damage_until: float | None = None
        self._poll()
        self._stop = threading.Event()
        self._period_s = period_s
        self._thread = threading.Thread(target=self._follow, name="ndd-follow", daemon=True)
        self._thread.start()

    @property
    def live(self) -> bool:
        return not self.snapshot().final

    def snapshot(self) -> Snapshot:
        return self._reader.snapshot()

    def command(self, action: Action) -> None:
        # In a thread, since a hanging run must not block the screen.
        threading.Thread(target=self._send, args=(action,), name="ndd-send", daemon=True).start()

    @property
    def damaged(self) -> int:
        return self._reader.damaged

    @property
    def trouble(self) -> str:
        """Why the record cannot be read, or ""."""
        why = self._failure or self._reader.trouble
        return f"events.jsonl cannot be read: {why}" if why else ""

    def notice(self) -> str | None:
        """Why a command failed or the record cannot be read; damage is reported once, for DAMAGE_SHOWN_S."""
        if self._notice or self.trouble:
            return self._notice or self.trouble
        if self.damaged and self._damage_until is None:
            self._damage_until = time.monotonic() + DAMAGE_SHOWN_S
        shown = self._damage_until is not None and time.monotonic() < self._damage_until
        return damage_text(self.damaged) if shown else None

    def close(self) -> None:
        super().close()
        self._stop.set()

    def _request(self, action: str) -> None:
        send(self.directory.control_socket, action, holder=os.getpid())

    def _send(self, action: Action) -> None:
        try:
            send(self.directory.control_socket, action)
            self._notice = None
        except UsageError as error:
            self._notice = str(error)

    def _follow(self) -> None:
        while not self._stop.wait(self._period_s):
            self._poll()

    def _poll(self) -> None:
        try:
            self._reader.poll()
            self._failure = ""
        except Exception as error:  # noqa: BLE001  the screen must not stand still without a reason
            self._failure = printable(error_text(error))


class HomeFolder:
    """The contents of the home screen."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: dict[str, str] = {}  # run -> why it is not read completely, as of the last `runs`

    def machine(self) -> list[Block]:
        from ndd_engine.hardware.detect import detect

        return list(machine_blocks(detect(use_torch=False)))

    def runs(self) -> list[RunRow]:
        rows: list[RunRow] = []
        damaged: dict[str, str] = {}
        for run in all_runs(self.root):
            try:
                row, damage = run_row(run)
            except Exception as error:  # noqa: BLE001  one run must not hide the others
                row, damage = RunRow(run.name, "", "unreadable", 0, 0, None, "", False), error_text(error)
            rows.append(row)
            damaged |= {run.name: damage} if damage else {}
        self.damaged = damaged
        return sorted(rows, key=lambda row: row.started_t or 0.0, reverse=True)

    def compare(self, a: str, b: str) -> tuple[list[Block], Path | None]:
        """Both runs compared, and the folder of their code if it is the same."""
        from ndd_console.words.comparison import two_compared, unlike_text
        from ndd_engine.trial.compare import compare as compared

        comparison = compared(RunDir(self.root / a), RunDir(self.root / b))
        unlike = unlike_text(comparison)
        blocks = [*([Text(unlike, "warn")] if unlike else []), *two_compared(comparison)]
        folder, other = (code_folder(recorded.run) for recorded in (comparison.a, comparison.b))
        return blocks, folder if folder == other else None

    def report(self, name: str) -> Path:
        from ndd_console.render import html
        from ndd_console.report.model import load
        from ndd_console.report.sections import page

        directory = RunDir(self.root / name)
        write_text(directory.report, html.render(page(load(directory))))
        return directory.report

    def workloads(self) -> list[StartRow]:
        return [*folder_rows(), *built_in_rows()]


def code_folder(run: RunEvent | None) -> Path | None:
    """Where the code of a run is; None for a built-in workload and for a run of another machine."""
    if run is None or run.host != socket.gethostname():
        return None
    script, workload = run.config.get("script"), run.config.get("workload")
    if isinstance(script, dict):
        folder = script.get("folder")
    else:
        paths = workload.get("path") if isinstance(workload, dict) else None
        folder = paths[0] if isinstance(paths, list) and paths else None
    return Path(folder) if isinstance(folder, str) and folder else None


def run_row(directory: RunDir) -> tuple[RunRow, str]:
    """The entry of a run, from its record, and why that is not read completely, or ""."""
    reader = RunReader(directory)
    reader.poll()
    snapshot = reader.snapshot()
    run = snapshot.run
    best, workload, changed_t = "", "", None
    with suppress(NddError):  # of a run without a record, from its configuration
        workload = read(directory.config).workload if run is None else run.workload
    with suppress(OSError):
        changed_t = directory.path.stat().st_mtime
    if snapshot.best is not None:
        name, value = next(iter(snapshot.best.metrics.items()), ("", None))
        best = "" if value is None else metrics_text({name: value})
    row = RunRow(
        name=directory.name,
        workload=workload,
        status="unreadable" if reader.trouble else snapshot.status,
        step=snapshot.step,
        total_steps=run.total_steps if run else 0,
        # A run that failed in preparation never started to train.
        started_t=snapshot.started_t or snapshot.preparing_t or changed_t,
        best=best,
        live=not snapshot.final,
        training_s=snapshot.elapsed_s,
    )
    return row, reader.trouble or damage_text(reader.damaged)


def built_in_rows() -> list[StartRow]:
    """The built-in workloads with their sizes; the default one comes first."""
    rows = []
    for name in sorted(WORKLOADS, key=lambda name: (name != DEFAULT_WORKLOAD, name)):
        sizes = ndd_profiles.read("workloads", name).get("sizes")
        rows.append(StartRow(name, TITLES[name], f"sizes {', '.join(sizes)}" if sizes else "one size"))
    return rows
