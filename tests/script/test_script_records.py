"""Records of processes that train: read while they are written, torn or damaged, and made into the events of a run.

The memories are written here as a script's processes write them: of one process, then of several ranks.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Gpu, Machine
from ndd_engine.measure.source import keeping_line
from ndd_engine.record.events import Event, MarkEvent, RanksEvent, RunEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import Command
from ndd_engine.script.follower import Follower
from ndd_engine.script.records import Records, Room
from ndd_watch import mapped
from ndd_watch.mapped import BACKWARD, DATA_WAIT, FORWARD, WAITING, MappedMemory

MS = 10**6


def run_line(**more: Any) -> dict[str, Any]:
    """The event of a run, as a process writes it."""
    return {
        "name": "", "workload": "", "config": {"script": {}}, "pid": 7, "host": "h", "device": "cpu",
        "device_name": "", "gpu": None, "versions": {}, "parameters": 1, "precision": "", "item": "item",
        "token": None, "tokens_per_item": 0, "items_per_step": 0, "items_per_epoch": 0, "steps_per_epoch": 0,
        "epochs": 0, "total_steps": 0, "model": "SGD", "data": "", **more,
    }  # fmt: skip


class Trained:
    """A process whose steps take 10 ms of forward, as its memory shows it."""

    def __init__(self, folder: Path, name: str = "pid-7") -> None:
        self.memory = MappedMemory()
        self.memory.attach(str(folder), name)
        self.values = self.memory.values
        self.values[mapped.PID] = os.getpid()
        self._shown = 0

    def put(self, kind: str, /, **body: Any) -> None:
        self.memory.put(kind, body)

    def step(self, rows: bool = True, seen: bool = True, data_ms: float = 0, wait_ms: float = 0) -> None:
        """rows: it is timed by phase. seen: it is timed at all. wait_ms: for other ranks, in the backward pass."""
        done, spent = self.values[mapped.DONE], [0] * mapped.COLUMNS
        spent[FORWARD], spent[DATA_WAIT] = 10 * MS, round(data_ms * MS)
        spent[BACKWARD + WAITING] = round(wait_ms * MS)
        if rows and seen:
            at = mapped.ROWS_AT + self.values[mapped.ROWS] % mapped.MOST_ROWS * mapped.ROW_WIDTH
            self.values[at] = done
            for phase, ns in enumerate(spent):
                self.values[at + 1 + phase] = ns
            self.values[mapped.ROWS] += 1
        self.values[mapped.LENGTHS_AT + done % mapped.MOST_LENGTHS] = (sum(spent) << 1 | rows) if seen else 0
        self.values[mapped.DONE] = done + 1

    def window(
        self, wall_ms: float, items: int = 0, timed: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """End a window that took so long."""
        done = self.values[mapped.DONE]
        steps, self._shown = done - self._shown, done
        self.put("window", **{
            "step": done, "epoch": 0, "epoch_step": done, "steps": steps, "micro_steps": steps, "items": items,
            "tokens": 0, "wall_ns": round(wall_ms * MS), "step_p50_ns": None, "step_p95_ns": None,
            "step_max_ns": None, "phases": {}, "passes": 0, "timed": {
                "end": done, "shown": done, "rest": [0] * mapped.COLUMNS, "device": [], "outside": {}, "first_ns": 0,
                **(timed or {}),
            }, **more,
        })  # fmt: skip


# Reading.


@pytest.mark.parametrize("gone", [0, 1, 7])
def test_what_a_killed_process_had_not_told_is_read_from_its_memory(tmp_path: Path, gone: int) -> None:
    process, records = Trained(tmp_path), Records(tmp_path)
    for _ in range(5):
        process.step()
    process.window(50)
    for _ in range(gone):
        process.step()
    list(records.new())
    found = [(one["step"], one["steps"], one["wall_ns"]) for _, one in records.new(final=True)]
    assert found == [(5 + gone, gone, gone * 10**7)][:gone]
    assert not list(records.new(final=True))


def test_a_reader_that_comes_too_late_loses_rows_but_no_step(tmp_path: Path) -> None:
    process, records = Trained(tmp_path), Records(tmp_path)
    steps = 2 * mapped.MOST_LENGTHS
    for _ in range(steps):
        process.step()
    process.window(10 * steps)
    ((_, window),) = records.new()
    assert window["steps"] == steps and window["timed_steps"] <= mapped.MOST_ROWS
    assert sum(body["host_ns"] for body in window["phases"].values()) == window["wall_ns"] == steps * 10**7


def test_lines_that_were_overwritten_are_lost_and_the_next_are_whole(tmp_path: Path) -> None:
    process, records = Trained(tmp_path), Records(tmp_path)
    process.put("a")
    assert len(list(records.new())) == 1
    for number in range(5000):
        process.memory.put("b", {"number": number, "text": "x" * 100})
    numbers = [one["number"] for _, one in records.new()]
    assert numbers == list(range(numbers[0], 5000)) and 1000 < len(numbers) < 5000
    assert not records.lost


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    process, records = Trained(tmp_path), Records(tmp_path)
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
    found = [(process.name, one["type"]) for process, one in Records(tmp_path).new()]
    assert found == [("rank-0", "a"), ("rank-0", "b")]
    room.fill()
    assert len(list(tmp_path.glob(f"{mapped.SPARE}*"))) == 2
    room.close()
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_console_that_was_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_engine.shared_folder.SHARED", tmp_path)
    monkeypatch.setattr("ndd_engine.shared_folder.LEAST_FREE", 0)
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
        self.follower = Follower(RunDir(folder / "run"), command, machine, self.events.append, folder)

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
        return self.follower.not_shown

    def new(self) -> list[Any]:
        del self.events[:]
        self.follower.poll()
        return list(self.events)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_run_with_what_was_seen_of_it(told: Told) -> None:
    config = {"script": {"loader": ["/there/train.py", 41]}, "loader": {"workers": 0}}
    assert not told.put("run", **run_line(config=config, parameters=99, items_per_step=16))
    run, window = told.window(10, items=160, last_loss=[10, 0.5], loss=0.5)
    assert isinstance(run, RunEvent) and (run.name, run.workload, run.parameters) == ("run", "train.py", 99)
    assert run.items_per_step == 16 and run.resumed_step is None and run.config["loader"]["workers"] == 0
    seen = {"command": ["python", "train.py"], "folder": "/there", "loader": ["/there/train.py", 41]}
    assert run.config["script"] == seen
    assert isinstance(window, WindowEvent) and (window.items, window.loss) == (160, 0.5)
    # Another loader than before.
    (run,) = told.put("run", **run_line(config={**config, "loader": {"workers": 2}}, items_per_step=16))
    assert isinstance(run, RunEvent) and run.config["loader"] == {"workers": 2}
    (window,) = told.window(10)
    assert window.step == 20


L4, H200 = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"


def gpu_of(folder: Path, gpu: dict[str, Any] | None) -> tuple[RunEvent, Gpu | None]:
    """The run of a script that says this of its GPU, and what is sampled; the console would use the L4."""
    gpus = tuple(Gpu(place, place, uuid, name, 24 << 30, (8, 9)) for place, (uuid, name) in enumerate(
        [(L4, "NVIDIA L4"), (H200, "NVIDIA H200")]
    ))  # fmt: skip
    folder.mkdir()
    told = Told(folder, replace(detect("cpu", use_torch=False), gpus=gpus, chosen=gpus[0]))
    told.put("run", **run_line(device="cuda:0", gpu=gpu, host=socket.gethostname()))
    run: RunEvent = told.window(10)[0]
    return run, told.follower.trains[1]


def test_the_gpu_of_a_script_is_the_one_that_it_trains_on(tmp_path: Path) -> None:
    known = {"total_bytes": 141 << 30, "capability": [9, 0], "visible": "1"}
    run, sampled = gpu_of(tmp_path / "a", {"uuid": H200.removeprefix("GPU-"), "name": "NVIDIA H200", **known})
    assert run.device_name == "NVIDIA H200" and run.gpu is not None and run.gpu["uuid"] == H200
    assert sampled is not None and sampled.uuid == H200
    # One that NVML does not list is what torch says, and never another GPU.
    run, _ = gpu_of(tmp_path / "b", {"uuid": None, **known, "name": "Orin"})
    assert run.device_name == "Orin" and run.gpu is not None and run.gpu["memory_total_bytes"] == 141 << 30
    run, _ = gpu_of(tmp_path / "c", None)
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
        ((10, 10, 10), None),
        ((11, 10), None),  # it ends in the middle of a step
        ((6, 4), None),  # they take turns
        ((10, 1, 10), "3 optimizers: 10, 1 and 10"),
        ((20, 7), "2 optimizers: 20 and 7; their rhythm is not regular, so that 10 is an estimate"),
        ((20, *[10] * 7), "first 8 optimizers: 20, 10, 10, 10, 10, 10, 10 and 10"),
    ],
)
def test_steps_of_several_optimizers_are_told_where_their_numbers_differ(
    told: Told, each: tuple[int, ...], text: str | None
) -> None:
    told.put("run", **run_line())
    for place, steps in enumerate(each):
        told.process.values[mapped.STEPPED + place] = steps
    told.window(10)
    lines = [line for line in told.not_shown if "optimizers" in line]
    assert len(lines) == (text is not None) and all(line.endswith(text or "") for line in lines)


@pytest.mark.parametrize("seen", [True, False])
def test_what_was_not_seen_of_the_steps_is_said(told: Told, seen: bool) -> None:
    told.put("run", **run_line())
    for _ in range(10):
        told.process.step(wait_ms=2 * seen)
    told.process.window(120, items=160 * seen)
    told.new()
    lacking = [line for line in told.not_shown if "not seen" in line or "not counted" in line]
    assert len(lacking) == (0 if seen else 2)
    if not seen:
        assert "backward (" in lacking[0] and lacking[1].startswith("items/s: ")


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
    script.write_text("for (")
    assert keeping_line(str(script)) == keeping_line(str(tmp_path / "gone.py")) == 0


# Windows of several ranks.


class Job:
    """Ranks that write records, and the events that the follower makes of them."""

    def __init__(self, folder: Path, world: int = 2, **place: Any) -> None:
        self.directory = RunDir(folder / "runs" / "it")
        self.directory.ranks.mkdir(parents=True)
        self.events: list[Event] = []
        self.processes: dict[int, Trained] = {}
        command = Command(("torchrun", "train.py"), folder)
        self.follower = Follower(self.directory, command, detect("cpu", use_torch=False), self.events.append)
        self.world, self.place = world, {"here": [0, world], **place}
        self.t = 1.0

    def write(self, rank: int, kind: str, /, **body: Any) -> None:
        self.t += 0.001
        self.processes[rank].put(kind, **{"t": self.t, **body})

    def begin(self, *ranks: int, pid: int = 10**8, exchanges: bool = True, **given: Any) -> None:
        for rank in ranks:
            place = {
                "rank": rank, "ranks": self.world, "restart": 0, "launch": "a", "strategy": "ddp", **self.place,
                **given,
            }  # fmt: skip
            config = {"script": {}, **({"parallel": place} if exchanges else {})}
            self.processes[rank] = Trained(self.directory.ranks, f"rank-{rank}")
            self.write(rank, "run", **run_line(pid=pid + rank, host=f"host{rank}", config=config))

    def window(
        self, rank: int, begin: int, end: int, data_ms: float = 1, wait_ms: float = 2, without: int = -1
    ) -> None:
        """Steps with 10 ms of forward, some of data_wait, and some of waiting for other ranks in backward."""
        process, count = self.processes[rank], end - begin
        process.values[mapped.DONE] = begin
        for number in range(begin, end):
            process.step(data_ms=data_ms, wait_ms=wait_ms, seen=number != without)
        self.t += 0.001
        process.window(
            count * (10 + data_ms + wait_ms), items=8 * count * self.world, t=self.t,
            timed={"cpu_ns": count * 5 * MS, "rss_bytes": 10**8 + rank},
        )  # fmt: skip

    def windows(self, begin: int, end: int, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.window(rank, begin, end)

    def end(self, rank: int, step: int, error: str = "") -> None:
        status = "failed" if error else "done"
        self.write(rank, "end", status=status, reason=error, step=step, exit_status=int(bool(error)))

    def poll(self) -> None:
        self.follower.poll()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.of(MarkEvent)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job, which ends with the test."""
    made: list[Job] = []

    def job(**given: Any) -> Job:
        made.append(Job(tmp_path, **given))
        return made[-1]

    yield job
    for one in made:
        one.follower.finish()


