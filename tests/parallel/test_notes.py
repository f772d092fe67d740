"""What ranks leave for each other, and what they conclude from it: causes of failures, requests, and hangs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import LIMIT_S

from ndd_engine.measure import stalls
from ndd_engine.run.control import Control, StopNow
from ndd_engine.train.parallel.hang import Note, StackRequests, parsed, place, stack_of, verdict, waiting_in
from ndd_engine.train.parallel.rank_place import (
    Cause,
    FolderNotes,
    HostRanks,
    Member,
    OtherRanks,
    RankPlace,
    first_over,
    introduce,
    leave_cause,
    others,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
HOSTS = ["one", "one", "two", "two"]
CLOSED = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def raised(error: Exception, file: str) -> Exception:
    """The error as code of this file raises it. file: relative to the folder of torch, or absolute."""
    path = Path(torch.__file__).parent / file
    try:
        exec(compile("raise error", str(path), "exec"), {"error": error})
    except Exception as found:  # noqa: BLE001
        return found
    raise AssertionError


LOST = raised(RuntimeError(CLOSED), "distributed/distributed_c10d.py")


def ranks_in(folder: Path, count: int = 3) -> list[OtherRanks]:
    store: Any = None
    return [
        OtherRanks(RankPlace(rank, count, rank, count), store, FolderNotes(folder)) for rank in range(count)
    ]


def test_a_note_replaces_an_earlier_one_and_survives_a_folder_that_was_cleaned_up(tmp_path: Path) -> None:
    notes, other = FolderNotes(tmp_path / "a"), FolderNotes(tmp_path / "a")
    assert notes.get("over/1") is None
    notes.put("over/1", "first")
    notes.put("over/1", "zweite \u2026 \ud800")
    assert (other.get("over/1") or "").startswith("zweite \u2026")
    shutil.rmtree(tmp_path / "a")
    notes.put("over", "1")
    assert other.get("over") == "1"
    # One that cannot be written raises nothing.
    (tmp_path / "file").touch()
    notes = FolderNotes(tmp_path / "file" / "in")
    notes.put("over", "1")
    assert notes.get("over") is None


def test_an_error_of_its_own_names_the_rank_and_is_told_to_the_others(tmp_path: Path) -> None:
    zero, one, _two = ranks_in(tmp_path)
    cause = others(one, ValueError("no such item"), "no such item", "at step 7")
    assert cause == Cause("failed", "rank 1: no such item", True, True)
    told = others(zero, LOST, "RuntimeError: …", "at step 7")
    assert told.text.startswith(cause.text) and "rank 0" in told.text  # which noticed it
    assert (told.status, told.of_this_rank, told.curable) == ("failed", False, True)
    found = first_over(zero)
    assert found is not None and found.text == cause.text
    assert first_over(one) is None


@pytest.mark.parametrize(
    "error",
    [
        raised(RuntimeError("DataLoader timed out after 120 seconds"), "utils/data/dataloader.py"),
        raised(ConnectionError("Caught ConnectionError in DataLoader worker process 0"), "_utils.py"),
        raised(OSError("[Errno 110] Connection timed out"), "/home/me/dataset.py"),
        raised(TimeoutError("the read operation timed out"), "/usr/lib/python3.11/ssl.py"),
    ],
)
def test_a_connection_of_the_users_own_is_not_that_to_another_rank(tmp_path: Path, error: Exception) -> None:
    zero, _one, _two = ranks_in(tmp_path)
    assert others(zero, error, "the data", "here") == Cause("failed", "rank 0: the data", True, True)


@pytest.mark.parametrize("file", ["autograd/graph.py", "nn/parallel/distributed.py", "_ops.py"])
@pytest.mark.parametrize(
    "cause",
    [
        Cause("failed", "rank 1: no item", True, True),
        # It would occur again.
        Cause("failed", "rank 1: no device", True, False, 3),
        # An immediate stop of one rank is a stop of the others.
        Cause("terminated", "terminated", True, False),
    ],
    ids=lambda cause: cause.text,
)
def test_a_lost_connection_in_a_collective_has_the_cause_of_the_other_rank(
    tmp_path: Path, file: str, cause: Cause
) -> None:
    zero, one, _two = ranks_in(tmp_path)
    leave_cause(one, cause)
    told = others(zero, raised(RuntimeError(CLOSED), file), "", "here")
    assert told.text.startswith(cause.text) and told.text != cause.text
    assert (told.status, told.curable, told.exit_status) == (cause.status, cause.curable, cause.exit_status)


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def member(rank: int, pid: int, host: str = "", space: str = "") -> str:
    """What a rank says of itself. host: of this one by default."""
    mine = Member.mine(rank)
    found = replace(mine, pid=pid) if not host else Member(rank, host, pid, space or mine.space)
    return json.dumps(asdict(found))


@pytest.mark.long
def test_a_rank_whose_process_is_gone_was_killed_unless_it_left(tmp_path: Path) -> None:
    zero, one, two = ranks_in(tmp_path)
    introduce(zero)
    gone, host = ended(), socket.gethostname()
    for rank in (1, 2):
        zero.notes.put(f"here/{rank}", member(rank, gone))
    two.notes.put("left/2", "")
    cause = others(zero, LOST, "", "at step 7")
    assert cause.text.startswith(f"rank 1 ({host}, process {gone})")
    assert (cause.status, cause.of_this_rank, cause.curable) == ("failed", False, True)
    found = HostRanks(zero).gone()
    assert found is not None and cause.text.startswith(found.text)
    one.notes.put("left/1", "")
    assert HostRanks(zero).gone() is None


@pytest.mark.long
def test_a_rank_that_was_killed_is_told_to_other_hosts_by_its_neighbour(tmp_path: Path) -> None:
    zero, one, two = ranks_in(tmp_path)
    introduce(one)
    gone, host = ended(), socket.gethostname()
    two.notes.put("here/2", member(2, gone))
    found = HostRanks(one).gone()
    # As rank 0 of another host sees them.
    zero.notes.put("here/1", member(1, 1, "elsewhere"))
    zero.notes.put("here/2", member(2, gone, host, "another container"))
    assert HostRanks(zero).gone() is None
    told = first_over(zero)
    assert told is not None and found is not None
    assert told.text == found.text and told.text.startswith(f"rank 2 ({host}, ")


def test_after_a_lost_connection_the_ranks_without_a_word_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_engine.train.parallel.rank_place.PATIENCE_S", 0.2)
    zero, one, two = ranks_in(tmp_path / "in")
    introduce(one)
    assert json.loads(one.notes.get("here/1") or "")["pid"] == os.getpid()
    one.notes.put("here/1", member(1, 77, "elsewhere"))
    two.notes.put("noticed/2", "")
    cause = others(zero, LOST, "RuntimeError: …", "at step 7")
    assert "rank 1 (elsewhere, process 77)" in cause.text and "rank 2" not in cause.text
    assert (cause.of_this_rank, cause.curable) == (True, True)
    # Without notes it is not known which one.
    (tmp_path / "file").touch()
    zero, *_ = ranks_in(tmp_path / "file")
    text = others(zero, LOST, "", "at step 7").text
    assert "rank 1" not in text and "rank 2" not in text


# Requests.


def shared() -> Control:
    control = Control()
    control.share(lambda: None)
    return control


def test_a_stop_that_another_rank_asked_for_is_the_reason_of_this_one() -> None:
    control = shared()
    control.obey({"terminated": 3})
    assert control.stops == control.stop_status == "terminated" and control.stop_reason.endswith("rank 3")
    assert control.pending and not control.kill


def test_the_reason_of_the_rank_that_was_asked_is_kept() -> None:
    control = shared()
    control.request("stop", "Ctrl-C", "interrupted")
    assert control.asks() == {"interrupted"}
    assert control.stopping and not control.stops and not control.pending  # before all ranks have agreed
    control.obey({"interrupted": 0})
    assert control.stop_reason == "Ctrl-C" and control.stops == "interrupted"


def test_an_immediate_stop_waits_for_the_agreement_between_steps() -> None:
    control = shared()
    control.request("kill", "Ctrl-C", "interrupted")
    control.check_kill()
    with pytest.raises(StopNow):
        control.check_kill(alone=True)
    assert control.asks() == {"kill", "interrupted"}
    control.obey({"interrupted": 0, "kill": 0})
    with pytest.raises(StopNow):
        control.check_kill()


def test_what_is_done_once_is_asked_for_once_and_a_pause_as_long_as_it_lasts() -> None:
    control = shared()
    for action in ("evaluate", "pause"):
        control.request(action)
    assert [control.asks(), control.asks()] == [{"evaluate", "pause"}, {"pause"}]
    control.obey({"evaluate": 0, "pause": 0})
    assert control.take_once() == {"evaluate"} and control.paused
    control.request("resume")
    assert control.asks() == set() and control.paused
    control.obey({})
    assert not control.paused and not control.pending


# Hangs.


def note(rank: int, step: int = 20, waits: str = "all_reduce", begun: int = 9) -> Note:
    return Note(rank, step, "backward", f"step.py:{rank}", begun, waits)


ALL = {rank: note(rank) for rank in range(4)}


@pytest.mark.parametrize(
    ("notes", "silent", "named"),
    [
        # It waits in nothing.
        (
            ALL | {1: Note(1, 20, "data_wait", "own.py:7", 8, "")},
            {},
            ("rank 1 (one)", "data_wait", "own.py:7", "step 21", "3 of 4"),
        ),
        # It gives no answer; what the system says of it is known.
        (
            {rank: ALL[rank] for rank in (0, 1, 3)},
            {2: "is stopped"},
            ("rank 2 (two)", "is stopped", "3 of 4"),
        ),
        # It is a step behind.
        (ALL | {3: note(3, step=19)}, {}, ("rank 3 (two)", "step 20", "step.py:3")),
        # It has begun fewer collectives.
        (ALL | {0: note(0, begun=8)}, {}, ("rank 0 (one)",)),
        # They are in different collectives.
        (ALL | {1: note(1, waits="broadcast")}, {}, ("rank 0", "step.py:0", "rank 1", "broadcast")),
    ],
)
def test_the_rank_that_holds_the_others_up_is_named(
    notes: dict[int, Note], silent: dict[int, str], named: tuple[str, ...]
) -> None:
    text = verdict(notes, silent, HOSTS, 62.0)
    assert all(word in text for word in named), text


# The collective that a rank waits in, from flight recorders as those of gloo and NCCL.


def entry(group: str, number: int, name: str, retired: bool = False) -> dict[str, Any]:
    return {
        "process_group": [group, ""], "pg_id": number, "profiling_name": name, "input_sizes": [[8]], "retired": retired,
    }  # fmt: skip


def recorder(begun: int, number: int, *entries: dict[str, Any]) -> dict[str, Any]:
    """What a recorder says. begun: collectives of its group."""
    return {"entries": list(entries), "pg_status": {str(number): {"last_enqueued_collective": begun}}}


AGREED = recorder(3, 1, entry("1", 1, "gloo:all_gather", True))


@pytest.mark.parametrize(
    ("nccl", "gloo", "begun", "name"),
    [
        (
            recorder(7, 0, entry("0", 0, "nccl:x", True), entry("0", 0, "nccl:all_gather")),
            AGREED,
            10,
            "all_gather",
        ),
        (recorder(5, 1, entry("0", 1, "nccl:broadcast", True)), AGREED, 8, ""),
        (None, recorder(4, 0, entry("0", 0, "gloo:all_reduce")), 4, "all_reduce"),
        (None, None, None, ""),
    ],
)
def test_the_collective_is_that_of_either_recorder(
    monkeypatch: pytest.MonkeyPatch, nccl: Any, gloo: Any, begun: int | None, name: str
) -> None:
    c10d = importlib.import_module("torch._C._distributed_c10d")
    for kind, told in (("nccl", nccl), ("fr", gloo)):

        def dump(_collectives: bool, _active: bool, told: Any = told) -> bytes:
            if told is None:
                raise RuntimeError("no such recorder")
            return json.dumps(told).encode()

        monkeypatch.setattr(c10d, f"_dump_{kind}_trace_json", dump, raising=False)
    assert waiting_in() == (begun, f"{name} of [[8]]" if name else "")


# The stack of a process that cannot tell it itself.

# A thread that waits, and a call of three seconds that keeps the interpreter lock.
SUBJECT = """
import ctypes, json, threading, time
from ndd_engine.train.parallel.hang import StackRequests

