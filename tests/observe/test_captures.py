"""Captures inside the process of a script: what they write, and when they make way; the script stays the same."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import SUBJECTS, Ran, run
from tests.tiers import few
from torch import nn

from ndd_engine.errors import UsageError
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.record.events import KernelsEvent
from ndd_engine.record.figures import EVALUATION_OR_CHECKPOINT
from ndd_engine.script.follower import folded
from ndd_engine.script.records import Room
from ndd_watch import CAPTURES
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock

pytestmark = pytest.mark.long

# Requests are seen where a window ends: after almost every step.
SETTINGS = {
    "NDD_WATCH_WINDOW_S": "0.001", "NDD_WATCH_PROFILE_S": "0", "NDD_WATCH_SHARE": "1", "NDD_WATCH_CAPTURE_S": "0",
}  # fmt: skip
ALONE = "the script uses a profiler of its own, and is left alone"


def ran(folder: Path, *words: str, observed: bool = True, **more: Any) -> Ran:
    (folder / "traces").mkdir(parents=True)
    settings = {**SETTINGS, CAPTURES: str(folder / "traces")} if observed else {}
    return run(
        folder, "captured.py", *words, observed=observed, **{"PYTHONWARNINGS": "ignore", **settings, **more}
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran, Ran]:
    """The training of 160 steps, bare and observed, with the folder of the latter."""
    folder = tmp_path_factory.mktemp("plain")
    return folder / "seen", ran(folder / "bare", observed=False), ran(folder / "seen")


def events(folder: Path, found: Ran) -> list[KernelsEvent]:
    lines = _taken(found)
    return [
        folded(folder / "traces" / line["data"]["trace"], line["step"], line["data"]["steps"])
        for line in lines
    ]


def _taken(found: Ran) -> list[dict[str, Any]]:
    """The marks of the captures of the process with the longest record."""
    lines = max(found.records.values(), key=len)
    return [line for line in lines if line["type"] == "mark" and "trace" in line["data"]]


def left_out(found: Ran) -> set[int]:
    return set(map(int, found.word("OUT").split(",")))


def own() -> KernelsEvent:
    """The capture of an own run of the same model."""
    spec = importlib.util.spec_from_file_location("captured", SUBJECTS / "captured.py")
    assert spec is not None and spec.loader is not None
    subject: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(subject)
    clock = PhaseClock()
    capture = ProfilerCapture(torch.device("cpu"), clock, model=subject.model)
    for number in range(5):
        if number == 1:
            capture.start()
        elif number == 2:
            capture.begin()
        clock.enter(phase.ZERO_GRAD)
        subject.optimizer.zero_grad()
        clock.enter(phase.FORWARD)
        out = subject.model(subject.x)
        clock.enter(phase.LOSS)
        loss = nn.functional.mse_loss(out, subject.y)
        clock.enter(phase.BACKWARD)
        loss.backward()
        clock.enter(phase.OPTIMIZER)
        subject.optimizer.step()
        clock.enter(phase.OTHER)
        if number >= 2:
            capture.step_ended()
    return capture.end(5)


@pytest.fixture
def _threads() -> Iterator[None]:
    """The subject trains with one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_the_event_is_that_of_an_own_run_and_the_script_is_the_same(
    plain: tuple[Path, Ran, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SUBJECTS))
    folder, bare, found = plain
    assert found.errors == bare.errors == ""
    assert found.out.startswith(bare.out) and found.word("LEFT") == "True"
    expected = own()
    first, second = events(folder, found)
    assert second.step >= first.step + 5
    for event in (first, second):
        assert (event.method, event.steps) == (expected.method, expected.steps) == ("operators", 3)
        assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
        # Each step may read its loss, which is an operator.
        assert expected.launches <= event.launches <= expected.launches + event.steps
        assert event.idle_ns.keys() == expected.idle_ns.keys()

        # Outside of modules, an own run of this test has a loss in a phase of its own.
        modules, mine = ({(*row[:2], row[4]) for row in one.modules if row[1]} for one in (event, expected))
        assert modules == mine
        lines, mine = (
            {
                (Path(row[0]).name, *row[1:3], row[5])
                for row in one.lines
                if row[2].startswith(("Net", "Block"))
            }
            for one in (event, expected)
        )
        assert lines == mine


@pytest.mark.budget(20)
def test_what_the_model_does_without_need_is_seen_in_a_capture_by_itself(tmp_path: Path) -> None:
    """Losses and random state are those of the bare run, which draws the same numbers."""
    bare = ran(tmp_path / "bare", "works", observed=False)
    found = ran(tmp_path / "seen", "works", NDD_WATCH_CAPTURE_S="0.02")
    assert found.errors == bare.errors == "" and found.word("LOSS") == bare.word("LOSS")
    taken = events(tmp_path / "seen", found)
    assert len(taken) > 2  # two of them are asked for
    for event in taken:
        (loop,) = [row for row in event.loops if row[2].endswith("forward")]
        assert (loop[3], loop[4], loop[7]) == (20, 1, 40)
        # The first call has another input.
        assert [(row[0], row[5]) for row in event.repeats] == [("head", 1)]
        assert {row[0] for row in event.unused} == {"blocks.*.up", "blocks.*.down"}


