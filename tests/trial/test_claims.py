"""The guides' claims: how each is measured on which machine, and its verdict."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from measured import Bench, machine, trial
from written_runs import evaluation, run_event, window, windows, write_run

from ndd_engine.config import read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.trial.claims import (
    ClaimResult,
    Verdict,
    chosen,
    claims,
    conditions,
    headline,
    measurements,
    run_claims,
)
from ndd_engine.trial.compare import LateError, Recorded, read_recorded
from ndd_engine.trial.tuning import place_of

IDS = [
    f"{guide}{number}"
    for guide, count in zip("NACFS", (7, 7, 8, 3, 8), strict=True)
    for number in range(1, count + 1)
]
*_, UNMEASURABLE = get_args(Verdict)
BIG = machine(cores=64, gpu=True)


class Watched:
    """Answers each watched run with windows of its own; sets: what was asked for, in order."""

    def __init__(self, folder: Path, events: Any, **identity: Any) -> None:
        self.folder, self.events, self.identity = folder, events, identity
        self.sets: list[tuple[str, ...]] = []

    def __call__(
        self, workload: str, sets: Sequence[str], seconds: float, stop: threading.Event
    ) -> Recorded | None:
        self.sets.append(tuple(sets))
        events = self.events(tuple(sets)) if callable(self.events) else self.events
        return read_recorded(write_run(self.folder / f"run-{len(self.sets)}", events, **self.identity))


def nothing(workload: str, sets: Sequence[str], seconds: float, stop: threading.Event) -> Recorded | None:
    raise AssertionError("no run is to be watched")


class Constant(Bench):
    """The same result for every change."""

    def __init__(self, result: Any) -> None:
        super().__init__({})
        self.result = result

    def __call__(self, request: Any, tell: Any, stop: Any) -> Any:
        self.requests.append(request)
        return replace(self.result, sets=list(request.sets))


def measured(name: str, bench: Any, where: Any = BIG, watch: Any = nothing) -> ClaimResult:
    (result,) = run_claims(chosen([name]), 5.0, measure=bench, watch=watch, machine=where)
    return result


# The table.


def test_every_claim_of_the_guides_is_there_once() -> None:
    assert [claim.id for claim in claims()] == IDS


def test_every_measurement_is_a_configuration_that_this_program_takes() -> None:
    for claim in claims():
        for part in claim.parts:
            for variant in part.variants:
                base = read(None, variant.base, claim.workload).resolve()
                if variant.change:
                    assert read(None, (*variant.base, *variant.change), claim.workload).resolve() != base
            assert part.kind == "whole" or part.variants, claim.id
            assert part.kind == "whole" or part.low > 0 or part.high < 100, claim.id


def test_claims_are_named_by_id_or_by_guide() -> None:
    assert [claim.id for claim in chosen(["f3", "N1"])] == ["N1", "F3"]
    assert {claim.guide for claim in chosen(["eeg"])} == {"eeg"}
    with pytest.raises(UsageError, match=r"X9; .*N1, .*eeg"):
        chosen(["X9"])


# What a machine can measure.


def test_where_the_guide_can_be_followed_it_is() -> None:
    bench = Constant(trial("faster", 1.9))
    assert measured("N1", bench).verdict == "confirmed"
    assert "loader.workers=8" in bench.requests[0].sets and "loader.pin_memory=true" in bench.requests[0].sets


def test_fewer_cores_measure_the_neighbour_and_say_so() -> None:
    bench = Constant(trial("faster", 1.9))
    result = measured("N1", bench, machine(cores=2))
    assert result.verdict == "depends"
    assert "loader.workers=2" in bench.requests[0].sets
    (part,), (line,) = result.parts, conditions(result)
    assert part.found is not None and part.found.value.ratio == 1.9
    assert all(word in part.where for word in ("2 workers", "CUDA GPU", "8 cores"))
    # The verdict is "depends": the part does not say "confirmed".
    assert part.outcome == "confirmed" and "confirmed" not in line


def test_what_needs_a_gpu_is_not_measurable_without_one() -> None:
    for name in ("A4", "C2", "C8"):
        assert measured(name, Constant(trial())).verdict != UNMEASURABLE
        without = Constant(trial())
        result = measured(name, without, machine(cores=64))
        assert result.verdict == UNMEASURABLE and not without.requests
        assert any("CUDA GPU" in part.reason for part in result.parts)


def test_how_long_it_takes_at_most_is_known_before() -> None:
    by_id = {claim.id: claim for claim in claims()}
    here = place_of(machine())
    assert measurements(by_id["N1"], here) == 1
    assert measurements(by_id["N7"], here) == 2
    assert measurements(by_id["S8"], here) == 1  # one run shows all its shares
    assert measurements(by_id["C8"], here) == 0


# Verdicts.


@pytest.mark.parametrize(
    ("claim", "result", "verdict"),
    [
        ("A3", trial("faster", 2.5), "confirmed"),  # 2-3x
        ("A3", trial("faster", 9.0), "confirmed"),  # more than claimed
        ("A3", trial("faster", 1.4), "not confirmed"),
        ("A3", trial("slower", 0.8), "not confirmed"),
        ("A3", trial("faster", 2.01), "confirmed"),
        ("A3", trial("inconclusive", 1.9, low=1.2, high=3.0), "inconclusive"),
        ("A3", replace(trial("inconclusive"), ratio=None, low=None, high=None), "not measured"),
        ("A3", trial("out of memory", None), "not measured"),
        ("A3", trial("faster", 2.5, in_effect=False, not_in_effect="no tensor cores"), "not measured"),
        # A claim of no gain falls with a gain.
        ("N2", trial("faster", 1.0), "confirmed"),
        ("N2", trial("faster", 0.7), "confirmed"),
        ("N2", trial("faster", 1.3), "not confirmed"),
    ],
)
def test_a_claim_is_judged_by_the_interval(claim: str, result: Any, verdict: str) -> None:
    assert measured(claim, Constant(result)).verdict == verdict


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (trial("out of memory", None, text="no room"), "no room"),
        (NddError("the disk\nis full"), "the disk is full"),
    ],
)
def test_why_something_was_not_measured_is_told(result: Any, reason: str) -> None:
    (part,) = measured("A3", Bench({"precision.amp=fp16": result})).parts
    assert (part.outcome, part.reason) == ("not measured", reason)


def test_a_claim_of_several_parts_falls_with_one_of_them() -> None:
    # Half the speed at twice the sequence, as claimed; and at 5.74 times the parameters too, which is not.
    assert measured("N7", Constant(trial("slower", 0.5))).verdict == "not confirmed"
    smaller = {"batch.sequence=128": 0.5, "workload.hidden=[512, 256, 128]": 0.175}
    bench = Bench({change: trial("slower", ratio) for change, ratio in smaller.items()})
    assert measured("N7", bench).verdict == "confirmed"


def test_what_can_only_be_measured_in_part_depends() -> None:
    result = measured("A7", Constant(trial("faster", 6.0)))
    assert result.verdict == "depends"
    assert [part.outcome for part in result.parts].count("not measured") == 1
    assert measured("A7", Constant(trial("faster", 2.0))).verdict == "not confirmed"


def test_what_ended_early_and_is_unclear_is_measured_again_in_what_is_left() -> None:
    # Clear of 1 after a second, and yet no answer to whether it is twice as fast.
    bench = Constant(trial("faster", 2.0, low=1.6, high=2.5, abba_blocks=4, seconds=1.0))
    result = measured("A3", bench)
    assert len(bench.requests) == 3
    assert [request.budget_s for request in bench.requests] == [5.0, 4.0, 3.0]
    assert ratio(result) == pytest.approx(2.0) and result.parts[0].found is not None
    value = result.parts[0].found.value
    assert value.low is not None and value.high is not None and 1.6 < value.low < 2.0 < value.high < 2.5
    assert result.verdict == "confirmed"
    spent = Constant(trial("faster", 2.0, low=1.7, high=2.35, abba_blocks=4, seconds=4.9))
    assert measured("A3", spent).verdict == "inconclusive"
    assert len(spent.requests) == 1


# Other figures than speed.


def test_an_epoch_counts_its_items() -> None:
    longer = {"items_per_step": 16, "steps_per_epoch": 20}
    found = trial("no difference", 1.0)
    result = measured("N4", Constant(replace(found, change={**found.change, **longer})))
    # As many items a second, but twice the items an epoch.
    assert ratio(result) == pytest.approx(0.5)
    assert result.verdict == "not confirmed"


def test_compiling_is_judged_over_the_guides_steps_and_told_for_longer_runs() -> None:
    found = trial("faster", 1.25, break_even_steps=15000)
    change = {**found.change, "prepare_s": 31.0}
    result = measured("N5", Constant(replace(found, change=change)))
    # 245 steps of 10 ms are 2.45 s; with the compiler 30 s and 1.96 s.
    assert ratio(result) == pytest.approx(2.45 / 31.96)
    assert result.verdict == "depends"
    assert "15,000" in next(conditions(result))
    never = measured("N5", Constant(replace(trial("slower", 0.9), change=change)))
    assert never.verdict == "confirmed"


@pytest.mark.parametrize(("peak", "verdict"), [(550, "confirmed"), (800, "not confirmed")])
def test_memory_is_a_ratio_of_peaks_of_the_same_trial(peak: int, verdict: str) -> None:
    found = trial("faster", 1.4)
    bench = Constant(replace(found, change={**found.change, "peak_bytes": peak}))
    claim = measured("C5", bench)
    assert claim.verdict == verdict and len(bench.requests) == 1
    (part,) = (part for part in claim.parts if part.part.kind == "memory")
    # It has an interval also from a single pair of processes.
    assert part.found is not None and part.found.value.low is not None and part.found.value.high is not None
    assert part.found.value.low < peak / 1000 < part.found.value.high
    assert any("95 % CI" in line and "one pair" in line for line in conditions(claim))


def ratio(result: ClaimResult) -> float:
    """What its first part measured."""
    found = result.parts[0].found
    assert found is not None and found.value.ratio is not None
    return found.value.ratio


def of_phases(seconds: float = 1.0, **shares: float) -> list[Event]:
    """Windows whose phases take these seconds."""
    body = {
        name.replace("__", "/"): {"host_ns": round(share * 1e9), "device_ns": None}
        for name, share in shares.items()
    }
    return [window((index + 1) * 10, seconds, phases=body) for index in range(20)]


def evaluated(sets: tuple[str, ...]) -> list[Event]:
    seconds = 1.0 if "evaluate.inference_mode=true" in sets else 1.2
    done = [evaluation(index, loss=1.0) for index in range(6)]
    return [*windows([1.0] * 6), *(replace(item, data={**item.data, "seconds": seconds}) for item in done)]


def optimized(sets: tuple[str, ...]) -> list[Event]:
    return of_phases(forward=0.9, optimizer=0.05 if "optimizer.implementation=fused" in sets else 0.1)


PARTS = {"forward__decoder": 280e-9, "forward__attention": 120e-9}
# Of a step without its evaluations.
SHARES = of_phases(
    1e-5, forward=600e-9, forward__encoder=200e-9, **PARTS, forward__pointer=80e-9, backward=160e-9,
    optimizer=240e-9, evaluate=9e-6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "events", "value", "verdict", "runs"),
    [
        ("S8", SHARES, 0.2, "confirmed", 1),
        # The sides alternate.
        ("C4", optimized, 2.0, "confirmed", 4),
        ("A6", evaluated, 1.2, "confirmed", None),
        # A step takes 0.1 s and an evaluation 1 s: 500 steps and one evaluation, or half of one.
        ("S5", [*windows([1.0] * 10), evaluation(10, loss=1.0)], 51 / 50.5, None, None),
        ("F3", of_phases(data_wait=0.8, forward=0.2), 0.8, "depends", None),
        ("F3", [run_event()], None, "not measured", None),  # without steps
    ],
)
def test_what_a_run_shows_by_itself_is_read_off_it(
    tmp_path: Path, claim: str, events: Any, value: float | None, verdict: str | None, runs: int | None
) -> None:
    watch = Watched(tmp_path, events)
    result = measured(claim, Constant(trial()), machine() if claim == "F3" else BIG, watch)
    assert value is None or ratio(result) == pytest.approx(value, rel=1e-3)
    assert verdict is None or result.verdict == verdict
    assert runs is None or len(watch.sets) == runs
    if claim == "C4":
        order = ["optimizer.implementation=fused" in sets for sets in watch.sets]
        assert order == [False, True, True, False]


def test_a_phase_that_is_not_timed_is_said_to_be_so_with_the_reason(tmp_path: Path) -> None:
    note = "Not timed separately: encoder, pointer in forward, because timing would slow down a micro-batch of 2 ms."
    events = [MarkEvent("note", 0, note), *of_phases(1e-5, forward=600e-9, **PARTS, backward=160e-9)]
    result = measured("S8", Constant(trial()), watch=Watched(tmp_path, events))
    assert result.parts[0].part.name == "encoder"
    assert result.parts[0].reason == f"n{note[1:].removesuffix('.')}"
    # Once for all parts of which it is true.
    lines = list(conditions(result))
    assert len([line for line in lines if "not timed separately" in line]) == 1 < len(result.parts)
    assert lines[0].startswith("encoder, ") and ": not measured: not timed" in lines[0]


def test_a_run_that_does_not_begin_in_time_says_how_many_seconds_may_be_enough() -> None:
    def late(workload: str, sets: Sequence[str], seconds: float, stop: threading.Event) -> Recorded | None:
        raise LateError("no steps within 4 s")

    result = measured("F3", Constant(trial()), machine(), late)
    assert result.verdict == "not measured" and headline(result) == "not measured: needs about 30 s"


def test_stopped_it_gives_the_claims_that_were_measured() -> None:
    stop = threading.Event()
    bench = Constant(trial("faster", 2.5))

    def tell(state: Any) -> None:
        if state.rows:
            stop.set()

    found = run_claims(chosen(["A3", "A4", "A5"]), 5.0, tell, stop, bench, nothing, BIG)
    assert [result.claim.id for result in found] == ["A3"]
