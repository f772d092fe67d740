"""The order of a user's own data: the same as a plain PyTorch loop's, and resumed where it was."""

from __future__ import annotations

import pytest
from order_help import Sets, ordered, plain_losses
from train_help import Result, Trainer, equal, training_state

__all__ = ["ordered"]

# Orders that a DataLoader expresses, with the same losses as a plain loop over it.
LOADERS = {
    "in order": "DataLoader(Data(), batch_size=4)",
    "in order, without the last": "DataLoader(Data(), batch_size=4, drop_last=True)",
    "shuffled with a generator": "DataLoader(Data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))",
    "weighted": "DataLoader(Data(), batch_size=4, sampler=WeightedRandomSampler(range(1, 51), 30, generator=torch.Generator().manual_seed(2)))",
    "with replacement": "DataLoader(Data(), batch_size=4, sampler=RandomSampler(range(50), True, 22, generator=torch.Generator().manual_seed(2)))",
    "a list of batches": "DataLoader(Data(), batch_sampler=[[0, 1, 2], [7], [3, 3, 4, 5]])",
    "endless": "DataLoader(Data(), batch_size=4, sampler=Endless())",
    "a stream": "DataLoader(Items(), batch_size=4)",
    "a stream without the last": "DataLoader(Items(), batch_size=4, drop_last=True)",
    "a stream of batches": "DataLoader(DataLoader(Items(48), batch_size=4, drop_last=True).dataset, batch_size=4)",
}
# These are only known to be resumed: a plain loop draws their random numbers from the model's generators.
OTHERS = {
    "shuffle=False": "parts(shuffle=False)",
    "buckets": "parts(batch_sampler=Buckets())",
    "weighted without a generator": "parts(sampler=WeightedRandomSampler(range(1, 51), 30))",
    "endless sampler as a part": "parts(sampler=Endless())",
    "a noisy stream": "parts() | dict(train_data=Items(noise=True))",
    "shuffled, with a smaller last batch": "parts() | dict(train_data=DataLoader(Data(), batch_size=4, shuffle=True))",
}
MADE = {name: f"parts() | dict(train_data={text})" for name, text in LOADERS.items()}
STEPS = 33


def losses(*results: Result) -> list[float]:
    found: dict[int, float] = {}
    for result in results:
        found |= result.losses
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_trains_as_a_plain_loop_over_it(trainer: Trainer, ordered: Sets, name: str) -> None:
    sets = ordered(MADE[name])
    result = trainer.train(*sets, f"run.max_steps={STEPS}")
    assert result.end is not None and result.end.status == "done", result.end
    assert losses(result) == pytest.approx(plain_losses(sets, STEPS), rel=1e-6)


@pytest.mark.parametrize("stop", [5, 14])
@pytest.mark.parametrize("name", [*MADE, *OTHERS])
def test_a_resumed_run_sees_the_data_that_it_would_have_seen(
    trainer: Trainer, ordered: Sets, name: str, stop: int
) -> None:
    sets = ordered({**MADE, **OTHERS}[name])
    whole = trainer.train(*sets, f"run.max_steps={STEPS}")
    half = trainer.train(*sets, f"run.max_steps={stop}")
    rest = trainer.train(f"run.max_steps={STEPS}", resume=half)
    assert [result.end.status for result in (whole, half, rest) if result.end] == ["done"] * 3
    assert losses(whole) == losses(half, rest)
    assert equal(training_state(whole.state(STEPS)), training_state(rest.state(STEPS)))


@pytest.mark.parametrize("stop", [3, 13, 20])
@pytest.mark.parametrize("more", ["", "loader.persistent=false"])
@pytest.mark.parametrize("data", ["Items()", "Items(noise=True)"])
def test_a_stream_read_by_workers_resumes_bit_for_bit(
    trainer: Trainer, ordered: Sets, data: str, stop: int, more: str
) -> None:
    sets = (*ordered(f"parts() | dict(train_data=DataLoader({data}, batch_size=4))"), "loader.workers=2")
    if more:
        sets = (*sets, more)
    whole = trainer.train(*sets, "run.max_steps=30")
    half = trainer.train(*sets, f"run.max_steps={stop}")
    rest = trainer.train("run.max_steps=30", resume=half)
    assert [result.end.status for result in (whole, half, rest) if result.end] == ["done"] * 3
    assert losses(whole) == losses(half, rest)
