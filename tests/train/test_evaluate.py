"""An evaluation does not change the training."""

from __future__ import annotations

import random

import pytest
import torch
from tests.states import equal
from train_help import Trainer

from ndd_engine.config import Config, read
from ndd_engine.run import StopNow
from ndd_engine.train.checkpoint_state import random_state
from ndd_engine.train.data.loader import EvalBatches
from ndd_engine.train.evaluate import Result, evaluate
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")


def made(trainer: Trainer, *sets: str) -> tuple[Config, Workload]:
    config = read(None, [*trainer.chartext, "workload.dropout=0.5", *sets]).resolve()
    torch.manual_seed(1)
    return config, prepare(config)


def run(config: Config, workload: Workload, batches: int | None = None) -> Result:
    section = config.evaluate.model_copy(update={"batches": batches})
    stepper = Stepper(workload, config.model_copy(update={"evaluate": section}), CPU, 1)
    return evaluate(stepper, EvalBatches(workload.eval_data, config), lambda: None)


@pytest.mark.parametrize("objective", ["autoregressive", "diffusion"])
def test_it_changes_no_random_number_no_gradient_and_no_mode(trainer: Trainer, objective: str) -> None:
    config, workload = made(trainer, f"workload.objective={objective}")
    workload.model.train()
    before, weights = (
        random_state(CPU),
        {key: value.clone() for key, value in workload.model.state_dict().items()},
    )
    first = run(config, workload)
    assert equal(random_state(CPU), before)
    assert equal(dict(workload.model.state_dict()), weights)
    assert workload.model.training
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    # Whatever was drawn in between, it gives the same figures: no dropout, the same noise.
    torch.rand(100)
    random.random()
    assert run(config, workload).metrics == first.metrics
    assert next(iter(first.metrics)) == first.headline[0] == "bits_per_char"


def test_a_result_that_is_not_finite_is_a_warning(trainer: Trainer) -> None:
    config, workload = made(trainer)
    assert run(config, workload).not_finite == ""
    workload.loss = lambda *_: torch.tensor(float("nan"))  # type: ignore[method-assign, assignment]
    assert "loss is nan" in run(config, workload).not_finite
    # Some data has no auroc.
    assert Result({"rmse": 0.5, "auroc": float("nan")}, 1, 1.0, True).not_finite == ""


def test_nothing_is_dropped_out(trainer: Trainer) -> None:
    config, workload = made(trainer)
    plain_config, plain = made(trainer, "workload.dropout=0.0")
    plain.model.load_state_dict(workload.model.state_dict())
    assert run(config, workload).metrics == run(plain_config, plain).metrics


def test_it_looks_at_no_more_batches_than_asked(trainer: Trainer) -> None:
    config, workload = made(trainer, "batch.micro=2")
    assert run(config, workload, batches=1).batches == 1
    everything = run(config, workload)
    assert everything.batches == -(-len(workload.eval_data) // 2)  # type: ignore[arg-type]
    assert run(config, workload, batches=1000).metrics == everything.metrics


def test_it_can_be_left_in_the_middle(trainer: Trainer) -> None:
    config, workload = made(trainer, "batch.micro=1")
    seen = []

    def between() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise StopNow

    before = random_state(CPU)
    with pytest.raises(StopNow):
        evaluate(Stepper(workload, config, CPU, 1), EvalBatches(workload.eval_data, config), between)
    assert workload.model.training
    assert equal(random_state(CPU), before)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_workers_give_the_same_figures(trainer: Trainer) -> None:
    config, workload = made(trainer)
    alone = run(config, workload)
    helped, _ = made(trainer, "loader.eval_workers=1")
    assert run(helped, workload).metrics == alone.metrics
