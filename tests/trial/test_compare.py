"""Comparison of two recorded runs: what is measured, what is excluded, and the verdict."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import ITEMS, STEPS, evaluation, run_event, sample, steady, window, windows, write_run

from ndd_console.render.text import lines as text_lines
from ndd_console.words.comparison import two_compared
from ndd_engine.errors import UsageError
from ndd_engine.record.events import Event, SampleEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.script_sources import Sources
from ndd_engine.script.command import Command
from ndd_engine.trial.compare import Comparison, Stretch, compare, compare_several, rate, ratio, warm_up
from ndd_engine.trial.estimates import Usual
from ndd_engine.trial.outcome import PairVariances


def compared(folder: Path, a: list[Event], b: list[Event], **of_b: object) -> Comparison:
    return compare(write_run(folder / "a", a), write_run(folder / "b", b, **of_b))


# The verdict.


def test_a_run_that_is_slower_by_a_tenth_is_called_slower(tmp_path: Path) -> None:
    found = compared(tmp_path, windows(steady(60, 1.0)), windows(steady(60, 1.1, seed=1)))
    assert found.verdict == "slower"
    assert found.speed.ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert found.speed.low < found.speed.ratio < found.speed.high < 1  # type: ignore[operator]
    assert found.slower_than(0.05) == "slower"
    assert found.slower_than(0.2) == "not slower"
    assert found.slower_than(0.09) == "inconclusive"


@pytest.fixture
def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with a device: trials have shown that processes on it hardly differ from each other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def known(device: str) -> None:
        for _ in range(20):
            PairVariances().add(device, Usual(0.0, 3.0))

    return known


def test_equal_runs_are_neither_faster_nor_slower(tmp_path: Path, alike: Callable[[str], None]) -> None:
    found = compared(tmp_path, windows(steady(80, 1.0)), windows(steady(80, 1.0, seed=2)))
    # Two processes with the same configuration may differ by as much, unless trials here have shown otherwise.
    assert found.verdict == "inconclusive"
    assert found.slower_than(0.05) == "not slower"
    alike(found.a.run.device_name)
    again = compare(RunDir(tmp_path / "a"), RunDir(tmp_path / "b"))
    assert again.verdict == "same" and again.speed.ratio == found.speed.ratio


def test_runs_that_differ_by_less_than_two_percent_are_not_called_faster(
    tmp_path: Path, alike: Callable[[str], None]
) -> None:
    alike(run_event().device_name)
    found = compared(
        tmp_path,
        windows(steady(400, 1.0, noise=0.001)),
        windows(steady(400, 1 / 1.015, seed=2, noise=0.001)),
    )
    assert found.speed.ratio == pytest.approx(1.015, abs=0.003)
    assert found.verdict not in ("faster", "slower")


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        (
            steady(8, 1.0, noise=0.6),
            steady(8, 1.15, seed=3, noise=0.6),
            None,
        ),  # they vary more than they differ
        ([1.0, 1.0], [2.0, 2.0], 0.5),  # too few for an interval
    ],
)
def test_what_the_windows_do_not_show_is_inconclusive(
    tmp_path: Path, a: list[float], b: list[float], ratio: float | None
) -> None:
    found = compared(tmp_path, windows(a), windows(b))
    assert found.verdict == found.slower_than(0.05) == "inconclusive"
    if ratio is not None:
        assert (found.speed.ratio, found.speed.low, found.speed.high) == (pytest.approx(ratio), None, None)


@pytest.mark.parametrize(("others", "called"), [(1.3, "inconclusive"), (0.1, "slower")])
def test_other_processes_beside_one_run_leave_no_verdict(tmp_path: Path, others: float, called: str) -> None:
    def beside(used: float, times: list[float]) -> list[Event]:
        host = {"cpu_percent": 50 * used, "process_cpu_percent": 70.0}
        return [*windows(times), *(SampleEvent(None, host) for _ in range(9))]

    found = compared(tmp_path, beside(0.7, steady(60, 1.0)), beside(0.7 + others, steady(60, 1.5, seed=1)))
    assert found.verdict == called
    assert found.disturbed == (called == "inconclusive") == any("processes" in why for why in found.unlike)
    assert found.slower_than(0.05) == called


# What is left out.


def test_profiled_and_warm_up_windows_are_left_out_and_counted(tmp_path: Path) -> None:
    slow_start = [5.0, 3.0, 2.0, *steady(60, 1.0)]
    capture = replace(window(900, 30.0), profiled=True)
    found = compared(tmp_path, windows(steady(60, 1.0, seed=4)), [*windows(slow_start), capture])
    assert found.b.profiled == 1
    assert 3 <= found.b.warm_up < 15
    assert found.speed.ratio == pytest.approx(1.0, abs=0.03)


def test_evaluations_and_checkpoints_are_no_part_of_the_speed(tmp_path: Path) -> None:
    both = {"forward": {"host_ns": 10**9}, "evaluate": {"host_ns": 4 * 10**9}}
    interrupted = [
        replace(item, wall_ns=5 * 10**9, phases=both) if index % 5 == 0 else item
        for index, item in enumerate(windows([1.0] * 40))
    ]
    found = compared(tmp_path, windows([1.0] * 40), interrupted)
    assert found.speed.ratio == pytest.approx(1.0)
    assert found.b.phases["evaluate"] > 0 and "evaluate" not in found.a.phases


def test_what_was_trained_twice_after_a_resume_counts_once_for_the_loss(tmp_path: Path) -> None:
    first = [window((index + 1) * STEPS, 1.0, 9.0) for index in range(8)]
    again = run_event(resumed_step=4 * STEPS)
    second = [window((index + 5) * STEPS, 1.0, 1.0) for index in range(8)]
    run = write_run(tmp_path / "b", [*first, again, *second])
    found = compare(write_run(tmp_path / "a", windows([1.0] * 12)), run)
    assert [loss for _, loss in found.b.losses] == [9.0] * 4 + [1.0] * 8
    # Each of the two processes warms up.
    assert found.b.warm_up == 2


# Further information.


def test_what_changed_is_told_by_kind(tmp_path: Path) -> None:
    config = {"batch": {"micro": 16}, "loader": {"workers": 2}, "run": {"name": "b"}}
    found = compared(
        tmp_path, windows([1.0] * 9), windows([1.0] * 9), config=config, versions={"torch": "2.7"}
    )
    told = {(item.kind, item.key, item.a, item.b) for item in found.differences}
    assert ("config", "loader.workers", "0", "2") in told
    assert ("version", "torch", "2.6", "2.7") in told
    assert not [item for item in found.differences if item.key == "run.name"]
    assert found.unlike == ()


def test_what_changed_in_a_script_is_its_diff_and_its_commit(tmp_path: Path) -> None:
    folder, commits = tmp_path / "project", ("1" * 40, "2" * 40)
    (folder / ".git" / "refs" / "heads").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "model.py").write_text("WIDTH = 8\n")
    runs = []
    for commit, name, lr in zip(commits, "ab", ("1e-3", "3e-4\x1b[2J"), strict=True):
        (folder / "train.py").write_text(f"def train():\n    lr = {lr}\n")
        (folder / ".git" / "refs" / "heads" / "main").write_text(commit + "\n")
        config = {"script": {"optimizer": ["train.py", 2 if name == "a" else 9]}}
        runs.append(
            write_run(tmp_path / name, windows([1.0] * 9), config=config, data=f"python train.py {name}")
        )
        Command(("torchrun", "train.py"), folder).keep(runs[-1])
    found = compare(*runs)
    shown = "\n".join(text_lines(two_compared(found)))
    assert "-    lr = 1e-3\n+    lr = 3e-4\\x1b[2J" in shown and "model.py" not in shown
    assert [(one.kind, one.a, one.b) for one in found.differences] == [
        ("source", commits[0][:12], commits[1][:12]), ("command", "python train.py a", "python train.py b")
    ]  # fmt: skip
    assert found.unlike == ()


def test_what_a_script_imports_is_kept_and_renamed_scripts_are_compared(tmp_path: Path) -> None:
    runs = []
    for name, width in (("first", 8), ("second", 9)):
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "__init__.py").write_text("from . import net\n")
        (folder / "parts" / "net.py").write_text(f"WIDTH = {width}\n")
        (folder / "unused.py").write_text(f"UNUSED = {width}\n")
        (folder / "broken.py").write_text("def (:\n")
        (folder / f"{name}.py").write_text(f"import torch, parts, broken\nSTEPS = {width}\n")
        runs.append(write_run(tmp_path / f"run-{name}", windows([1.0] * 9), config={"script": {}}))
        Command(("python", f"{name}.py"), folder).keep(runs[-1])
    shown = "\n".join(compare(*runs).diff)
    assert "-STEPS = 8\n+STEPS = 9" in shown and "-WIDTH = 8\n+WIDTH = 9" in shown
    assert "UNUSED" not in shown and "broken.py" not in shown


def test_a_long_diff_is_cut_and_damaged_sources_cost_only_the_diff(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, windows([1.0] * 9), config={"script": {}}) for name in "ab"]
    for place, run in enumerate(runs):
        Sources("", {"train.py": "\n".join(f"x = {place * line}" for line in range(400))}).keep(run)
    text = text_lines(two_compared(compare(*runs)))
    assert len(text) < 150 and any("more lines" in line for line in text)
    runs[1].sources.write_text('{"commit": 3, "files": [1]}')
    assert compare(*runs).diff == ()


@pytest.mark.parametrize(
    ("other", "comparable"),
    [
        ({"device_name": "another"}, True),
        ({"items_per_step": 64}, True),
        ({"host": "other"}, True),
        ({"workload": "eeg"}, False),
        ({"parameters": 5}, False),
    ],
)
def test_what_is_not_alike_is_warned_of_and_other_models_have_no_verdict(
    tmp_path: Path, other: dict[str, object], comparable: bool
) -> None:
    found = compared(tmp_path, windows(steady(60, 1.0)), windows(steady(60, 3.0, seed=1)), **other)
    assert (found.verdict != "not comparable") == comparable
    if comparable:
        assert len(found.unlike) == 1
    else:
        with pytest.raises(UsageError, match=r"^a and b"):
            found.slower_than(0.05)


def test_single_losses_of_scripts_are_compared_only_at_equal_steps(tmp_path: Path) -> None:
    """A script's loss is read at one step of a window, which differs between runs, and at milestones, which do not."""

    def read(*steps: int, milestones: Sequence[int]) -> list[Event]:
        ends = range(STEPS, STEPS * len(steps) + 1, STEPS)
        return [
            window(
                end, 1.0, 100.0 / at, last_loss=(at, 100.0 / at),
                milestone_losses=tuple((one, 100.0 / one) for one in milestones if end - STEPS < one <= end),
            )
            for end, at in zip(ends, steps, strict=True)
        ]  # fmt: skip

    def losses(folder: str, a: list[Event], b: list[Event]) -> list[tuple[int, tuple[float | None, ...]]]:
        of = {"config": {"script": {"command": ["python", "train.py"]}}}
        found = compare(
            write_run(tmp_path / folder / "a", a, **of), write_run(tmp_path / folder / "b", b, **of)
        )
        return [(point.items, point.losses) for point in found.losses]

    every = (2, 4, 8, 14, 20, 28)
    other = losses("other", read(9, 19, 28, milestones=every), read(8, 17, 28, milestones=every))
    assert other == [(at * ITEMS, (100.0 / at, 100.0 / at)) for at in (4, 14, 20, 28)]
    # One run has missed some, and no step has the loss of another one.
    some = losses("some", read(9, 19, 28, milestones=every), read(8, 17, 28, milestones=(8, 28)))
    assert some == [(at * ITEMS, (100.0 / at, 100.0 / at)) for at in (8, 28)]
    assert losses("none", read(7, 20, milestones=(2,)), read(7, 20, milestones=(4,))) == []


