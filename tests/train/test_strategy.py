"""How ranks share a model, with process groups of one process: a real one of one rank, a fake one of several."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ndd_engine.config import Config, read
from ndd_engine.config.schema import ParallelSection
from ndd_engine.errors import UsageError
from ndd_engine.predict.rank_memory import pretended
from ndd_engine.predict.step_probes import endless
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.parallel.strategy import Fsdp2, _hook, blocks, effects, strategy_of
from ndd_engine.train.prepare import seed
from ndd_engine.train.rehearsal import Rehearsal
from ndd_engine.train.settings import VerifiedSettings
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.result import TrainingParts
from ndd_watch.clock import PhaseClock

CPU = torch.device("cpu")
FSDP2 = "parallel.strategy=fsdp2"


@contextmanager
def group(backend: str, ranks: int = 1) -> Iterator[None]:
    dist.init_process_group(backend, rank=0, world_size=ranks, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def configured(*sets: str) -> Config:
    batch = ("batch.micro=4", "batch.accumulation=2", "clip.max_norm=0.5")
    return read(sets=("workload.size=tiny", "run.max_steps=5", *batch, *sets), workload="chartext").resolve()


def trained(config: Config, steps: int = 3) -> tuple[Stepper, list[float]]:
    """The stepper after a few steps, and the losses."""
    seed(config.run.seed)
    workload = prepare(config)
    stepper = Stepper(workload, config, CPU, 10, strategy_of(config, CPU, workload.training))
    batches = endless(workload, config, config.batch.micro)
    return stepper, [float(stepper.step(batches, PhaseClock(), step) or 0) for step in range(steps)]


@pytest.mark.parametrize(("strategy", "name"), [("ddp", "adamw"), ("fsdp2", "adamw"), ("fsdp2", "sgd")])
def test_a_group_of_one_rank_learns_what_a_single_process_does(strategy: str, name: str) -> None:
    alone, losses = trained(configured(f"optimizer.name={name}"))
    with group("gloo"):
        sets = ("parallel.ranks=2", f"parallel.strategy={strategy}", f"optimizer.name={name}")
        stepper, found = trained(configured(*sets))
        assert found == losses
        torch.testing.assert_close(stepper.extras["grad_norm"], alone.extras["grad_norm"])


def test_bf16_gradients_need_nccl_and_a_backend_for_each_device_is_enough() -> None:
    with group("gloo"), pytest.raises(UsageError, match="NCCL"):
        trained(configured("parallel.ranks=2", "parallel.compress=bf16"), steps=0)
    with group("cpu:gloo"):  # as "cpu:gloo,cuda:nccl", of which a build for CPUs lacks one half
        assert _hook("bf16", torch.device("cuda")) is default_hooks.bf16_compress_hook


def test_each_rank_keeps_its_share_of_a_sharded_model() -> None:
    with group("fake", 4):
        stepper, _ = trained(configured("parallel.ranks=4", FSDP2), steps=1)
        whole = sum(item.numel() for item in stepper.parameters)
        kept = sum(item.to_local().numel() for item in stepper.parameters)  # type: ignore[attr-defined]
        assert whole / 4 <= kept < whole / 3.5


def test_repeated_layers_are_found_and_shared_ones_left_out() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    layers = nn.ModuleList([layer() for _ in range(3)])
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": layers, "head": nn.Linear(4, 8)})
    assert blocks(model) == list(layers)
    tied = nn.ModuleList([layer() for _ in range(3)])
    tied[0][0].weight = tied[2][0].weight  # type: ignore[index]
    assert blocks(nn.Sequential(tied)) == [tied[1]]
    # Small layers stay with the root, large ones do not; a list that is never called cannot be gathered.
    assert blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    assert len(blocks(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))) == 2
    towers = nn.ModuleList([nn.ModuleList([layer(), layer()]) for _ in range(2)])
    assert len(blocks(towers)) == 4


@pytest.mark.parametrize(
    ("sets", "parts", "named"),
    [
        ([], {"step": print}, "own step"),
        ([], {"state": print}, "carries state"),
        ([FSDP2], {"optimizers": {}}, "optimizer"),
        ([FSDP2, "speed.channels_last=true"], {}, "speed.channels_last = false"),
        (
            [FSDP2, "optimizer.name=sgd", "optimizer.implementation=fused"],
            {},
            'optimizer.implementation = "auto"',
        ),
        ([], {}, "trains alone"),
    ],
)
def test_what_ranks_cannot_share_is_named(sets: list[str], parts: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        strategy_of(configured("parallel.ranks=2", *sets), CPU, TrainingParts(**parts))


def test_several_models_cannot_be_sharded() -> None:
    with pretended(2, CPU):
        section = ParallelSection(ranks=2, strategy="fsdp2")
        with pytest.raises(UsageError, match="models"):
            Fsdp2(section, CPU).place(nn.ModuleDict({"net": nn.Linear(2, 2)}))


def effects_of(*sets: str) -> dict[str, tuple[str, bool | None]]:
    """What is reported of [parallel]: the applied value, and whether it is in effect (None: not asked for)."""
    config = configured(*sets)
    stepper, _ = trained(config, steps=1)
    batches = Batches(stepper.workload.train_data, config)
    settings = VerifiedSettings(stepper, batches, EvalBatches(stepper.workload.eval_data, config))
    if (strategy := stepper.strategy) is not None:
        settings.of_ranks = lambda: effects(strategy, config.parallel, 7.0)
    events = settings.of_model(Rehearsal())
    assert all(event.verified for event in events)
    found = {event.name: (event.applied, event.in_effect) for event in events}
    return {key[9:]: value for key, value in found.items() if key.startswith("parallel.")}


def test_settings_of_ddp_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    sets = ("ranks=2", "bucket_mb=0.3", "compress=fp16", "find_unused=true", "hang_s=7", "restarts=3")
    with group("gloo"):
        found = effects_of(*(f"parallel.{each}" for each in (*sets, "reduce_dtype=bf16")))
        defaults = effects_of("parallel.ranks=2")
    assert found["ranks"] == ("1", False)  # the group of this test
    assert found["bucket_mb"] == ("0.3", True) and found["find_unused"] == ("true", True)
    assert found["compress"] == ("fp16", True) and found["hang_s"] == ("7.0", True)
    assert found["restarts"] == ("3", True)
    assert found["reduce_dtype"] == ("off", False)  # of FSDP2
    assert defaults["bucket_mb"] == ("25.0", None) and defaults["compress"] == ("off", None)


def test_settings_of_ranks_have_no_effect_in_a_single_process() -> None:
    assert effects_of("parallel.compress=fp16", "parallel.restarts=2") == {
        "compress": ("off", False), "restarts": ("off", False),
    }  # fmt: skip
