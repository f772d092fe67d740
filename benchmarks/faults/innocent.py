"""Runs that look guilty and are not, and runs in which nothing is wrong at all."""

from __future__ import annotations

from .cases import CORES, OWN, Case
from .faulty import ANTISPOOF, CHARTEXT, FINETUNE, NDD, SUMMARISE

# Whatever says that the loader is to blame.
LOADERS = ("few-workers", "data-wait", "item-collate", "on-the-fly", "slow-storage")


def _innocent(
    name: str, workload: str, looks: str, sets: tuple[str, ...], suspects: tuple[str, ...], *,
    factory: str = "", asleep: int = 0, seconds: float = 8.0,
) -> Case:  # fmt: skip
    return Case(
        "innocent", name, "", workload, looks, sets, (), factory, suspects, asleep=asleep, seconds=seconds
    )


INNOCENTS: list[Case] = [
    _innocent(
        "read-every-step", "ndd", "the loss is read back every step (log.every_steps = 1)",
        (*NDD, "log.every_steps=1"), ("logging", "sync"),
    ),
    _innocent(
        "loop-optimizer", "chartext", "the update goes parameter by parameter, in a step that takes far longer",
        ("workload.size=small", "batch.micro=32", "optimizer.implementation=loop"), ("optimizer",),
    ),
    _innocent(
        "no-workers", "chartext", "the loader has no processes, and needs none", CHARTEXT,
        (*LOADERS, "in-memory-workers"),
    ),
    _innocent(
        "short-lived-workers", OWN, "the loader process ends with every epoch, and epochs are long",
        ("workload.options.latency_ms=1", "batch.micro=4", "loader.workers=1", "loader.persistent=false"),
        ("worker-restart", "many-workers", "few-workers", "in-memory-workers"), factory="storage",
    ),
    _innocent(
        "workers-beyond-cores", "antispoof", "two loader processes a core, for clips that change every epoch",
        ("workload.size=small", "workload.augment=true", "batch.micro=8", f"loader.workers={2 * CORES}"),
        ("many-workers", "few-workers", "oversubscribed"), seconds=15.0,
    ),
    _innocent(
        "evaluations", "finetune", "an evaluation every epoch, which is over at once",
        (*FINETUNE, "workload.examples=70", "evaluate.every_epochs=1", "evaluate.batches=1"), ("evaluation",),
    ),
    _innocent(
        "checkpoints", "chartext", "a checkpoint every 100 steps, which is written at once",
        (*CHARTEXT, "checkpoint.every_steps=100"), ("checkpoint",),
    ),
    _innocent(
        "clipping", "summarise", "gradients are clipped every step", (*SUMMARISE, "clip.max_norm=0.5"),
        ("clip", "sync"),
    ),
    _innocent(
        "sleeping-neighbours", "ndd", "three other processes that sleep", NDD,
        ("neighbour-cores", "oversubscribed", "quota"), asleep=3,
    ),
    _innocent(
        "bounded-cache", OWN, "memory grows by 16 MB a step until a cache of 320 MB is full",
        ("batch.micro=256", "workload.options.keep_mb=16", "workload.options.limit_mb=320"), ("leak",),
        factory="keeping",
    ),
    _innocent(
        "cheap-encoding", "finetune", "items are encoded anew each time, which takes next to nothing",
        (*FINETUNE, "workload.size=medium", "loader.cache=false", "workload.document_chars=128"),
        ("on-the-fly", "few-workers", "data-wait"),
    ),
    _innocent(
        "threads-as-cores", "antispoof", "run.threads is set, to the number of cores",
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
    Case("healthy", workload, "", workload, "nothing is planted", sets)
    for workload, sets in (
        ("ndd", NDD),
        ("chartext", CHARTEXT),
        ("antispoof", ANTISPOOF),
        ("finetune", FINETUNE),
        ("summarise", SUMMARISE),
    )
]