def stuck():
    begin = time.monotonic()
    ctypes.PyDLL(None).sleep(3)
    return time.monotonic() - begin

waiting = threading.Thread(target=threading.Event().wait, daemon=True)
waiting.start()
listening = StackRequests(threading.get_ident(), waiting.native_id)
print(json.dumps(listening.address), flush=True)
print(stuck(), flush=True)
listening.stop()
"""


@LINUX
@pytest.mark.long
def test_a_call_that_holds_the_interpreter_lock_is_read_and_not_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "subject.py"
    path.write_text(SUBJECT)
    subject = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert subject.stdout is not None
    told = json.loads(subject.stdout.readline())
    time.sleep(0.3)
    # A signal that it does not listen to would end it.
    assert stack_of({**told, "signal": told["signal"] - 1}, stopped=False) == [] or stalls.find() is not None
    stack = stack_of(told, stopped=False)
    assert [frame["name"] for frame in stack] == ["stuck", "<module>"]
    assert place(stack).split("subject.py:")[1] == "7 stuck"
    assert float(subject.stdout.readline()) > 2.9
    assert subject.wait(LIMIT_S) == 0


def test_a_signal_that_is_used_already_is_left_alone() -> None:
    number = signal.SIGRTMAX - 2
    before = signal.signal(number, lambda *_: None)
    try:
        assert StackRequests(1, 1).address is None
    finally:
        signal.signal(number, before)


def test_the_stack_of_one_thread_in_what_faulthandler_writes() -> None:
    text = """Thread 0x00007f0000000001 (most recent call first):
  File "/a/loader.py", line 3 in read
Current thread 0x00007f0000000002 (most recent call first):
  File "/a b/work.py", line 12 in inner
  File "/a b/work.py", line 20 in <module>
"""
    assert [(frame["line"], frame["name"]) for frame in parsed(text, 0x7F0000000002)] == [
        (12, "inner"),
        (20, "<module>"),
    ]
    assert parsed(text, 5) == []
    assert place([]) == "an unknown line"
