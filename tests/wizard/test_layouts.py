"""Ranks and strategy for machines with 1, 2, 4 and 8 GPUs: what is probed, proposed and written."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
import tomli
from situations import HOST, OPENED, situation

from ndd_engine.child import Json
from ndd_engine.config import read
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpus import Gpu, Machine
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import Family, Memory, StepTime, TimedBatch, Trace
from ndd_engine.predict.probe_process import Probed
from ndd_engine.wizard.planner import Planner, Situation, proposals
from ndd_engine.wizard.proposals import Answers, Layout, Proposal, ranks_to_propose
from ndd_engine.wizard.session import ProposalSet, to_verify, written

ON_GPU = replace(OPENED, device="cuda:0", device_name="Test GPU", train_items=6400)


def machine(*names: str, free_mib: int = 1000) -> Machine:
    """GPUs of these names; each has 10 MiB less free than the one before."""
    gpus = tuple(
        Gpu(place, place, f"GPU-{place}", name, 2000 * MIB, (9, 0), free_bytes=(free_mib - 10 * place) * MIB)
        for place, name in enumerate(names)
    )
    return Machine(gpus, gpus[0] if gpus else None, "cuda:0" if gpus else "cpu", {}, HOST)


def memory(fixed_mib: int, mib_per_item: int) -> Memory:
    trace = Trace(((0, 0), (1, 0)))
    lines = (float(fixed_mib * MIB), 0.0), (0.0, float(mib_per_item * MIB))
    return Memory(Family((4, 8), trace, lines, aligned=True), "gpu", 0, "test")


def proposed(
    gpus: Machine, whole_mib: int, *sets: str, answers: Answers | None = None
) -> tuple[ProposalSet, list[Layout], Answers]:
    """The proposals for a machine whose probes find a model of this size, 10 MiB per item; the layouts probed."""
    answers = answers or Answers(workload="chartext", sets=("workload.size=tiny", "run.device=cpu", *sets))
    probed: list[Layout] = []

    def ask(command: Json) -> Json:
        # Only what was chosen has to be read back.
        config = read(None, [*answers.all_sets, *command["sets"]], "chartext").resolve()
        layout = Layout(config.parallel.ranks, config.parallel.strategy)
        probed.append(layout)
        share = layout.ranks if layout.strategy == "fsdp2" else 1
        points = tuple(TimedBatch(micro, micro * 1e-3, 1e-4, 0.0) for micro in (4, 8))
        found = Probed(1000, 64.0, memory(whole_mib // share, 10), StepTime(points, 0.0, on_gpu=True))
        return {"probed": asdict(found)}

    planner = Planner(answers, lambda *_: None, threading.Event())
    planner._ask = ask  # type: ignore[method-assign]
    base = situation(*sets, opened=ON_GPU, gpu=None)
    ranks = ranks_to_propose(answers, base.config, gpus, None, ON_GPU)
    free = gpus.free_bytes or 0
    there: Situation = replace(
        base, free_bytes=free, ranks=ranks.count, ranks_why=ranks.why, rank_bytes=ranks.free_bytes or free,
        notes=tuple(ranks.notes),
    )  # fmt: skip
    found = tuple(planner.probe(there))
    rows = tuple(row for one in found for row in proposals(there, answers, one))
    return ProposalSet(there, found, rows), probed, answers


def best(found: ProposalSet, answers: Answers) -> Proposal:
    return found.ranked(answers)[0]


def test_one_gpu_changes_nothing() -> None:
    found, probed, answers = proposed(machine("A"), 100)
    assert probed == [Layout()]
    assert found.situation.ranks == 1 and not found.situation.notes
    assert {one.layout for one in found.rows} == {Layout()}
    assert to_verify(found, answers)
    assert "parallel" not in written(answers, found.situation, best(found, answers))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_each_gpu_gets_a_rank_with_the_whole_model_where_it_fits(count: int) -> None:
    found, probed, answers = proposed(machine(*["A"] * count), 100)
    assert probed == [Layout(), Layout(count)]  # nothing has to be sharded
    one = best(found, answers)
    assert one.layout == Layout(count)
    assert one.batch.items * count == 16  # the effective batch of the configuration is held
    assert one.free_bytes == (1000 - 10 * (count - 1)) * MIB  # of the fullest GPU
    text = written(answers, found.situation, one)
    assert tomli.loads(text)["parallel"] == {"ranks": count, "strategy": "ddp"}
    assert f"{one.batch.micro} x {one.batch.accumulation} x {count}" in text
    assert found.situation.notes
    assert not to_verify(found, answers)  # a measurement has one rank


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_model_that_does_not_fit_a_gpu_is_sharded(count: int) -> None:
    found, probed, answers = proposed(machine(*["A"] * count), 1200)
    assert probed == [Layout(), Layout(count), Layout(count, "fsdp2")]
    one = best(found, answers)
    assert one.layout == Layout(count, "fsdp2") and one.fits
    assert all(not row.fits for row in found.rows if row.layout != one.layout)
    text = written(answers, found.situation, one)
    assert tomli.loads(text)["parallel"]["strategy"] == "fsdp2"
    assert "1.2 GiB" in text  # what each rank needs with the whole model
    document = one.to_dict()
    assert (document["ranks"], document["strategy"]) == (count, "fsdp2")
    assert f"parallel.ranks={count}" in document["set"]


def test_only_what_does_not_fit_is_sharded() -> None:
    # 900 MiB and 10 per item: with DDP 2 to 4 items fit, 8 of 16 on two ranks do not.
    found, _, _ = proposed(machine("A", "A"), 940)
    micros = {
        strategy: {one.batch.micro for one in found.rows if one.layout == Layout(2, strategy) and one.fits}
        for strategy in ("ddp", "fsdp2")
    }
    assert micros == {"ddp": {2, 4}, "fsdp2": {8}}


def test_ranks_are_as_many_as_the_effective_batch_is_divisible_by() -> None:
    sets = "batch.micro=6", "batch.accumulation=1"
    found, probed, answers = proposed(machine(*["A"] * 4), 100, *sets)
    assert found.situation.ranks == 3 and probed[-1] == Layout(3)
    assert any(note.startswith("3 of 4") for note in found.situation.notes)
    assert best(found, answers).batch.items == 2


def test_a_batch_set_as_effective_is_probed_and_written() -> None:
    found, _, answers = proposed(machine("A", "A"), 100, "batch.effective=24", "batch.micro=8")
    assert all(not one.why for one in found.found)
    assert best(found, answers).batch.items == 12


def test_configured_ranks_are_kept_and_asked_ones_come_first() -> None:
    configured, probed, _ = proposed(machine("A", "A"), 100, "parallel.ranks=4", "batch.micro=4")
    assert configured.situation.ranks == 4 and probed == [Layout(4)]
    assert [one for one in configured.rows if one.present and one.layout == Layout(4)]
    answers = Answers(workload="chartext", sets=("workload.size=tiny", "run.device=cpu"), ranks=2)
    found, _, _ = proposed(machine("A"), 100, answers=answers)
    assert found.situation.ranks == 2 and found.situation.ranks_why == "2 ranks on A"
    alone, _, _ = proposed(machine("A", "A"), 100, answers=replace(answers, ranks=1))
    assert alone.situation.ranks == 1


def test_gpus_of_another_name_and_other_devices_are_left_out() -> None:
    assert len(equal_gpus(machine("A", "A", "B", "A"))) == 2
    assert len(equal_gpus(machine("A"))) == 1
    second = machine("A", "A")
    assert equal_gpus(replace(second, chosen=second.gpus[1], device="cuda:1")) == []
    assert equal_gpus(machine()) == []


def test_what_several_ranks_cannot_train_is_planned_for_one() -> None:
    own = replace(ON_GPU, not_shared="own step")
    answers: Any = Answers(workload="chartext")
    found = ranks_to_propose(answers, situation(gpu=None).config, machine("A", "A"), None, own)
    assert found.count == 1 and "own step" in found.notes[0]
