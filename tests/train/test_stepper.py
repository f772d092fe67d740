"""One optimizer step: its gradient in every division, its rate, precision, optimizer and clipping, and its parts."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import few
from torch import Tensor, nn
from train_help import EVERY_STEP, Trainer, Written

from ndd_engine.config import Config, read
from ndd_engine.config.schema import OptimizerSection, ScheduleSection
from ndd_engine.measure.window import Window
from ndd_engine.record.events import PHASES
from ndd_engine.train.step.optimizers import learning_rate, make_optimizer, make_precision
from ndd_engine.train.step.part_timer import PartTimer
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import MeanLoss
from ndd_engine.workloads.factory_data import prepare
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock, no_phase

CPU = torch.device("cpu")


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", *sets]).resolve()


def test_warm_up_rises_in_equal_steps_to_the_rate() -> None:
    rates = [learning_rate(step, 100, 1.0, ScheduleSection(warmup_steps=4)) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    # One that is longer than the run is no error.
    schedule = ScheduleSection(kind="cosine", warmup_steps=50)
    assert learning_rate(9, 10, 1.0, schedule) == pytest.approx(0.2)
    assert learning_rate(50, 10, 1.0, schedule) == 1.0


def test_the_cosine_starts_at_the_rate_and_ends_at_the_least() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=10, min_lr=0.1)
    rates = [learning_rate(step, 110, 1.0, schedule) for step in range(130)]
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[35] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[110:] == [pytest.approx(0.1)] * 20
    assert rates[10:111] == sorted(rates[10:111], reverse=True)


def test_the_schedule_reaches_the_steps(trainer: Trainer) -> None:
    sets = ("optimizer.lr=0.01", "schedule.kind=cosine", "schedule.warmup_steps=4", "run.max_steps=12")
    result = trainer.train(*trainer.ndd, *EVERY_STEP, *sets)
    schedule = ScheduleSection(kind="cosine", warmup_steps=4)
    assert result.rates == [round(learning_rate(step, 12, 0.01, schedule), 6) for step in range(12)]


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_a_tiny_model_learns_in_every_precision_and_computes_in_its_type(trainer: Trainer, amp: str) -> None:
    precision = make_precision(config(f"precision.amp={amp}"), CPU)
    if precision.autocast is not None:
        with precision.autocast:
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    assert (precision.autocast is None) == (amp == "off")
    sets = ("run.max_steps=60", "optimizer.lr=0.01", f"precision.amp={amp}")
    result = trainer.train(*trainer.chartext, *EVERY_STEP, *sets)
    assert result.end.status == "done"
    assert result.identity.precision == ("fp32" if amp == "off" else amp)
    losses = [result.losses[step] for step in range(1, 61)]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    scales = {window.loss_scale for window in result.windows if window.steps}
    assert (scales == {65536.0}) if amp == "fp16" else (scales == {None})


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("wanted", ["auto", "fused", "foreach", "loop"])
def test_each_implementation_is_taken_and_auto_is_fused_where_torch_has_it(name: str, wanted: str) -> None:
    section = OptimizerSection(name=name, lr=0.1, weight_decay=0.02, implementation=wanted)  # type: ignore[arg-type]
    optimizer = make_optimizer(section, nn.Linear(3, 3), CPU)
    for group, decay in zip(optimizer.param_groups, (0.02, 0.0), strict=True):
        assert (group["fused"], group["foreach"]) == (wanted in ("auto", "fused"), wanted == "foreach")
        assert (group["lr"], group["weight_decay"]) == (0.1, decay)
    assert type(optimizer).__name__.lower() == name


def test_the_optimizer_is_given_what_is_configured_and_only_what_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    adam = make_optimizer(OptimizerSection(betas=[0.8, 0.7], eps=1e-3), model, CPU)
    assert (adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]) == ((0.8, 0.7), 1e-3)
    assert [group["params"] for group in adam.param_groups] == [[model[1].weight], [model[1].bias]]
    sgd = make_optimizer(OptimizerSection(name="sgd", momentum=0.5), model, CPU)
    assert sgd.param_groups[0]["momentum"] == 0.5


def test_clipping_records_the_norm_and_limits_the_step(trainer: Trainer) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.lr=1.0", "optimizer.weight_decay=0.0", "run.max_steps=5")
    common = (*trainer.ndd, *EVERY_STEP, *sgd)
    clipped, free = trainer.train(*common, "clip.max_norm=1e-12"), trainer.train(*common)
    assert all((window.grad_norm or 0) > 1e-12 for window in clipped.windows if window.steps)
    assert all(window.grad_norm is None for window in free.windows)
    assert "clip" in clipped.windows[0].phases
    assert "clip" not in free.windows[0].phases
    # Clipped to nothing, the weights stay where they were.
    one, other = clipped.state(5)["model"], free.state(5)["model"]
    assert any((one[key] - other[key]).abs().max() > 1e-6 for key in one if key.endswith("weight"))


SWITCHES = """
import sys, torch
from ndd_engine.config import read
from ndd_engine.train.step.optimizers import make_precision
torch.cuda.get_device_capability = lambda device: (9, 0)
for sets in sys.argv[1:]:
    config = read(None, ["run.epochs=1", "precision.amp=off", *sets.split()]).resolve()
    make_precision(config, torch.device("cuda"))
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    newer = [getattr(place, "fp32_precision", None) for place in places]
    with backends.cudnn.flags(enabled=False):
        pass
    print(newer, torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32)
