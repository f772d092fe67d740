"""The phases of a step, by index."""

from __future__ import annotations

from .mapped import COLUMNS

PHASES = (
    "data_wait", "to_device", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "log", "evaluate",
    "checkpoint", "other",
)  # fmt: skip
(
    DATA_WAIT, TO_DEVICE, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, LOG, EVALUATE, CHECKPOINT, OTHER,
) = range(12)  # fmt: skip

# A range of torch's profiler that begins at a time which is known on our clock.
ANCHOR = "ndd: anchor"
# Key of what is added to a trace.
NOTED = "ndd"
# Added to a phase while it waits for other ranks.
WAITING = len(PHASES)
# By index: the phases, and their waiting for other ranks.
NAMES = (*PHASES, *(f"{name}/exchange" for name in PHASES))
assert len(NAMES) == COLUMNS
# The part of waiting for data that was for the first batch of a pass, in later passes: workers may start anew for it.
FIRST_BATCH = "data_wait/first_batch"
