"""A memory budget: levels change no result, plans stay within it, and blocks with side effects are left alone."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ndd_engine.config import Config, read
from ndd_engine.errors import ConfigError, UsageError
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.predict.absent import ShapeTracer, ways_elsewhere
from ndd_engine.predict.budget import BudgetPlanner
from ndd_engine.predict.estimate import HOST_GRANULE, ONE
from ndd_engine.predict.step_probes import Prober
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.rehearsal import rehearse
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare
from ndd_watch import recompute
from ndd_watch.turns import Option, Turns, TurnTable

CPU = torch.device("cpu")
FACTORY = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *, scale=1.0):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x))))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.spread = nn.BatchNorm1d(32, momentum=None)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(self.spread(x))


def factory(settings):
    data = torch.utils.data.TensorDataset(torch.rand(2048, 16), torch.rand(2048, 4))
    return {
        "model": Net(), "train_data": data, "forward": lambda model, batch: model(batch[0]),
        "loss": lambda out, batch: (out - batch[1]).square().mean(),
    }
'''  # fmt: skip


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "deep.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    yield "deep:factory"
    sys.modules.pop("deep", None)


def made(workload: str, *sets: str) -> tuple[Config, Any]:
    config = read(None, ["run.device=cpu", "run.max_steps=10", *sets], workload).resolve()
    torch.manual_seed(0)
    return config, prepare(config, lambda _: None)


def trained(model: nn.Module, batch: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(losses and gradients of two steps, buffers, random state)."""
    torch.manual_seed(1)
    results = []
    for _ in range(2):
        loss = model(batch).square().mean()
        loss.backward()
        results += [
            loss.detach(),
            *(item.grad.clone() for item in model.parameters() if item.grad is not None),
        ]
    return results, [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()


@pytest.mark.parametrize("level", recompute.LEVELS)
def test_a_level_changes_neither_losses_nor_gradients_buffers_and_random_states(
    deep: str, level: str
) -> None:
    model = made(deep)[1].model
    batch = torch.rand(8, 16)
    plain = trained(copy.deepcopy(model), batch)
    recompute.set_levels(model, {"blocks.1": level, "blocks.3": level, "spread": level})
    names = list(model.state_dict())
    twin = copy.deepcopy(model)  # its blocks are its own
    for result in (trained(model, batch), trained(twin, batch)):
        for ours, theirs in zip(
            (*result[0], *result[1], result[2]), (*plain[0], *plain[1], plain[2]), strict=True
        ):
            assert torch.equal(ours, theirs)
    recompute.set_levels(model, {})
    assert not recompute.blocks_of(model) and list(model.state_dict()) == names


def peak(prober: Prober, levels: dict[str, str]) -> int:
    """Bytes in use of a step at the whole micro-batch, recorded."""
    return prober.with_levels(levels).trace(prober.config.batch.micro).until(ONE).peak(HOST_GRANULE)


@pytest.mark.long
@pytest.mark.budget(30)
def test_a_plan_stays_within_its_budget(deep: str) -> None:
    prober = Prober(*made(deep, "batch.micro=256"), CPU, lambda _: None)
    planner = BudgetPlanner(prober, prober.memory(0), 0, runs_plain=True)
    most = peak(prober, {})
    least = peak(prober, {f"blocks.{place}": recompute.ALL for place in range(5)})
    for budget in ((most + least) // 2, least):
        plan = planner.plan(budget)
        assert plan.levels and plan.peak_bytes <= budget
        assert peak(prober, plan.levels) <= budget
    assert planner.plan(most).levels == {}
    impossible = planner.plan(least // 4)
    assert impossible.memory is None and least // 4 < impossible.peak_bytes < 1.1 * least


@pytest.mark.long
def test_a_gpu_that_is_not_there_gets_the_fewest_blocks_that_compute_again(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Normalisation without a momentum reads a number, which shapes do not have.
    (tmp_path / "shaped.py").write_text(FACTORY.replace(", momentum=None", ""))
    config, workload = made("shaped:factory")
    monkeypatch.delitem(sys.modules, "shaped")
    tracer = ShapeTracer(config.changed(batch={"micro": 65_536}), workload, lambda _: None)
    most = tracer.memory("shapes").peak(65_536)
    every = {f"blocks.{place}": recompute.ALL for place in range(5)}
    least = tracer.recomputed(every).memory("shapes").peak(65_536)
    found = tracer.within((most + least) // 2, 0, "shapes")
    assert found is not None
    _, needs, count, blocks = found
    assert 0 < count < blocks and needs.peak(65_536) <= (most + least) // 2
    assert tracer.within(least // 2, 0, "shapes") is None


@pytest.mark.long
def test_smaller_blocks_are_taken_where_the_largest_ones_need_too_much(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FACTORY.replace(", momentum=None", "")
    text = text.replace(
        "nn.ModuleList(Block() for _ in range(5))", "nn.Sequential(*[Block() for _ in range(5)])"
    )
    text = text.replace(
        "for block in self.blocks:\n            x = block(x, scale=0.5)", "x = self.blocks(x)"
    )
    (tmp_path / "nested.py").write_text(text)
    config, workload = made("nested:factory")
    monkeypatch.delitem(sys.modules, "nested")
    tracer = ShapeTracer(config.changed(batch={"micro": 65_536}), workload, lambda _: None)
    whole, parts = (
        tracer.recomputed(dict.fromkeys(names, recompute.ALL)).memory("shapes").peak(65_536)
        for names in (("blocks",), [f"blocks.{place}" for place in range(5)])
    )
    assert parts < 0.9 * whole
    found = tracer.within((whole + parts) // 2, 0, "shapes")
    assert found is not None and found[1].peak(65_536) <= (whole + parts) // 2


@pytest.mark.long
def test_where_parameters_are_the_limit_they_fit_in_bf16(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.py").write_text(FACTORY.replace(", momentum=None", "").replace("128", "65_536"))
    gpu = gpu_named("RTX 3090")
    config, workload = made("wide:factory", "batch.micro=4")
    monkeypatch.delitem(sys.modules, "wide")
    before = copy.deepcopy(workload.model.state_dict())
    tracer = ShapeTracer(config, workload, lambda _: None)
    memory = tracer.memory("shapes")
    peak = memory.peak(4)
    # Three quarters of what parameters, gradients and moments take.
    limit = memory.outside_bytes + (peak - memory.outside_bytes) * 3 // 4
    found = ways_elsewhere(tracer, memory, gpu, limit, 0, None)
    assert [way.sets for way in found] == [("precision.amp=bf16", "precision.parameters=bf16")]
    assert found[0].peak_bytes <= limit and "losses" in found[0].note
    after = workload.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # Nothing fits into a tenth.
    assert ways_elsewhere(tracer, memory, gpu, memory.outside_bytes + peak // 10, 0, None) == []


class Drawing(nn.Module):
    """A block whose second pass would compute something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "generator":
            return self.inner(x) * random.random()
        if self.kind == "buffers":
            self.seen += 1
        if self.kind == "inputs":
            x += 1
        return self.inner(x).tanh()


@pytest.mark.parametrize("kind", ["generator", "buffers", "inputs", "none"])
def test_a_block_that_cannot_compute_twice_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Drawing(kind))
    with recompute.watched_effects(model, {"1": model[1]}) as effects:
        model(torch.rand(4, 8)).sum().backward()
    assert bool(effects["1"]) == (kind != "none")
    assert kind == "none" or kind in effects["1"]


def test_a_run_refuses_such_a_block_and_a_module_that_it_has_not(deep: str) -> None:
    config, workload = made(deep)
    workload.model.blocks[2] = nn.Sequential(Drawing("generator"))
    workload.model.blocks[2].forward = lambda x, scale: x + random.random()  # type: ignore[method-assign]
    stepper = Stepper(workload, config.changed(memory={"recompute": ["blocks.2=all"]}), CPU, 10)
    with pytest.raises(UsageError, match=r"blocks\.2 .*random"):
        rehearse(stepper, next(iter(torch.utils.data.DataLoader(workload.train_data, 8))))
    with pytest.raises(UsageError, match=r"block\.2.*blocks\.2"):
        Stepper(workload, config.changed(memory={"recompute": ["block.2=all"]}), CPU, 10)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('memory.budget="8XB"', "memory.budget"),
        ("memory.budget=8", "memory.budget"),
        ('memory.recompute=["a=some"]', "memory.recompute"),
    ],
)
def test_a_mistake_names_its_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(None, [text], "chartext").resolve()
    assert error.value.problems[0].key.startswith(key)


def test_a_budget_is_read_in_its_unit() -> None:
    budgets = {"8GB": 8 * 10**9, "1.5 GiB": 3 << 29, "auto": None}
    for text, bytes_ in budgets.items():
        assert read(None, [f'memory.budget="{text}"'], "chartext").resolve().memory.budget_bytes == bytes_


def exhaustive(table: TurnTable, limit: int) -> float | None:
    """The least seconds of all combinations of levels that stay within a limit."""
    by_turn = [
        [option for option in table.options if option.begin == place]
        for place in range(len(table.plain.names))
    ]
    best = None
    for chosen in itertools.product(*by_turn):
        saved, ok = 0, table.plain.outside <= limit
        for option in chosen:
            forward = table.plain.start[option.begin] - saved + option.forward
            backward = table.plain.after[option.end] - saved - option.saves + option.backward
            ok = ok and max(forward, backward) <= limit
            saved += option.saves
        if ok:
            seconds = sum(option.seconds for option in chosen)
            best = seconds if best is None else min(best, seconds)
    return best


def test_the_search_finds_the_cheapest_levels_of_all() -> None:
    draw = random.Random(3)
    found = 0
    for _ in range(40):
        grown = [draw.randint(1, 9) for _ in range(5)]
        start = tuple(sum(grown[:place]) for place in range(5))
        after = (*start, sum(grown))
        rise = [draw.randint(0, 9) for _ in range(5)]
        plain = Turns(
            tuple("abcde"), start, tuple(one + other for one, other in zip(after[1:], rise, strict=True)), after,
            tuple(one + draw.randint(0, 3) for one in after[1:]), 0,
        )  # fmt: skip
        table = TurnTable(plain)
        for place, name in enumerate("abcde"):
            saves = draw.randint(0, grown[place])
            table.options.append(
                Option(place, place + 1, name, "all", saves, draw.randint(0, 9), grown[place], draw.random())
            )
        for limit in range(5, plain.peak + 1, 3):
            choice, best = table.cheapest(limit, lambda _: True), exhaustive(table, limit)
            assert (choice is None) == (best is None)
            assert choice is None or choice.seconds == pytest.approx(best)
            found += choice is not None and bool(choice.levels)
    assert found > 20


@pytest.mark.long
def test_a_run_chooses_its_blocks_trains_as_without_and_keeps_them(deep: str, tmp_path: Path) -> None:
    from ndd_engine import run_training

    sets = {
        "run.max_steps": 6,
        "batch.micro": 512,
        "run.device": "cpu",
        "run.threads": 1,
        "checkpoint.at_end": True,
    }
    plain = run_training(workload=deep, runs=tmp_path, run="plain", sets=sets)
    # Less than the process has, so that all blocks compute again, would be refused.
    refused = run_training(workload=deep, runs=tmp_path, run="small", sets={**sets, "memory.budget": "1MB"})
    assert refused.status == "failed" and "memory.budget" in refused.reason
    levels = ["blocks.0=all", "blocks.4=cheap"]
    ours = run_training(workload=deep, runs=tmp_path, run="ours", sets={**sets, "memory.recompute": levels})
    assert ours.snapshot.loss == plain.snapshot.loss
    again = run_training(
        resume="ours", runs=tmp_path, sets={"run.max_steps": 8, "memory.recompute": ["blocks.1=all"]}
    )
    longer = run_training(resume="plain", runs=tmp_path, sets={"run.max_steps": 8})
    assert again.snapshot.loss == longer.snapshot.loss
    settings = {each.name: each for each in load_state(RunDir(tmp_path / "ours")).snapshot().settings}
    assert settings["memory.recompute"].in_effect
