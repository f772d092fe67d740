"""Configurations of workloads for their tests, the problems of their data, and a plain loop that trains them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts, problems

ANTISPOOF: dict[str, Any] = {
    "name": "antispoof", "blocks": [1, 1, 1, 1], "channels": [16, 16, 32, 64], "dropout": 0.1, "clips": 240,
}  # fmt: skip
SUMMARISE: dict[str, Any] = {
    "name": "summarise", "embedding": 24, "hidden": 32, "layers": 1, "vocabulary": 500, "target": 24, "pairs": 400,
}  # fmt: skip


def configured(workload: dict[str, Any], seed: int = 1337, **batch: int) -> Config:
    """The section of a workload and of the batch, with the other values at their defaults."""
    return Config.model_validate({"run": {"epochs": 1, "seed": seed}, "workload": workload, "batch": batch})


def made(section: dict[str, Any], micro: int, sequence: int) -> Workload:
    torch.manual_seed(1)
    return prepare(configured(section, micro=micro, sequence=sequence))


def refused(config: Config) -> str:
    """The problems of its data as text; there must be some, and building the workload must report the same ones."""
    found = problems(config, "run.toml")
    assert found and all(problem.where == "run.toml" and problem.key for problem in found)
    for refuse in (facts, prepare):
        with pytest.raises(ConfigError) as caught:
            refuse(config)
        assert [problem.message for problem in caught.value.problems] == [
            problem.message for problem in found
        ]
    return "\n".join(map(str, found))


def told(workload: str, data: Path | str, micro: int = 4, sequence: int = 16, **batch: int) -> str:
    """What is wrong with this data for this workload."""
    return refused(configured({"name": workload, "data": str(data)}, micro=micro, sequence=sequence, **batch))


def train(workload: Workload, steps: int, lr: float, micro: int, clip: float = math.inf) -> None:
    """So many steps over the items, in an order of its own seed."""
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(
        workload.train_data, micro, shuffle=True, drop_last=True, generator=order, collate_fn=workload.collate
    )
    done = 0
    while done < steps:
        for batch in islice(loader, steps - done):
            loss = workload.loss(workload.forward(workload.model, batch), batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(workload.model.parameters(), clip)
            optimizer.step()
            done += 1


@torch.no_grad()
def evaluate(
    workload: Workload, predict: Callable[[Any], Any] | None = None, micro: int = 256
) -> dict[str, float]:
    """The metric of the model, or of `predict` in its place."""
    workload.model.eval()
    metric = workload.metric()
    for batch in DataLoader(workload.eval_data, micro, collate_fn=workload.collate):  # type: ignore[arg-type]
        output = predict(batch) if predict else workload.forward(workload.model, batch)
        metric.update(output, batch, workload.loss(output, batch))
    workload.model.train()
    return metric.result()