def test_losses_are_compared_at_the_same_number_of_items(tmp_path: Path) -> None:
    # B takes twice the items a step: at the same step it has seen twice as much.
    a = [window((index + 1) * STEPS, 1.0, 100.0 - index) for index in range(40)]
    b = [window((index + 1) * STEPS, 1.0, 100.0 - 2 * index) for index in range(20)]
    found = compared(tmp_path, a, b, items_per_step=2 * ITEMS)
    assert [point.items for point in found.losses] == [1600, 3200, 4800, 6400]
    for point in found.losses:
        assert point.losses[0] == pytest.approx(point.losses[1], abs=2.0)


def test_memory_and_evaluations_are_read(tmp_path: Path) -> None:
    more = [evaluation(50, loss=1.5), evaluation(60, loss=1.7), sample(1000), sample(3000, 500), sample(2000)]
    found = compared(tmp_path, windows([1.0] * 9), [*windows([1.0] * 9), *more])
    body = found.to_dict()
    assert body["b"]["peak_bytes"] == 3500 and body["a"]["peak_bytes"] is None
    assert body["a"]["training_s"] == pytest.approx(9.0)
    assert body["b"]["best_evaluation"]["metrics"] == {"loss": 1.5}
    assert body["b"]["last_evaluation"]["metrics"] == {"loss": 1.7}


