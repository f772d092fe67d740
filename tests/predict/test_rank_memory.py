"""Memory of one rank, predicted in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from test_outlook import outlook

from ndd_engine.config import Config, read
from ndd_engine.predict import rank_memory
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import MANY, ONE, Trace
from ndd_engine.predict.fakes import traced
from ndd_engine.predict.rank_memory import BucketsOnly, pretended, shares, stepper_of_rank
from ndd_engine.predict.step_probes import Prober, endless, record
from ndd_engine.train.prepare import seed
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")


def made(*sets: str) -> tuple[Config, Workload]:
    all_sets = ["run.device=cpu", "workload.size=mini", "batch.sequence=16", "precision.amp=off", *sets]
    config = read(None, all_sets, "chartext").resolve()
    seed(config.run.seed)
    return config, prepare(config, lambda _: None)


@cache
def predicted(*sets: str, device: str = "cpu") -> Trace:
    """device: "cuda" leaves out the copies of gloo."""
    config, workload = made(*sets)
    with pretended(config.parallel.ranks, torch.device(device)):
        return Prober(config, workload, CPU, lambda _: None).trace(4)


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_of_ddp_needs_buckets_and_one_of_fsdp2_a_share() -> None:
    alone, ddp = predicted(), predicted("parallel.ranks=2")
    two, four = (predicted(f"parallel.ranks={count}", "parallel.strategy=fsdp2") for count in (2, 4))
    _, workload = made()
    weights = sum(item.nbytes for item in workload.model.parameters())
    assert ddp.peak() - alone.peak() == pytest.approx(weights, rel=0.05)
    # The trace of a sharded model contains its parameters: a share of them, of the gradients and of two moments.
    assert two.peak() - four.peak() == pytest.approx(4 * weights * (1 / 2 - 1 / 4), rel=0.3)
    assert four.peak() < alone.peak() + weights
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.long
def test_on_the_cpu_the_copies_of_gloo_are_part_of_an_exchange() -> None:
    gpu, host = (
        predicted("parallel.ranks=2", "parallel.strategy=fsdp2", device=kind) for kind in ("cuda", "cpu")
    )
    assert len(host.sizes()) > len(gpu.sizes())


@pytest.mark.long
@pytest.mark.parametrize("compress", [pytest.param("off", marks=pytest.mark.slow), "fp16"])
def test_the_stand_in_for_fake_tensors_allocates_what_ddp_does(compress: str) -> None:
    config, workload = made("parallel.ranks=2", f"parallel.compress={compress}", "parallel.bucket_mb=0.2")
    with pretended(2, CPU):
        real = Prober(config, workload, CPU, lambda _: None)
        batches = [real.trace(4)]
        single = config.batch.model_copy(update={"accumulation": 1})
        plain = config.model_copy(update={"batch": single})

        def stand_in() -> Stepper:
            return stepper_of_rank(workload, plain, CPU, BucketsOnly(config.parallel, CPU))

        batches.append(record(stand_in, endless(workload, config, 4), CPU))
    for mark in (ONE, MANY):
        first, second = (trace.until(mark).peak() for trace in batches)
        assert second == pytest.approx(first, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_gpu_that_is_not_here_is_traced_with_fake_tensors(strategy: str) -> None:
    config, workload = made("parallel.ranks=4", f"parallel.strategy={strategy}")
    with pretended(4, torch.device("cuda")):
        fake, flops = traced(config, workload, 4)
    real = predicted("parallel.ranks=4", f"parallel.strategy={strategy}", device="cuda")
    weights = sum(item.nbytes for item in workload.model.parameters()) if strategy == "ddp" else 0
    # On a GPU the parameters are part of the trace, on the CPU the order of the data.
    order = 8 * len(workload.train_data)  # type: ignore[arg-type]
    assert fake.peak() - weights == pytest.approx(real.peak() - order, rel=0.02)
    assert flops


def test_what_a_rank_holds_throughout_a_step() -> None:
    _, workload = made()
    whole = sum(item.nbytes for item in workload.model.parameters())

    def held(*sets: str) -> rank_memory.Shares:
        config = made(*sets)[0]
        return shares(config, workload.model, 2 * whole)

    ddp = held("parallel.ranks=4")
    assert (ddp.parameters, ddp.gradients, ddp.buckets, ddp.optimizer) == (whole, 0, whole, 2 * whole)
    assert held("parallel.ranks=4", "batch.accumulation=2").gradients == whole  # beside the buckets
    sharded = held("parallel.ranks=4", "parallel.strategy=fsdp2")
    assert whole / 4 <= sharded.parameters < whole / 3.5
    assert sharded.gradients == sharded.parameters and sharded.optimizer == pytest.approx(whole / 2, rel=0.1)
    assert sharded.gathered == whole  # both of its two layers are there at a time
    half = held("parallel.ranks=4", "parallel.strategy=fsdp2", "parallel.param_dtype=bf16")
    assert half.gathered == whole // 2


def test_a_rank_holds_its_shares_with_gathered_layers_and_buckets() -> None:
    config = read(
        None, ["workload.size=tiny", "batch.micro=10", "batch.accumulation=2", "parallel.ranks=4"], "chartext"
    ).resolve()
    held = rank_memory.Shares(4 * MIB, 3 * MIB, 8 * MIB, gathered=2 * MIB, buckets=MIB)
    found = replace(outlook(114), config=config, shares=held)
    assert found.parts["gathered layers"] == 2 * MIB and found.parts["buckets"] == MIB
    assert sum(found.parts.values()) == 2 * found.parts["total"]
