"""One side of a trial: a real run of the engine in a child process, which trains block by block on command.

`python -m ndd_engine.trial.side IN OUT FOLDER`, see `ndd_engine.child`. The training loop runs once and never returns:
`Blocks` replaces the step and blocks on the pipe at the end of each block. Loader workers are stopped meanwhile
(SIGSTOP), so they neither disturb the other side nor prefetch: a block starts with as many batches ready as the
previous one ended with.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndd_engine.child import ChildError, ChildServer, Pipe, draft_of
from ndd_engine.config import anywhere, to_toml
from ndd_engine.errors import NddError
from ndd_engine.hardware.host import resident_peak
from ndd_engine.record.events import Event, Json, MarkEvent, RunEvent, SettingEvent, StageEvent
from ndd_engine.text import printable

if TYPE_CHECKING:
    import torch

    from ndd_engine.train.prepare import Prepared
    from ndd_engine.train.run import Run

# Names the folder of the trial's compiler caches, in the environment of its sides.
CACHES = "NDD_TRIAL_CACHES"
# Maximum seconds until the system assigns an orphan to another parent.
ORPHANED_S = 0.2
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
        self._parent = os.getppid()
        self.workers: tuple[int, ...] = ()
        self.commands = {
            "choose": lambda command: {"config": chosen(command, self.pipe.tell)},
            "prepare": self._train,
        }

    def serve(self) -> None:
        # Takes seconds: import while the other side prepares.
        import ndd_engine.train.prepare  # noqa: F401

        super().serve()

    def clean_up(self) -> None:
        """Loader workers end by themselves once their parent is gone, unless they are stopped."""
        self.signal_workers(signal.SIGCONT)
        shutil.rmtree(self._sockets, ignore_errors=True)
        caches = os.environ.get(CACHES, "")
        if caches and Path(caches).is_dir() and self._orphaned():
            shutil.rmtree(caches, ignore_errors=True)

    def _orphaned(self) -> bool:
        """Whether the trial has ended. The pipe of a killed process closes shortly before its children are orphans."""
        deadline = time.monotonic() + ORPHANED_S
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getppid() != self._parent

    def _train(self, command: Json) -> None:
        from ndd_engine.train.prepare import prepare_run
        from ndd_engine.train.run import Run, RunRequest

        begin = time.perf_counter()
        run = Run.open(RunRequest(draft_of(command), self.folder / "runs", probes=False), self._hear)
        prepared = prepare_run(run)
        prepared.sampler.stop()
        blocks = Blocks(self, run, prepared, begin)
        vars(prepared.loop.stepper)["step"] = blocks
        prepared.loop.total_steps, prepared.loop.passes = 1 << 60, None
        try:
            prepared.loop.run()
        except NddError:
            raise
        except Exception as error:
            from ndd_engine.train.failures import explain

            loop = prepared.loop
            failure = explain(
                error, loop.step + 1, prepared.clock.current, prepared.config, prepared.device, loop.stepper
            )
            text = failure.text + (f" ({failure.where})" if failure.where else "")
            raise ChildError("oom" if failure.of_memory else "failed", printable(text)) from error

    def _hear(self, _t: float, event: Event) -> None:
        """Collect facts from the run's events, on the recorder's thread."""
        facts = self.facts
        if isinstance(event, StageEvent):
            self.pipe.tell(event.text)
        elif isinstance(event, SettingEvent):
            facts.settings[event.name] = [event.requested, event.applied, event.in_effect, event.verified]
        elif isinstance(event, MarkEvent) and event.kind == "compile":
            facts.compile_s = float(event.data["seconds"])
        elif isinstance(event, RunEvent):
            facts.device, facts.device_name, facts.threads = event.device, event.device_name, event.threads
            facts.items_per_step, facts.steps_per_epoch = event.items_per_step, event.steps_per_epoch

    def signal_workers(self, number: signal.Signals) -> None:
        """Stop the loader workers (SIGSTOP), so that they do not prefetch, or resume them (SIGCONT)."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker, number)


