"""Profiler captures on a GPU: busy time against CUDA events, and the causes of planted gaps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ndd_engine.config import read
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.record.events import Event, KernelsEvent, MarkEvent, parse
from ndd_engine.run.run import Run
from ndd_engine.script.follower import folded
from ndd_engine.script.records import Records
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_watch import CAPTURES, FOLDER, SITE
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock

WAITING = "waiting for data"


@pytest.fixture
def left() -> torch.Tensor:
    return torch.randn(4096, 4096, device="cuda")


def recorded(step: Callable[[PhaseClock], None], times: int = 3) -> KernelsEvent:
    """A capture of `times` calls of a step, after a warm-up call that is left out."""
    clock = PhaseClock()
    recording = ProfilerCapture(torch.device("cuda"), clock)
    recording.start()
    step(clock)
    recording.begin()
    for _ in range(times):
        step(clock)
        recording.step_ended()
    event = recording.end(times)
    assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
    return event


def test_busy_time_agrees_with_cuda_events(left: torch.Tensor) -> None:
    spans: list[float] = []

    def step(clock: PhaseClock) -> None:
        clock.enter(phase.DATA_WAIT)
        time.sleep(0.05)
        clock.enter(phase.FORWARD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            torch.mm(left, left)
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e6)

    step(PhaseClock())
    spans.clear()
    event = recorded(step)
    assert event.method == "kernels"
    assert event.launches >= 60
    assert event.busy_ns == pytest.approx(sum(spans[1:]), rel=0.1)
    assert event.idle_ns[WAITING] == pytest.approx(3 * 50e6, rel=0.1)


def test_gaps_between_launches_and_after_a_synchronisation(left: torch.Tensor) -> None:
    small = torch.randn(64, 64, device="cuda")

    def launching(clock: PhaseClock) -> None:
        clock.enter(phase.FORWARD)
        for _ in range(20):
            torch.mm(small, small)
            time.sleep(0.002)

    event = recorded(launching)
    assert event.idle_ns["launch gaps"] > 0.8 * event.wall_ns

    def waiting(clock: PhaseClock) -> None:
        clock.enter(phase.FORWARD)
        for _ in range(10):
            torch.mm(left, left).sum().item()
            time.sleep(0.005)  # the GPU has nothing queued, because the host waited for it

    event = recorded(waiting)
    assert event.idle_ns["synchronising"] > event.idle_ns.get("launch gaps", 0)


def test_kernels_launched_ahead_leave_no_launch_gaps(left: torch.Tensor) -> None:
    def step(clock: PhaseClock) -> None:
        clock.enter(phase.FORWARD)
        for _ in range(30):
            torch.mm(left, left)
        torch.cuda.synchronize()

    event = recorded(step)
    assert event.idle_ns.get("launch gaps", 0) < 0.05 * event.wall_ns
    assert event.busy_ns > 0.9 * event.wall_ns


def test_copies_to_pageable_memory_count_as_synchronising(left: torch.Tensor) -> None:
    def step(clock: PhaseClock) -> None:
        clock.enter(phase.FORWARD)
        for _ in range(10):
            torch.mm(left, left)[:64].cpu()  # blocks inside the copy, without a synchronising call
            time.sleep(0.005)

    event = recorded(step)
    assert event.idle_ns["synchronising"] > event.idle_ns.get("launch gaps", 0)


def test_convolutions_are_recognised_by_their_kernels() -> None:
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    images = torch.randn(32, 64, 56, 56, device="cuda")

    def step(clock: PhaseClock) -> None:
        clock.enter(phase.FORWARD)
        for _ in range(10):
            layer(images).sum().backward()
        torch.cuda.synchronize()

    event = recorded(step)
    assert event.convolution_ns > 0.3 * event.busy_ns, event.top
    assert event.collective_ns == event.exposed_ns == 0


def test_copies_count_as_busy_time(left: torch.Tensor) -> None:
    host = torch.randn(64, 1024, 1024).pin_memory()

    def step(clock: PhaseClock) -> None:
        clock.enter(phase.TO_DEVICE)
        host.to("cuda", non_blocking=True)
        clock.enter(phase.FORWARD)
        torch.mm(left, left)
        torch.cuda.synchronize()

    event = recorded(step)
    assert 0 < event.copy_ns <= event.busy_ns
    assert event.launches >= 3


def train(folder: Path, *sets: str) -> list[Event]:
    base = ("run.device=cuda", "evaluate.every_epochs=0", "checkpoint.every_minutes=0", "workload.size=small")
    draft = read(None, [*base, *sets], "chartext", {"run": {"max_steps": 40, "name": "capture"}})
    run = Run.open(TrainingRun(RunRequest(draft, folder)))
    end = run.execute()
    run.close()
    assert end.status == "done", end.reason
    return [item[1] for item in map(parse, run.directory.events.read_bytes().splitlines()) if item]


@pytest.mark.parametrize("sets", [(), ("speed.cuda_graph=true", "precision.amp=off")])
def test_captures_of_a_run(tmp_path: Path, sets: tuple[str, ...]) -> None:
    trace = tmp_path / "trace.json"
    events = train(tmp_path, "log.kernels_every=10", f"log.trace={trace}", *sets)
    captures = [event for event in events if isinstance(event, KernelsEvent)]
    assert len(captures) == 3
    for event in captures:
        assert event.method == "kernels"
        assert 0 < event.busy_ns <= event.wall_ns
        # A replayed graph's kernels are seen one by one.
        assert event.launches > 10 * event.steps
    assert trace.stat().st_size > 0
    assert not [event for event in events if isinstance(event, MarkEvent) and event.kind == "warning"]


SCRIPT = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
host = torch.ones(512, 2048).pin_memory()
for step in range(300):
    if step in (100, 200):
        sys.modules["_ndd_watch.clock"].S[17] += 1  # asks for a capture, see ndd_watch.mapped
    loss = model(host.to("cuda", non_blocking=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
"""


def test_a_script_is_captured_twice(tmp_path: Path) -> None:
    folders = {FOLDER: tmp_path / "records", CAPTURES: tmp_path}
    folders[FOLDER].mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(SITE), "NDD_WATCH_WINDOW_S": "0.02"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**environment, **{name: str(path) for name, path in folders.items()}},
    )  # fmt: skip
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr
    records = Records(folders[FOLDER])
    lines = [line for _, line in records.new(final=True)]
    marks = [line for line in lines if line["type"] == "mark"]
    assert not [mark for mark in marks if "no profiler capture" in mark["text"]]
    found = [(mark["step"], mark["data"]) for mark in marks if "trace" in mark["data"]]
    events = [folded(tmp_path / data["trace"], step, data["steps"]) for step, data in found]
    assert len(events) == 2
    for event in events:
        assert event.method == "kernels" and event.steps == 3 and event.copy_ns > 0
        names = {row[0]: row for row in event.modules}
        assert names["0"][2] > 0 and names["0"][3] > 0
