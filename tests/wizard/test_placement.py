"""Data placement: on a GPU each placement is a separate row; precisions and threads by device."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from situations import HOST, KEPT, MODEL, OPENED, situation

from ndd_console.words.wizard import threads_line
from ndd_engine.hardware.gpus import Machine
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import Family, ItemCounts, Memory, StepTime, TimedBatch, Trace
from ndd_engine.predict.probe_process import other_is_faster
from ndd_engine.wizard.planner import Planner, ProbedModel, Situation, proposals, unprobed_present
from ndd_engine.wizard.proposals import Answers, gpu_named, ranked
from ndd_engine.wizard.session import reasons


def found() -> ProbedModel:
    """1 MiB and 2 ms per item; half of the time is loading data."""
    trace = Trace(((0, 8 * MIB), (0, -1)))
    family = Family((4, 8), trace, ((0.0, float(MIB)),), aligned=True)
    points = tuple(TimedBatch(micro, micro * 1e-3, micro * 1e-4, micro * 1e-3) for micro in (4, 8))
    return ProbedModel(
        MODEL, 1000, 64.0, Memory(family, "gpu", 0, "test"), StepTime(points, 0.0, on_gpu=False)
    )


def test_data_on_the_gpu_costs_memory_and_saves_time() -> None:
    rows = proposals(situation(), Answers(), found())
    places = {place: [one for one in rows if one.placement == place] for place in ("host", "device")}
    assert len(places["host"]) == len(places["device"]) > 1
    for host, device in zip(places["host"], places["device"], strict=True):
        assert host.batch == device.batch and host.key != device.key
        assert device.memory_bytes == host.memory_bytes + KEPT
        assert device.step_s < host.step_s
        assert "loader.placement=device" in device.sets()
        assert device.total_s < host.total_s


@pytest.mark.parametrize(
    "there",
    [
        situation(opened=replace(OPENED, items=ItemCounts(None, gathers=False))),
        situation("loader.workers=2"),
        situation(gpu=None),
    ],
    ids=["every epoch has other data", "loader workers", "no GPU"],
)
def test_what_cannot_be_kept_on_a_gpu_stays_on_the_host(there: Situation) -> None:
    assert {one.placement for one in proposals(there, Answers(), found())} == {"host"}


def test_cached_items_count_where_they_are_stored() -> None:
    tensors, encoded, changing = (
        ItemCounts(KEPT, gathers=True),
        ItemCounts(KEPT, gathers=False),
        ItemCounts(None, gathers=False),
    )
    assert tensors.loader_bytes(on_gpu=True, placement="device", cache=False) == KEPT
    assert tensors.loader_bytes(on_gpu=True, placement="host", cache=True) == 0
    assert tensors.loader_bytes(on_gpu=False, placement="host", cache=True) == 0  # already in host memory
    assert encoded.loader_bytes(on_gpu=False, placement="host", cache=True) == KEPT
    assert encoded.loader_bytes(on_gpu=False, placement="host", cache=False) == 0
    assert changing.loader_bytes(on_gpu=True, placement="device", cache=True) == 0


def test_chosen_threads_are_written_with_a_reason() -> None:
    there = situation(gpu=None, opened=replace(OPENED, chosen_threads=1))
    one = proposals(there, Answers(), found())[0]
    assert "run.threads=1" in one.sets()
    assert reasons(there, one)["run.threads"]
    usual = situation(gpu=None)
    assert "run.threads" not in reasons(usual, proposals(usual, Answers(), found())[0])


FASTER = replace(OPENED, threads=1, faster=True, by_threads=[(2, 0.02), (1, 0.01)])
AS_FAST = replace(OPENED, threads=2, by_threads=[(2, 0.01), (1, 0.0098)])


def test_threads_that_are_faster_are_proposed_beside_the_present_configuration() -> None:
    there = situation(gpu=None, opened=FASTER)
    rows = proposals(there, Answers(), found())
    assert {one.threads for one in rows} == {1} and not any(one.present for one in rows)
    assert reasons(there, rows[0])["run.threads"] == (
        "20 ms a micro-batch with 2 threads, 10 ms a micro-batch with 1 thread"
    )
    sized = Answers(sets=("workload.size=tiny",))
    present = unprobed_present(there, sized, rows)
    assert present is not None and present.threads is None and present.given == () and present.allowed
    # Another model or batch than any of the rows is outside the limits.
    outside = unprobed_present(there, sized, ())
    assert outside is not None and not outside.allowed


def test_threads_that_are_as_fast_are_not_proposed() -> None:
    there = situation(gpu=None, opened=AS_FAST)
    rows = proposals(there, Answers(), found())
    assert {one.threads for one in rows} == {None} and any(one.present for one in rows)
    assert "run.threads" not in reasons(there, rows[0])


def test_the_wizard_says_with_how_many_threads_it_measured() -> None:
    assert threads_line(situation(gpu=None, opened=FASTER)) == (
        "measured with 1 thread; a micro-batch takes 20 ms with 2 threads, 10 ms with 1 thread; "
        "run.threads=1 is proposed",
    )
    assert threads_line(situation(gpu=None, opened=AS_FAST)) == (
        "measured with 2 threads; a micro-batch takes 10 ms with 2 threads, 9.8 ms with 1 thread",
    )
    assert threads_line(situation(gpu=None, opened=replace(OPENED, threads=4))) == (
        "measured with 4 threads",
    )
    assert threads_line(situation(opened=FASTER)) == ()  # for another GPU


@pytest.mark.parametrize(
    ("present", "other", "faster"),
    [
        ([2.0, 2.1, 2.0], [1.0, 1.1, 1.0], True),
        ([2.0, 2.1, 2.0], [1.0, 1.9, 1.0], False),  # one turn is as slow
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], False),
        ([], [], False),
    ],
)
def test_another_number_of_threads_has_to_be_faster_in_every_turn(
    present: list[float], other: list[float], faster: bool
) -> None:
    assert other_is_faster(present, other) is faster


def test_bf16_is_probed_if_the_cpu_supports_it() -> None:
    def amps(units: tuple[str, ...]) -> tuple[str, ...]:
        machine = Machine((), None, "cpu", {}, replace(HOST, bf16_units=units))
        planner = Planner(Answers(workload="chartext"), lambda *_: None, threading.Event())
        return planner._amps(None, machine, situation(gpu=None).config, OPENED)[0]

    assert amps(()) == ("off",)
    assert amps(("amx_bf16",)) == ("off", "bf16")


@pytest.mark.parametrize(("name", "found"), [("T4", ("off", "fp16")), ("H200", ("off", "bf16"))])
def test_a_gpu_is_probed_with_the_dtypes_it_supports(name: str, found: tuple[str, ...]) -> None:
    planner = Planner(Answers(workload="chartext"), lambda *_: None, threading.Event())
    machine = Machine((), None, "cpu", {}, HOST)
    amps, notes = planner._amps(gpu_named(name), machine, situation().config, OPENED)
    assert amps == found
    assert bool(notes) == (found[1] == "fp16")
    # NVML does not list it, torch trains on it.
    there = replace(OPENED, device="cuda:0", device_name=f"NVIDIA {name}")
    assert planner._amps(None, machine, situation().config, there)[0] == found


def test_for_another_gpu_nothing_of_this_host_is_written() -> None:
    there = situation(opened=replace(OPENED, chosen_threads=1))
    one = proposals(there, Answers(), found())[0]
    assert one.threads is None and one.setup_s == 0


def test_what_fits_only_with_retries_is_marked_and_comes_last() -> None:
    # Per item 60 MiB, freed before 61 MiB are allocated: 9 items need more than the memory, unless it is released.
    trace = Trace(((0, 0), (0, -1), (1, 0), (1, -1)))
    family = Family((4, 8), trace, ((0.0, 60.0 * MIB), (0.0, 61.0 * MIB)), aligned=True)
    points = tuple(TimedBatch(micro, 1e-3, 1e-4, 1e-3) for micro in (4, 8))
    probed = ProbedModel(
        MODEL, 1000, 64.0, Memory(family, "gpu", 0, "test"), StepTime(points, 0.0, on_gpu=True)
    )
    answers = Answers(hold_effective=False)
    rows = [one for one in proposals(situation(), answers, probed) if one.placement == "host"]
    retried = [one for one in rows if one.retries]
    assert {one.batch.micro for one in retried} and all(one.fits for one in retried)
    assert all(one.batch.micro * 121 > 1000 >= one.batch.micro * 61 for one in retried)
    assert all(one.to_dict()["retries"] for one in retried)
    order = ranked(rows, answers)
    assert order[0].retries == 0 and order[-1].retries
