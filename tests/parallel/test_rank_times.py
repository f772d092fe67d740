"""Work and waiting of a rank on a device that is behind the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from qa.ranks.simulated import Planted
from tests.waiting import until

from ndd_engine.measure.stragglers import MOST_WINDOWS, compared_steps
from ndd_engine.measure.window import Window
from ndd_engine.record.event import RankEvent, RanksEvent
from ndd_engine.record.events import MarkEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.parallel.rank_loop import Comparing, DeviceSteps
from ndd_engine.train.parallel.strategy import PART, StreamWaits
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock

MS = 1_000_000


class Machine:
    """A host and a GPU that works through what the host has queued. ms: host and device time so far."""

    def __init__(self) -> None:
        self.host_ms = self.device_ms = 0.0

    def now(self) -> int:
        return round(self.host_ms * MS)

    def launch(self, ms: float) -> None:
        """The host queues a kernel that takes so long; it takes the host a tenth of a millisecond."""
        self.host_ms += 0.1
        self.device_ms = max(self.device_ms, self.host_ms) + ms

    def synchronise(self) -> None:
        self.host_ms = max(self.host_ms, self.device_ms)


class Event:
    """A CUDA event: reached when the device has done what was queued before it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at = 0.0

    def record(self, _stream: object = None) -> None:
        self._at = max(self._machine.host_ms, self._machine.device_ms)

    def query(self) -> bool:
        return self._machine.host_ms >= self._at

    def elapsed_time(self, end: Event) -> float:
        return end._at - self._at


def step(machine: Machine, clock: PhaseClock, wait_ms: float, data_ms: float = 0.0) -> None:
    """10 ms of forward, 20 of backward, then a wait for other ranks; the host is ahead until the end of the step."""
    clock.enter(phase.DATA_WAIT)
    machine.host_ms += data_ms
    clock.enter(phase.FORWARD)
    machine.launch(10)
    clock.enter(phase.BACKWARD)
    machine.launch(20)
    clock.enter_part(PART)
    machine.launch(wait_ms)
    clock.enter(phase.OPTIMIZER)
    machine.launch(1)
    clock.enter(phase.LOG)
    machine.synchronise()
    clock.end_step()


def device_clock(machine: Machine) -> PhaseClock:
    clock = PhaseClock(machine.now)
    clock.gpu.prepare(lambda: Event(machine), lambda: None)
    return clock


def told(clock: PhaseClock, machine: Machine, evaluation_ms: float = 0.0) -> list[RankEvent]:
    """What a rank tells of windows of 20 steps, in the sixth of which the ranks agree."""
    device_steps, found = DeviceSteps(clock.gpu), []
    for number in range(1, 121):
        step(machine, clock, wait_ms=5, data_ms=4)
        device_steps.after(number)
        device_steps.wanted = device_steps.wanted or number % 20 == 6
        if number % 20 == 10:
            clock.evaluation(True)
            machine.host_ms += evaluation_ms
            clock.evaluation(False)
        if not number % 20:
            window = Window.of(clock)
            device_steps.add(window)
            found.append(compared_steps(number, number - 20, window.names, device_steps.known()))
    return found


@pytest.mark.parametrize("evaluation_ms", [0.0, 500.0])
def test_on_a_gpu_work_and_waiting_are_those_of_the_device(evaluation_ms: float) -> None:
    machine = Machine()
    clock = device_clock(machine)
    first, second, *others = told(clock, machine, evaluation_ms)
    assert not first.numbers and not second.numbers  # the device may be behind
    for event in others:
        # The step after the next one after the agreement, two windows before, on all ranks.
        assert event.begin + event.numbers[0] == event.step - 60 + 7
        assert event.wait_ns[0] / MS == pytest.approx(5, abs=0.2)
        assert event.own_ns[0] / MS == pytest.approx(35, abs=1)
        each = {name: ns / MS for name, ns in event.phases_ns.items()}
        assert (each["data_wait"], each["forward"], each["backward"]) == pytest.approx((4, 10, 20), abs=0.2)


class Stream:
    """A CUDA stream; waiting for an event takes the compute stream 3 ms."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def wait_event(self, _event: object) -> None:
        self._machine.host_ms += 3


def test_waits_of_the_compute_stream_in_forward_and_backward_are_exchange() -> None:
    machine = Machine()
    clock = PhaseClock(machine.now)
    compute, other = Stream(machine), Stream(machine)
    original = Stream.wait_event
    waits = StreamWaits(clock, compute, Stream)
    for name in (phase.TO_DEVICE, phase.FORWARD, phase.BACKWARD):
        clock.enter(name)
        compute.wait_event(None)
        other.wait_event(None)
    waits.stop()
    assert Stream.wait_event is original
    compute.wait_event(None)
    phases = Window.of(clock).phases()
    assert {name: times["host_ns"] / MS for name, times in phases.items()} == {
        "to_device": 6, "forward": 6, "forward/exchange": 3, "backward": 9, "backward/exchange": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("world", "late"), [(2, False), (3, False), (3, True)])
def test_a_rank_whose_record_ends_is_named_and_left_out_until_it_goes_on(
    tmp_path: Path, world: int, late: bool
) -> None:
    """As on a node with a full disk. late: the disk of the node only answers late."""
    windows = list(Planted(world).windows(MOST_WINDOWS + 15, seed=1))
    run, found = RunDir(tmp_path), list[object]()
    comparing = Comparing(run, ["here"] * world, "ddp", found.append)
    last, others = world - 1, range(1, world - 1)

    def write(rank: int, few: list[list[RankEvent]]) -> None:
        folder = run.ranks / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "events.jsonl").open("a") as file:
            file.writelines(window[rank].to_json(1.0) + "\n" for window in few)

    def train(few: list[list[RankEvent]]) -> None:
        """Windows of all ranks but the last one."""
        for rank in others:
            write(rank, few)
        for window in few:
            comparing.add(window[0])

    def notes() -> list[str]:
        return [event.text for event in found if isinstance(event, MarkEvent)]

    def newest() -> tuple[int, int]:
        events = [event for event in found if isinstance(event, RanksEvent)]
        return (events[-1].step, events[-1].world) if events else (0, 0)

    early, more, rest = windows[:5], windows[5 : 5 + MOST_WINDOWS], windows[5 + MOST_WINDOWS :]
    try:
        write(last, early)
        train(early)
        until(lambda: newest() == (early[-1][0].step, world))
        if late:
            write(last, more)
        train(more)
        if late:
            until(lambda: newest() == (more[-1][0].step, world))
        else:
            until(notes)
            until(lambda: world == 2 or newest() == (more[-1][0].step, 2))
            write(last, more)
        write(last, rest)
        train(rest)
        until(lambda: newest() == (rest[-1][0].step, world))
    finally:
        comparing.stop()
    text = f"rank {last} of {world}: no new windows in the record, so no part of the comparison of ranks"
    assert notes() == ([] if late else [text])
