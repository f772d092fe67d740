"""What a script does without need: dense gradients of tables, graphs that stay, DataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted_runs import NVML, Planted, healthy, profiled

TABLE = ("Net.encoder.table", "Embedding", 1_000_000, 64, 512, 0.95, "Adam")


def script(tables: list[Any] | None = None, facts: dict[str, Any] | None = None, **more: Any) -> Planted:
    config = {
        "script": {"command": ["python", "train.py"], **(facts or {})},
        "batch": {"accumulation": 1, "micro": 8},
    }
    functions = replace(profiled(), tables=tables or [])
    return Planted(run={"config": config}, functions=functions, **more)


@pytest.mark.parametrize(("optimizer", "backward", "zero"), [(4.0, 16.0, 1.0), (60.0, 40.0, 8.0)])
def test_a_dense_gradient_costs_what_all_phases_take_for_its_table(
    optimizer: float, backward: float, zero: float
) -> None:
    phases = healthy(forward=2.0, loss=0.5, backward=backward, optimizer=optimizer, zero_grad=zero)
    found = script([TABLE], phases=phases).verdict()
    assert found.cause == "dense-embedding" and "Net.encoder.table" in found.title and found.share is not None
    cost = 0.95 * (optimizer + zero + backward - 2 * 2.5)
    assert found.share == pytest.approx(cost / sum(phases.values()), abs=0.01)
    assert "1,000,000" in found.title and "512" in found.title
    assert "sparse=True" in found.changes[0].text and "SparseAdam" in found.changes[0].text


def test_its_ceiling_is_large_where_nothing_else_takes_time() -> None:
    phases = dict.fromkeys(healthy(), 0.0) | {
        "forward": 0.3,
        "backward": 300.0,
        "optimizer": 1700.0,
        "zero_grad": 70.0,
    }
    found = script([(*TABLE[:5], 0.9999, "Adam")], phases=phases).verdict()
    assert found.ceiling == 100.0  # the largest that is told


def test_an_optimizer_that_takes_sparse_gradients_stays_and_clipping_is_counted() -> None:
    found = script([(*TABLE[:6], "SGD")], phases=healthy(optimizer=6.0, clip=6.0)).named("dense-embedding")
    assert "SGD takes such gradients" in found.changes[0].text and "clip_grad_norm_" in found.changes[0].text
    assert any("clipping" in item.text for item in found.evidence)


def test_one_cause_has_one_finding() -> None:
    causes = script([TABLE], phases=healthy(optimizer=30.0)).causes()
    assert causes[0] == "dense-embedding" and "optimizer" not in causes
    assert "optimizer" in script(phases=healthy(optimizer=30.0)).causes()


def test_a_table_whose_phases_take_little_is_no_finding() -> None:
    assert script([TABLE]).causes() == ["healthy"]  # backward takes no more than that of any model
    assert script([(*TABLE[:5], 0.1, "Adam")], phases=healthy(optimizer=6.0)).causes() == ["healthy"]


def test_a_gpu_is_judged_by_its_own_clock() -> None:
    device = {"forward": 7.0, "loss": 0.5, "backward": 11.5, "optimizer": 0.4, "zero_grad": 0.1}
    run = script([TABLE], phases=healthy(optimizer=12.0), device=device, gpu=NVML)
    assert "dense-embedding" not in run.causes()
    run = script([TABLE], phases=healthy(optimizer=12.0), device={**device, "optimizer": 12.0}, gpu=NVML)
    assert run.verdict().cause == "dense-embedding"


@pytest.mark.parametrize(("devices", "told"), [(8, True), (2, True), (1, False), (None, False)])
def test_data_parallel_on_several_gpus(devices: int | None, told: bool) -> None:
    run = script(facts={"data_parallel": devices})
    assert ("data-parallel" in run.causes()) is told
    if told:
        found = run.named("data-parallel")
        assert found.ceiling is None and f"--nproc-per-node={devices}" in found.changes[0].text


def test_graphs_that_are_retained_without_need_cost_no_time() -> None:
    (found,) = script(facts={"retains": ["/me/train.py", 27]}).found()
    assert found.cause == "retain-graph" and found.ceiling is None and found.share is None
    assert found.changes[0].where == "train.py:27" and "retain_graph" in found.changes[0].text
    assert script().causes() == ["healthy"]
