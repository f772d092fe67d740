"""`python capped.py BYTES`: with that memory limit, train the largest batch predicted to fit, then larger ones
until memory runs out. Prints both. A separate process, because the limit cannot be removed."""

from __future__ import annotations

import sys

import torch

from ndd_engine.config import read
from ndd_engine.predict.allocator import Rules
from ndd_engine.predict.probing import Prober
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.registry import prepare

STEP = 8


def prober(amp: str) -> Prober:
    """Configuration of the character model on the first GPU."""
    sets = ["run.device=cuda", "workload.size=small", f"precision.amp={amp}"]
    config = read(None, sets, "chartext").resolve()
    seed(config.run.seed)
    return Prober(config, prepare(config, lambda _: None), torch.device("cuda", 0), lambda _: None)


def main(cap: int) -> None:
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    probe = prober("bf16")
    family, rules = probe.family(), Rules.of_environment()
    proposed = STEP
    while family.trace(proposed + STEP).on_gpu(rules).peak_reserved <= cap:
        proposed += STEP
    probe.trace(proposed)  # raises where the prediction was too low
    largest = proposed
    try:
        while largest < 2 * proposed:
            probe.trace(largest + STEP)
            largest += STEP
    except torch.OutOfMemoryError:
        pass
    print(proposed, largest)


if __name__ == "__main__":
    main(int(sys.argv[1]))
