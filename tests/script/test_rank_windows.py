"""Windows of the ranks of a script: brought to the same steps; ranks that are missing, end early or start again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memories import MS, Trained, run_line

from ndd_engine.hardware.detect import detect
from ndd_engine.record.events import Event, MarkEvent, RanksEvent, RunEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import Command
from ndd_engine.script.follower import Follower
from ndd_watch import mapped


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
        self,
        rank: int,
        begin: int,
        end: int,
        data_ms: float = 1,
        wait_ms: float = 2,
        without: tuple[int, ...] = (),
    ) -> None:
        """Steps with 10 ms of forward, some of data_wait, and some of waiting for other ranks in backward."""
        process, count = self.processes[rank], end - begin
        process.values[mapped.DONE] = begin
        for number in range(begin, end):
            process.step(data_ms=data_ms, wait_ms=wait_ms, seen=number not in without)
        self.t += 0.001
        process.window(
            count * (10 + data_ms + wait_ms), items=8 * count * self.world, t=self.t,
            timed={"cpu_ns": count * 5 * MS, "rss_bytes": 10**8 + rank},
        )  # fmt: skip

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
    assert (
        found.exchange_ns == 8 * 2 * MS and found.skew_ns == 8 * 5 * MS and found.critical_ns == 8 * 21 * MS
    )
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
    job.window(1, 0, 8, without=(3,))
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
        job.window(0, begin, begin + 8)
        job.window(1, begin, begin + 8)
    job.poll()
    assert len(job.of(RanksEvent)) == 10 and job.of(RanksEvent)[-1].world == 2
    assert [text for text in job.texts if "rank 2 of 3" in text]


def test_a_rank_that_ends_early(job: Job) -> None:
    job.begin(0, 1)
    for rank in (0, 1):
        job.window(rank, 0, 8)
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
    for rank in (0, 1):
        job.window(rank, 0, 8)
    job.end(1, 8, "ValueError: bad")
    job.begin(0, 1, pid=2 * 10**8, restart=1)
    for rank in (1, 0):
        job.window(rank, 0, 16)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [8, 24]
    assert [event.step for event in job.of(WindowEvent)] == [8, 24]
    (text,) = job.texts
    assert text.startswith("rank 1: ") and all(word in text for word in ("bad", "restart 1", "step 8"))


def test_processes_that_exchange_nothing_are_not_compared(job: Job) -> None:
    job.begin(0, 1, exchanges=False)
    for rank in (0, 1):
        job.window(rank, 0, 8)
    job.poll()
    assert not job.of(RanksEvent) and len(job.of(WindowEvent)) == 1
    assert "parallel" not in job.of(RunEvent)[0].config


def test_damaged_figures_of_a_rank_cost_only_themselves(job: Job) -> None:
    job.begin(0, 1)
    job.begin(0, pid=1, ranks=10**12)
    job.write(1, "window", step=8, steps=8, timed={"end": 8, "rest": [1]})
    for rank in (0, 1):
        job.window(rank, 8, 16)
    job.poll()
    assert [event.step for event in job.of(RanksEvent)] == [16]
    for rank in (0, 1):
        job.write(rank, "mark", kind="warning", step=16, text="planted", data={"observed": "no more"})
    job.poll()
    assert [text.split(":")[0] for text in job.texts] == ["rank 0", "rank 1"]
