"""What ranks leave for each other, and what they conclude from it: causes of failures, and hangs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ndd_engine.train.control import Control
from ndd_engine.train.parallel.agreement import Decision, SharedControl
from ndd_engine.train.parallel.failures import (
    Cause,
    Neighbours,
    _space,
    first_over,
    introduce,
    leave_cause,
    others,
)
from ndd_engine.train.parallel.hang import Note, verdict
from ndd_engine.train.parallel.notes import FolderNotes
from ndd_engine.train.parallel.place import Place
from ndd_engine.train.request import Ranks

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


def ranks_in(folder: Path, count: int = 3) -> list[Ranks]:
    store: Any = None
    return [Ranks(Place(rank, count, rank, count), store, FolderNotes(folder)) for rank in range(count)]


def test_a_note_replaces_an_earlier_one_and_a_missing_one_is_none(tmp_path: Path) -> None:
    notes, other = FolderNotes(tmp_path / "a"), FolderNotes(tmp_path / "a")
    assert notes.get("over/1") is None
    notes.put("over/1", "first")
    notes.put("over/1", "zweite \u2026 \ud800")
    assert (other.get("over/1") or "").startswith("zweite \u2026")
    notes.put("over", "1")
    assert other.get("over") == "1"


def test_a_folder_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes = FolderNotes(tmp_path / "file" / "in")
    notes.put("over", "1")
    assert notes.get("over") is None


def test_an_error_of_its_own_names_the_rank_and_is_told_to_the_others(tmp_path: Path) -> None:
    zero, one, _two = ranks_in(tmp_path)
    cause = others(
        one, ValueError("no such item"), "ValueError at step 7 in data_wait: no such item", "at step 7"
    )
    assert cause == Cause("failed", "rank 1: ValueError at step 7 in data_wait: no such item", True, True)
    told = others(zero, LOST, "RuntimeError: …", "at step 7 in backward")
    assert told.text == f"{cause.text} (rank 0 noticed at step 7 in backward)"
    assert (told.status, told.own, told.curable) == ("failed", False, True)
    found = first_over(zero)
    assert found is not None
    assert found.text == cause.text
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
    cause = others(zero, error, "the data at step 7 in data_wait", "at step 7 in data_wait")
    assert cause == Cause("failed", "rank 0: the data at step 7 in data_wait", True, True)


@pytest.mark.parametrize("file", ["autograd/graph.py", "nn/parallel/distributed.py", "_ops.py"])
def test_a_lost_connection_shows_in_the_code_that_waits_for_a_collective(tmp_path: Path, file: str) -> None:
    zero, one, _two = ranks_in(tmp_path)
    leave_cause(one, Cause("failed", "rank 1: no such item", True, True))
    assert others(zero, raised(RuntimeError(CLOSED), file), "", "here").text.startswith(
        "rank 1: no such item"
    )


def test_a_failure_that_would_occur_again_is_not_curable_on_any_rank(tmp_path: Path) -> None:
    zero, one, _two = ranks_in(tmp_path)
    leave_cause(one, Cause("failed", "run.device: no such device", True, False, 3))
    told = others(zero, LOST, "", "while preparing")
    assert told.text.startswith("rank 1: run.device: no such device")
    assert (told.curable, told.exit_status) == (False, 3)


def test_an_immediate_stop_of_one_rank_is_a_stop_of_the_others(tmp_path: Path) -> None:
    zero, one, _two = ranks_in(tmp_path)
    leave_cause(one, Cause("terminated", "terminated (SIGTERM)", True, False))
    told = others(zero, LOST, "", "at step 7 in checkpoint")
    assert (told.status, told.text) == ("terminated", "terminated (SIGTERM) at rank 1, immediately")


@pytest.mark.long
def test_a_rank_whose_process_is_gone_was_killed_unless_it_left(tmp_path: Path) -> None:
    zero, one, two = ranks_in(tmp_path)
    for ranks in (zero, one, two):
        introduce(ranks)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    for rank in (1, 2):
        zero.notes.put(f"here/{rank}", json.dumps({"host": host, "pid": ended.pid, "space": _space()}))
    two.notes.put("left/2", "")
    cause = others(zero, LOST, "", "at step 7 in backward")
    words = f"rank 1 ({host}, process {ended.pid}) was killed or ended"
    noticed = f"{words} (rank 0 noticed at step 7 in backward)"
    assert cause == Cause("failed", noticed, own=False, curable=True)
    assert Neighbours(zero).gone() == Cause("failed", words, own=False, curable=True)
    one.notes.put("left/1", "")
    assert Neighbours(zero).gone() is None


@pytest.mark.long
def test_a_rank_that_was_killed_is_told_to_other_hosts_by_its_neighbour(tmp_path: Path) -> None:
    zero, one, two = ranks_in(tmp_path)
    introduce(one)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    two.notes.put("here/2", json.dumps({"host": socket.gethostname(), "pid": ended.pid, "space": _space()}))
    assert Neighbours(one).gone() is not None
    zero.notes.put(
        "here/1", json.dumps({"host": "elsewhere", "pid": 1, "space": ""})
    )  # as rank 0 of another host sees them
    zero.notes.put(
        "here/2", json.dumps({"host": socket.gethostname(), "pid": ended.pid, "space": "another container"})
    )
    assert Neighbours(zero).gone() is None
    found = first_over(zero)
    assert found is not None
    assert found.text == f"rank 2 ({socket.gethostname()}, process {ended.pid}) was killed or ended"


def test_after_a_lost_connection_the_ranks_without_a_word_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_engine.train.parallel.failures.PATIENCE_S", 0.2)
    zero, one, two = ranks_in(tmp_path)
    introduce(one)
    assert json.loads(one.notes.get("here/1") or "")["pid"] == os.getpid()
    one.notes.put("here/1", json.dumps({"host": "elsewhere", "pid": 77, "space": ""}))
    two.notes.put("noticed/2", "")
    cause = others(zero, LOST, "RuntimeError: …", "at step 7 in backward")
    assert "lost the connection to another rank at step 7 in backward" in cause.text
    assert "; no response since from rank 1 (elsewhere, process 77): RuntimeError" in cause.text
    assert (cause.own, cause.curable) == (True, True)


def test_without_notes_a_lost_connection_accuses_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_engine.train.parallel.failures.PATIENCE_S", 0.2)
    (tmp_path / "file").touch()
    zero, *_ = ranks_in(tmp_path / "file")
    assert ", and it is not known which one" in others(zero, LOST, "", "at step 7").text


def test_notes_survive_a_folder_that_was_cleaned_up(tmp_path: Path) -> None:
    notes = FolderNotes(tmp_path / "in")
    notes.put("here/0", "a")
    shutil.rmtree(tmp_path / "in")
    notes.put("over", "1")
    assert notes.get("over") == "1"


# Requests.


def shared() -> SharedControl:
    return SharedControl(Control(), lambda: None)


def agreed(**asked: int) -> Decision:
    return Decision(asked, 1, 0.0, 0.0)


def test_a_stop_that_another_rank_asked_for_is_the_reason_of_this_one() -> None:
    control = shared()
    control.obey(agreed(terminated=3))
    for each in (control, control.own):
        assert (each.stop_status, each.stop_reason) == ("terminated", "terminated at rank 3")
    assert not control.kill


def test_the_reason_of_the_rank_that_was_asked_is_kept() -> None:
    control = shared()
    control.own.request("stop", "interrupted (Ctrl-C)", "interrupted")
    assert control.asks()["interrupted"]
    assert not control.stopping  # not before all ranks have agreed
    control.obey(agreed(interrupted=0))
    assert control.stop_reason == "interrupted (Ctrl-C)"


def test_an_immediate_stop_waits_for_the_agreement_between_steps() -> None:
    control = shared()
    control.own.request("kill", "interrupted (Ctrl-C)", "interrupted")
    control.check_kill()
    assert control.asks()["kill"]
    control.obey(agreed(interrupted=0, kill=0))
    assert control.kill
    assert control.pending


# Hangs.


def note(
    rank: int, step: int = 20, phase: str = "backward", waits: str = "all_reduce of [[8]]", begun: int = 9
) -> Note:
    return Note(rank, step, phase, f"train/step.py:{rank} backward", begun, waits)


def test_a_rank_that_waits_in_nothing_holds_the_others_up() -> None:
    notes = {rank: note(rank) for rank in (0, 2, 3)} | {
        1: Note(1, 20, "data_wait", "own.py:7 __getitem__", 8, "")
    }
    assert verdict(notes, {}, HOSTS, 62.0) == (
        "step 21 has not ended for 1 min 02 s: rank 1 (one) is in data_wait, at own.py:7 __getitem__; "
        "3 of 4 ranks wait in all_reduce of [[8]]"
    )


def test_a_rank_without_an_answer_is_named_with_what_the_system_says() -> None:
    text = verdict({rank: note(rank) for rank in (0, 1, 3)}, {2: "is stopped (process 5)"}, HOSTS, 3.0)
    assert "rank 2 (two) is stopped (process 5); 3 of 4 ranks wait in all_reduce of [[8]]" in text


def test_a_rank_that_is_a_step_behind_is_named() -> None:
    notes = {rank: note(rank, step=20 - (rank == 3)) for rank in range(4)}
    text = verdict(notes, {}, HOSTS, 3.0)
    assert text.startswith("step 20 has not ended for 3")
    assert "rank 3 (two) is in backward, at train/step.py:3 backward" in text


def test_fewer_collectives_begun_name_the_rank() -> None:
    notes = {rank: note(rank, begun=9 - (rank == 0)) for rank in range(4)}
    assert "rank 0 (one) is in backward" in verdict(notes, {}, HOSTS, 3.0)


def test_ranks_in_different_collectives_are_listed_with_their_places() -> None:
    notes = {0: note(0), 1: note(1, waits="broadcast of [[3]]")}
    assert (
        "the ranks wait in different collectives: rank 0 in all_reduce of [[8]], at train/step.py:0 backward; "
        in (verdict(notes, {}, HOSTS[:2], 3.0))
    )