def test_captured_steps_are_in_no_statistics(plain: tuple[Path, Ran, Ran]) -> None:
    _, _, found = plain
    captures = _taken(found)
    assert len(captures) == 2
    out, windows = left_out(found), found.of("window")
    for line in captures:
        # One is recorded first, and writing the trace delays the one after them.
        assert set(range(line["step"] - 4, line["step"] + 1)) <= out
        assert line["step"] - 5 not in out and line["step"] + 1 not in out
    assert (found.total("steps"), found.total("timed_steps")) == (160, 160 - len(out))
    ends = [window["step"] for window in windows if window.get("profiled")]
    assert all(any(line["step"] <= end for end in ends) for line in captures)
    assert 0 < len(ends) < len(windows)


# The thread with the capture waits for a profiler in another one. What torch says of a profiler without an end is on
# the page.
@pytest.mark.parametrize("word", few(["profiles", "profiled", "python", "elsewhere"], 1))
def test_a_script_that_profiles_itself_is_left_alone(tmp_path: Path, word: str) -> None:
    bare, found = ran(tmp_path / "bare", word, observed=False), ran(tmp_path / "seen", word)
    assert found.status == bare.status == 0, found.errors
    assert found.word("LOSS") == bare.word("LOSS")
    if word in ("profiles", "elsewhere"):  # its own trace has its own step, and nothing of ours
        counts = [one.out.splitlines()[0].split()[-1] for one in (found, bare)]
        assert counts == ["5", "5"]
    assert {line["text"].partition(": ")[2] for line in found.marks("no profiler capture")} == {ALONE}
    if word != "elsewhere":
        # One profiler of torch may be followed by another; one of Python has ended.
        assert len(_taken(found)) == (word == "python")
        assert not list((tmp_path / "seen" / "traces").iterdir()) or word == "python"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("thread",), ("thread", "ends")])
def test_a_training_in_a_thread_is_not_captured(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Kineto belongs to the thread that started it: the process crashed where another one ended it."""
    found = ran(tmp_path, *words)
    assert (found.status, found.errors, _taken(found)) == (0, "", [])
    assert {"thread" in line["text"] for line in found.marks("no profiler capture")} == {True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "expected"), [("after", ("RECORDS", "False")), ("forks", ("RECORDED", "0"))]
)
def test_a_capture_ends_where_no_step_does_and_is_not_in_a_process_that_is_forked_within_it(
    tmp_path: Path, word: str, expected: tuple[str, str]
) -> None:
    found = ran(tmp_path, word)
    assert found.word(expected[0]) == expected[1]
    if word == "forks":
        assert len(_taken(found)) == 2


@pytest.mark.parametrize(
    ("word", "steps"), few([("evaluates", 1), ("saves", 1), ("ends", 1), ("teaches", 3)], 1)
)
def test_a_capture_ends_before_what_is_no_step(
    tmp_path: Path, plain: tuple[Path, Ran, Ran], word: str, steps: int
) -> None:
    """A teacher in each step is part of it."""
    found = ran(tmp_path, word)
    assert found.errors == ""
    if word in ("evaluates", "saves"):  # what it does besides does not change its training
        assert found.word("LOSS") == plain[1].word("LOSS")
    first = events(tmp_path, found)[0]
    assert first.steps == steps and EVALUATION_OR_CHECKPOINT not in first.idle_ns


@pytest.mark.slow
def test_a_folder_that_is_gone_costs_the_capture_only(tmp_path: Path, plain: tuple[Path, Ran, Ran]) -> None:
    found = ran(tmp_path, "folder")
    assert found.errors == "" and found.out.startswith(plain[1].out)
    assert not _taken(found) and not found.marks("the observation ended")
    folders = [str(tmp_path / "traces") in line["text"] for line in found.marks("no profiler capture")]
    assert folders == [True, True] and found.total("steps") == 160


def test_a_full_disk_costs_the_capture_only(tmp_path: Path, plain: tuple[Path, Ran, Ran]) -> None:
    """A limit of the length of files stands for it: writing ends in the middle of the trace."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    (tmp_path / "seen" / "records").mkdir(parents=True)
    Room(tmp_path / "seen" / "records", shared=False)
    found = ran(tmp_path / "seen", before=limit)
    assert found.errors == "" and found.out.startswith(plain[1].out)
    assert found.total("steps") == 160
    for line in _taken(found):
        with pytest.raises((UsageError, OSError)):
            folded(tmp_path / "seen" / "traces" / line["data"]["trace"], line["step"], line["data"]["steps"])


def test_the_clock_of_the_gpu_goes_on_after_a_capture(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    settings = {**SETTINGS, CAPTURES: str(tmp_path / "traces"), "PYTHONWARNINGS": "ignore"}
    found = run(tmp_path, "on_gpu.py", "2", "4", "8", "0", "asks", **settings)
    assert found.status == 0 and not found.marks("not timed on the GPU") and "CUDA" not in found.errors
    (line,) = _taken(found)
    captured = range(line["step"] - 4, line["step"] + 1)
    windows = found.of("window")
    timed = [window for window in windows if window["device_steps"]]
    assert timed[0]["step"] < captured[0] and timed[-1]["step"] > captured[-1] + 1
    # A step of the capture carries no events.
    assert found.total("device_steps") <= line["step"] - 5 + windows[-1]["step"] - captured[-1]
