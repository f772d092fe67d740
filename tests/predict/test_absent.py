"""A GPU that is not in this machine: kernels, host and GPU as two timelines, and loops traced from a few steps."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ndd_engine.config import read
from ndd_engine.hardware.gpus import GpuProfile, load
from ndd_engine.hardware.kernels import Card, Kernels, Op, Shape, fitted, kernels_of
from ndd_engine.predict import absent
from ndd_engine.predict.absent import ShapeTracer, reading_once
from ndd_engine.predict.estimate import MANY, ONE
from ndd_engine.predict.launches import Issue, issues, spent, step_estimate
from ndd_engine.predict.other_sizes import LENGTHS, OPS, repeated
from ndd_engine.workloads.factory_data import prepare


def gpu(slug: str) -> GpuProfile:
    return next(one for one in load() if one.slug == slug)


def product(rows: int, width: int = 1024, dtype: str = "bf16") -> Op:
    left, right = Shape((rows, width), 2, dtype), Shape((width, width), 2, dtype)
    return Op("forward", "mm", (left, right), (rows, width))


def test_a_large_product_takes_its_flops_and_a_small_one_its_start() -> None:
    card = Card(gpu("h100-sxm"))
    (large,) = kernels_of(product(65_536, 8192), tf32=False)
    bound_s = large.flops / (card.gpu.dense_tflops["bf16"] * 1e12)
    assert bound_s / 1.3 < card.seconds(large) < 2 * bound_s
    (small,) = kernels_of(product(1, 8), tf32=False)
    assert card.seconds(small) < 2e-6 * fitted().kinds["product"]["start_us"]


@pytest.mark.parametrize(
    ("better", "kernel"),
    [
        ({"bandwidth_gb_s": 512.0}, Kernels("elementwise", 4e9, elements=1e9)),
        ({"sms": 72}, Kernels("softmax", 1e6, elements=1e9)),
        ({"dense_tflops": {"bf16": 80.2, "fp32": 40.0}}, kernels_of(product(65_536, 8192), tf32=False)[0]),
    ],
    ids=["bytes", "elements", "products"],
)
def test_each_kind_of_kernel_is_as_fast_as_what_limits_it(better: dict[str, object], kernel: Kernels) -> None:
    slow = gpu("rtx-4070-laptop")
    fast = replace(slow, **better)  # type: ignore[arg-type]
    assert Card(slow).seconds(kernel) == pytest.approx(2 * Card(fast).seconds(kernel), rel=0.05)


def test_the_slower_of_host_and_gpu_decides() -> None:
    launches = [Issue(10e-6, (1e-6,))] * 100
    kernels = [Issue(1e-6, (10e-6,))] * 100
    assert spent(launches).wall_s == pytest.approx(1000e-6, rel=0.01)
    assert spent(launches, slower=3).wall_s == pytest.approx(3000e-6, rel=0.01)
    for slower in (1, 3):
        assert spent(kernels, slower).wall_s == pytest.approx(1000e-6, rel=0.02)


def test_which_side_decides_moves_from_the_host_to_the_gpu_with_the_batch() -> None:
    micros = [(micro, [product(8 * micro, 256)] * 50) for micro in (1, 256, 16_384)]
    found = step_estimate(micros, [], Card(gpu("rtx-4070-laptop")), tf32=True)
    assert [found.decides(micro) for micro, _ in micros] == ["host", "host or GPU", "GPU"]
    for micro, _ in micros:
        low, middle, high = (time.step_s(micro) for time in (found.low, found.middle, found.high))
        assert low < middle < high
    # The host takes as long for 256 times the items.
    assert found.middle.host_s(1) == found.middle.host_s(256)
    # Creating the data takes longer than the step.
    assert found.with_data([(1, 1.0), (256, 1.0), (16_384, 100.0)]).decides(256) == "data"


def test_a_host_whose_launches_were_timed_has_a_narrower_range() -> None:
    of_any, timed, slow = (
        step_estimate([(1, [product(8, 256)] * 50)], [], Card(gpu("rtx-4070-laptop")), True, slower)
        for slower in (None, 5.0, 10.0)
    )
    assert of_any.low.step_s(1) < timed.low.step_s(1) < timed.high.step_s(1) < of_any.high.step_s(1)
    assert slow.middle.host_s(1) == pytest.approx(2 * timed.middle.host_s(1))


def test_launches_are_timed_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    assert 0.05 < absent.launch_cost(torch.device("cpu")) < 10_000
    assert torch.equal(torch.get_rng_state(), before)
    config = read(None, ["run.max_steps=2", "workload.size=tiny"], "chartext").resolve()
    tracer = ShapeTracer(config, prepare(config), lambda _: None)
    hosts = []
    monkeypatch.setattr(absent, "step_estimate", lambda *given: hosts.append(given[-1]))
    monkeypatch.setattr(absent, "launch_cost", lambda device: 4.0 if device.type == "cuda" else None)
    for present in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        tracer.estimate(gpu("t4"), [1])
    assert hosts == [None, 4.0]


def test_repeated_operations_have_one_plan() -> None:
    assert len({id(issue) for issue in issues([product(8)] * 9, Card(gpu("t4")), tf32=True)}) == 1


LOOPS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(12, 16), nn.Linear(16, 5)

    def forward(self, batch):
        x, state, found = batch[0], batch[0].new_zeros(len(batch[0]), 16), []
        for place in range(x.shape[1]):
            state = self.cell(x[:, place], state)
            found.append(torch.tanh(state))
        return self.head(torch.stack(found, dim=1)).mean(dim=1)


def make(settings):
    x, y = torch.zeros(64, settings.sequence, 12), torch.zeros(64, dtype=torch.long)
    data = torch.utils.data.TensorDataset(x, y)
    return {
        "model": Net(), "train_data": data, "eval_data": data, "item": "row",
        "forward": lambda model, batch: model(batch),
        "loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    }
"""


