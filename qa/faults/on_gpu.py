"""The planted faults that need a CUDA GPU: in three severities each, like the others.

They have not run on a GPU yet; `make gpu` runs them, and docs/verified.md says when they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cases import OWN, Case, three
from .faulty import OWN_BATCH, TINY_TEXT

# Idle time on a GPU is attributed to causes by profiler captures.
ON_GPU = ("run.device=cuda", "log.kernels_every=40")


def _on_gpu(cases: Sequence[Case]) -> list[Case]:
    return [replace(case, sets=(*case.sets, *ON_GPU)) for case in cases]


GPU_CASES: list[Case] = _on_gpu(
    [
        *three(
            "launch-bound",
            "kernels that are shorter than their launch: smaller and smaller micro-batches of a tiny model",
            [("chartext", (*TINY_TEXT, f"batch.micro={micro}")) for micro in (128, 32, 4)],
            sets=["precision.amp=off"],
            cure=["speed.cuda_graph=true"],
        ),
        *three(
            "sync",
            "the step reads 4 and 24 values from the GPU, and also empties the allocator's cache",
            [
                (OWN, ("workload.options.reads=4",)),
                (OWN, ("workload.options.reads=24",)),
                (OWN, ("workload.options.reads=24", "workload.options.empty=1")),
            ],
            sets=OWN_BATCH,
            cure=["workload.options.reads=0", "workload.options.empty=0"],
            factory="reading",
        ),
        *three(
            "transfer",
            "batches of 4, 32 and 128 MB in pageable memory, with little to compute",
            [(OWN, (f"workload.options.megabytes={size}",)) for size in (4, 32, 128)],
            sets=OWN_BATCH,
            cure=["workload.options.megabytes=1"],
            factory="heavy",
        ),
        *three(
            "amp",
            "mixed precision is off (precision.amp), for larger and larger models",
            [
                ("chartext", (f"workload.size={size}", "batch.micro=32"))
                for size in ("small", "medium", "guide")
            ],
            sets=["precision.amp=off"],
            cure=["precision.amp=auto"],
        ),
    ]
)