@pytest.fixture
def job(make: Callable[..., Job]) -> Job:
    return make()


def test_exchange_is_the_least_wait_and_skew_the_rest(job: Job) -> None:
    job.begin(0, 1)
    job.window(0, 0, 8, data_ms=1, wait_ms=12)
    job.poll()
    assert not job.of(RanksEvent)
    job.window(1, 0, 8, data_ms=11, wait_ms=2)
    job.poll()
    (found,) = job.of(RanksEvent)
    assert (found.step, found.steps, found.world, found.hosts, found.strategy) == (8, 8, 2, 2, "ddp")
    assert (found.exchange_ns, found.skew_ns, found.critical_ns) == (16 * MS, 40 * MS, 168 * MS)
    assert list(found.columns_us["data_wait"][3:]) == [11000, 1] and found.wall_ns == 8 * 23 * MS
    means = sum(found.columns_us[name][2] for name in ("data_wait", "forward")) * 8 * 1000
    assert means + found.exchange_ns + found.skew_ns == found.wall_ns
    assert list(found.memory_bytes["rss"][3:]) == [10**8 + 1, 1] and found.launched is None
    (run,) = job.of(RunEvent)
    # Of all ranks: 8 items a rank.
    assert run.items_per_step == 16 and run.config["parallel"] == {"ranks": 2, "strategy": "ddp"}