# The statistics.


def test_the_interval_of_equal_series_holds_one_about_as_often_as_it_says() -> None:
    draw = random.Random(5)
    for alike, least in ((0.0, 0.92), (0.5, 0.90), (0.8, 0.86)):
        held = 0
        for _ in range(200):
            sides = []
            for _side in range(2):
                level, series = draw.gauss(0, 1), []
                for _ in range(60):
                    level = alike * level + math.sqrt(1 - alike**2) * draw.gauss(0, 1)
                    series.append(Stretch(100 * math.exp(0.05 * level), 1e9))
                sides.append(rate(series[warm_up(series) :]))
            found = ratio(*sides)
            held += found.low is not None and found.high is not None and found.low <= 1 <= found.high
        assert held / 200 >= least


def test_a_rate_is_all_items_over_all_time_however_long_its_windows() -> None:
    found = rate([Stretch(10, 1e9), Stretch(10, 3e9), Stretch(20, 2e9), Stretch(20, 2e9)])
    assert found.value == pytest.approx(60 / 8)


# More than two runs.


def test_each_run_is_compared_with_the_first(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", [*windows(steady(60, 1.0)), evaluation(600, rmse=0.5)])
    slow = write_run(tmp_path / "slow", [*windows(steady(60, 1.1, seed=1)), evaluation(600, rmse=0.4)])
    short = write_run(
        tmp_path / "short", windows(steady(40, 0.8, seed=2), loss=4.0), config={"optimizer": {"lr": 0.5}}
    )
    other = write_run(tmp_path / "other", windows(steady(60, 1.0, seed=3)), parameters=99, model="bigger")
    found = compare_several((base, slow, short, other))
    assert [each.verdict for each in found.candidates] == ["slower", "faster", "not comparable"]
    for each, run in zip(found.candidates, (slow, short, other), strict=True):
        assert each == compare(base, run)  # exactly what a comparison of two says
    # Losses at the same number of items for all: those of the shortest run.
    assert found.losses[-1].items == 40 * STEPS * ITEMS and len(found.losses[-1].losses) == 4
    assert found.losses[-1].losses[2] == pytest.approx(2 * (found.losses[-1].losses[0] or 0))
    body = found.to_dict()
    assert body["baseline"]["run"] == "base"
    assert [each["run"]["run"] for each in body["candidates"]] == ["slow", "short", "other"]
    assert "losses" not in body["candidates"][0] and body["losses"][0]["share"] == 0.25
    with pytest.raises(UsageError, match="same run"):
        compare_several((base, slow, base))