class Blocks:
    """Replaces Stepper.step: trains the steps of a block, then waits for the next command.

    A block is timed from the start of its first step to the start of the step after its last one. It includes
    everything between steps: waiting for data, recording, evaluations, checkpoints, the start of an epoch.
    """

    def __init__(self, side: Side, run: Run, prepared: Prepared, begin: float) -> None:
        self._side, self._run, self._loop = side, run, prepared.loop
        self._device: torch.device = prepared.device
        self._step = prepared.loop.stepper.step
        self._prepare_from: float | None = begin
        self._losses: list[torch.Tensor] = []
        self._calls = self._first = self._last = 0
        self._least = 0
        self._until: float | None = None
        self._begin = 0.0

    def __call__(self, *arguments: Any) -> Any:
        if self._calls == self._last or (
            self._until is not None and self._calls >= self._least and time.perf_counter() >= self._until
        ):
            self._end_block()
        if self._calls == self._first:
            self._begin = self._now()
        self._calls += 1
        loss = self._step(*arguments)
        if len(self._losses) < LOSSES and loss is not None:
            self._losses.append(loss.detach().clone())
        return loss

    def _end_block(self) -> None:
        side = self._side
        end = self._now()
        seen = self._loop.batches.seen
        side.workers = seen.workers if seen is not None else ()
        side.signal_workers(signal.SIGSTOP)
        if self._prepare_from is not None:
            side.facts.prepare_s = end - self._prepare_from
            self._prepare_from = None
            side.pipe.send({"ready": self._facts()})
        else:
            side.pipe.send({"seconds": end - self._begin, "steps": self._calls - self._first})
        while (command := side.pipe.receive())["do"] != "train":
            side.pipe.send(self._facts())
        self._begin_block(command)
        side.signal_workers(signal.SIGCONT)
        self._loop.slept(time.perf_counter() - end)

    def _begin_block(self, command: Json) -> None:
        """lead: untimed steps first. until_s: end after so many seconds, but not before `least` steps. within: keep the
        timed steps within one epoch."""
        lead, steps = int(command["lead"]), int(command["steps"])
        loop = self._loop
        if (
            command["within"] and loop.batches.own is None
        ):  # the place in other orders does not follow from the step
            done = loop.step % loop.steps_per_epoch
            if done + lead + steps >= loop.steps_per_epoch:
                loop.step += loop.steps_per_epoch - done - 1  # makes this step the last one of the epoch
                lead += 1
        self._calls, self._first, self._last = 0, lead, lead + steps
        seconds = command["until_s"]
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._least = lead + int(command["least"])

    def _facts(self) -> Json:
        self._run.recorder.flush()
        facts = self._side.facts
        facts.losses = [float(loss) for loss in self._losses]
        facts.peak_bytes, facts.reserved_bytes = peak_memory(self._device)
        return asdict(facts)

    def _now(self) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def chosen(command: Json, tell: Callable[[str], None]) -> str:
    """The configuration as TOML, with absolute paths and the size that is best on this machine."""
    from ndd_engine.hardware.detect import detect
    from ndd_engine.train.probes.autosize import decide

    draft = draft_of({**command, "overrides": None})
    config, _ = decide(draft, detect(draft.resolve().run.device), tell)
    return to_toml(anywhere(config))


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """(peak allocated, peak reserved) bytes on the GPU; (peak resident, None) on the CPU."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device)), int(torch.cuda.max_memory_reserved(device))
    import psutil

    own = resident_peak()
    workers = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # PSS counts pages shared between processes once in total.
            found = child.memory_full_info()
            workers += int(getattr(found, "pss", found.rss))
    return (None if own is None else own + workers), None


if __name__ == "__main__":
    Side.main(sys.argv[1:])
