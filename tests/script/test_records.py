"""Reading records while they are written, torn or damaged, and turning them into events."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memories import Trained, run_line

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Gpu, Machine
from ndd_engine.measure.source import keeping_line
from ndd_engine.record.events import MarkEvent, RunEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import Command
from ndd_engine.script.follower import Follower
from ndd_engine.script.records import Records, Room
from ndd_watch import mapped


def test_lines_arrive_once_and_the_leading_rank_comes_first(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert not list(records.new())
    other, leading = Trained(tmp_path, "rank-1"), Trained(tmp_path, "rank-0")
    other.put("a")
    leading.put("b")
    assert [(process.name, one["type"]) for process, one in records.new()] == [
        ("rank-0", "b"),
        ("rank-1", "a"),
    ]
    assert not list(records.new())
    leading.put("c")
    assert [one["type"] for _, one in records.new()] == ["c"]


def test_a_window_has_the_rows_of_its_steps_and_closes(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for number in range(10):
        process.step(rows=number % 2 == 0)
    process.window(100)
    ((_, window),) = records.new()
    assert (window["steps"], window["timed_steps"], window["step_p50_ns"]) == (10, 5, 10**7)
    assert window["phases"]["forward"]["host_ns"] == window["wall_ns"] == 10**8


@pytest.mark.parametrize("gone", [0, 1, 7])
def test_what_a_killed_process_had_not_told_is_read_from_its_memory(tmp_path: Path, gone: int) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for _ in range(5):
        process.step()
    process.window(50)
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
    process.window(10 * steps)
    ((_, window),) = records.new()
    assert window["steps"] == steps and window["timed_steps"] <= mapped.MOST_ROWS
    assert sum(body["host_ns"] for body in window["phases"].values()) == window["wall_ns"] == steps * 10**7


def test_lines_that_were_overwritten_are_lost_and_the_next_are_whole(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    process.put("a")
    assert len(list(records.new())) == 1
    for number in range(5000):
        process.memory.put("b", {"number": number, "text": "x" * 100})
    numbers = [one["number"] for _, one in records.new()]
    assert numbers == list(range(numbers[0], 5000)) and 1000 < len(numbers) < 5000
    assert not records.lost


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    process, records = Trained(tmp_path, "pid-7"), Records(tmp_path)
    for text in ("{", "[" * 5000, "\x00", "7", json.dumps({"v": 1, "type": "a", "t": 1})):
        process.memory._append(text.encode() + b"\n")
    process.put("good")
    process.window(3, timed={"rest": [0]})
    process.window(3, step="x")
    process.put("long", text="x" * mapped.MOST_LINE_BYTES)
    assert [one["type"] for _, one in records.new()] == ["good"]
    assert records.lost == 8


def test_a_file_that_is_no_memory_and_one_that_nobody_uses_yet(tmp_path: Path) -> None:
    (tmp_path / "pid-1.map").write_text("short")
    os.close(mapped.make(str(tmp_path / "pid-2.map")))
    records = Records(tmp_path)
    assert not list(records.new()) and not records.processes


def test_processes_take_spare_files_and_keep_their_names_apart(tmp_path: Path) -> None:
    room = Room(tmp_path, shared=False)
    first, second = Trained(tmp_path, "rank-0"), Trained(tmp_path, "rank-0")
    first.put("a")
    second.put("b")
    assert not list(tmp_path.glob(f"{mapped.SPARE}*"))
    assert [(process.name, one["type"]) for process, one in Records(tmp_path).new()] == [
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


class Told:
    """A process, and the events that the console makes of what it writes."""

    def __init__(self, folder: Path, machine: Machine | None = None) -> None:
        self.events: list[Any] = []
        self.folder = folder
        self.begin()
        machine = detect("cpu", use_torch=False) if machine is None else machine
        command = Command(("python", "train.py"), Path("/there"))
        self._follower = Follower(RunDir(folder / "run"), command, machine, self.events.append, folder)

    def begin(self) -> None:
        """Also in the place of the present process."""
        self.process = Trained(self.folder, "rank-0")

    def put(self, kind: str, /, **body: Any) -> list[Any]:
        """The events of a line."""
        self.process.put(kind, **body)
        return self.new()

    def window(self, steps: int, **more: Any) -> list[Any]:
        """The events of a window with so many steps."""
        for _ in range(steps):
            self.process.step()
        self.process.window(10 * steps, **more)
        return self.new()

    @property
    def not_shown(self) -> list[str]:
        return self._follower.not_shown

    def new(self) -> list[Any]:
        del self.events[:]
        self._follower.poll()
        return list(self.events)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_run_with_what_was_seen_of_it(told: Told) -> None:
    config = {"script": {"loader": ["/there/train.py", 41]}, "loader": {"workers": 0}}
    assert not told.put("run", **run_line(config=config, parameters=99, items_per_step=16))
    run, window = told.window(10, items=160, last_loss=[10, 0.5], loss=0.5)
    assert isinstance(run, RunEvent) and (run.workload, run.parameters) == ("train.py", 99)
    assert run.name == "run" and run.items_per_step == 16 and run.resumed_step is None
    assert run.config["loader"]["workers"] == 0 and run.config["script"] == {
        "command": ["python", "train.py"], "folder": "/there", "loader": ["/there/train.py", 41],
    }  # fmt: skip
    assert isinstance(window, WindowEvent) and (window.items, window.loss) == (160, 0.5)
    # Another loader than before.
    (run,) = told.put("run", **run_line(config={**config, "loader": {"workers": 2}}, items_per_step=16))
    assert isinstance(run, RunEvent) and run.config["loader"] == {"workers": 2}
    (window,) = told.window(10)
    assert window.step == 20


L4, H200 = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"


def gpu_of(folder: Path, gpu: dict[str, Any] | None) -> RunEvent:
    """The run of a script that says this of its GPU; the console would use the L4."""
    gpus = tuple(Gpu(place, place, uuid, name, 24 << 30, (8, 9)) for place, (uuid, name) in enumerate(
        [(L4, "NVIDIA L4"), (H200, "NVIDIA H200")]
    ))  # fmt: skip
    folder.mkdir()
    told = Told(folder, replace(detect("cpu", use_torch=False), gpus=gpus, chosen=gpus[0]))
    told.put("run", **run_line(device="cuda:0", gpu=gpu))
    run: RunEvent = told.window(10)[0]
    return run


def test_the_gpu_of_a_script_is_the_one_that_it_trains_on(tmp_path: Path) -> None:
    known = {"total_bytes": 141 << 30, "capability": [9, 0], "visible": "1"}
    run = gpu_of(tmp_path / "a", {"uuid": H200.removeprefix("GPU-"), "name": "NVIDIA H200", **known})
    assert run.device_name == "NVIDIA H200" and run.gpu is not None and run.gpu["uuid"] == H200
    # One that NVML does not list is what torch says, and never another GPU.
    run = gpu_of(tmp_path / "b", {"uuid": None, **known, "name": "Orin"})
    assert run.device_name == "Orin" and run.gpu is not None and run.gpu["memory_total_bytes"] == 141 << 30
    run = gpu_of(tmp_path / "c", None)
    assert run.gpu is None and run.device_name == "cuda:0"


def test_a_process_that_is_started_again_goes_on_counting(told: Told) -> None:
    told.put("run", **run_line(total_steps=30))
    told.window(10)
    told.begin()
    (run,) = told.put("run", **run_line(total_steps=30, pid=8))
    assert run.total_steps == 40 and run.resumed_step is None
    (window,) = told.window(5, last_loss=[5, 0.5])
    assert (window.step, window.steps, *window.last_loss) == (15, 5, 15, 0.5)
    (mark,) = told.put("mark", kind="note", step=5, text="a")
    assert mark.step == 15
    # Its framework has loaded a checkpoint, and counts as we do.
    told.begin()
    told.put("run", **run_line(pid=9, resumed_step=12))
    (window,) = told.window(5, step=17)
    assert window.step == 20


@pytest.mark.parametrize(
    ("each", "text"),
    [
        ((10,), None),
        ((10, 10, 10), None),
        ((11, 10), None),  # it ends in the middle of a step
        ((6, 4), None),  # they take turns
        ((50, 10), "optimizer steps of the 2 optimizers: 50 and 10"),
        ((10, 1, 10), "optimizer steps of the 3 optimizers: 10, 1 and 10"),
        (
            (20, 7),
            "optimizer steps of the 2 optimizers: 20 and 7; their rhythm is not regular, so that 10 is an estimate",
        ),
        ((20, *[10] * 7), "optimizer steps of the first 8 optimizers: 20, 10, 10, 10, 10, 10, 10 and 10"),
    ],
)
def test_steps_of_several_optimizers_are_told_where_their_numbers_differ(
    told: Told, each: tuple[int, ...], text: str | None
) -> None:
    told.put("run", **run_line())
    for place, steps in enumerate(each):
        told.process.values[mapped.STEPPED + place] = steps
    told.window(10)
    assert [line for line in told.not_shown if "optimizers" in line] == ([] if text is None else [text])


def test_texts_of_a_script_control_no_terminal_and_damaged_lines_cost_themselves(told: Told) -> None:
    told.put("run", **run_line())
    data = {"file": "a.py", "line": 3, "function": "f", "timed": False}
    (mark,) = told.put("mark", kind="note", step=0, text="batches are made by \x1b[31mf", data=data)
    assert isinstance(mark, MarkEvent) and "\x1b" not in mark.text
    assert not told.put("functions", step="x", wall_ns=1, functions=[])
    assert not told.put("stacks", step=1, looks=1, frames=[[1]])
    assert not told.window(1, items="many") and told.window(1)


def test_the_line_that_keeps_the_losses_is_found_in_the_script(told: Told, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "total = 0.0\nfor x in data:\n    loss = model(x)\n    loss.backward()\n    total += loss\n"
    )
    told.put("run", **run_line(config={"script": {"keeps": [str(script), 0]}}))
    run, window = told.window(10, kept_steps=9)
    assert isinstance(run, RunEvent) and run.config["script"]["keeps"] == [str(script), 5]
    assert isinstance(window, WindowEvent) and window.kept_steps == 9
    # A file that is gone, and one that is no Python.
    for text in (None, "for ("):
        other = tmp_path / f"{text}.py"
        if text is not None:
            other.write_text(text)
        assert keeping_line(str(other)) == 0