"""


@pytest.mark.long
@pytest.mark.parametrize("more", few(["", " speed.compile=max-autotune"], 1))
def test_both_apis_of_torch_can_read_the_tf32_switches(more: str) -> None:
    # torch.backends.cuda.matmul.allow_tf32 and `cudnn.flags` raise "mix of the legacy and new APIs" where only
    # `fp32_precision` was set. The switches are global, so this runs in a process of its own.
    sets = [f"precision.tf32={on}{more}" for on in ("true", "false", "true")]
    done = subprocess.run(
        [sys.executable, "-c", SWITCHES, *sets], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    on, off, again = done.stdout.splitlines()
    assert on == again and on.endswith(" high True True")
    assert off.endswith(" False False")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert on.count("'tf32'") == 3
        assert "tf32" not in off


# Parts of the forward pass


class Ticking:
    """A clock that the modules below advance."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Takes(nn.Module):
    def __init__(
        self, ticking: Ticking, ns: int, inner: nn.Module | None = None, breaks: bool = False
    ) -> None:
        super().__init__()
        self.ticking, self.ns, self.inner, self.breaks = ticking, ns, inner, breaks

    def forward(self, x: Tensor) -> Tensor:
        self.ticking.now += self.ns
        if self.inner is not None:
            x = self.inner(self.inner(x))
        if self.breaks:
            raise RuntimeError("no")
        return x


def timed(model: nn.Module, parts: PartTimer, ticking: Ticking) -> dict[str, int]:
    clock = PhaseClock(ticking)
    parts.clock = clock
    clock.enter(phase.FORWARD)
    model(torch.zeros(1))
    parts.clock = None
    clock.enter(phase.BACKWARD)
    ticking.now += 7
    clock.end_step()
    window = Window.of(clock)
    phases = window.phases()
    assert sum(item["host_ns"] for name, item in phases.items() if name in PHASES) == window.wall_ns
    return {name: item["host_ns"] for name, item in phases.items()}


def test_an_inner_part_is_its_own_and_both_belong_to_forward() -> None:
    ticking = Ticking()
    attention = Takes(ticking, 10)
    decoder = Takes(ticking, 100, attention)
    found = timed(
        nn.Sequential(Takes(ticking, 1000), decoder),
        PartTimer({"decoder": decoder, "attention": [attention]}),
        ticking,
    )
    assert found == {"forward": 1120, "forward/decoder": 100, "forward/attention": 20, "backward": 7}


