"""Updates that a gradient scaler skips in a run of one's own are counted as those of a script are."""

from __future__ import annotations

import pytest
from train_help import Trainer, Written

SOURCE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

done = 0

class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (float("inf") if SKIPS else 1.0)

def count(train):
    global done
    done = train.step

def factory(settings):
    x = torch.rand(400, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loss = lambda output, batch: (Steep.apply(output) - batch[1]).square().mean()
    return dict(model=nn.Linear(4, 1), train_data=data, loss=loss, on_step=count)
"""


# The first updates are skipped while the scale settles, and count only where they go on.
@pytest.mark.parametrize(
    ("skips", "first", "count"),
    [("done > 9 and done % 4 == 3", 11, 5), ("done < 3", None, 0), ("done < 25", 0, 25), ("False", None, 0)],
)
def test_skipped_updates_are_counted_and_the_first_is_known(
    trainer: Trainer, written: Written, skips: str, first: int | None, count: int
) -> None:
    sets = ("batch.micro=4", "run.threads=1", "log.profile_every_s=0", "run.max_steps=30")
    result = trainer.train(*written(SOURCE.replace("SKIPS", skips)), *sets, "precision.amp=fp16")
    assert result.end.status == "done", result.end
    windows = result.windows
    assert sum(window.skipped for window in windows) == count
    assert next((one.first_skipped for one in windows if one.first_skipped is not None), None) == first
