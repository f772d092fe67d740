"""A process of a trial: a real run of the engine, which trains run by run of a block on command, for one side or both.

`python -m ndd_engine.trial.side IN OUT FOLDER`, see `ndd_engine.child`. The training loop runs once and never returns:
`Blocks` replaces the step and blocks on the pipe at the end of each run of a block. Loader workers are stopped
meanwhile (SIGSTOP), so they neither disturb the other side nor prefetch: a run starts with as many batches ready as the
previous one ended with. `switching.SwitchingBlocks` does so for both sides in one process, `side_ranks.RankBlocks` on
each rank of a side with several.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndd_engine.child import ChildError, ChildServer, Pipe, draft_of
from ndd_engine.config import anywhere, to_toml
from ndd_engine.errors import NddError
from ndd_engine.hardware.host import usable_threads
from ndd_engine.record.events import Event, Json, MarkEvent, RunEvent, SettingEvent, StageEvent
from ndd_engine.text import printable

from .parts import Parts
from .peaks import peak_memory

if TYPE_CHECKING:
    import torch

    from ndd_engine.measure.clock import PhaseClock
    from ndd_engine.run.run import Run
    from ndd_engine.train.prepare import Prepared
    from ndd_engine.train.training_run import Training
    from ndd_engine.workloads.base import Batch

    from .side_ranks import Others

# Names the folder of the trial's compiler caches, in the environment of its sides.
CACHES = "NDD_TRIAL_CACHES"
# The number of ranks of a side, so that they import torch at the same time.
RANKS = "NDD_TRIAL_RANKS"
# Maximum seconds until the system assigns an orphan to another parent.
ORPHANED_S = 0.2
# Steps of a run that never ends by itself.
ENDLESS = 1 << 60
# Number of first losses that are compared between the two sides.
LOSSES = 10


def not_in_effect(settings: Mapping[str, list[Any]]) -> list[str]:
    """The requested settings that are not in effect, with the reason. settings: as in SideFacts."""
    return [
        f"{name} is {applied} instead of {requested} ({why})"
        for name, (requested, applied, in_effect, why) in settings.items()
        if in_effect is False
    ]


@dataclass
class SideFacts:
    """What was measured of one side. Seconds and bytes.

    prepare_s: from the imports to the first step, compile_s of it compiling; warmup_s, warmup_steps: of the slower
    first steps. step_s, items_per_s: of the measured blocks. peak_bytes: allocated on the GPU; on the CPU, resident
    in the process and its loader workers; peaks: of each process of the side. settings: by name [requested, applied,
    in effect, how that was verified]. losses: of the first steps.

    ranks: number of ranks. With several, peak_bytes and reserved_bytes are those of the rank with the most, rank_peaks
    those of each, losses are means over the ranks, and findings what the diagnosis found. parts_ns: of a step, means
    over the ranks, see `parts`; {} without a window or if one process has both sides.
    """

    device: str = ""
    device_name: str = ""
    threads: int | None = None
    items_per_step: int = 0
    steps_per_epoch: int = 0
    prepare_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    warmup_steps: int = 0
    step_s: float | None = None
    items_per_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    ranks: int = 1
    rank_peaks: list[int] = field(default_factory=list)
    parts_ns: dict[str, float] = field(default_factory=dict)
    findings: list[Json] = field(default_factory=list)

    def to_dict(self) -> Json:
        """For the trial event."""
        body = asdict(self)
        body["not_in_effect"] = not_in_effect(body.pop("settings"))
        return body


class Side(ChildServer):
    """The process of one side."""

    # A failed run holds memory that the other side may need.
    keeps_serving = False
    one_line = True

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        # With stopped workers in the group, the kernel sends SIGHUP when the trial dies; clean up first.
        signal.signal(signal.SIGHUP, lambda *_: None)
        # For the sockets of loader processes, which reuse it if it exists before they start.
        self._sockets = multiprocessing.util.get_temp_dir()
        self.facts = SideFacts()
        self.parts = Parts()
        # Of a side of several ranks.
        self.others: Others | None = None
        self._parent = os.getppid()
        # Loader workers that may be stopped.
        self.workers: tuple[int, ...] = ()
        self.commands = {
            "choose": lambda command: {"config": chosen(command, self.pipe.tell)},
            "prepare": self._train,
        }

    def serve(self) -> None:
        # Takes seconds: import while the other side prepares.
        if (size := int(os.environ.get(RANKS, "1"))) > 1:
            from .side_ranks import Others

            self.others = Others(self, size)
        import ndd_engine.train.prepare  # noqa: F401

        super().serve()

    def clean_up(self) -> None:
        """End the other ranks; remove the caches if the trial was killed."""
        if self.others is not None:
            self.others.close()
        self.end_workers()
        caches = os.environ.get(CACHES, "")
        if caches and Path(caches).is_dir() and self._orphaned():
            shutil.rmtree(caches, ignore_errors=True)

    def end_workers(self) -> None:
        """Loader workers end by themselves once their parent is gone, unless they are stopped."""
        signal_to(self.workers, signal.SIGCONT)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _orphaned(self) -> bool:
        """Whether the trial has ended. The pipe of a killed process closes shortly before its children are orphans."""
        deadline = time.monotonic() + ORPHANED_S
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getppid() != self._parent

    def _train(self, command: Json) -> None:
        from ndd_engine.train.prepare import prepare_run

        begin = time.perf_counter()
        training = self.open(command)
        prepared = prepare_run(training.opened)
        prepared.sampler.stop()
        blocks = self._blocks(command, training, prepared, begin)
        vars(prepared.loop.stepper)["step"] = blocks
        prepared.loop.total_steps, prepared.loop.passes = ENDLESS, None
        try:
            prepared.loop.run()
        except NddError:
            raise
        except Exception as error:
            from ndd_engine.train.failures import explain

            if (cause := self._cause()) is not None:
                raise cause from error
            loop = prepared.loop
            failure = explain(
                error, loop.step + 1, prepared.clock.current, prepared.config, prepared.device, loop.stepper
            )
            text = failure.text + (f" ({failure.where})" if failure.where else "")
            raise ChildError("oom" if failure.of_memory else "failed", printable(text)) from error

    def _error(self, error: BaseException) -> Json:
        lost = not isinstance(error, (NddError, ChildError))
        return super()._error((self._cause() if lost else None) or error)

    def _cause(self) -> ChildError | None:
        """After a failure: that of another rank, which was the first."""
        return None if self.others is None else self.others.cause()

    def open(self, command: Json) -> Training:
        """Open the run of this process; of several ranks, as the first of them."""
        from ndd_engine.run.run import Run
        from ndd_engine.train.request import RunRequest
        from ndd_engine.train.training_run import Training

        draft = draft_of(command)
        ranks = draft.resolve().parallel.ranks
        if ranks > 1:
            from .side_ranks import lead

            return lead(self, command, ranks)
        training = Training(RunRequest(draft, self.folder / "runs", probes=False))
        Run.open(training, self.heard)
        return training

    def heard(self, _t: float, event: Event) -> None:
        """Hear an event of the run."""
        self.hear(self.facts, event)

    def _blocks(self, command: Json, training: Training, prepared: Prepared, begin: float) -> Blocks:
        """change: of a command, the candidate, if the process has both sides."""
        run = training.run
        if training.ranks is not None:
            from .side_ranks import RankBlocks

            return RankBlocks(self, run, prepared, begin)
        if "change" not in command:
            return Blocks(self, run, prepared, begin)
        from .switching import SwitchingBlocks

        return SwitchingBlocks(self, run, prepared, begin, command)

    def hear(self, facts: SideFacts, event: Event) -> None:
        """Collect facts from the run's events, on the recorder's thread."""
        if isinstance(event, StageEvent):
            self.pipe.tell(event.text)
        elif isinstance(event, SettingEvent):
            facts.settings[event.name] = [event.requested, event.applied, event.in_effect, event.verified]
        elif isinstance(event, MarkEvent) and event.kind == "compile":
            facts.compile_s = float(event.data["seconds"])
        elif isinstance(event, RunEvent):
            facts.device, facts.device_name, facts.threads = event.device, event.device_name, event.threads
            facts.items_per_step, facts.steps_per_epoch = event.items_per_step, event.steps_per_epoch
        else:
            self.parts.hear(event)


class Blocks:
    """Replaces Stepper.step: trains the steps of a run of a block, then waits for the next command.

    A run is timed from the start of its first step to the start of the step after its last one. It includes everything
    between steps: waiting for data, recording, evaluations, checkpoints, the start of an epoch.
    """

    def __init__(self, side: Side, run: Run, prepared: Prepared, begin: float) -> None:
        self._side, self._run, self._loop = side, run, prepared.loop
        self._device: torch.device = prepared.device
        self._step = prepared.loop.stepper.step
        self._begin_s, self._ready = begin, False
        self._losses: list[torch.Tensor] = []
        self._calls = self._first = self._last = 0
        self._least = 0
        self._until: float | None = None
        self._begin = 0.0
        self._measuring = False

    def __call__(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> torch.Tensor | None:
        if self._calls == self._last or self._over():
            self._end_run()
        if self._calls == self._first:
            self._begin = self._now()
        self._calls += 1
        loss = self._train(batches, clock, step)
        if len(self._losses) < LOSSES and loss is not None:
            self._losses.append(loss.detach().clone())
        return loss

    def _train(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> torch.Tensor | None:
        return self._step(batches, clock, step)

    def _over(self) -> bool:
        """Whether the time of the run is over."""
        return self._until is not None and self._calls >= self._least and time.perf_counter() >= self._until

    def _end_run(self) -> None:
        side = self._side
        end = self._now()
        self._end_window()
        if not self._ready:
            self._ready = True
            self._before(end - self._begin_s)
            answer: Json = {"ready": self._facts()}
        else:
            answer = {"seconds": end - self._begin, "steps": self._calls - self._first}
        side.workers = self._all_workers()
        signal_to(self._workers(), signal.SIGSTOP)  # they would prefetch and disturb the other side
        self._begin_run(self._asked(answer))
        signal_to(self._workers(), signal.SIGCONT)
        self._loop.slept(time.perf_counter() - end)

    def _end_window(self) -> None:
        """Record the run: the pause that follows belongs to no window."""
        self._loop._window()

    def _asked(self, answer: Json) -> Json:
        """Answer, and wait for the next command to train."""
        pipe = self._side.pipe
        pipe.send(answer)
        while (command := pipe.receive())["do"] != "train":
            pipe.send(self._facts())
        return command

    def _before(self, prepare_s: float) -> None:
        """Called once before the first run. prepare_s: seconds to prepare."""
        self._side.facts.prepare_s = prepare_s

    def _workers(self) -> tuple[int, ...]:
        """The loader workers of the run."""
        seen = self._loop.batches.seen
        return seen.workers if seen is not None else ()

    def _all_workers(self) -> tuple[int, ...]:
        """The loader workers of the process, stopped ones included."""
        return self._workers()

    def _begin_run(self, command: Json) -> None:
        """lead: untimed steps first. until_s: end after so many seconds, but not before `least` steps. within: keep the
        timed steps within one epoch."""
        lead, steps = int(command["lead"]), int(command["steps"])
        if command["within"]:
            lead += self._stay_within_epoch(lead + steps)
        self._calls, self._first, self._last = 0, lead, lead + steps
        seconds = command["until_s"]
        if seconds is None and not self._measuring:
            self._measuring = True
            self._run.recorder.flush()
            self._side.parts.clear()  # of the warm-up
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._least = lead + int(command["least"])

    def _stay_within_epoch(self, steps: int) -> int:
        """Go to the next epoch if this one has not more than so many steps left. Returns further lead steps."""
        loop = self._loop
        if loop.batches.own is not None:
            return 0  # the place in other orders does not follow from the step
        done = loop.step % loop.steps_per_epoch
        if done + steps < loop.steps_per_epoch:
            return 0
        loop.step += loop.steps_per_epoch - done - 1  # makes this step the last one of the epoch
        return 1

    def _facts(self) -> Json:
        self._run.recorder.flush()
        facts = self._side.facts
        facts.losses = [float(loss) for loss in self._losses]
        facts.peak_bytes, facts.reserved_bytes = peak_memory(self._device)
        facts.parts_ns = self._side.parts.per_step() if self._measuring else {}
        return asdict(facts)

    def _now(self) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def signal_to(workers: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to loader workers that are still running."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker, number)


def chosen(command: Json, tell: Callable[[str], None]) -> str:
    """The configuration as TOML, with absolute paths and the size that is best on this machine."""
    from ndd_engine.hardware.detect import detect
    from ndd_engine.train.probes.autosize import decide

    draft = draft_of({**command, "overrides": None})
    asked = draft.resolve()
    machine = detect(asked.run.device)
    ranks = asked.parallel.ranks
    threads = max(usable_threads(machine.host) // ranks, 1) if ranks > 1 else None
    config, _ = decide(draft, machine, tell, threads)
    return to_toml(anywhere(config))


if __name__ == "__main__":
    Side.main(sys.argv[1:])
