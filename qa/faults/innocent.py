"""Runs that only look as if they had a fault, healthy runs, and all cases of the suite."""

from __future__ import annotations

from typing import Any

from .cases import CORES, OWN, Case
from .faulty import ANTISPOOF, CHARTEXT, FAULTS, FINETUNE, GPU_CASES, NDD, SHORT_STEPS, SUMMARISE

# Causes in the loader.
LOADERS = ("few-workers", "data-wait", "item-collate", "on-the-fly", "slow-storage")


def _innocent(
    name: str, workload: str, looks: str, sets: tuple[str, ...], suspects: tuple[str, ...], **more: Any
) -> Case:
    return Case("innocent", name, "", workload, looks, sets, suspects=suspects, **more)


INNOCENTS: list[Case] = [
    _innocent(
        "read-every-step", "eeg", "the loss is read back every step (log.every_steps = 1)",
        (*NDD, "log.every_steps=1"), ("logging", "sync"),
    ),
    _innocent(
        "loop-optimizer", "chartext", "the optimizer loops over parameters, in a step that takes far longer",
        ("workload.size=small", "batch.micro=32", "optimizer.implementation=loop"), ("optimizer",),
    ),
    _innocent(
        "no-workers", "chartext", "the loader has no workers, and needs none", CHARTEXT,
        (*LOADERS, "in-memory-workers"),
    ),
    _innocent(
        "short-lived-workers", OWN, "the loader worker restarts every epoch, and epochs are long",
        ("workload.options.latency_ms=1", "batch.micro=4", "loader.workers=1", "loader.persistent=false"),
        ("worker-restart", "many-workers", "few-workers", "in-memory-workers"), factory="storage",
    ),
    _innocent(
        "workers-beyond-cores", "antispoof", "two loader workers per core, for clips that change every epoch",
        ("workload.size=small", "workload.augment=true", "batch.micro=8", f"loader.workers={2 * CORES}"),
        ("many-workers", "few-workers", "oversubscribed"), seconds=15.0,
    ),
    _innocent(
        "evaluations", "finetune", "an evaluation every epoch, which takes almost no time",
        (*FINETUNE, "workload.examples=70", "evaluate.every_epochs=1", "evaluate.batches=1"), ("evaluation",),
    ),
    _innocent(
        "checkpoints", "chartext", "a checkpoint every 100 steps, which takes almost no time",
        (*CHARTEXT, "checkpoint.every_steps=100"), ("checkpoint",),
    ),
    _innocent(
        "clipping", "summarise", "gradients are clipped every step", (*SUMMARISE, "clip.max_norm=0.5"),
        ("clip", "sync"),
    ),
    _innocent(
        "sleeping-neighbours", "eeg", "three other processes, all asleep", NDD,
        ("neighbour-cores", "oversubscribed", "quota"), asleep=3,
    ),
    _innocent(
        "roomy-limit", OWN, "a tensor leaves 20 % of the memory of a control group of 3 GiB",
        ("batch.micro=256", "run.threads=1", "workload.options.free=0.2"), ("near-limit", "leak"), factory="occupying",
        memory_bytes=3 << 30,
    ),
    _innocent(
        "bounded-cache", OWN, "memory grows by 16 MB per step until a cache of 320 MB is full",
        ("batch.micro=256", "workload.options.keep_mb=16", "workload.options.limit_mb=320"), ("leak",),
        factory="keeping",
    ),
    _innocent(
        "newest-in-worker", OWN, "a loader worker keeps the newest 100 items",
        (*SHORT_STEPS, "loader.workers=1", "loader.persistent=true"), ("worker-memory",), factory="hoarding",
        seconds=14.0,
    ),
    _innocent(
        "small-table", OWN, "a step reads all rows of a table of 64", ("batch.micro=256", "workload.options.rows=64"),
        ("dense-embedding",), factory="table",
    ),
    _innocent(
        "debugged", OWN, "autograd looks for anomalies in the first 5 steps",
        (*SHORT_STEPS, "workload.options.until=5"), ("anomaly",), factory="debugging",
    ),
    _innocent(
        "bounded-window", OWN, "each step sorts the newest 20,000 values, which it has after 50 steps",
        ("batch.micro=256", "workload.options.more=400", "workload.options.most=20000"), ("slowing",),
        factory="growing", seconds=14.0,
    ),
    _innocent(
        "masks", OWN, "scores of -inf, which a softmax turns into zeros",
        (*SHORT_STEPS, "workload.options.what=4"), ("not-finite",), factory="damaged",
    ),
    _innocent(
        "scaler", OWN, "fp16 with a gradient scaler, which looks for its scale",
        (*SHORT_STEPS, "precision.amp=fp16"), ("not-finite", "amp"), factory="damaged",
    ),
    _innocent(
        "waiting-worker", OWN, "a loader worker, whose items nobody waits for",
        (*SHORT_STEPS, "loader.workers=1"), ("hang", "died"), factory="waiting",
    ),
    _innocent(
        "closed-files", OWN, "each step opens a file and closes it",
        (*SHORT_STEPS, "workload.options.every=1", "workload.options.close=1"), ("open-files",),
        factory="opening",
    ),
    _innocent(
        "quick-epochs", OWN, "epochs of 3 steps, whose first batch takes almost no time",
        ("batch.micro=4", "run.threads=1", "workload.options.items=12"), ("short-epochs", "worker-restart"),
        factory="storage",
    ),
    _innocent(
        "cheap-encoding", "finetune", "items are encoded again for every batch, which takes almost no time",
        (*FINETUNE, "workload.size=medium", "loader.cache=false", "workload.document_chars=128"),
        ("on-the-fly", "few-workers", "data-wait"),
    ),
    _innocent(
        "threads-as-cores", "antispoof", "run.threads is set to the number of cores",
        (*ANTISPOOF, f"run.threads={CORES}"),
        ("oversubscribed", "few-threads"),
    ),
    _innocent(
        "small-but-full", "chartext", "micro-batches of 8, each of which keeps the cores busy",
        ("workload.size=small", "batch.micro=8", "batch.effective=16", "batch.sequence=128"),
        ("small-micro", "user-code"),
    ),
]  # fmt: skip

HEALTHY: list[Case] = [
    Case("healthy", workload, "", workload, "no planted fault", sets)
    for workload, sets in (
        ("eeg", NDD),
        ("chartext", CHARTEXT),
        ("antispoof", ANTISPOOF),
        ("finetune", FINETUNE),
        ("summarise", SUMMARISE),
    )
]


def all_cases(gpu: bool = False) -> list[Case]:
    """Every case, in the order in which they run. gpu: also those that need a CUDA GPU."""
    return [*HEALTHY, *INNOCENTS, *FAULTS, *(GPU_CASES if gpu else ())]
