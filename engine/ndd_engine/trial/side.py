"""One side of a trial: a real run of the engine in a process of its own, which trains block by block when told to.

`python -m ndd_engine.trial.side IN OUT FOLDER` reads commands from one pipe and answers on the other, a JSON object a
line.
The training loop runs once and never ends; in the place of the step is `Blocks`, which sleeps in a read of its pipe
where a block ends. The loader's workers are stopped meanwhile (SIGSTOP): they neither disturb the other side nor load
ahead, and a block begins with as many batches waiting as the last one ended with.

When the pipe closes, however the other end died, the process and everything it wrote are gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ndd_engine.child import Pipe, first_to_go
from ndd_engine.config import anywhere, read, to_toml
from ndd_engine.errors import NddError
from ndd_engine.hardware.host import resident_peak
from ndd_engine.record.events import Event, Json, MarkEvent, RunEvent, SettingEvent, StageEvent
from ndd_engine.text import printable

if TYPE_CHECKING:
    import torch

    from ndd_engine.train.prepare import Prepared
    from ndd_engine.train.run import Run

# Of the first steps, for the comparison of the two sides.
LOSSES = 10


@dataclass
class SideFacts:
    """What one side is like; `to_dict` of it is in the trial's event. Seconds and bytes.

    prepare_s: from the imported program to the first step, compile_s of it in the compiler; warmup_s: of the first
    steps, which are slower, and warmup_steps how many they are. step_s, items_per_s: of the measured blocks.
    peak_bytes: allocated at most on the card; without one resident in the process, with its share of the loader's
    workers. settings: by name [requested, applied, in effect, how that was verified]. losses: of the first steps.
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
    losses: list[float] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def not_in_effect(self) -> list[str]:
        """Settings that were asked for and are not in effect, with the reason."""
        return [
            f"{name} = {requested} is {applied}: {why}"
            for name, (requested, applied, in_effect, why) in self.settings.items()
            if in_effect is False
        ]

    def to_dict(self) -> Json:
        body = asdict(self)
        del body["settings"]
        return {**body, "not_in_effect": self.not_in_effect}


class Side:
    """The process: what it was told to prepare, and what is known of it."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        self.pipe = pipe
        self.folder = folder
        # Of the loader's processes, which use it too when it is there before them.
        self._sockets = multiprocessing.util.get_temp_dir()
        self.facts = SideFacts()
        self.workers: tuple[int, ...] = ()

    def leave(self) -> NoReturn:
        """End the process at once; its workers end with it, as they watch for that."""
        with contextlib.suppress(Exception):
            self.wake_workers()
            for folder in (self.folder, self._sockets):
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def serve(self) -> None:
        """Do what is asked until the end; every error is told."""
        try:
            # Takes seconds: done while the other side prepares.
            import ndd_engine.train.prepare  # noqa: F401

            while (command := self.pipe.receive())["do"] != "end":
                if command["do"] == "choose":
                    self.pipe.send({"config": chosen(command, self.pipe.tell)})
                elif command["do"] == "prepare":
                    self._train(command)
        except (EOFError, BrokenPipeError):
            return
        except BaseException as error:  # noqa: BLE001  every way to end is told, a dataset's sys.exit too
            traceback.print_exc()
            kind, text = _told(error)
            with contextlib.suppress(OSError):
                self.pipe.send({"error": text, "kind": kind})

    def _train(self, command: Json) -> None:
        from ndd_engine.train.prepare import prepare_run
        from ndd_engine.train.run import Run, RunRequest

        begin = time.perf_counter()
        path = command["config"]
        draft = read(Path(path) if path else None, command["sets"], command["workload"], command["overrides"])
        run = Run.open(RunRequest(draft, self.folder / "runs", probes=False), self._hear)
        prepared = prepare_run(run)
        prepared.sampler.stop()
        blocks = Blocks(self, run, prepared, begin)
        vars(prepared.loop.stepper)["step"] = blocks
        prepared.loop.total_steps = 1 << 60
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
            raise _ExplainedError(failure.of_memory, text) from error

    def _hear(self, _t: float, event: Event) -> None:
        """In the recorder's thread: what the run says of itself."""
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

    def stop_workers(self, workers: tuple[int, ...]) -> None:
        """Let the loader's processes stand still, so that they do not load ahead."""
        self.workers = workers
        self._signal(signal.SIGSTOP)

    def wake_workers(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker, number)


class Blocks:
    """In the place of Stepper.step: trains as many steps as it is told, then sleeps until the next command.

    A block's time is from the beginning of its first step to the beginning of the step after its last one, so that
    everything between steps is in it: the wait for data, records, evaluations, checkpoints, the start of an epoch.
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
        side.stop_workers(seen.workers if seen is not None else ())
        if self._prepare_from is not None:
            side.facts.prepare_s = end - self._prepare_from
            self._prepare_from = None
            side.pipe.send({"ready": self._facts()})
        else:
            side.pipe.send({"seconds": end - self._begin, "steps": self._calls - self._first})
        while (command := side.pipe.receive())["do"] != "train":
            if command["do"] == "end":
                side.leave()
            side.pipe.send(self._facts())
        self._begin_block(command)
        side.wake_workers()
        self._loop.slept(time.perf_counter() - end)

    def _begin_block(self, command: Json) -> None:
        """lead: steps before the timed ones. until_s: end after so many seconds, and no less than `least` steps.
        within: the timed steps lie within one epoch."""
        lead, steps = int(command["lead"]), int(command["steps"])
        loop = self._loop
        if command["within"]:
            done = loop.step % loop.steps_per_epoch
            if done + lead + steps >= loop.steps_per_epoch:
                loop.step += loop.steps_per_epoch - done - 1  # this step is the epoch's last one
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


class _ExplainedError(Exception):
    """A failure in training in words. of_memory: memory ran out."""

    def __init__(self, of_memory: bool, text: str) -> None:
        super().__init__(text)
        self.of_memory = of_memory


def _told(error: BaseException) -> tuple[str, str]:
    if isinstance(error, _ExplainedError):
        return ("oom" if error.of_memory else "failed"), printable(str(error))
    from ndd_engine.train.failures import told

    return told(error)


def chosen(command: Json, tell: Callable[[str], None]) -> str:
    """The present's configuration as TOML, as it holds in any folder, with the size that is best here."""
    from ndd_engine.hardware.detect import detect
    from ndd_engine.train.probes.autosize import decide

    path = command["config"]
    draft = read(Path(path) if path else None, command["sets"], command["workload"])
    config, _ = decide(draft, detect(draft.resolve().run.device), tell)
    return to_toml(anywhere(config))


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """(bytes allocated at most, bytes reserved at most) on a card; on the host (resident at most, None)."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device)), int(torch.cuda.max_memory_reserved(device))
    import psutil

    own = resident_peak()
    workers = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # Pages that processes share are counted once in all of them.
            found = child.memory_full_info()
            workers += int(getattr(found, "pss", found.rss))
    return (None if own is None else own + workers), None


def main(arguments: list[str]) -> None:
    """The process. arguments: the numbers of the pipes' ends, and the folder for everything it writes."""
    first_to_go()
    # With stopped workers in the group, the kernel sends it when the trial dies; there is something to remove first.
    signal.signal(signal.SIGHUP, lambda *_: None)
    side = Side(Pipe(int(arguments[0]), int(arguments[1])), Path(arguments[2]))

    side.pipe.leave_when_closed(side.leave)
    side.serve()
    side.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