@pytest.mark.long
def test_a_loop_over_time_is_extended_to_what_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looping.py").write_text(LOOPS)
    sets = [f'workload.path=["{tmp_path}"]', "batch.micro=4", "batch.sequence=40", "run.max_steps=2"]
    config = read(None, sets, "looping:make").resolve()
    monkeypatch.setattr(absent, "MOST_OPS", 200)
    tracer = ShapeTracer(config, prepare(config), lambda _: None)
    loop = tracer._loop
    assert loop is not None and loop.length == 40
    whole = tracer._traced(8, 40)
    family = tracer._family(40)
    assert family.aligned
    for mark in (ONE, MANY):
        extended = family.trace(8).until(mark)
        assert extended.peak(512) == pytest.approx(whole.trace.until(mark).peak(512), rel=0.001)
    short, longer = (tracer._traced(4, steps).micro for steps in LENGTHS)
    ops = repeated(short, longer, LENGTHS, 40, OPS, tracer._traced(8, LENGTHS[1]).micro)
    assert Counter(op.name for op in ops) == Counter(op.name for op in whole.micro)
    card = Card(gpu("rtx-4070-laptop"))
    times = [spent(issues(each, card, True)).busy_s for each in (ops, whole.micro)]
    assert times[0] == pytest.approx(times[1], rel=0.001)
    assert not tracer.memory("test").why_not
    # Another size of the same model need not look for it.
    again = ShapeTracer(config, prepare(config), lambda _: None, tracer.leaves)
    assert again._loop == loop


@pytest.mark.long
def test_a_loop_that_cannot_be_shortened_is_traced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixed.py").write_text(
        LOOPS.replace("range(x.shape[1])", "range(12)").replace("x[:, place]", "x[:, 0]")
    )
    sets = [f'workload.path=["{tmp_path}"]', "batch.micro=4", "batch.sequence=40", "run.max_steps=2"]
    config = read(None, sets, "fixed:make").resolve()
    monkeypatch.setattr(absent, "MOST_OPS", 60)
    tracer = ShapeTracer(config, prepare(config), lambda _: None)
    assert tracer._loop is None
    assert tracer.estimate(gpu("t4"), [4, 8]).middle.step_s(8) > 0


ENTRIES = """
import torch
from torch import nn
from torch.utils.data import Dataset

READ = []
class Texts(Dataset):
    def __len__(self): return 40
    def __getitem__(self, place):
        READ.append(place)
        return {"x": torch.zeros(8 + place % 5)} if settings_kind == "dict" else Item(torch.zeros(8))
class Item:
    def __init__(self, x): self.x = x
def collate(items):
    found = [item.pop("x") if isinstance(item, dict) else item.x for item in items]  # items that are used up
    return nn.utils.rnn.pad_sequence(found, batch_first=True)
def make(settings):
    global settings_kind
    settings_kind = settings.option("kind", "dict")
    return {
        "model": nn.Linear(1, 4), "train_data": Texts(), "eval_data": Texts(), "collate": collate,
        "loss": lambda output, batch: output.square().mean(),
        "forward": lambda model, batch: model(batch[..., None]),
    }
"""


@pytest.mark.parametrize(("kind", "once"), [("dict", True), ("object", False)])
def test_an_item_is_read_once_for_all_traces_unless_a_batch_may_change_it(
    kind: str, once: bool, tmp_path: Path
) -> None:
    (tmp_path / f"entries_{kind}.py").write_text(ENTRIES)
    sets = [
        f'workload.path=["{tmp_path}"]',
        "batch.micro=4",
        "run.max_steps=2",
        f'workload.options.kind="{kind}"',
    ]
    config = read(None, sets, f"entries_{kind}:make").resolve()
    workload = prepare(config)
    read_items = sys.modules[f"entries_{kind}"].READ
    read_items.clear()
    shaped = reading_once(workload)
    for amp in ("off", "bf16"):
        ShapeTracer(config.changed(precision={"amp": amp}), shaped, lambda _: None).memory("test")
    assert (max(Counter(read_items).values()) == 1) is once
