"""Learning rates, precision and optimizer: what "auto" becomes, and that every choice really trains."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from tests.tiers import few
from torch import nn
from train_help import EVERY_STEP, Trainer

from ndd_engine.config import Config, read
from ndd_engine.config.schema import OptimizerSection, ScheduleSection
from ndd_engine.train.step.optimizers import learning_rate, make_optimizer, make_precision

CPU = torch.device("cpu")


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", *sets]).resolve()


def test_warm_up_rises_in_equal_steps_to_the_rate() -> None:
    schedule = ScheduleSection(warmup_steps=4)
    rates = [learning_rate(step, 100, 1.0, schedule) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_cosine_starts_at_the_rate_and_ends_at_the_least() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=10, min_lr=0.1)
    rates = [learning_rate(step, 110, 1.0, schedule) for step in range(130)]
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[35] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[110:] == [pytest.approx(0.1)] * 20
    assert rates[10:111] == sorted(rates[10:111], reverse=True)


def test_a_warm_up_longer_than_the_run_is_no_error() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=50)
    assert learning_rate(9, 10, 1.0, schedule) == pytest.approx(0.2)
    assert learning_rate(50, 10, 1.0, schedule) == 1.0


@pytest.mark.parametrize(
    ("amp", "dtype", "scales"), [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)]
)
def test_mixed_precision_computes_in_its_type(amp: str, dtype: torch.dtype, scales: bool) -> None:
    precision = make_precision(config(f"precision.amp={amp}"), CPU)
    assert precision.name == amp
    assert (precision.scaler is not None) == scales
    assert precision.autocast is not None
    with precision.autocast:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_a_tiny_model_learns_in_every_precision(trainer: Trainer, amp: str) -> None:
    result = trainer.train(
        *trainer.chartext, *EVERY_STEP, "run.max_steps=60", "optimizer.lr=0.01", f"precision.amp={amp}"
    )
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


def test_the_schedule_reaches_the_steps(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd,
        *EVERY_STEP,
        "run.max_steps=12",
        "optimizer.lr=0.01",
        "schedule.kind=cosine",
        "schedule.warmup_steps=4",
    )
    schedule = ScheduleSection(kind="cosine", warmup_steps=4)
    seen = {window.step: window.lr for window in result.windows if window.steps}
    assert seen == {step: learning_rate(step - 1, 12, 0.01, schedule) for step in range(1, 13)}


def test_clipping_records_the_norm_and_limits_the_step(trainer: Trainer) -> None:
    common = (
        *trainer.ndd,
        *EVERY_STEP,
        "run.max_steps=5",
        "optimizer.name=sgd",
        "optimizer.lr=1.0",
        "optimizer.weight_decay=0.0",
    )
    clipped = trainer.train(*common, "clip.max_norm=1e-12")
    free = trainer.train(*common)
    assert all(
        window.grad_norm is not None and window.grad_norm > 1e-12
        for window in clipped.windows
        if window.steps
    )
    assert all(window.grad_norm is None for window in free.windows)
    # Clipped to nothing, the weights stay where they were.
    assert "clip" in clipped.windows[0].phases
    assert "clip" not in free.windows[0].phases
    moved = [
        (clipped.state(5)["model"][key] - free.state(5)["model"][key]).abs().max() > 1e-6
        for key in clipped.state(5)["model"]
        if key.endswith("weight")
    ]
    assert any(moved)


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