def test_windows_that_end_at_other_steps_meet_at_a_common_one(job: Job) -> None:
    job.begin(0, 1)
    for begin in range(0, 32, 8):
        job.window(0, begin, begin + 8)
    job.window(1, 0, 16)
    job.window(1, 16, 48)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [16]
    job.window(0, 32, 48)
    job.poll()
    assert [(event.step, event.steps) for event in job.of(RanksEvent)] == [(16, 16), (48, 32)]


def test_a_step_that_one_rank_profiled_is_compared_on_none(job: Job) -> None:
    job.begin(0, 1)
    job.window(0, 0, 8)
    job.window(1, 0, 8, without=3)
    job.poll()
    (found,) = job.of(RanksEvent)
    assert found.steps == 7 and list(found.columns_us["forward"][:4]) == [10000] * 4


def late_rank(job: Job) -> dict[str, Any]:
    """The late rank after windows in which rank 1 takes 10 ms longer for its data."""
    for begin in range(0, 80, 8):
        job.window(0, begin, begin + 8, data_ms=1, wait_ms=12)
        job.window(1, begin, begin + 8, data_ms=11, wait_ms=2)
    job.poll()
    late = job.of(RanksEvent)[-1].late
    assert late is not None and (late["rank"], late["phase"]) == (1, "data_wait")
    return dict(late)


