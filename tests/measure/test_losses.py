"""Losses reach the host in order and in batches of N steps."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.measure.reporting import LossReader

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.lists(st.floats(-1e3, 1e3, width=32), max_size=60), st.sets(st.integers(0, 60)))
def test_every_loss_arrives_once_in_order(every: int, losses: list[float], drains: set[int]) -> None:
    reader = LossReader(CPU, every)
    arrived: list[tuple[int, float]] = []
    waiting = 0
    for step, loss in enumerate(losses, start=1):
        new = reader.add(step, torch.tensor(loss), {})
        waiting += 1
        assert len(new) in (0, waiting)
        assert waiting <= every
        waiting = 0 if new else waiting
        arrived += new
        if step in drains:
            arrived += reader.drain()
            waiting = 0
    arrived += reader.drain()
    assert arrived == list(enumerate(losses, start=1))
    assert reader.drain() == []


def test_the_newest_of_what_is_beside_the_loss_arrives_with_it() -> None:
    reader = LossReader(CPU, 2)
    reader.add(1, torch.tensor(1.5, dtype=torch.bfloat16), {"grad_norm": torch.tensor(10.0)})
    assert reader.extras == {}
    newest = {"grad_norm": torch.tensor(20.0), "loss_scale": torch.tensor(4.0)}
    assert reader.add(2, torch.tensor(2.0), newest) == [(1, 1.5), (2, 2.0)]
    assert reader.extras == {"grad_norm": 20.0, "loss_scale": 4.0}
