"""The planted faults: each in three severities, on the workloads that can have it.

Sizes are chosen so that the high severity costs well over 10 % on a few CPU cores. The low one may cost so little that
`healthy` is a correct diagnosis as well, depending on the measured cost.
"""

from __future__ import annotations

from dataclasses import replace

from .cases import CORES, OWN, Case, three

# The five workloads without a fault: small models, data ready in memory.
NDD = ("batch.micro=1024",)
CHARTEXT = ("workload.size=mini",)
TINY_TEXT = ("workload.size=tiny",)
ANTISPOOF = ("workload.size=tiny", "workload.clips=80", "loader.cache=true")
FINETUNE = ("workload.size=tiny", "loader.cache=true", "batch.micro=4", "workload.document_chars=3000")
SUMMARISE = (
    "workload.size=tiny", "workload.pairs=800", "workload.summaries=0", "batch.micro=16", "batch.effective=16",
)  # fmt: skip

SHORT_PAIRS = (*SUMMARISE, "batch.sequence=48", "workload.target=16")
OWN_BATCH = ("batch.micro=256",)
SHORT_STEPS = ("batch.micro=64", "run.threads=1")

# Clips that change every epoch cannot be cached: there, a loader worker is no fault.
CHANGING = ("workload.size=tiny", "workload.augment=true", "batch.micro=8", "run.threads=1")


def _small_text(sequence: int, micro: int) -> tuple[str, ...]:
    """A model so small that fetching its segments one by one is noticeable."""
    return (
        "workload.size=tiny", "workload.layers=1", "workload.width=16", f"batch.sequence={sequence}",
        f"batch.micro={micro}",
    )  # fmt: skip


