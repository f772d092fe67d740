"""Steps that become slower are told from noise, a rise at one moment and larger batches; what has grown is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planted_runs import Planted, cores, script

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.diagnose.pace_rules import line_through, shift
from ndd_engine.record.events import FunctionsEvent, SampleEvent, StacksEvent
from ndd_engine.record.snapshot import MOST_POINTS
from ndd_engine.record.state import RunState
from tests import records

MS = 1_000_000
WINDOWS = 180
SHARES = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}


def slowing(
    step_ms: Callable[[int], float],
    *functions: tuple[int, FunctionsEvent],
    items: Callable[[int], int] = lambda index: 64,
    planted: Planted | None = None,
    phase: str = "forward",
    cause: str = "slowing",
    host: dict[str, Any] | None = None,
) -> Finding | None:
    """The finding with this cause of a run with these step times by window.

    functions: window -> a profiled step after it. host: of a sample after each window.
    """
    state, profiled = RunState(), dict(functions)
    for t, event in (planted or Planted(windows=0)).events():
        state.fold(t, event)
    chance = random.Random(1)
    for index in range(WINDOWS):
        ns = round(step_ms(index) * (1 + chance.random() * 0.03) * MS)
        phases = {
            "backward": records.phase(5 * MS * 50, steps=50),
            phase: records.phase((ns - 5 * MS) * 50, steps=50),
        }
        window = records.window(50 * (index + 1), 50, ns * 50, phases=phases, items=50 * items(index))
        state.fold(float(index), window)
        if host is not None:
            state.fold(float(index), SampleEvent(None, host))
        if index in profiled:
            state.fold(float(index), profiled[index])
    return next((one for one in diagnose(state.snapshot()) if one.cause == cause), None)


def profile(step: int, ms: float, sizes: dict[str, int] | None = None) -> FunctionsEvent:
    """A step in which `remember` takes so many milliseconds of its own, and Net.forward around it 5 more."""
    rows = [
        ("/home/me/train.py", 12, "remember", 1, round(ms * MS), round(ms * MS), "Net.forward", "forward"),
        ("/home/me/train.py", 30, "Net.forward", 1, round((ms + 5) * MS), 5 * MS, "", "forward"),
    ]
    return FunctionsEvent(step, round((ms + 9) * MS), rows, [], {}, sizes=sizes or {})


def steadily(index: int) -> float:
    """From 10 to 40 ms."""
    return 10 + index / 6


def test_the_finding_says_how_much_since_when_and_in_which_phase() -> None:
    found = slowing(steadily)
    assert found is not None and found.confidence == "likely"
    assert "10 ms to 39 ms over 8,800 steps" in found.title and "in forward" in found.title
    assert found.share == pytest.approx(0.74, abs=0.02)
    assert any(" 3." in item.text and "µs longer" in item.text for item in found.evidence)
    # Each phase that grows has its interval.
    run = Planted(grows={"forward": 1.0, "optimizer": 0.3}, windows=24, host=cores(1.0, 1.0))
    (told,) = [item.text for item in run.named("slowing").evidence if "beyond the noise" in item.text]
    assert "forward by 2" in told and "optimizer by " in told and "backward" not in told


@pytest.mark.parametrize(
    "step_ms",
    [
        lambda index: 10,
        lambda index: 10 + 20 / (1 + index),  # it warms up
        lambda index: 10 if index < 150 else 14,  # for half a minute
        lambda index: 10 if index < 90 else 11.5,  # by little
        lambda index: 10 + min(index, 20) / 5,  # it levels off
        lambda index: 10 + 6 * (index % 30 == 29),  # an evaluation
        lambda index: 14 if 60 < index < 100 or index > 150 else 10,  # another program
        lambda index: 199 * (1 + 0.14 * index / WINDOWS),  # by little, which nothing explains
    ],
    ids=["flat", "warm-up", "moment", "little", "level", "evaluation", "another program", "unexplained"],
)
def test_what_only_looks_like_it_is_not_named(step_ms: Callable[[int], float]) -> None:
    assert slowing(step_ms) is None


def test_larger_batches_take_longer_and_a_small_rise_needs_an_explanation() -> None:
    assert slowing(steadily, items=lambda index: round(6.4 * steadily(index))) is None
    assert slowing(lambda index: 199 * (1 + 0.3 * index / WINDOWS)) is not None
    piled = (3, profile(200, 1.0, {"hooks:block": 2})), (170, profile(8550, 1.0, {"hooks:block": 900}))
    named = slowing(lambda index: 199 * (1 + 0.14 * index / WINDOWS), *piled)
    assert named is not None and "of block" in named.title


def at_once(index: int) -> float:
    """From 10 to 14 ms, 1 min 40 s after the start."""
    return 10 if index < 100 else 14


def test_a_rise_at_one_moment_is_told_with_its_moment_and_its_phase() -> None:
    found = slowing(at_once)
    assert found is not None and found.confidence == "possible"
    assert "10 ms to 14" in found.title and "in forward" in found.title
    since = int(found.title.partition("about step ")[2].partition(", ")[0].replace(",", ""))
    assert 4800 <= since <= 5300 and " 1 min 4" in found.title
    assert any("one moment" in item.text for item in found.evidence)
    assert "this step" in found.changes[0].text
    # Steadily slower: no such moment.
    steady = slowing(steadily)
    assert steady is not None and "since about" not in steady.title


def test_a_rise_at_one_moment_in_all_phases_is_that_of_another_program() -> None:
    def run(host: dict[str, Any] | None, minutes: int) -> list[str]:
        state = RunState()
        for t, event in Planted(windows=0).events():
            state.fold(t, event)
        for index in range(60 * minutes):
            ms = 10 if index < 20 * minutes else 14
            phases = {
                name: records.phase(round(part * ms * MS * 50), steps=50) for name, part in SHARES.items()
            }
            state.fold(float(index), records.window(50 * (index + 1), 50, ms * MS * 50, phases=phases))
            if host is not None:
                state.fold(float(index), SampleEvent(None, host))
        return [one.cause for one in diagnose(state.snapshot())]

    alone = cores(1.0, 1.0)
    assert "slowing" not in run(None, 9)  # other programs are not known
    assert "slowing" not in run(alone, 3)
    assert "slowing" in run(alone, 9)
    busy = cores(2.0, 1.0, neighbours=[{"pid": 7, "name": "stress", "cores": 0.9}])
    assert "slowing" not in run(busy, 9)


def test_a_function_that_explains_a_rise_at_one_moment_is_named_sooner() -> None:
    def late(index: int) -> float:
        return 10 if index < 140 else 40

    assert slowing(late) is None
    found = slowing(late, (3, profile(200, 1.0)), (170, profile(8550, 29.0)))
    assert found is not None and found.confidence == "certain" and "about step" in found.title
    assert "where remember" in found.title and "and longer" not in found.title
    assert "this step" in found.changes[0].text


def test_other_programs_that_take_the_cores_are_not_the_fault_of_the_script() -> None:
    busy = cores(2.0, 1.0, neighbours=[{"pid": 7, "name": "stress", "cores": 0.9}])
    # Both phases grow alike.
    assert slowing(lambda index: 2 * 5.0, planted=Planted(host=busy)) is None
    run = Planted(grows={name: ms / 20 for name, ms in Planted().phases.items()}, windows=24, host=busy)
    assert "slowing" not in run.causes()
    alone = replace(run, host=None).named("slowing")
    assert "all phases" in alone.title and not alone.sets
    # A rise in one phase has to be larger than on an idle machine.
    for grows in (0.3, 2.0):
        run = Planted(grows={"forward": grows}, windows=24, host=busy)
        assert ("slowing" in run.causes()) == (grows > 1)
        assert "slowing" in replace(run, host=None).causes()


def test_beside_other_programs_a_profiled_step_blames_no_function_for_a_small_rise() -> None:
    """Both profiled steps were interrupted by other programs, in different functions."""

    def unsteady(upwards: float) -> Callable[[int], float]:
        chance = random.Random(2)
        return lambda index: 10 + upwards * index / WINDOWS + chance.uniform(0, 10)

    steps = (3, profile(200, 1.0)), (170, profile(8550, 29.0))
    stress = cores(2.0, 1.0, neighbours=[{"pid": 7, "name": "stress", "cores": 0.9}])
    alone = slowing(unsteady(4.0), *steps, host=cores(1.0, 1.0))
    assert alone is not None and "remember" in alone.title
    assert slowing(unsteady(4.0), *steps, host=stress) is None
    assert slowing(unsteady(20.0), *steps, host=stress) is not None


# Step, and milliseconds of a step, of its forward and of its backward, of a script on a tenth of a core.
CROWDED = (
    (2, 23.0, 0.4, 29.9), (9, 25.2, 12.0, 16.3), (47, 30.2, 9.3, 16.7), (89, 26.7, 0.9, 17.0), (163, 26.3, 1.1, 17.8),
    (204, 30.5, 4.4, 11.7), (238, 32.9, 1.9, 23.9), (272, 31.1, 1.2, 20.2), (306, 30.3, 14.2, 15.6),
    (340, 36.2, 11.9, 17.6), (374, 34.6, 7.2, 21.7), (408, 43.6, 9.2, 15.6), (409, 40.7, 0.7, 39.2),
)  # fmt: skip


def test_beside_other_programs_no_function_is_blamed_where_no_phase_has_grown() -> None:
    def told(host: dict[str, Any], grows: float) -> bool:
        state, before = RunState(), 0
        for t, event in Planted(windows=0).events():
            state.fold(t, event)
        for index, (step, ms, forward, backward) in enumerate(CROWDED):
            count, parts = step - before, {"forward": forward + grows * index, "backward": backward}
            phases = {
                name: records.phase(round(part * MS) * count, steps=count) for name, part in parts.items()
            }
            ns = round((ms + grows * index) * MS) * count
            state.fold(float(index), records.window(step, count, ns, phases=phases, items=count))
            state.fold(float(index), SampleEvent(None, host))
            before = step
            if step in (9, 238):
                state.fold(float(index), profile(step, 1.0 if step == 9 else 29.0))
        return "slowing" in [one.cause for one in diagnose(state.snapshot())]

    stress = cores(2.0, 0.2, neighbours=[{"pid": 7, "name": "stress", "cores": 1.8}])
    assert told(cores(1.0, 1.0), 0.0) and not told(stress, 0.0) and told(stress, 4.0)


def test_the_newest_profiled_step_explains_the_rise_until_then() -> None:
    """From 10 to 40 ms; at the profiled step it was 25 ms."""
    found = slowing(steadily, (3, profile(200, 1.0)), (90, profile(4550, 15.0)))
    assert found is not None and "where remember" in found.title
    early = slowing(steadily, (3, profile(200, 1.0)), (90, profile(4550, 5.0)))
    assert early is not None and "remember" not in early.title


@pytest.mark.parametrize(
    ("key", "before", "now", "text", "advice"),
    [
        ("hooks:block.3", 2, 900, "hooks of block.3 grow from 2 to 900", "register hooks once"),
        ("parameters:SGD", 2, 900, "parameters in SGD grow from 2 to 900", "add_param_group once"),
        ("handlers:train", 2, 900, "handlers of the logger train grow from 2 to 900", "add a handler once"),
        ("state:Mine", 2, 900, "entries of the state of Mine grow from 2 to 900", "optimizer.state.pop"),
        ("hooks:block.3", 2, 30, "hooks of block.3 grow from 2 to 30", "register hooks once"),
        ("hooks:block.3", 900, 901, "", ""),  # many from the beginning on
        ("state:Adam", 0, 900, "", ""),  # layers that begin to train
        ("state:Adam", 100, 300, "", ""),
    ],
)
def test_what_piles_up_is_counted(key: str, before: int, now: int, text: str, advice: str) -> None:
    steps = (3, profile(200, 1.0, {key: before})), (170, profile(8550, 1.0, {key: now}))
    found = slowing(steadily, *steps)
    assert found is not None and text in found.title and advice in found.changes[0].text
    assert text or "grow from" not in found.title
    # Hooks and handlers are named before steps are slower, if they are not only a few.
    early = slowing(lambda index: 10.0, *steps, cause="piling-up")
    assert (early is not None) == (("hooks" in text or "handlers" in text) and now > 30)
    assert early is None or (text in early.title and "once" in early.changes[0].text)


def called(step: int, function: str, ms: float, where: str = "remember", **moved: int) -> FunctionsEvent:
    """A step in which a line of `remember`, or of the loop itself, calls this."""
    name, line = (where, 13) if where else ("<module>", 40)
    row = ("/home/me/train.py", line, name, function, "", 1, round(ms * MS), "forward")
    found = profile(step, ms, {f"{kind}:": size for kind, size in moved.items()})
    return replace(found, calls=[row], functions=found.functions if where else [])


APPEND = "append what is new"


@pytest.mark.parametrize(
    ("first", "newest", "title", "advice", "where"),
    [
        (profile(200, 1.0), profile(8550, 29.0), "where remember takes longer", "", "train.py:12 in remember"),
        *(
            (
                called(200, function, 1.0), called(8550, function, 29.0),
                f"remember takes longer and longer, in {function}", advice, "train.py:13 in remember",
            )
            for function, advice in (
                ("dumps", f"{APPEND} to the file"), ("list.sort", "sort once after the loop"),
                ("numpy.concatenate", "join once, after the loop"), ("deepcopy", "copy only what is new"),
                ("work", "keep running sums"),
            )
        ),
        # Of a loop that is in no function, only what it calls is known.
        (
            called(200, "work", 1.0, ""), called(8550, "work", 29.0, ""), "where work takes longer and longer", "",
            "train.py:40 in <module>",
        ),
        # A file that grows is told with what a step reads of it.
        (
            called(200, "max", 1.0, read=9000), called(8550, "max", 29.0, read=4 << 20, written=900),
            "while a step reads 4.0 MiB instead of 9 KiB", APPEND, "train.py:13 in remember",
        ),
    ],
)  # fmt: skip
def test_the_innermost_function_that_grew_is_named_with_why(
    first: FunctionsEvent, newest: FunctionsEvent, title: str, advice: str, where: str
) -> None:
    found = slowing(steadily, (3, first), (170, newest))
    assert found is not None and found.confidence == "certain"
    assert title in found.title and "writes" not in found.title and advice in found.changes[0].text
    assert found.changes[0].where == where
    assert any(" 1 ms " in item.text and "step 200" in item.text for item in found.evidence)


def test_what_did_not_grow_is_not_named_and_old_records_have_stack_samples() -> None:
    same = slowing(steadily, (3, profile(200, 29.0)), (170, profile(8550, 29.0)))
    assert same is not None and "remember" not in same.title
    newest = called(8550, "max", 29.0, read=12_000)
    read = slowing(steadily, (3, called(200, "max", 1.0, read=9000)), (170, newest))
    assert read is not None and "a step reads" not in read.title
    samples = StacksEvent(8000, 5, [("forward", "/home/me/train.py", 9, "<module>", 3, 1)])
    found = slowing(steadily, planted=Planted(windows=0, stacks=samples))
    assert found is not None and found.changes[0].where == "train.py:9 in <module>"


def test_a_graph_that_is_carried_comes_before_the_memory_that_it_takes() -> None:
    carries, back = {"carries": ["/home/me/train.py", 15]}, profile(8550, 1.0, {"graph:": 400})
    found = slowing(steadily, (170, back), planted=script(carries, windows=0), phase="backward")
    assert found is not None and " 400 earlier steps" in found.title
    assert "detach" in found.changes[0].text and found.changes[0].where == "train.py:15"
    used = [(400 + 20 * index) * (1 << 20) for index in range(24)]
    grown = script(
        carries, grows={"backward": 2.0}, windows=24, used=used, host=cores(1.9, 1.9), functions=back
    )
    assert grown.causes()[:2] == ["slowing", "leak"]


def test_a_long_run_keeps_few_points_and_forgets_what_is_repeated() -> None:
    state = RunState()
    for index in range(5000):
        state.fold(float(index), records.window(index + 1, 1, (10 + index % 4) * MS))
    pace = state.snapshot().pace
    assert len(pace) < MOST_POINTS and [point[0] for point in pace] == sorted({point[0] for point in pace})
    # Whatever slows down some of the windows is gone.
    assert {point[1] for point in pace[:-4]} == {10 * MS}
    state.pace.cut(1000)
    assert state.snapshot().pace[-1][0] <= 1000
    before = state.snapshot().pace
    state.fold(1.0, records.window(1001, 1, MS, profiled=True))
    assert state.snapshot().pace == before


@pytest.mark.parametrize("true", [0.0, 0.5, -2.0])
def test_intervals_of_slopes_and_of_rises_have_their_true_value(true: float) -> None:
    """Of 95 % of noisy series, at least of nine in ten here."""
    chance, slopes, rises = random.Random(0), 0, 0
    for _ in range(100):
        line = line_through([(float(x), true * x + chance.gauss(0, 3)) for x in range(16)])
        assert line is not None and line.low <= line.slope <= line.high
        slopes += line.low <= true <= line.high
        _, low, high = shift(*([chance.gauss(level, 3) for _ in range(8)] for level in (0, true)))
        rises += low <= true <= high
    assert slopes >= 90 and rises >= 90
    # Outliers change a slope little.
    line = line_through([(float(x), 2.0 * x + (50 if x in (3, 9) else 0)) for x in range(16)])
    assert line is not None and line.slope == pytest.approx(2.0, abs=0.1)


def neighbours_come_and_go(chance: random.Random) -> Callable[[int], float]:
    slower = [1.0]
    for _ in range(WINDOWS):
        slower.append(chance.choice([1.0, 1.1, 1.2, 1.3]) if chance.random() < 0.1 else slower[-1])
    return lambda index: 200 * slower[index]


def alike_from_one_to_the_next(chance: random.Random) -> Callable[[int], float]:
    level = [0.0]
    for _ in range(WINDOWS):
        level.append(0.9 * level[-1] + chance.gauss(0, 0.02))
    return lambda index: 200 * (1 + abs(level[index]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("series", [neighbours_come_and_go, alike_from_one_to_the_next])
@pytest.mark.parametrize("phase", ["other", "data_wait"])
def test_series_without_a_trend_are_silent(
    series: Callable[[random.Random], Callable[[int], float]], seed: int, phase: str
) -> None:
    assert slowing(series(random.Random(seed)), phase=phase) is None