def test_an_error_inside_leaves_no_part_open() -> None:
    ticking = Ticking()
    broken = Takes(ticking, 5, breaks=True)
    parts, clock = PartTimer({"head": broken}), PhaseClock(ticking)
    parts.clock = clock
    clock.enter(phase.FORWARD)
    with pytest.raises(RuntimeError):
        broken(torch.zeros(1))
    assert clock.current == "forward"


def test_parts_of_forward_are_timed_where_a_step_is_long_enough(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What share of a step the timing may take decides, not how long one takes on the machine of the test.
    monkeypatch.setattr("ndd_engine.train.step.part_timer.ALLOWED_SHARE", 1.0)
    long = trainer.train(*trainer.chartext, "run.max_steps=3")
    names = {name for window in long.windows for name in window.phases}
    assert {"forward/attention", "forward/feed_forward", "forward/head"} <= names
    monkeypatch.setattr("ndd_engine.train.step.part_timer.ALLOWED_SHARE", 1e-9)
    short = trainer.train(*trainer.chartext, "run.max_steps=3")
    assert not any("forward/attention" in window.phases for window in short.windows)
    assert any("attention" in mark.text for mark in short.marks("note"))


# A step has the gradient of its items, however they are divided into micro-batches.

DIVISIONS = ((8, 1), (4, 2), (2, 4), (1, 8))

OWN = """
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
    def forward(self, words):
        return self.head(self.embedding(words))

class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        length = (0 if index % 8 == 5 else 1 + index * 7 % 13)  # some have no word at all
        return torch.arange(1, 1 + length) % 29 + 1

def join(items):
    return pad_sequence(items, batch_first=True) if max(map(len, items)) else torch.zeros(len(items), 1).long()

def loss(output, words):
    # NaN for a batch without a word, as in torch
    return F.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=0)

def factory(settings):
    parts = dict(model=Net(), train_data=Lines(), loss=loss, collate=join)
    if settings.option("weigh", True):
        parts["weight"] = lambda words: WEIGHT
    return parts
"""


Sets = Callable[..., tuple[str, ...]]


@pytest.fixture
def own_sets(written: Written) -> Sets:
    """own_sets(weight) are settings of a workload of lines of 0 to 13 words, padded to the longest."""
    more = ("run.epochs=1", "batch.sequence=13")
    return lambda weight="(words != 0).sum()": (*written(OWN.replace("WEIGHT", weight)), *more)


def builtin_sets(kind: str, folder: Path) -> tuple[str, ...]:
    draw = random.Random(3)
    words = [f"w{number}" for number in range(60)]

    def sentence(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(most // 6, most)))

    if kind == "summarise":
        lines = [json.dumps({"source": sentence(40), "summary": sentence(12)}) for _ in range(80)]
        file = folder / "pairs.jsonl"
        more = ("embedding=8", "hidden=8", "layers=2", "vocabulary=200", "dropout=0.0")
    else:
        lines = [json.dumps({"text": sentence(60)}) for _ in range(80)]
        file = folder / "texts.jsonl"
        more = (
            "layers=2",
            "heads=2",
            "width=16",
            "dropout=0.0",
            "vocabulary=280",
            "pad=longest",
            "examples=40",
        )
    file.write_text("\n".join(lines) + "\n")
    sets = (f"workload.{item}" for item in (f"name={kind}", f"data={file}", *more))
    return (*sets, "run.epochs=1", "batch.sequence=300")


def made(sets: tuple[str, ...], micro: int, accumulation: int) -> tuple[Stepper, Config]:
    config = read(None, [*sets, f"batch.micro={micro}", f"batch.accumulation={accumulation}"]).resolve()
    torch.manual_seed(5)
    workload = prepare(config)
    workload.model.double()
    return Stepper(workload, config, CPU, total_steps=10), config


def micro_batches(stepper: Stepper, micro: int, items: int = 8) -> Iterator[Any]:
    data: Any = stepper.workload.train_data
    collate = stepper.workload.collate
    assert collate is not None
    for start in range(0, items, micro):
        yield collate([data[index] for index in range(start, start + micro)])


def gradients(sets: tuple[str, ...], micro: int, accumulation: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step of the first 8 items."""
    stepper, _ = made(sets, micro, accumulation)
    found: dict[str, Tensor] = {}

    def update(_enter: Any) -> None:
        for name, parameter in stepper.model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()

    stepper.update = update  # type: ignore[method-assign]
    loss = stepper.step(micro_batches(stepper, micro), PhaseClock(), 0)
    assert loss is not None
    return loss, found


@pytest.mark.parametrize("kind", ["finetune", "summarise", "own"])
def test_padded_data_has_the_same_gradient_in_every_division(
    kind: str, tmp_path: Path, own_sets: Sets
) -> None:
    sets = own_sets() if kind == "own" else builtin_sets(kind, tmp_path)
    stepper, _ = made(sets, 1, 8)
    batches = list(micro_batches(stepper, 1))
    assert len({len(batch[0]) if kind == "own" else batch[0].shape[1] for batch in batches}) > 3
    loss, whole = gradients(sets, *DIVISIONS[0])
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for micro, accumulation in DIVISIONS[1:]:
        other_loss, other = gradients(sets, micro, accumulation)
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-12)
        for name, gradient in whole.items():
            assert torch.allclose(gradient, other[name], rtol=0, atol=1e-12), (name, micro)


def test_without_a_weight_every_micro_batch_counts_alike(own_sets: Sets) -> None:
    sets = (*own_sets(), "workload.options.weigh=false")
    stepper, _ = made(sets, 4, 2)
    parts = [float(stepper.forward_backward(batch, no_phase)) * 2 for batch in micro_batches(stepper, 4)]
    stepper, _ = made(sets, 4, 2)
    loss = stepper.step(micro_batches(stepper, 4), PhaseClock(), 0)
    assert float(loss) == pytest.approx(sum(parts) / 2)  # type: ignore[arg-type]
    assert float(loss) != pytest.approx(float(gradients(own_sets(), 4, 2)[0]), rel=1e-4)  # type: ignore[arg-type]


def test_clips_weighted_by_class_have_the_same_loss_in_every_division() -> None:
    sets = ["workload.name=antispoof", "workload.size=tiny", "workload.clips=48", "run.epochs=1"]
    config = read(None, [*sets, "batch.micro=2", "batch.accumulation=4"]).resolve()
    workload = prepare(config)
    stepper = Stepper(workload, config, CPU, total_steps=10)
    output = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1])  # 2 x spoof, one of each, ...
    batches = [(torch.zeros(2), labels[start : start + 2]) for start in range(0, 8, 2)]
    losses = [workload.loss(output[2 * index : 2 * index + 2], batch) for index, batch in enumerate(batches)]
    shares = stepper.shares(batches)
    assert sum(shares) == pytest.approx(1.0)
    whole = float(workload.loss(output, (torch.zeros(8), labels)))
    assert float(sum(map(torch.mul, losses, map(torch.tensor, shares)))) == pytest.approx(whole, rel=1e-6)


def test_the_mean_loss_of_an_evaluation_has_the_same_weights(own_sets: Sets) -> None:
    stepper, _ = made(own_sets(), 8, 1)
    workload, results = stepper.workload, []
    for micro in (8, 3, 1):
        metric = workload.metric()
        assert isinstance(metric, MeanLoss)
        for batch in micro_batches(stepper, micro, items=9 if micro == 3 else 8):
            output = workload.forward(stepper.model, batch)
            metric.update(output, batch, workload.loss(output, batch))
        results.append(metric.result()["loss"])
    assert results[2] == pytest.approx(results[0], rel=1e-12)
    assert results[1] > 0  # one batch more


@pytest.mark.parametrize("weight", ["words != 0", "'many'", "-2.0", "torch.tensor(float('nan'))", "None"])
def test_a_weight_that_is_no_number_is_reported_with_the_factorys_file(
    trainer: Trainer, own_sets: Sets, weight: str
) -> None:
    end = trainer.train(*own_sets(weight), "batch.micro=4", "batch.accumulation=2").end
    assert end.status == "failed"
    assert "weight returned" in end.reason and "written_" in end.reason