FAULTS: list[Case] = [
    # In the loader.
    *three(
        "on-the-fly",
        "documents are tokenised again for every batch (loader.cache off); longer documents are more severe",
        [("finetune", (*FINETUNE, f"workload.document_chars={chars}")) for chars in (400, 2_000, 16_000)],
        sets=["loader.cache=false"],
        cure=["loader.cache=true"],
    ),
    *three(
        "on-the-fly",
        "spectrograms are computed again for every batch (loader.cache off), with smaller and smaller models",
        [
            ("antispoof", (*ANTISPOOF, f"workload.channels={channels}", "workload.reduction=4"))
            for channels in ("[16, 16, 32, 64]", "[8, 8, 16, 32]", "[4, 4, 8, 16]")
        ],
        sets=["loader.cache=false"],
        cure=["loader.cache=true"],
    ),
    *three(
        "item-collate",
        "windows in memory are fetched item by item (loader.fetch), with smaller and smaller models",
        [
            ("eeg", (*NDD, "workload.hidden=[512, 256]")),
            ("chartext", _small_text(4, 1024)),
            ("eeg", (*NDD, "workload.hidden=[64, 32]")),
        ],
        sets=['loader.fetch="item"'],
        cure=['loader.fetch="auto"'],
    ),
    *three(
        "in-memory-workers",
        "1, 2 and 4 loader workers for data in memory",
        [
            ("chartext", (*_small_text(16, 256), "loader.workers=1")),
            ("eeg", (*NDD, "loader.workers=2")),
            ("eeg", (*NDD, "loader.workers=4")),
        ],
        cure=["loader.workers=0"],
    ),
    *three(
        "many-workers",
        "3, 6 and 12 loader workers per core, for crops that take longer to send than to compute",
        [(OWN, (f"loader.workers={count}",)) for count in (3 * CORES, 6 * CORES, 12 * CORES)],
        sets=["batch.micro=64"],
        cure=["loader.workers=0"],
        factory="crops",
        # So many workers take seconds to start, also in a trial.
        seconds=25.0,
        trial_s=60.0,
    ),
    *three(
        "worker-restart",
        "the loader worker restarts every epoch (loader.persistent off), with shorter and shorter epochs",
        [("antispoof", (*CHANGING, f"workload.clips={clips}")) for clips in (320, 120, 40)],
        sets=["loader.workers=1", "loader.persistent=false"],
        cure=["loader.persistent=true"],
        # Whole epochs are compared, and the first one takes longest.
        trial_s=90.0,
    ),
    *three(
        "slow-storage",
        "each item takes 2, 6 and 20 ms to arrive, as from a network disk (without using the CPU)",
        [(OWN, (f"workload.options.latency_ms={ms}",)) for ms in (2, 6, 20)],
        sets=["batch.micro=4"],
        cure=["workload.options.latency_ms=0"],
        factory="storage",
    ),
    # In the step, and around it.
    *three(
        "evaluation",
        "an evaluation every 100 steps, every 12 steps with summaries generated for ROUGE, and every 10 steps",
        [
            ("chartext", (*TINY_TEXT, "evaluate.batches=8", "evaluate.every_steps=100")),
            (
                "summarise",
                (
                    *SHORT_PAIRS,
                    "workload.summaries=2",
                    "workload.beam=2",
                    "evaluate.batches=1",
                    "evaluate.every_steps=12",
                ),
            ),
            ("chartext", (*TINY_TEXT, "evaluate.batches=8", "evaluate.every_steps=10")),
        ],
        cure=["evaluate.every_steps=0"],
        trial_s=60.0,  # runs have to contain evaluations
    ),
    *three(
        "checkpoint",
        "a checkpoint every 8 steps, every 3 steps and every step",
        [
            ("eeg", (*NDD, "workload.hidden=[256, 128]", "checkpoint.every_steps=8")),
            ("finetune", (*FINETUNE, "checkpoint.every_steps=3")),
            ("finetune", (*FINETUNE, "checkpoint.every_steps=1")),
        ],
        cure=["checkpoint.every_steps=0"],
    ),
    *three(
        "optimizer",
        "the optimizer loops over parameters (optimizer.implementation): 20, 100 and 800 small ones",
        [(OWN, (f"workload.options.count={count}",)) for count in (20, 100, 800)],
        sets=[*OWN_BATCH, "optimizer.implementation=loop"],
        cure=["optimizer.implementation=auto"],
        factory="scales",
    ),
    *three(
        "small-micro",
        "the same optimizer step in micro-batches of 4, 2 and 1",
        [
            ("summarise", (*SUMMARISE, "batch.micro=4")),
            ("chartext", (*TINY_TEXT, "batch.effective=16", "batch.micro=2")),
            ("summarise", (*SUMMARISE, "batch.micro=1")),
        ],
        cure=["batch.micro=16"],
        seconds=10.0,
    ),
    *three(
        "stepwise",
        "the decoder projects states and vocabulary in each step (workload.decoder), for longer and longer sources",
        [
            ("summarise", (*SUMMARISE, f"batch.sequence={source}", f"workload.target={target}"))
            for source, target in ((24, 6), (96, 32), (192, 48))
        ],
        sets=['workload.decoder="stepwise"'],
        cure=['workload.decoder="hoisted"'],
        seconds=10.0,
    ),
    *three(
        "few-threads",
        "one thread on several cores (run.threads), for larger and larger models",
        [
            ("chartext", ("workload.size=mini",)),
            ("antispoof", ANTISPOOF),
            ("chartext", ("workload.size=small", "batch.micro=32")),
        ],
        sets=["run.threads=1"],
        cure=[f"run.threads={CORES}"],
    ),
    *three(
        "oversubscribed",
        "2, 4 and 8 threads per core (run.threads)",
        [
            ("chartext", (*CHARTEXT, f"run.threads={threads}"))
            for threads in (2 * CORES, 4 * CORES, 8 * CORES)
        ],
        cure=[f"run.threads={CORES}"],
    ),
    *three(
        "gc",
        "every step creates containers and drops old ones, among 0.3, 1 and 3 million live ones",
        [
            (OWN, (f"workload.options.held={held}", f"workload.options.each={each}"))
            for held, each in ((300_000, 5_000), (1_000_000, 15_000), (3_000_000, 50_000))
        ],
        sets=OWN_BATCH,
        cure=["workload.options.each=0"],
        factory="garbage",
        trial_s=200.0,  # runs cover whole intervals between collections
    ),
    *three(
        "neighbour-cores",
        "other processes compute on the same cores: one fewer than the cores, as many, and one more",
        [("chartext", CHARTEXT), ("eeg", NDD), ("antispoof", ANTISPOOF)],
        busy=[max(CORES - 1, 1), CORES, CORES + 1],
        trial_s=60.0,
    ),
    *three(
        "leak",
        "every step keeps 1, 4 and 16 MB of outputs",
        [(OWN, (f"workload.options.keep_mb={mb}",)) for mb in (1, 4, 16)],
        cure=["workload.options.keep_mb=0"],
        sets=OWN_BATCH,
        factory="keeping",
        seconds=25.0,  # until what holds it is known
        proved=False,
        place="planted_models.py",
    ),
    *three(
        "worker-memory",
        "a loader worker keeps 8, 16 and 32 KB of each item",
        [(OWN, (f"workload.options.keep_kb={size}",)) for size in (8, 16, 32)],
        sets=[*SHORT_STEPS, "loader.workers=1", "loader.persistent=true", "workload.options.most=0"],
        cure=["workload.options.most=100"],
        factory="hoarding",
        seconds=25.0,
        proved=False,
    ),
    # What ends a run, or keeps it from going on.
    *three(
        "not-finite",
        "from step 100 on, a column of the input, the loss or the gradient is not finite",
        [(OWN, (f"workload.options.what={what}",)) for what in (1, 2, 3)],
        sets=[*SHORT_STEPS, "workload.options.first=100"],
        cure=["workload.options.what=0"],
        factory="damaged",
        proved=False,
        fails=True,
    ),
    *three(
        "not-finite",
        "a gradient scaler skips one of 16 updates, one of 4, and all of them, since a gradient is infinite",
        [(OWN, (f"workload.options.every={every}",)) for every in (16, 4, 1)],
        # On a CPU, matrix products in fp16 are slow.
        sets=[
            "batch.micro=8",
            "run.threads=1",
            "precision.amp=fp16",
            "workload.options.what=3",
            "workload.options.first=10",
        ],
        cure=["workload.options.what=0"],
        factory="damaged",
        proved=False,
        seconds=14.0,
        place="updates skipped",
        variant="skipped",
    ),
    *three(
        "hang",
        "a loader worker reads a FIFO, or takes a lock twice; the main process waits for a dead one",
        [
            (OWN, ("workload.options.kind=1", "loader.workers=1")),
            (OWN, ("workload.options.kind=2", "loader.workers=1")),
            (OWN, ("workload.options.kind=3", "workload.options.after=100")),
        ],
        sets=SHORT_STEPS,
        cure=["workload.options.kind=0"],
        factory="waiting",
        seconds=16.0,
        proved=False,
        place="planted_models.py",
        fails=True,
    ),
    *three(
        "died",
        "a loader worker is killed, crashes, or is ended by SIGTERM",
        [(OWN, (f"workload.options.kind={-number}",)) for number in (9, 11, 15)],
        sets=[*SHORT_STEPS, "loader.workers=1"],
        cure=["workload.options.kind=0"],
        factory="waiting",
        proved=False,
        fails=True,
    ),
    *three(
        "open-files",
        "a file is opened in every 4th step, every second one and every step, and stays open",
        [(OWN, (f"workload.options.every={every}",)) for every in (4, 2, 1)],
        sets=SHORT_STEPS,
        cure=["workload.options.every=0"],
        factory="opening",
        proved=False,
        fails=True,
        place="values.txt",
    ),
    *three(
        "short-epochs",
        "epochs of 8, 4 and 2 steps, whose first batch a persistent worker makes while the model waits",
        [(OWN, (f"workload.options.items={4 * steps}",)) for steps in (8, 4, 2)],
        sets=[
            "batch.micro=4",
            "run.threads=1",
            "workload.options.latency_ms=20",
            "workload.options.rows=256",
            "loader.workers=1",
        ],
        cure=["workload.options.items=4096"],
        factory="storage",
        proved=False,
    ),
    *three(
        "logging",
        "every step is recorded separately (log.window_s = 0), with shorter and shorter steps",
        [
            (OWN, (f"workload.options.width={width}", f"batch.micro={micro}"))
            for width, micro in ((256, 64), (64, 16), (16, 4))
        ],
        sets=["log.window_s=0"],
        cure=["log.window_s=1.0"],
        factory="plain",
    ),
    *three(
        "user-code",
        "a Python loop in forward computes a constant",
        [(OWN, (f"workload.options.rounds={rounds}",)) for rounds in (20_000, 60_000, 300_000)],
        sets=OWN_BATCH,
        cure=["workload.options.rounds=0"],
        factory="loop",
    ),
    *three(
        "slowing",
        "each step sorts all values that earlier steps have kept, 400 and 1,600 more each time, or registers 8 hooks",
        [(OWN, (f"workload.options.{option}",)) for option in ("more=400", "hooks=8", "more=1600")],
        sets=OWN_BATCH,
        cure=["workload.options.more=0", "workload.options.hooks=0"],
        factory="growing",
        seconds=14.0,
        proved=False,
    ),
    *three(
        "near-limit",
        "a tensor leaves 3, 2 and 1.5 % of the memory of a control group of 3 GiB",
        [(OWN, (f"workload.options.free={part}",)) for part in (0.03, 0.02, 0.015)],
        sets=OWN_BATCH,
        cure=["workload.options.free=0.5"],
        factory="occupying",
        proved=False,
        variant="host",
        memory_bytes=3 << 30,
    ),
    *three(
        "dense-embedding",
        "a step reads 256 rows of a table of 5,000, 20,000 and 80,000",
        [(OWN, (f"workload.options.rows={rows}",)) for rows in (5_000, 20_000, 80_000)],
        sets=OWN_BATCH,
        cure=["workload.options.rows=16"],
        factory="table",
        proved=False,
        place="table",
    ),
    *three(
        "anomaly",
        "autograd looks for anomalies in each step, with smaller and smaller models",
        [(OWN, (f"workload.options.width={width}",)) for width in (512, 256, 64)],
        sets=[*SHORT_STEPS, "workload.options.until=1000000000"],
        cure=["workload.options.until=0"],
        factory="debugging",
        proved=False,
    ),
    *three(
        "compile-cost",
        "a run of 30, 100 and 300 steps is compiled first (speed.compile)",
        [("chartext", (*TINY_TEXT, f"run.max_steps={steps}")) for steps in (300, 100, 30)],
        sets=["speed.compile=default"],
        cure=["speed.compile=off"],
        to_end=True,
        proved=False,
    ),
    *three(
        "recompile",
        "batches of 2, 4 and 7 different lengths, each compiled separately (speed.compile_dynamic off)",
        [(OWN, (f"workload.options.kinds={kinds}",)) for kinds in (2, 4, 7)],
        sets=["speed.compile=default", "speed.compile_dynamic=false", "batch.micro=2"],
        cure=["workload.options.kinds=1"],
        factory="lengths",
        seconds=20.0,
        proved=False,
    ),
]

# The cases below have not run on a GPU yet; `make gpu` runs them, and docs/verified.md says when they have.
# Idle time on a GPU is attributed to causes by profiler captures.
ON_GPU = ("run.device=cuda", "log.kernels_every=40")
GPU_CASES: list[Case] = [
    replace(case, sets=(*case.sets, *ON_GPU))
    for case in (
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
        *three(
            "near-limit",
            "a tensor leaves 3, 2 and 1 % of the GPU's memory free",
            [(OWN, (f"workload.options.free={part}",)) for part in (0.03, 0.02, 0.01)],
            sets=OWN_BATCH,
            cure=["workload.options.free=0.5"],
            factory="occupying",
            proved=False,
        ),
    )
]
