"""A run of several ranks that stops and resumes equals one that does not, also with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_help import Trained, train
from tests.states import equal

# Every epoch has 5 steps of 8 items: the runs stop in the middle of the second and the third one.
COMMON = (
    "workload.name=ranks_workloads:points", "run.threads=1", "run.device=cpu", "batch.micro=2", "batch.effective=8",
    "optimizer.lr=0.05", "clip.max_norm=0.1", "checkpoint.keep=9", "evaluate.every_epochs=0", "evaluate.every_steps=5",
    "log.profile_every_s=0", "run.max_steps=13",
)  # fmt: skip
pytestmark = pytest.mark.long
DROPOUT = ("workload.options.dropout=0.3", "workload.options.norm=true")


def trained(root: Path, name: str, *sets: str, parts: tuple[tuple[int, int, str], ...]) -> Trained:
    """One run in parts of (ranks, last step, strategy)."""
    for index, (ranks, last, strategy) in enumerate(parts):
        more = (f"run.max_steps={last}", f"parallel.strategy={strategy}")
        done = train(root, name, *COMMON, *sets, *more, ranks=ranks, resume=index > 0)
        assert done.status == 0, done.output
    return done


def weights(run: Trained, step: int = 13) -> dict[str, Any]:
    state = run.state(step)
    return {key: state[key] for key in ("model", "optimizer", "scaler", "step")}


def difference(one: Trained, other: Trained) -> float:
    first, second = one.state(13)["model"], other.state(13)["model"]
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((1, "ddp"), (4, "ddp"), (2, "fsdp2"), (4, "fsdp2"))
        ),
    ],
)
@pytest.mark.budget(60)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, ranks: int, strategy: str) -> None:
    whole = trained(tmp_path, "whole", *DROPOUT, parts=((ranks, 13, strategy),))
    parts = trained(tmp_path, "parts", *DROPOUT, parts=((ranks, 7, strategy), (ranks, 13, strategy)))
    assert equal(weights(parts), weights(whole))
    assert whole.metrics.items() <= parts.metrics.items() and whole.metrics.keys() >= {5, 10, 13}
    for rank in range(ranks if ranks > 1 else 0):
        assert equal(parts.random(13, rank), whole.random(13, rank))
    if ranks > 1:
        assert not torch.equal(whole.random(13, 0)["torch"], whole.random(13, 1)["torch"])


@pytest.mark.budget(60)
def test_another_number_of_ranks_continues_the_same_training(tmp_path: Path) -> None:
    """Without random numbers in the model: two ranks, one and two again; a step adds up two micro-batches."""
    sets = ("batch.effective=4",)
    two = trained(tmp_path, "two", *sets, parts=((2, 13, "ddp"),))
    one = trained(tmp_path, "one", *sets, parts=((1, 13, "ddp"),))
    mixed = trained(tmp_path, "mixed", *sets, parts=((2, 4, "ddp"), (1, 8, "ddp"), (2, 13, "ddp")))
    for run in (one, mixed):
        assert equal(weights(run), weights(two))
        for step, metrics in two.metrics.items():
            assert run.metrics[step] == pytest.approx(metrics, rel=1e-13)


@pytest.mark.parametrize(
    "parts", [((2, 4, "ddp"), (2, 8, "fsdp2"), (2, 13, "ddp")), ((4, 6, "fsdp2"), (1, 13, "ddp"))]
)
@pytest.mark.slow
def test_another_strategy_or_order_of_sums_differs_by_rounding(
    tmp_path: Path, parts: tuple[tuple[int, int, str], ...]
) -> None:
    whole = trained(tmp_path, "whole", parts=((2, 13, "ddp"),))
    assert difference(trained(tmp_path, "parts", parts=parts), whole) < 1e-14


@pytest.mark.slow
def test_a_stream_goes_on_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    """Its order is drawn while it is read: from generators that all ranks share, not from the model's."""
    sets = ("workload.name=ranks_workloads:stream", "run.epochs=3", *DROPOUT)
    whole = trained(tmp_path, "whole", *sets, parts=((2, 13, "ddp"),))
    parts = trained(tmp_path, "parts", *sets, parts=((2, 7, "ddp"), (2, 13, "ddp")))
    assert equal(weights(parts), weights(whole))


@pytest.mark.slow
def test_callbacks_change_the_weights_of_all_ranks_alike(tmp_path: Path) -> None:
    sets = ("workload.name=ranks_workloads:averaged", "batch.effective=4", "run.max_steps=8")
    one, two = (trained(tmp_path, f"on-{n}", *sets, parts=((n, 8, "ddp"),)) for n in (1, 2))
    assert equal(weights(two, 8), weights(one, 8))
    averages = [run.state(8)["stateful"]["average"] for run in (one, two)]
    assert equal(averages[1]["weights"], averages[0]["weights"])
    # What differs between ranks is that of rank 0; its loss is that of its own micro-batches.
    assert averages[1]["losses"].shape == (8,) and not torch.equal(
        averages[1]["losses"], averages[0]["losses"]
    )


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (("workload.name=ranks_workloads:optimizing", "parallel.strategy=fsdp2"), "optimizer"),
        (("workload.options.unused=true",), "parallel.find_unused"),
        (("workload.options.loader=true",), "train_data.drop_last"),
    ],
)
@pytest.mark.slow
def test_what_ranks_cannot_share_is_one_sentence(tmp_path: Path, sets: tuple[str, ...], named: str) -> None:
    done = train(tmp_path, "refused", *COMMON, *sets, ranks=2)
    assert done.status == 2 and named in done.output, done.output
    assert "Traceback" not in done.output
