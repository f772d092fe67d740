"""Public training codes as factories: 50 steps have the losses of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import port_gan
import port_gpt
import port_recurrent
import pytest
import torch
from train_help import EVERY_STEP, Trainer

from ndd_engine.train.data.item_sources import EpochBatches

HERE = Path(__file__).parent
SEED = 7
# module, factory, settings, training items
PORTS: dict[str, tuple[Any, str, tuple[str, ...], int]] = {
    "gpt": (port_gpt, "factory", ("clip.max_norm=1.0", "batch.micro=4", "batch.sequence=12"), 96),
    "recurrent": (port_recurrent, "factory", ("batch.micro=4", "batch.sequence=6"), 40),
    "recurrent-torch": (port_recurrent, "hooked", ("clip.max_norm=0.25", "batch.micro=4", "batch.sequence=6"), 40),
    "gan": (port_gan, "factory", ("batch.micro=8",), 108),
}  # fmt: skip


def settings(port: str) -> tuple[str, ...]:
    module, factory, sets, _ = PORTS[port]
    return (
        f"workload.name={module.__name__}:{factory}", f'workload.path=["{HERE}"]', f"run.seed={SEED}", "run.threads=1",
        *EVERY_STEP, *sets,
    )  # fmt: skip


def batches(port: str) -> Iterator[Any]:
    """The batches of a run: its order depends only on the seed and the epoch."""
    module, _, _, items = PORTS[port]
    order = EpochBatches(items, module.BATCH, SEED)
    data = module.data()
    epoch = 0
    while True:
        order.set(epoch)
        for indices in order:
            yield [tensor[indices] for tensor in data.tensors]
        epoch += 1


@pytest.mark.parametrize("port", PORTS)
def test_the_losses_are_those_of_the_plain_loop(trainer: Trainer, port: str) -> None:
    result = trainer.train(*settings(port), "run.max_steps=50")
    expected = PORTS[port][0].plain(batches(port), SEED)
    found = [loss for _, loss in sorted(result.losses.items())]
    assert found == pytest.approx(expected, rel=2e-6)
    # The rate went down, in the recurrent ones with the evaluations.
    rates = [window.lr for window in result.windows if window.steps]
    if port == "recurrent":
        assert result.state(50)["stateful"]["annealing"]["lr"] < port_recurrent.LR
        assert set(rates) == {None}  # it has no optimizer of torch
    elif port == "recurrent-torch":
        assert rates[0] == port_recurrent.LR and rates[-1] is not None and rates[-1] < port_recurrent.LR


def test_a_step_of_ones_own_is_timed_and_its_average_of_the_weights_is_saved(trainer: Trainer) -> None:
    result = trainer.train(*settings("gan"), "run.max_steps=12")
    seen = {name for window in result.windows if window.steps for name in window.phases}
    assert {"data_wait", "forward", "loss", "backward", "optimizer", "zero_grad"} <= seen
    assert set(dict(result.snapshot.scalars)) == {"critic", "generator"}
    last = result.marks("evaluation")[-1].data["metrics"]
    assert set(last) == {"loss", "real"} and 0 < last["real"] < 1
    model = result.state(12)["model"]
    assert int(model["average.n_averaged"]) == 12  # the test step left no trace
    assert not torch.equal(model["average.module.0.weight"], model["generator.0.weight"])
