"""Ranks exchange gradients in each step, and nothing else: votes and figures of windows are about one a second."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from ranks_help import train

from ndd_engine.train.parallel.world import FLIGHT_RECORDER

STEPS = 400


@pytest.mark.long
@pytest.mark.skipif(FLIGHT_RECORDER != "TORCH_FR_BUFFER_SIZE", reason="this torch counts those of NCCL only")
@pytest.mark.parametrize(("strategy", "of_step"), [("ddp", 1), ("fsdp2", 11)])
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
        # At first the votes are 1, 2, 4, ... steps apart. Each lets rank 0 gather the figures of a window.
        assert STEPS - in_steps[of_step] < 30, in_steps
