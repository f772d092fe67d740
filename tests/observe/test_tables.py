"""Embeddings whose gradients have values for rows that a step does not read, as a profiled step sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import run
from tests.tiers import few
from torch import Tensor, nn
from torch.nn import functional

from ndd_watch.looks import Looks
from ndd_watch.slowing import Tables

ROWS = 5000


def found(
    table: nn.Module,
    loss: Callable[[Tensor], Tensor],
    indices: int = 40,
    optimizer: Any = torch.optim.Adam,
    calls: int = 1,
) -> list[list[Any]]:
    """What a step tells whose model calls the table so often."""
    model = nn.Sequential(nn.ReLU(), table)
    tables = Tables(torch, Looks(torch))
    tables.enters(model, 1, ((), {}))
    total = torch.zeros(())
    for _ in range(calls):
        x = torch.randint(ROWS, (indices // calls,))
        given = (x, torch.zeros(1, dtype=torch.long)) if isinstance(table, nn.EmbeddingBag) else (x,)
        tables.enters(table, 2, (given, {}))
        total = total + loss(table(*given))
    tables.loss(total)
    return tables.found([optimizer(model.parameters())])


def summed(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS])
def test_a_large_table_of_which_a_step_reads_few_rows(kind: Any, rows: int) -> None:
    (row,) = found(kind(rows, 4), summed)
    assert row == ["Sequential.1", kind.__name__, rows, 4, 40, 1.0, "Adam"]


def test_calls_within_a_step_are_added_up() -> None:
    (row,) = found(nn.Embedding(ROWS, 4), summed, indices=40, calls=4)
    assert row[4] == 40


def test_a_step_that_reads_many_rows_and_a_small_table_are_usual() -> None:
    assert not found(nn.Embedding(ROWS, 4), summed, indices=ROWS // 3)
    assert not found(
        nn.Embedding(ROWS, 4, sparse=True), summed, optimizer=lambda given: torch.optim.SGD(given, lr=0.1)
    )
    small = nn.Embedding(500, 4)
    tables = Tables(torch, Looks(torch))
    x = torch.arange(4)
    tables.enters(small, 1, ((x,), {}))
    tables.loss(small(x).sum())
    assert not tables.found([torch.optim.Adam(small.parameters())])


def test_a_table_that_something_else_uses_has_a_gradient_for_each_row_anyway() -> None:
    table = nn.Embedding(ROWS, 4)
    assert not found(table, lambda output: functional.linear(output, table.weight).sum())
    # Called by a function, where its indices are not seen.
    more = torch.arange(ROWS)
    assert not found(table, lambda output: output.sum() + functional.embedding(more, table.weight).sum())


def test_without_its_use_in_the_graph_nothing_is_known() -> None:
    assert not found(
        nn.Embedding(ROWS, 4), lambda output: output.detach().sum() + torch.ones(1, requires_grad=True).sum()
    )
    frozen = nn.Embedding(ROWS, 4).requires_grad_(False)
    assert not found(frozen, lambda output: output.sum() * torch.ones(1, requires_grad=True).sum())


def test_a_graph_that_is_too_large_is_not_judged() -> None:
    def long(output: Tensor) -> Tensor:
        for _ in range(11_000):
            output = output + 1
        return output.sum()

    assert not found(nn.Embedding(ROWS, 4), long)


@pytest.mark.parametrize(("devices", "several"), [([0, 1], 2), ([0], 1), ([], 0)])
def test_data_parallel_with_its_devices(devices: list[int], several: int) -> None:
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids = devices
    tables = Tables(torch, Looks(torch))
    tables.enters(model, 1, ((torch.ones(1, 2),), {}))
    assert tables.devices == several


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "told"),
    few([(("5000",), True), (("5000", "tied"), False), (("5000", "sparse"), False), (("150",), False)], 2),
)
def test_of_a_script(tmp_path: Path, words: tuple[str, ...], told: bool) -> None:
    ran = run(tmp_path, "embeds.py", *words, NDD_WATCH_PROFILE_S="0.05", NDD_WATCH_WINDOW_S="0.05")
    assert not ran.status, ran.errors
    profiled = ran.of("functions")
    assert profiled and all(bool(one["tables"]) is told for one in profiled)
    if told:
        assert profiled[-1]["tables"][0][:5] == ["Net.encoder.table", "Embedding", 5000, 8, 40]


@pytest.mark.slow
@pytest.mark.long
def test_a_script_with_data_parallel(tmp_path: Path) -> None:
    ran = run(
        tmp_path, "embeds.py", "5000", "parallel", NDD_WATCH_PROFILE_S="0.05", NDD_WATCH_WINDOW_S="0.05"
    )
    assert not ran.status, ran.errors
    assert ran.of("run")[-1]["config"]["script"]["data_parallel"] == 2
    assert ran.of("functions")[-1]["tables"][0][0] == "Parallel.module.encoder.table"


def attention(loss: Tensor, attends: bool = True) -> str | None:
    tables = Tables(torch, Looks(torch), attends)
    tables.loss(loss)
    tables.loss(torch.ones(2, requires_grad=True).sum())  # another loss of the same step
    return tables.attention


def test_the_backend_of_attention_is_in_the_graph() -> None:
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    fused = summed(functional.scaled_dot_product_attention(x, x, x))
    assert attention(fused) == "flash" and attention(fused, attends=False) is None
    assert attention(summed(torch.softmax(x @ x.mT, -1) @ x)) == ""  # by hand: no backend can be chosen


def test_a_node_of_the_script_is_no_attention() -> None:
    class ScaledDotProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given * 1

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return given[0]

    assert attention(summed(ScaledDotProduct.apply(torch.randn(3, requires_grad=True)))) == ""
