"""The examples of docs/own-model.md train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from train_help import EVERY_STEP, Trainer, Written, resumed

DOCS = Path(__file__).parents[2] / "docs" / "own-model.md"
START = """
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

class Gpt(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 9))

class Generator(nn.Linear):
    def __init__(self):
        super().__init__(64, 2)

class Discriminator(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)
    def zero_state(self, batch):
        return self.head.weight.new_zeros(1, batch, 4)
    def forward(self, x, state):
        out, state = self.cell(x, state)
        return self.head(out).mean(dim=(1, 2)), state

def Tokens(settings):
    words = torch.arange(400).reshape(40, 10) % 9
    return TensorDataset(words[:, :-1], words[:, 1:])

def Images():
    return TensorDataset(torch.rand(40, 2))

def Series():
    x = torch.rand(40, 5, 3)
    return TensorDataset(x, x.sum(dim=(1, 2)))

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

def mean_square(output, batch):
    return nn.functional.mse_loss(output.flatten(), batch[1].flatten())

def real_or_fake(output, real):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, float(real)))

def rate(step):
    return 1e-3 / (1 + step)
"""
WHOLE = {"AdamW(groups": "", "def eval_step": ""}
PARTS = {
    'parts["state"]': "model = Recurrent()\nparts = dict(model=model, train_data=Series(), loss=mean_square)",
    "AveragedModel": "net = nn.Linear(2, 2)\nx = torch.rand(40, 2)\n"
    "parts = dict(train_data=TensorDataset(x, x), loss=mean_square)",
}


def example(text: str) -> str:
    """The code block of the page that contains this text."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return str(found)


@pytest.mark.parametrize("text", [*WHOLE, *PARTS])
@pytest.mark.long
def test_an_example_trains_and_resumes(trainer: Trainer, written: Written, text: str) -> None:
    code = example(text)
    if text in PARTS:
        lines = "\n".join([PARTS[text], *code.splitlines(), "return parts"])
        code = "def factory(settings):\n" + "".join(f"    {line}\n" for line in lines.splitlines())
    sets = (*written(START + code), "batch.micro=4", *EVERY_STEP)
    assert resumed(trainer, sets, 5, 12).marks("evaluation")
