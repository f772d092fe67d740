"""Runs of several ranks: one that stops and resumes equals one that does not, also with another number of ranks.

Steps exchange gradients, and nothing else: the ranks agree about once a second.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.records import events_of
from tests.states import equal
from tests.tiers import few

from ndd_engine.config import read
from ndd_engine.record.events import Event, MarkEvent, RanksEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.run import Run
from ndd_engine.train.checkpoint import CheckpointStore, rank_entry
from ndd_engine.train.checkpoint_tensors import EntryReader
from ndd_engine.train.parallel.world import FLIGHT_RECORDER
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun

HERE = Path(__file__).parent
# Every epoch has 5 steps of 8 items: the runs stop in the middle of the second and the third one.
COMMON = (
    "workload.name=ranks_workloads:points", "run.threads=1", "run.device=cpu", "batch.micro=2", "batch.effective=8",
    "optimizer.lr=0.05", "clip.max_norm=0.1", "checkpoint.keep=9", "evaluate.every_epochs=0", "evaluate.every_steps=5",
    "log.profile_every_s=0", "run.max_steps=13",
)  # fmt: skip
DROPOUT = ("workload.options.dropout=0.3", "workload.options.norm=true")


@dataclass(frozen=True)
class Trained:
    """A run that `train` made. output: what it printed. status: its exit status."""

    folder: Path
    status: int
    output: str

    @property
    def events(self) -> list[Event]:
        """What rank 0 recorded."""
        return events_of(RunDir(self.folder))

    @property
    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """The evaluations, with their steps."""
        marks = [event for event in self.events if isinstance(event, MarkEvent)]
        return [(mark.step, mark.data["metrics"]) for mark in marks if mark.kind == "evaluation"]

    def state(self, step: int) -> dict[str, Any]:
        """What a single process loads from the checkpoint of a step."""
        store = CheckpointStore(self.folder / "checkpoints", 9)
        return store.load(next(saved for saved in store.all() if saved.step == step))

    def random(self, step: int, rank: int) -> Any:
        """The random generators that a rank has saved."""
        (folder,) = self.folder.glob(f"checkpoints/step-{step:08d}*")
        reader = EntryReader(folder, frozenset(path.name for path in folder.iterdir()))
        return reader.values(rank_entry(rank))[0]["random"]


def train(
    root: Path, name: str, *sets: str, ranks: int, resume: bool = False, from_step: int | None = None
) -> Trained:
    """Train as a user does: `ndd-console train --ranks N`; a single rank trains in this process."""
    options = (*sets, f'workload.path=["{HERE}"]')
    if ranks == 1:
        earlier = RunDir(root / name) if resume else None
        own = (*options, "parallel.ranks=1", *(() if resume else (f"run.name={name}",)))
        draft = read(earlier.config if earlier else None, own)
        run = Run.open(TrainingRun(RunRequest(draft, root, earlier, from_step)))
        try:
            end = run.execute()
        finally:
            run.close()
        return Trained(root / name, end.exit_status, end.reason)
    words = [word for each in options for word in ("--set", each)]
    words += [] if from_step is None else ["--from-step", str(from_step)]
    command = [sys.executable, "-m", "ndd_console", "--runs", str(root), "train", "--headless"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--resume" if resume else "--run", name, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=170,
        check=False,
    )
    return Trained(root / name, done.returncode, done.stdout)


def trained(root: Path, name: str, *sets: str, parts: tuple[tuple[int, int, str], ...]) -> Trained:
    """One run in parts of (ranks, last step, strategy)."""
    for index, (ranks, last, strategy) in enumerate(parts):
        more = (f"run.max_steps={last}", f"parallel.strategy={strategy}")
        done = train(root, name, *COMMON, *sets, *more, ranks=ranks, resume=index > 0)
        assert done.status == 0, done.output
    return done


def whole_and_resumed(
    root: Path, *sets: str, ranks: int = 2, strategy: str = "ddp"
) -> tuple[Trained, Trained]:
    """(a run in one piece, the same run resumed from its checkpoint of step 7)."""
    sets = (*sets, "checkpoint.every_steps=7")
    whole = trained(root, "whole", *sets, parts=((ranks, 13, strategy),))
    shutil.copytree(whole.folder, root / "parts")
    return whole, train(root, "parts", ranks=ranks, resume=True, from_step=7)


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
@pytest.mark.long
@pytest.mark.budget(40)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, ranks: int, strategy: str) -> None:
    whole, parts = whole_and_resumed(tmp_path, *DROPOUT, ranks=ranks, strategy=strategy)
    assert parts.status == 0, parts.output
    assert equal(weights(parts), weights(whole))
    assert [step for step, _ in whole.metrics] == [5, 10, 13]
    assert parts.metrics == [*whole.metrics, *whole.metrics[1:]]
    for rank in range(ranks if ranks > 1 else 0):
        assert equal(parts.random(13, rank), whole.random(13, rank))
    if ranks > 1:
        assert not torch.equal(whole.random(13, 0)["torch"], whole.random(13, 1)["torch"])


@pytest.mark.long
@pytest.mark.budget(40)
def test_another_number_of_ranks_continues_the_same_training(tmp_path: Path) -> None:
    """Without random numbers in the model: two ranks, one and two again; a step adds up two micro-batches."""
    sets = ("batch.effective=4",)
    one = trained(tmp_path, "one", *sets, parts=((1, 13, "ddp"),))
    mixed = trained(tmp_path, "mixed", *sets, parts=((2, 4, "ddp"), (1, 8, "ddp"), (2, 13, "ddp")))
    assert equal(weights(mixed), weights(one))
    found = dict(mixed.metrics)
    for step, metrics in one.metrics:
        assert found[step] == pytest.approx(metrics, rel=1e-13)


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
    whole, parts = whole_and_resumed(tmp_path, *sets)
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


# What a step exchanges.

STEPS = 400


@pytest.mark.long
@pytest.mark.skipif(FLIGHT_RECORDER != "TORCH_FR_BUFFER_SIZE", reason="this torch counts those of NCCL only")
@pytest.mark.parametrize(("strategy", "of_step"), few([("ddp", 1), ("fsdp2", 11)], 1))
@pytest.mark.budget(30)
def test_steps_have_no_collective_beside_the_exchange_of_gradients(
    tmp_path: Path, strategy: str, of_step: int
) -> None:
    """FSDP2 gathers and reduces three layers and the rest: 4 + 3 gathers, 4 reductions."""
    sets = (
        "workload.name=ranks_workloads:counted", f"workload.options.folder={tmp_path}", "run.device=cpu",
        "run.threads=1", "batch.micro=4", "run.epochs=1000", f"run.max_steps={STEPS}", f"parallel.strategy={strategy}",
        "evaluate.every_epochs=0", "checkpoint.every_epochs=0", "log.profile_every_s=0",
    )  # fmt: skip
    done = train(tmp_path, "counted", *sets, ranks=2)
    assert done.status == 0, done.output
    for rank in range(2):
        begun = [json.loads(line) for line in (tmp_path / f"begun-{rank}.jsonl").read_text().splitlines()]
        assert len(begun) == STEPS
        in_steps = Counter[int]()
        for before, after in pairwise(begun):
            in_steps[sum(after.values()) - sum(before.values())] += 1
        assert in_steps.most_common(1)[0][0] == of_step
        # At first the agreements are 1, 2, 4, ... steps apart.
        assert STEPS - in_steps[of_step] < 30, in_steps
    records = (RunDir(done.folder), RunDir(done.folder / "ranks" / "1"))
    losses, others = (
        {event.step: event.loss for event in events_of(run) if isinstance(event, WindowEvent)}
        for run in records
    )
    # The mean over the ranks, whose own losses differ.
    assert losses == others and None not in losses.values()
    compared = [event for event in done.events if isinstance(event, RanksEvent)]
    # Of a window with very many steps, only some are compared.
    assert STEPS / 2 < sum(event.steps for event in compared) <= STEPS and compared[-1].step == STEPS
    for event in compared:
        outside = ("own", "wait", "cpu")
        phases = sum(each[2] for name, each in event.columns_us.items() if name not in outside)
        waits = (event.exchange_ns + event.skew_ns) / event.steps / 1e3
        assert waits > 0  # for the gradients of the other rank
        assert phases + waits == pytest.approx(event.wall_ns / event.steps / 1e3, rel=1e-3)
