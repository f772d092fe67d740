"""What does not go on is named with the line it is at, and what it waits for; what computes is not accused."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ndd_engine.hardware.process_state import ProcessState, Waiting
from ndd_engine.measure import process_watch, reporting, trainer_watch
from ndd_engine.measure.stalls import Frame, Stalls, Standing, explained
from ndd_engine.measure.trainer_watch import PreparationWatch, TrainerWatch, TrainingThread
from ndd_engine.record.event import NO_HANGS, OVER
from ndd_engine.record.events import DeathEvent, Event, MarkEvent, StageEvent, StallEvent
from ndd_watch.clock import PhaseClock
from ndd_watch.looks import own

TORCH = "/x/lib/python3.11/site-packages/torch"
LOADER = ("_try_get_data", f"{TORCH}/utils/data/dataloader.py")
MAIN_LOOP = ("<module>", "/home/me/train.py", 24)
ITEM = ("__getitem__", "/home/me/train.py", 11)
FUTEX = Waiting("futex", "futex_do_wait", library="libc.so.6")


def stack(*frames: tuple[Any, ...]) -> list[Frame]:
    """(function, file, line) each, the innermost first."""
    return [{"name": name, "filename": file, "line": line[0] if line else 1} for name, file, *line in frames]


def standing(
    waiting: Waiting,
    frames: list[Frame] | None,
    role: str = "the main process",
    letter: str = "S",
    **more: Any,
) -> Standing:
    state = ProcessState(len(role), "python", letter, 1, 0.0, 1, 0, 0, None)
    return Standing(state, role, waiting, frames, **more)


PYTHON = "/usr/lib/python3.11"
RECEIVES = ("wait", f"{PYTHON}/multiprocessing/connection.py")
MAIN = standing(Waiting("poll", "poll_schedule_timeout"), stack(RECEIVES, LOADER, MAIN_LOOP))
READS, TYPED = Waiting("read", "", "/data/a.bin"), Waiting("read", "", "/dev/pts/1")


def worker(waiting: Waiting, *frames: tuple[Any, ...], **more: Any) -> Standing:
    return standing(waiting, stack(*frames), "loader worker 1", **more)


def named(*children: Standing, main: Standing = MAIN, dead: Sequence[DeathEvent] = ()) -> StallEvent:
    return explained([main], children, dead, 30, 9.0, "data_wait")


IDLE = worker(Waiting("poll"), ("get", f"{PYTHON}/multiprocessing/queues.py"))
JOINS = standing(Waiting("wait"), stack(("join", f"{PYTHON}/multiprocessing/process.py"), MAIN_LOOP))
CASES = [
    (
        "threads",
        named(IDLE, worker(Waiting("futex", "futex_do_wait", library="libgomp.so.1"), ITEM, forked=True, fresh=True)),
        ["waits for loader worker 1", "train.py:11 in __getitem__), which sleeps", "libgomp.so.1, since its first"],
        "forkserver",
    ),
    ("lock", named(worker(FUTEX, ITEM, forked=True)), ["lock that was held when it was forked"], "forkserver"),
    (
        "queue",
        named(worker(Waiting("write", "pipe_write", "pipe:[7]"), ("fill", "/home/me/train.py", 4)), main=JOINS),
        ["train.py:24) waits for", "train.py:4 in fill), which waits", "queue that it writes to"],
        "before join()",
    ),
    (
        "dead",
        named(main=JOINS, dead=[DeathEvent(30, 7, "child process", "SIGKILL")]),
        ["waits for child process (pid 7), which was killed by SIGKILL"],
        "exitcode",
    ),
    ("storage", named(worker(READS, ITEM)), ["train.py:11 in __getitem__), which waits in read of /data"], "timeout"),
    ("storage", named(main=standing(READS, stack(ITEM))), ["train.py:11 in __getitem__)", "/data/a.bin"], "mount"),
    (
        "storage",
        named(standing(Waiting("", "nfs_wait"), None, "loader worker 1"), main=standing(Waiting("poll"), None)),
        ["waits for loader worker 1", "nfs_wait"],
        "mount",
    ),
    ("input", named(main=standing(TYPED, stack(ITEM))), ["input"], ""),
    ("input", named(main=standing(Waiting("poll"), stack(("cmdloop", f"{PYTHON}/pdb.py"), ITEM))), ["input"], ""),
    (
        "waits",
        named(main=standing(FUTEX, stack(("wait", f"{PYTHON}/threading.py"), ("get", f"{PYTHON}/queue.py"), ITEM))),
        ["train.py:11 in __getitem__) waits for what another thread puts into a queue"],
        "has ended with an error",
    ),
    ("sleep", named(worker(Waiting("sleep"), ITEM)), ["train.py:11 in __getitem__), which sleeps in time.sleep"], ""),
    ("stopped", named(main=standing(FUTEX, None, letter="T")), ["stopped by a signal or a debugger"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "event", "words", "advice"), CASES)
def test_what_is_waited_for_is_named(kind: str, event: StallEvent, words: list[str], advice: str) -> None:
    assert event.kind == kind, event.text
    assert all(word in event.text for word in words), event.text
    assert advice in event.advice
    assert bool(event.advice) == (kind not in NO_HANGS)


def test_the_rank_that_does_not_enter_a_collective_is_named() -> None:
    reduces = stack(("all_reduce", f"{TORCH}/distributed/distributed_c10d.py"), MAIN_LOOP)
    waits = standing(FUTEX, reduces, "rank 0")
    behind = standing(FUTEX, stack(("wait", f"{PYTHON}/threading.py"), ITEM), "rank 1")
    event = explained([waits, behind], [], [], 30, 9.0, "?")
    assert (event.kind, event.where) == ("collective", "train.py:11 in __getitem__")
    assert "rank 0" in event.text.split(" that rank 1 ")[0]
    # Of one rank alone nobody knows what the others do.
    assert explained([waits], [], [], 30, 9.0, "?").kind == "ranks"


class Subject:
    """A process that trains: this one."""

    name, phase, thread = "it", "data_wait", 1

    def __init__(self, pid: int) -> None:
        self.pid, self.steps = pid, 7
        self.progress = (1, 7)


def test_a_stall_is_told_again_when_it_has_doubled_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, subject, told = 0.0, Subject(os.getpid()), []
    ignored = frozenset(int(entry.name) for entry in Path("/proc/self/task").iterdir())
    stalls = Stalls(4.0, lambda _: stack(ITEM), lambda: ignored, lambda: now)
    monkeypatch.setattr("ndd_engine.measure.stalls.moved_bytes", lambda pid: 0)
    monkeypatch.setattr("ndd_engine.measure.stalls.children_of", lambda pid: iter(()))

    def pass_s(seconds: float) -> None:
        nonlocal now
        for _ in range(round(seconds)):
            now += 1
            told.extend((now, event) for event in stalls.look([subject]))
            if stalls._job is not None:
                stalls._job.join()

    pass_s(20)
    assert len(told) == 3  # after 4, 8 and 16 s
    assert all("train.py:11 in __getitem__" in event.text for _, event in told)
    subject.progress = (2, 8)
    pass_s(1)
    assert told[-1][1].kind == OVER
    told.clear()
    pass_s(3)
    assert not told


def test_a_run_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_watch, "PERIOD_S", 0.01)
    watch = TrainerWatch(TrainingThread(PhaseClock(), lambda: 0), lambda event: None, lambda: False)
    watch.start()
    watch.stop()
    watch.stop()
    assert "ndd-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_watch_that_fails_says_so_once() -> None:
    def broken() -> bool:
        raise ZeroDivisionError("of ours")

    told: list[Event] = []
    watch = TrainerWatch(TrainingThread(PhaseClock(), lambda: 7), told.append, broken)
    watch.look()
    watch.look()
    (note,) = told
    assert isinstance(note, MarkEvent) and note.step == 7
    assert "hangs" in note.text and "ZeroDivisionError: of ours" in note.text


@pytest.mark.parametrize("hangs", [True, False])
def test_what_hangs_before_the_first_step_is_told_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(trainer_watch, "PERIOD_S", 0.02)
    monkeypatch.setattr(process_watch, "Stalls", partial(Stalls, 0.3))
    monkeypatch.setattr("ndd_engine.measure.stalls.moved_bytes", lambda pid: 0)
    monkeypatch.setattr("ndd_engine.measure.stalls.children_of", lambda pid: iter(()))
    told: list[Event] = []
    found = threading.Event()

    def put(event: Event) -> None:
        told.append(event)
        if isinstance(event, StallEvent):
            found.set()

    with PreparationWatch(put, lambda: not hangs) as watch:
        watch.put(StageEvent("prepare", "reading the data"))
        assert found.wait(10.0 if hangs else 0.5) == hangs
        watch.put(StageEvent("prepare", "moving the model to the device"))
    stalls = [event for event in told if isinstance(event, StallEvent)]
    assert [event.kind for event in stalls] == ["waits", OVER] * hangs
    assert not hangs or ("preparation" in stalls[0].text and "test_stalls.py" in stalls[0].text)
    # A run that ends in a hang keeps it.
    told.clear()
    found.clear()
    with suppress(KeyboardInterrupt), PreparationWatch(put, lambda: not hangs):
        assert found.wait(10.0 if hangs else 0.5) == hangs
        raise KeyboardInterrupt
    assert not any(isinstance(event, StallEvent) and event.kind == OVER for event in told)


ENGINE = Path(reporting.__file__).parents[1]
OWN = (__file__, str(ENGINE / "workloads" / "eeg.py"))
FOREIGN = (torch.nn.functional.__file__, os.__file__, pytest.__file__, reporting.__file__, "<string>")


@pytest.mark.parametrize("file", [*OWN, *FOREIGN, str(ENGINE / "workloads" / "factory_data.py")])
def test_what_counts_as_the_users_own(file: str) -> None:
    assert own(compile("0", file, "exec")) is (file in OWN)


def test_the_memory_of_its_own_is_told_of_each_process() -> None:
    found = named(worker(FUTEX, ITEM, forked=True, private_bytes=3 << 30))
    assert any("loader worker 1" in line and "3.0 GiB" in line for line in found.processes)
