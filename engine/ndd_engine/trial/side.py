"""A process of a trial: a real run of the engine, which trains in runs on command, for one side or for both.

`python -m ndd_engine.trial.side IN OUT FOLDER`, see `ndd_engine.child`. The training loop runs once and never returns:
it waits in its gate (`ndd_watch.trying`). Loader workers are stopped meanwhile, so they neither disturb the other side
nor prefetch: a run starts with as many batches ready as the previous one ended with. A side of several ranks has a
process for each of them.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

from ndd_engine.batches import map_tensors
from ndd_engine.child import ChildError, ChildServer, Pipe, draft_of
from ndd_engine.config import Config, anywhere, to_toml
from ndd_engine.diagnose import diagnose
from ndd_engine.errors import NddError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import resident_peak, usable_threads
from ndd_engine.record.events import Event, Json, MarkEvent, RunEvent, SettingEvent, StageEvent
from ndd_engine.run.run import Run
from ndd_engine.text import printable
from ndd_engine.train.checkpoint_state import kept_random, random_state, restore_random_state
from ndd_engine.train.failures import explain
from ndd_engine.train.loop import Course
from ndd_engine.train.parallel.rank_place import OtherRanks, RankPlace, notes_of
from ndd_engine.train.parallel.world import STORE_TIMEOUT
from ndd_engine.train.prepare import Prepared, prepare_run, training_batches
from ndd_engine.train.rank_run import open_rank
from ndd_engine.train.rehearsal import decide, rehearse
from ndd_engine.train.request import RunRequest
from ndd_engine.train.settings import VerifiedSettings
from ndd_engine.train.step.optimizers import Precision, make_precision
from ndd_engine.train.training_run import TrainingRun
from ndd_watch.changes import LOADER, MODEL, PREFETCH, switched_by
from ndd_watch.trying import Trainer, gate, signal_to, still

from .outcome import CACHES, LOSSES, Parts, SideFacts, differences

# Maximum seconds until the system assigns an orphan to another parent.
ORPHANED_S = 0.2
# Steps of a run that never ends by itself.
ENDLESS = 1 << 60
# Findings that say nothing about what takes the time.
_NO_CAUSE = ("too-short", "healthy")


class Side(ChildServer):
    """The process of one side, of one of its ranks, or of both sides."""

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
        self._store: TCPStore | None = None
        self._parent = os.getppid()
        # Loader workers that may be stopped.
        self.workers: tuple[int, ...] = ()
        self.commands = {
            "choose": lambda command: {"config": chosen(command, self.pipe.tell)},
            "meet": self._meet,
            "prepare": self._train,
        }

    def clean_up(self) -> None:
        """Loader workers end by themselves once their parent is gone, unless they are stopped.

        If the trial was killed, nobody else removes the caches.
        """
        signal_to(self.workers, signal.SIGCONT)
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

    def _meet(self, command: Json) -> Json:
        """As rank 0: the port at which the ranks meet, which the system chooses."""
        self._store = TCPStore("localhost", 0, int(command["ranks"]), True, wait_for_workers=False)
        return {"port": self._store.port}

    def _train(self, command: Json) -> None:
        begin = time.perf_counter()
        training = self._opened(command)
        prepared = prepare_run(training.opened)
        prepared.sampler.stop()
        loop = prepared.loop
        loop.total_steps, loop.passes = ENDLESS, None
        loop.gate = gate(
            OwnTrainer(self, training, prepared, begin, command), self.pipe.receive, self.pipe.send
        )
        try:
            loop.run()
        except NddError:
            raise
        except Exception as error:
            failure = explain(
                error, loop.step + 1, prepared.clock.current, prepared.config, prepared.device, loop.stepper
            )
            text = failure.text + (f" ({failure.where})" if failure.where else "")
            raise ChildError("oom" if failure.of_memory else "failed", printable(text)) from error
        raise ChildError("failed", f"the training ended by itself at step {loop.step:,}")

    def _opened(self, command: Json) -> TrainingRun:
        """The run of this process. Of several ranks, the command has "rank", "ranks" and "port"."""
        request = RunRequest(draft_of(command), self.folder / "runs", probes=False)
        if "rank" not in command:
            training = TrainingRun(request)
            Run.open(training, self._hear)
            return training
        rank, ranks = int(command["rank"]), int(command["ranks"])
        store = self._store or TCPStore("localhost", int(command["port"]), ranks, False)
        store.set_timeout(STORE_TIMEOUT)
        here = RankPlace(rank, ranks, rank, ranks)
        training = TrainingRun(request, OtherRanks(here, store, notes_of(store, here)))
        open_rank(training, self._hear)
        return training

    def _hear(self, _t: float, event: Event) -> None:
        """Collect facts from the run's events, on the recorder's thread."""
        facts = self.facts
        if isinstance(event, StageEvent):
            self.pipe.tell(event.text)
        elif isinstance(event, SettingEvent):
            facts.settings[event.name] = in_short(event)
        elif isinstance(event, MarkEvent) and event.kind == "compile":
            facts.compile_s = float(event.data["seconds"])
        elif isinstance(event, RunEvent):
            facts.device, facts.device_name, facts.threads = event.device, event.device_name, event.threads
            facts.items_per_step, facts.steps_per_epoch = event.items_per_step, event.steps_per_epoch
            facts.unit = event.item
        else:
            self.parts.hear(event)


@dataclass
class Setup:
    """A configuration of a process. settings: verifies it. losses: of its first steps, until it is `left`."""

    config: Config
    precision: Precision
    threads: int
    course: Course
    settings: VerifiedSettings
    facts: SideFacts
    losses: list[torch.Tensor] = field(default_factory=list)
    left: bool = False


class OwnTrainer(Trainer):
    """The loop of a run of the engine, as its gate sees it.

    With a command that has "change", the process is both sides: the model and the optimizer stay, and what differs is
    switched between runs. begin: when the preparation began.
    """

    def __init__(
        self, side: Side, training: TrainingRun, prepared: Prepared, begin: float, command: Json
    ) -> None:
        self._side, self._run, self._loop = side, training.run, prepared.loop
        self._device, self._clock, self._begin_s = prepared.device, prepared.clock, begin
        self._measuring = False
        self._current = 0
        side.facts.ranks = 1 if training.ranks is None else training.ranks.place.size
        self._setups = [self._setup(prepared.config, prepared.loop.course, side.facts)]
        self._changed: set[str] = set()
        if "change" in command:
            self._add(anywhere(draft_of({**command, **command["change"]}).resolve()))
            self._first_state = _copied(self._loop.stepper.state())
            self._first_random = random_state(self._device)

    def _setup(self, config: Config, course: Course, facts: SideFacts) -> Setup:
        loader = config.loader
        facts.stock = -(-loader.workers * (loader.prefetch or PREFETCH) // config.batch.accumulation)
        threads = config.run.threads or torch.get_num_threads()
        precision = make_precision(config, self._device)
        return Setup(config, precision, threads, course, self._loop.settings, facts)

    def _add(self, config: Config) -> None:
        """The other side of the process."""
        loop, base = self._loop, self._setups[0]
        if loop.batches.own_order is not None:
            # Both sides would draw from the same sampler or stream.
            raise ChildError("failed", "the order of the data is the workload's own")
        self._changed = set(differences(base.config, config))
        batches = loop.batches
        if self._changed & switched_by(LOADER):
            batches = training_batches(loop.stepper.workload, config, self._device, self._side.pipe.tell)
        self._run.recorder.flush()  # the facts of the preparation, which both share
        self._setups.append(self._setup(config, Course(batches), copy.deepcopy(base.facts)))
        self._side.facts = SideFacts()  # later events could be those of either side

    # For the gate.

    def settle(self) -> Iterator[None]:
        self._setups[0].facts.prepare_s = time.perf_counter() - self._begin_s
        return iter(())

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        # Runs of a process with both sides are short, and a window has those of both.
        if len(self._setups) == 1:
            self._loop.end_window()
        self._side.workers = tuple({worker for setup in self._setups for worker in _workers(setup.course)})
        with self._loop.rest(), still(lambda: _workers(self._loop.course)):
            yield

    def begin(self, command: Json) -> None:
        """within: keep the timed steps within one epoch. measured: what its steps consist of counts."""
        loop = self._loop
        if len(self._setups) > 1:
            self._switch(int(command["side"]))
        if command["within"] and loop.batches.own_order is None:
            left = loop.steps_per_epoch - loop.step % loop.steps_per_epoch
            if left <= command["lead"] + command["steps"]:
                loop.end_epoch()
        if command["measured"] and not self._measuring:
            self._measuring = True
            self._run.recorder.flush()
            self._side.parts.clear()  # of the warm-up

    def stepped(self) -> None:
        setup = self._setups[self._current]
        loss = self._loop.stepper.training.loss
        if len(setup.losses) < LOSSES and not setup.left and loss is not None:
            setup.losses.append(loss.detach().clone())

    def end(self) -> None:
        if len(self._setups) > 1 and self._device.type == "cuda":
            facts = self._setups[self._current].facts
            facts.peak_bytes = max(peak_memory(self._device)[0] or 0, facts.peak_bytes or 0)

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def waited(self) -> float:
        return self._clock.waited_ns / 1e9

    def facts(self) -> Json:
        self._loop.compared()
        self._run.recorder.flush()
        for setup in self._setups:
            setup.facts.losses = [float(loss) for loss in setup.losses]
            setup.facts.settings |= {name: in_short(told) for name, told in setup.settings.recorded.items()}
        if len(self._setups) == 1:
            facts = self._setups[0].facts
            facts.peak_bytes, facts.reserved_bytes = peak_memory(self._device)
            facts.parts_ns = self._side.parts.per_step() if self._measuring else {}
            if self._measuring and facts.ranks > 1:
                found = diagnose(self._run.recorder.snapshot())
                facts.findings = [one.to_dict() for one in found if one.cause not in _NO_CAUSE]
        elif (
            self._device.type == "cpu"
            and not self._changed & switched_by(MODEL)
            and (own := resident_peak()) is not None
        ):
            # Otherwise, what one side needs cannot be told from what the other one did.
            for setup in self._setups:
                setup.facts.peak_bytes = own + _resident(_workers(setup.course))
        return {"sides": [asdict(setup.facts) for setup in self._setups]}

    # Both sides in one process.

    def _switch(self, index: int) -> None:
        """Continue with this configuration, also if it is the current one: preparing the other side sets its TF32."""
        setup = self._setups[index]
        self._setups[self._current].left |= index != self._current
        self._current = index
        if torch.get_num_threads() != setup.threads:
            torch.set_num_threads(setup.threads)
        self._loop.switch(setup.config, setup.precision, setup.course, setup.settings)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if setup.facts.prepare_s is None:
            self._prepare(setup)

    def _prepare(self, setup: Setup) -> None:
        """Before the first steps of the candidate, as the baseline began: it has trained, and losses are compared."""
        begin, base, stepper, batches = self.now(), self._setups[0], self._loop.stepper, setup.course.batches
        stepper.load(_copied(self._first_state))
        restore_random_state(self._first_random, self._device)
        setup.settings = VerifiedSettings(stepper, batches, self._loop.evaluation)
        if self._changed & switched_by(MODEL):  # the preparation included the baseline's test step
            with kept_random(self._device):
                setup.settings.of_model(rehearse(stepper, batches.sample()))
        shared = base.course.batches is batches
        setup.course = Course(batches)
        if shared:
            base.course = setup.course
        self._loop.switch(setup.config, setup.precision, setup.course, setup.settings)
        setup.facts.threads = torch.get_num_threads()
        assert base.facts.prepare_s is not None
        setup.facts.prepare_s = base.facts.prepare_s + self.now() - begin


def in_short(event: SettingEvent) -> list[Any]:
    """As in SideFacts."""
    return [event.requested, event.applied, event.in_effect, event.verified]


def _workers(course: Course) -> tuple[int, ...]:
    return course.batches.seen.workers if course.batches.seen is not None else ()


def _copied(state: Any) -> Any:
    """A state with its tensors copied to the host."""
    return map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True))


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """(peak allocated, peak reserved) bytes on the GPU; (peak resident, None) of the process and its loader workers."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)), int(torch.cuda.max_memory_reserved(device))
    own = resident_peak()
    workers = [child.pid for child in psutil.Process().children(recursive=True)]
    return (None if own is None else own + _resident(workers)), None


def _resident(workers: Sequence[int]) -> int:
    """Resident bytes of processes; pages that they share count once in total."""
    total = 0
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(worker).memory_full_info()
            total += int(getattr(found, "pss", found.rss))
    return total


def chosen(command: Json, tell: Callable[[str], None]) -> str:
    """The configuration as TOML, with absolute paths and the size that is best on this machine."""
    draft = draft_of({**command, "overrides": None})
    asked = draft.resolve()
    machine = detect(asked.run.device)
    ranks = asked.parallel.ranks
    threads = max(usable_threads(machine.host) // ranks, 1) if ranks > 1 else None
    config, _ = decide(draft, machine, tell, threads)
    return to_toml(anywhere(config))


if __name__ == "__main__":
    Side.main(sys.argv[1:])
