"""Reading records while they are written, torn or damaged, and turning them into events."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Gpu, Machine
from ndd_engine.record.events import (
    FunctionsEvent,
    MarkEvent,
    RunEvent,
    ScalarsEvent,
    StacksEvent,
    WindowEvent,
    parse,
)
from ndd_engine.script.command import Command
from ndd_engine.script.facts import Facts
from ndd_engine.script.records import Records, Room
from ndd_watch import mapped
from ndd_watch.mapped import Memory
from ndd_watch.phases import FORWARD


def line(kind: str, **body: Any) -> dict[str, Any]:
    return {"v": 2, "type": kind, "t": 1.0, **body}


class Trained:
    """A process that trains, as its memory shows it: steps of 10 ms, each of them forward."""

    def __init__(self, folder: Path, name: str, pid: int = 0) -> None:
        self.memory = Memory()
        self.memory.attach(str(folder), name)
        self.values = self.memory.values
        self.values[mapped.PID] = pid or os.getpid()

    def step(self, rows: bool = True) -> None:
        done = self.values[mapped.DONE]
        if rows:
            at = mapped.ROWS_AT + self.values[mapped.ROWS] % mapped.MOST_ROWS * mapped.ROW_WIDTH
            self.values[at] = done
            for phase in range(mapped.COLUMNS):
                self.values[at + 1 + phase] = 10**7 if phase == FORWARD else 0
            self.values[mapped.ROWS] += 1
        self.values[mapped.LENGTHS_AT + done % mapped.MOST_LENGTHS] = 10**7 << 1 | rows
        self.values[mapped.DONE] = done + 1

    def window(self, steps: int, **more: Any) -> None:
        body = {
            "step": self.values[mapped.DONE], "correction": 0, "micro_steps": steps, "wall_ns": steps * 10**7,
            "rest": [0] * mapped.COLUMNS, "loss": None,
        }  # fmt: skip
        self.memory.put("steps", {**body, **more})


def test_lines_arrive_once_and_the_leading_rank_comes_first(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert not list(records.new())
    other, leading = Trained(tmp_path, "rank-1"), Trained(tmp_path, "rank-0")
    other.memory.put("a", {})
    leading.memory.put("b", {})
    assert [(name, one["type"]) for name, one in records.new()] == [("rank-0", "b"), ("rank-1", "a")]
    assert not list(records.new())
    leading.memory.put("c", {})
    assert [one["type"] for _, one in records.new()] == ["c"]


def test_a_window_has_the_rows_of_its_steps_and_closes(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for number in range(10):
        process.step(rows=number % 2 == 0)
    process.window(10)
    ((_, window),) = records.new()
    assert (window["steps"], window["timed_steps"], window["step_p50_ns"]) == (10, 5, 10**7)
    assert window["phases"]["forward"]["host_ns"] == window["wall_ns"] == 10**8


@pytest.mark.parametrize("gone", [0, 1, 7])
def test_what_a_killed_process_had_not_told_is_read_from_its_memory(tmp_path: Path, gone: int) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for _ in range(5):
        process.step()
    process.window(5)
    for _ in range(gone):
        process.step()
    list(records.new())
    found = list(records.new(final=True))
    assert [(one["step"], one["steps"], one["wall_ns"]) for _, one in found] == [
        (5 + gone, gone, gone * 10**7)
    ][:gone]
    assert not list(records.new(final=True))


def test_a_reader_that_comes_too_late_loses_rows_but_no_step(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    steps = 2 * mapped.MOST_LENGTHS
    for _ in range(steps):
        process.step()
    process.window(steps)
    ((_, window),) = records.new()
    assert window["steps"] == steps and window["timed_steps"] <= mapped.MOST_ROWS
    assert sum(body["host_ns"] for body in window["phases"].values()) == window["wall_ns"] == steps * 10**7


def test_lines_that_were_overwritten_are_lost_and_the_next_are_whole(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    process.memory.put("a", {})
    assert len(list(records.new())) == 1
    for number in range(5000):
        process.memory.put("b", {"number": number, "text": "x" * 100})
    numbers = [one["number"] for _, one in records.new()]
    assert numbers == list(range(numbers[0], 5000)) and 1000 < len(numbers) < 5000
    assert not records.damaged


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for text in ("{", "[" * 5000, "\x00", "7", json.dumps({"v": 1, "type": "a", "t": 1})):
        process.memory._append(text.encode() + b"\n")
    process.memory.put("good", {})
    process.window(3, rest=[0])
    process.window(3, step="x")
    assert [one["type"] for _, one in records.new()] == ["good"]
    assert records.damaged == 7


def test_a_file_that_is_no_memory_and_one_that_nobody_uses_yet(tmp_path: Path) -> None:
    (tmp_path / "pid-1.map").write_text("short")
    os.close(mapped.make(str(tmp_path / "pid-2.map")))
    records = Records(tmp_path)
    assert not list(records.new()) and not records.processes


def test_processes_take_spare_files_and_keep_their_names_apart(tmp_path: Path) -> None:
    room = Room(tmp_path, shared=False)
    first, second = Trained(tmp_path, "rank-0"), Trained(tmp_path, "rank-0")
    first.memory.put("a", {})
    second.memory.put("b", {})
    assert not list(tmp_path.glob(f"{mapped.SPARE}*"))
    assert [(name, one["type"]) for name, one in Records(tmp_path).new()] == [
        ("rank-0", "a"),
        ("rank-0", "b"),
    ]
    room.fill()
    assert len(list(tmp_path.glob(f"{mapped.SPARE}*"))) == 2
    room.close()
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_console_that_was_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_engine.script.records.SHARED", tmp_path)
    monkeypatch.setattr("ndd_engine.script.records.LEAST_FREE", 0)
    left, mine = Room(tmp_path / "a"), Room(tmp_path / "b")
    (left.folder / "owner").write_text("1 0.0")
    third = Room(tmp_path / "c")
    assert not left.folder.exists() and mine.folder.exists() and third.folder.exists()
    mine.close()
    assert not mine.folder.exists()


@pytest.fixture(scope="module")
def machine() -> Machine:
    return detect("cpu", use_torch=False)


@pytest.fixture
def facts(machine: Machine) -> Facts:
    return Facts("train-001", Command(("python", "train.py"), Path("/there")), machine)


def window(step: int, **more: Any) -> dict[str, Any]:
    body = {
        "step": step, "steps": 10, "timed_steps": 10, "micro_steps": 20, "wall_ns": 10**9, "loss": 0.5, "lr": 0.1,
        "phases": {"forward": {"host_ns": 10**9, "p50_ns": 1, "p95_ns": 1, "max_ns": 1, "device_ns": None}},
        "step_p50_ns": 1, "step_p95_ns": 1, "step_max_ns": 1, "shape": [8, 3], "gc_ns": 0, "gc_count": 0,
        "gc_max_ns": 0, "skipped_updates": 0,
    }  # fmt: skip
    return line("window", **{**body, **more})


def test_a_run_with_what_was_seen_of_it(facts: Facts) -> None:
    told: list[Any] = []
    for one in (
        line("process", pid=7, host="h", python="3.9", torch="2.1", threads=2, ranks=None),
        line("model", device="cpu", optimizer="AdamW", parameters=99, implementation="loop"),
        line("loader", workers=0, pin_memory=False, prefetch=None, persistent=False, batch_size=8, items=64,
             dataset="Own", place=["/there/train.py", 41]),
        window(10), window(20, skipped_updates=1),
    ):  # fmt: skip
        told += facts.take(one)
    run, first, second, skipped = told
    assert isinstance(run, RunEvent) and (run.workload, run.parameters, run.items_per_step) == (
        "train.py",
        99,
        16,
    )
    assert run.config["loader"]["workers"] == 0 and run.config["optimizer"] == {"implementation": "loop"}
    assert isinstance(first, WindowEvent) and isinstance(second, WindowEvent)
    assert (first.items, first.last_loss, second.step) == (160, (10, 0.5), 20)
    assert isinstance(skipped, MarkEvent) and "1 update" in skipped.text
    assert parse(run.to_json(1.0)) == (1.0, run)


L4, H200 = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"


def gpu_of(machine: Machine, **told: Any) -> RunEvent:
    """The run of a script that says this of its GPU; the console would use the L4."""
    gpus = tuple(Gpu(place, place, uuid, name, 24 << 30, (8, 9)) for place, (uuid, name) in enumerate(
        [(L4, "NVIDIA L4"), (H200, "NVIDIA H200")]
    ))  # fmt: skip
    facts = Facts("r", Command(("python", "t.py"), Path("/")), replace(machine, gpus=gpus, chosen=gpus[0]))
    list(facts.take(line("process", pid=7, host="h", python="3.11", torch="2.13", threads=2)))
    list(facts.take(line("model", device="cuda:0", optimizer="Adam", parameters=1, **told)))
    (run, _) = facts.take(window(10))
    assert isinstance(run, RunEvent)
    return run


def test_a_script_trains_on_the_gpu_that_it_names(machine: Machine) -> None:
    """CUDA_VISIBLE_DEVICES and the order of CUDA decide what "cuda:0" is in its process."""
    known = {"name": "NVIDIA H200", "total_bytes": 141 << 30, "capability": [9, 0], "visible": "1"}
    run = gpu_of(machine, gpu={"uuid": H200.removeprefix("GPU-"), **known})
    assert run.device_name == "NVIDIA H200" and run.gpu is not None and run.gpu["uuid"] == H200
    # One that NVML does not list is what torch says, and never another GPU.
    run = gpu_of(machine, gpu={"uuid": None, **known, "name": "Orin"})
    assert run.device_name == "Orin" and run.gpu is not None and run.gpu["memory_total_bytes"] == 141 << 30
    run = gpu_of(machine, gpu=None)
    assert run.gpu is None and run.device_name == "cuda:0"


def test_a_resumed_training_goes_on_with_the_steps_of_its_framework(facts: Facts) -> None:
    totals = {"framework": "transformers", "total_steps": 120, "epochs": 3}
    assert not list(facts.take(line("totals", done=0, earlier=100, **totals)))
    run, seen = facts.take(window(10))
    assert isinstance(run, RunEvent) and (run.resumed_step, run.total_steps) == (100, 120)
    assert isinstance(seen, WindowEvent) and seen.step == 110
    (mark,) = facts.take(line("evaluation", done=10, seconds=2.0, lower=False, metrics={"eval_loss": 1.0}))
    assert isinstance(mark, MarkEvent) and mark.step == 110
    assert mark.data == {"metrics": {"eval_loss": 1.0}, "better": "higher", "seconds": 2.0}
    # Another training of the process, from its begin: the steps never go back.
    (run,) = facts.take(line("totals", done=20, earlier=0, **totals))
    assert isinstance(run, RunEvent) and (run.resumed_step, run.total_steps) == (None, 240)
    (seen,) = facts.take(window(25, steps=15))
    assert isinstance(seen, WindowEvent) and seen.step == 125
    # The script's own calls of `observe()` count as it likes.
    (scalars,) = facts.take(line("scalars", step=7, values={"a": 1.0}))
    assert isinstance(scalars, ScalarsEvent) and scalars.step == 7


def test_stacks_profiles_and_sources(facts: Facts) -> None:
    (stacks,) = facts.take(line("stacks", step=3, looks=5, frames=[["other", "a.py", 3, "f", None, 4]]))
    assert isinstance(stacks, StacksEvent) and stacks.frames == [("other", "a.py", 3, "f", 4, 1)]
    functions = [["a.py", 1, "f", 2, 8, 7, "g", "other"]]
    (found,) = facts.take(line("profile", step=3, ns=9, functions=functions, phases={"other": 8}))
    assert (
        isinstance(found, FunctionsEvent)
        and found.functions == [tuple(functions[0])]
        and found.phases == {"other": 8}
    )
    (source,) = facts.take(line("source", file="a.py", line=3, function="\x1b[31mf", timed=False))
    assert isinstance(source, MarkEvent) and "\x1b" not in source.text and "cannot be timed" in source.text
    (unseen,) = facts.take(line("unseen", functions=["save"], reason="its source is not there"))
    assert isinstance(unseen, MarkEvent) and "save" in unseen.text


@pytest.mark.parametrize("bad", [line("window"), window("x"), line("stacks", step=1, looks=1, frames=[[1]])])  # type: ignore[arg-type]
def test_lines_of_another_format_raise_what_the_run_catches(facts: Facts, bad: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        list(facts.take(bad))
