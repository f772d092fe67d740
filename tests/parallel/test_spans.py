"""Work and waiting of a rank, by the host's clock and by a device that is behind the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndd_engine.measure import clock as phase
from ndd_engine.measure.clock import DevicePhaseClock, PhaseClock, Window
from ndd_engine.record.events import WindowEvent
from ndd_engine.record.ranks import RanksEvent
from ndd_engine.run.control import Control
from ndd_engine.train.parallel import team as team_module
from ndd_engine.train.parallel.marks import PART, StreamWaits
from ndd_engine.train.parallel.notes import StoreNotes
from ndd_engine.train.parallel.place import Place
from ndd_engine.train.parallel.spans import WindowSpans
from ndd_engine.train.parallel.team import Team
from tests import records

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


def event(window: Window, **more: object) -> WindowEvent:
    steps = len(window.rows)
    more = {"phases": window.phases(), "device_steps": len(window.device), **more}
    return records.window(steps, steps, window.wall_ns, **more)  # type: ignore[arg-type]


def device_clock(machine: Machine) -> DevicePhaseClock:
    return DevicePhaseClock(lambda: Event(machine), machine.now)  # type: ignore[arg-type,return-value]


def test_on_a_gpu_work_and_waiting_are_those_of_the_device() -> None:
    machine = Machine()
    clock = device_clock(machine)
    for _ in range(60):
        step(machine, clock, wait_ms=5, data_ms=4)
    window = event(clock.take())
    assert window.phases["log"]["host_ns"] > 0.8 * window.wall_ns, "the host waits where it synchronises"
    spans = WindowSpans().of(window)
    each = {name: (work / 60 / MS, wait / 60 / MS) for name, (work, wait) in spans.items()}
    assert each["data_wait"] == pytest.approx((4, 0), abs=0.2)
    assert each["forward"] == pytest.approx((10, 0), abs=0.2)
    assert each["backward"] == pytest.approx((20, 5), abs=0.2)
    assert sum(work + wait for work, wait in spans.values()) == pytest.approx(window.wall_ns)


def test_evaluations_keep_the_time_of_the_host_and_the_whole_is_the_wall_time() -> None:
    machine = Machine()
    clock = device_clock(machine)
    for _ in range(60):
        step(machine, clock, wait_ms=5)
    clock.enter(phase.EVALUATE)
    machine.host_ms += 500
    clock.enter(phase.OTHER)
    window = event(clock.take())
    spans = WindowSpans().of(window)
    assert spans["evaluate"] == (500 * MS, 0)
    assert spans["forward"][0] / 60 / MS == pytest.approx(10, abs=0.2)
    assert sum(work + wait for work, wait in spans.values()) == pytest.approx(window.wall_ns)


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
    phases = clock.take().phases()
    assert {name: times["host_ns"] / MS for name, times in phases.items()} == {
        "to_device": 6, "forward": 6, "forward/exchange": 3, "backward": 9, "backward/exchange": 3,
    }  # fmt: skip


@contextmanager
def alone(clock: PhaseClock, recorded: list[Any]) -> Iterator[Team]:
    """A team of one rank, with a real process group."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    patch = pytest.MonkeyPatch()
    patch.setattr("ndd_engine.train.parallel.agreement.time.perf_counter", lambda: clock.now() * 1e-9)
    try:
        world: Any = SimpleNamespace(
            place=Place(0, 1, 0, 1), rank=0, size=1, control=dist.group.WORLD, hosts=["a"],
            notes=StoreNotes(store), store=store,
            device=torch.device("cpu"),
        )  # fmt: skip
        team = Team(world, Control(), recorded.append, clock, "ddp", window_s=1.0)
        team.begin(0)
        yield team
        team.end()
    finally:
        patch.undo()
        dist.destroy_process_group()


def trained(team: Team, machine: Machine, steps: int, after: Callable[[int], None] = lambda _: None) -> None:
    """So many steps of 36 ms. after: called after each of them, with its number."""
    for done in range(1, steps + 1):
        step(machine, team.clock, wait_ms=5)
        if team.after_step(done, counts=True) and "window" in team.turn(profile=False):
            team.put(event(team.clock.take()))
            team.cut()
        after(done)
    team.settle()


def test_what_rank_0_records_of_a_gpu_has_the_times_of_the_device() -> None:
    machine = Machine()
    recorded: list[Any] = []
    with alone(device_clock(machine), recorded) as team:
        trained(team, machine, 120)
    (*_, last) = [item for item in recorded if isinstance(item, RanksEvent)]
    means = {name: summary[2] / 1e3 for name, summary in last.columns_us.items()}
    assert means["forward"] == pytest.approx(10, abs=0.3)
    assert means["backward"] == pytest.approx(20, abs=0.3)
    assert means["wait"] == pytest.approx(5, abs=0.3)
    assert means["own"] == pytest.approx(31, abs=1)


def test_a_loss_that_arrives_between_two_windows_counts_in_the_next_one_with_losses() -> None:
    # As losses of a GPU do: those of another rank may arrive when rank 0 has none.
    machine = Machine()
    recorded: list[Any] = []
    with alone(device_clock(machine), recorded) as team:
        for loss, others in ((4.0, 2.0), (None, 8.0), (6.0, None)):
            step(machine, team.clock, wait_ms=5)
            mine = replace(event(team.clock.take()), loss=loss, last_loss=None if loss is None else (3, loss))
            team.put(mine)
            team.cut()
            if others is not None:
                team._flying[1].append(team._flying[0].clone())  # type: ignore[index,union-attr]
                row = team._flying[1][-1]  # type: ignore[index]
                row[team_module._AT["loss_sum"]], row[team_module._AT["loss_count"]] = others, 1.0
                row[team_module._LAST_LOSS], row[team_module._HAS_LOSS] = others, 1.0
        team.settle()
    windows = [item for item in recorded if isinstance(item, WindowEvent)]
    assert [item.loss for item in windows] == [3.0, None, 7.0, *[None] * (len(windows) - 3)]
    assert [item.last_loss for item in windows[:3]] == [(3, 3.0), None, (3, 6.0)]


def test_windows_end_although_the_ranks_meet_after_every_step() -> None:
    # As with checkpoint.every_steps = 1: each meeting reads the vote that is in flight.
    machine = Machine()
    recorded: list[Any] = []
    with alone(device_clock(machine), recorded) as team:
        trained(team, machine, 200, lambda _: team.agree())
    windows = [item for item in recorded if isinstance(item, WindowEvent)]
    assert [item.wall_ns / 1e9 for item in windows] == pytest.approx([1.0] * 7, abs=0.1)