def test_a_late_rank_is_named_with_its_line(job: Job, tmp_path: Path) -> None:
    job.begin(0, 1)
    frames = [["data_wait", str(tmp_path / "train.py"), 7, "load", 9, 1]]
    job.write(1, "stacks", step=1, looks=9, frames=frames)
    late = late_rank(job)
    assert (late["host"], late["where"], late["late_ns"]) == ("host1", "train.py:7 load", 10 * MS)


def test_a_profiled_step_names_the_function_that_only_the_late_rank_calls(job: Job, tmp_path: Path) -> None:
    """Stack samples see the line that waits for the interpreter lock instead."""
    job.begin(0, 1)
    for rank, ms in enumerate((1, 11)):
        frames = [["data_wait", str(tmp_path / "train.py"), 9, "main", 5, 1]]
        job.write(rank, "stacks", step=0, looks=5, frames=frames)
        functions = [
            [str(tmp_path / "train.py"), 40, "work", 1, ms * MS, ms * MS, "augment", "data_wait"],
            [str(tmp_path / "train.py"), 1, "main", 1, 20 * MS, 9 * MS, "", "other"],
        ]
        job.write(rank, "functions", step=1, wall_ns=20 * MS, functions=functions)
    place, _, caller = late_rank(job)["where"].partition(",")
    assert place.split() == ["train.py:40", "work"] and caller.endswith("augment")


