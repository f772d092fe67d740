"""Ranks exchange gradients in each step, and nothing else: they agree about once a second."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from ranks_help import train
from tests.records import events_of
from tests.tiers import few

from ndd_engine.record.events import RanksEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.parallel.world import FLIGHT_RECORDER

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
        phases = sum(
            mean
            for name, (_, _, mean, _, _) in event.columns_us.items()
            if name not in ("own", "wait", "cpu")
        )
        waits = (event.exchange_ns + event.skew_ns) / event.steps / 1e3
        assert phases + waits == pytest.approx(event.wall_ns / event.steps / 1e3, rel=1e-3)