def test_ranks_of_other_hosts_are_named_and_left_out(make: Callable[..., Job]) -> None:
    job = make(world=4, here=[2, 2])
    job.begin(2, 3)
    for rank in (2, 3):
        job.window(rank, 0, 8, data_ms=rank)
    job.poll()
    (found,) = job.of(RanksEvent)
    assert (found.world, found.launched, found.first_rank) == (2, 4, 2)
    assert sorted(found.rows_us) == ["2", "3"] and found.columns_us["own"][4] == 3
    assert [text for text in job.texts if "0 to 1 of 4" in text]


def test_a_rank_that_is_not_observed_holds_up_nothing(make: Callable[..., Job]) -> None:
    job = make(world=3)
    job.begin(0, 1)
    for begin in range(0, 80, 8):
        job.windows(begin, begin + 8)
    job.poll()
    assert len(job.of(RanksEvent)) == 10 and job.of(RanksEvent)[-1].world == 2
    assert [text for text in job.texts if "rank 2 of 3" in text]


def test_a_rank_that_ends_early(job: Job) -> None:
    job.begin(0, 1)
    job.windows(0, 8)
    job.window(1, 8, 11)
    job.end(1, 11)
    job.window(0, 8, 16)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [8]
    job.end(0, 16, "RuntimeError: Connection closed by peer")
    job.follower.finish()
    assert job.follower.ended is not None
    status, reason = job.follower.ended
    assert status == "done" and reason.startswith("rank 1 ") and "11 steps" in reason
    assert [text for text in job.texts if "11" in text and "16" in text]  # steps of each rank


def test_the_rank_that_failed_first_is_the_reason(job: Job) -> None:
    job.begin(0, 1)
    job.end(1, 4, "ValueError: too large")
    job.end(0, 4, "RuntimeError: Connection closed by peer")
    job.poll()
    assert job.follower.ended is not None
    status, reason = job.follower.ended
    assert status == "failed" and reason.startswith("rank 1: ") and reason.endswith("too large")


def test_a_restart_goes_on_counting(job: Job) -> None:
    job.begin(0, 1)
    job.windows(0, 8)
    job.end(1, 8, "ValueError: bad")
    job.begin(0, 1, pid=2 * 10**8, restart=1)
    job.windows(0, 16, 1, 0)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [8, 24]
    assert [event.step for event in job.of(WindowEvent)] == [8, 24]
    (text,) = job.texts
    assert text.startswith("rank 1: ") and all(word in text for word in ("bad", "restart 1", "step 8"))


def test_processes_that_exchange_nothing_are_not_compared(job: Job) -> None:
    job.begin(0, 1, exchanges=False)
    job.windows(0, 8)
    job.poll()
    assert not job.of(RanksEvent) and len(job.of(WindowEvent)) == 1
    assert "parallel" not in job.of(RunEvent)[0].config


def test_damaged_figures_of_a_rank_cost_only_themselves(job: Job) -> None:
    job.begin(0, 1)
    job.begin(0, pid=1, ranks=10**12)
    job.write(1, "window", step=8, steps=8, timed={"end": 8, "rest": [1]})
    job.windows(8, 16)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [16]
    for rank in (0, 1):
        job.write(rank, "mark", kind="warning", step=16, text="planted", data={"observed": "no more"})
    job.poll()
    assert [text.split(":")[0] for text in job.texts] == ["rank 0", "rank 1"]
