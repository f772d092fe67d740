"""The faults that are planted into observed scripts, each with two levels and its innocent twin, and innocent scripts.

The twin of a fault is level 0 of the same script: it does what looks like the fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ndd_engine.diagnose import ENDINGS

# Of training, until what holds growing memory is known.
GROWS_S = 25.0
HANGS, SLOWING, FRAMEWORKS, WORK = "hangs.py", "slowing.py", "frameworks.py", "planted_work.py"
# Causes that accuse an innocent script in any place, since they cost no time.
HAZARDS = frozenset({
    *ENDINGS, "leak", "worker-memory", "evaluation-memory", "checkpoint-memory", "near-limit", "repeated-items",
    "retain-graph", "anomaly", "slowing", "piling-up",
})  # fmt: skip
INNOCENTS = (
    "dense", "convolutions", "transformer", "recurrent", "accumulates", "worker", "generator", "evaluates", "scales",
    "stream", "one-batch", "logs", "tokens",
)  # fmt: skip
# Innocent models.
WORK_INNOCENTS = ("layers", "chunks", "regularized", "unrolled", "words", "shared")
# Innocent kinds of the script that becomes slower.
NOT_SLOWING = ("larger-batches", "evaluates")


@dataclass(frozen=True)
class Fault:
    """causes: the right ones. levels: low and high. function: that a finding must name, "" if there is none.

    ranks: of the script, under torchrun if there are several. script: in which it is planted; hangs.py may fail.
    package: that the script needs. busy: whether it is planted beside the script, as so many other processes. seconds:
    of training. quota: whether level 4 runs in a control group with a quarter of a core, and the twin with 64 cores.
    """

    name: str
    causes: tuple[str, ...]
    levels: tuple[float, float]
    function: str = ""
    ranks: int = 1
    script: str = "planted.py"
    package: str = ""
    busy: bool = False
    seconds: float = 14.0
    quota: bool = False


def _at(fault: str) -> str:
    """The line of a fault of planted_work.py, as findings have it: "planted_work.py:49"."""
    lines = (Path(__file__).parents[1] / "scripts" / WORK).read_text(encoding="utf-8").splitlines()
    return next(
        f"{WORK}:{number}" for number, line in enumerate(lines, 1) if line.endswith(f"# fault {fault}")
    )


FAULTS = (
    Fault("slow-item", ("data-wait",), (2, 10), "work, called by Items.__getitem__"),
    Fault("slow-storage", ("data-wait",), (2, 10), "__getitem__"),
    Fault("slow-collate", ("data-wait",), (2, 10), "work, called by collate"),
    Fault("slow-batch", ("data-wait", "slow-function"), (2, 10), "work, called by get_batch"),
    Fault("slow-generator", ("slow-function",), (2, 10), "work, called by tokenize"),
    Fault("slow-function", ("slow-function",), (2, 10), "work, called by schedule"),
    Fault("log-norms", ("user-code", "slow-function"), (2, 10), "log_norms"),
    Fault("many-workers", ("many-workers", "data-wait"), (8, 16)),
    Fault("worker-restart", ("worker-restart",), (2, 10)),
    Fault("iterator-restart", ("iterator-restart",), (2, 10), "planted.py"),
    Fault("short-epochs", ("short-epochs",), (2, 10)),
    Fault("repeated-items", ("repeated-items",), (2, 4), "Stream.__iter__"),
    Fault("leak", ("leak",), (0.5, 1), "planted.py", seconds=GROWS_S),
    Fault("not-finite", ("not-finite",), (1, 4), "input x"),
    Fault("leaves-out", ("not-finite",), (2, 8), "input x"),
    Fault("python-objects", ("worker-memory",), (4, 10)),
    Fault("worker-keeps", ("worker-memory",), (0.5, 2), seconds=GROWS_S),
    Fault("evaluation-keeps", ("evaluation-memory", "evaluation"), (10, 40)),
    Fault("checkpoint-copies", ("checkpoint-memory", "checkpoint"), (20, 60)),
    Fault("recompile", ("recompile",), (7, 1000), "weighed"),
    Fault("lengths", ("recompile",), (7, 1000), "padded"),
    Fault("compile-cost", ("compile-cost",), (16, 48), seconds=6.0),
    Fault("dense-embedding", ("dense-embedding",), (2, 10), "WithIds.table"),
    Fault("denormals", ("denormals",), (2, 10)),
    Fault("retain-graph", ("retain-graph",), (1, 4), "planted.py"),
    Fault("optimizer-loop", ("optimizer",), (2, 8)),
    Fault("clip", ("clip",), (2, 8)),
    Fault("checkpoint", ("checkpoint",), (2, 10)),
    Fault("evaluate", ("evaluation",), (2, 10)),
    Fault("evaluate-joins", ("evaluation",), (4, 16), "in evaluate"),
    Fault("logging", ("logging",), (2, 10), "Board.add_scalar"),
    Fault("threads", ("oversubscribed",), (4, 16)),
    Fault("quota", ("quota",), (4, 10), quota=True),
    Fault("neighbours", ("neighbour-cores",), (1, 3), busy=True),
    Fault("garbage", ("gc",), (2, 10)),
    Fault("collects", ("gc",), (4, 16), "planted.py"),
    Fault("anomaly", ("anomaly",), (6, 24)),
    Fault("straggler", ("straggler",), (5, 20), "augment", ranks=2),
    Fault("skew", ("skew",), (4, 16), ranks=2),
    Fault("exchange", ("exchange",), (2, 8), ranks=2),
    *(
        Fault(name, ("slowing",), levels, function, script=SLOWING)
        for name, levels, function in (
            ("graph", (1, 3), "graphs of at least"),
            ("hooks", (10, 40), "hooks of block.2"),
            ("sorts", (10, 40), "median_loss"),
            ("concatenates", (20, 60), "Net.recall"),
            ("rewrites", (10, 40), "save_history"),
            ("handlers", (10, 40), "handlers of the logger train"),
            ("parameters", (20, 60), "parameters in SGD"),
            ("state", (10, 40), "state"),
        )
    ),
    *(
        Fault(fault, (cause,), (1, 2), _at(fault), script=WORK)
        for fault, cause in (
            ("step-cell", "sequential-loop"),
            ("step-raw", "sequential-loop"),
            ("step-attends", "sequential-loop"),
            ("vocabulary", "large-vocabulary"),
            ("tied", "large-vocabulary"),
            ("classes", "large-vocabulary"),
            ("small-operations", "small-operations"),
            ("attention-by-hand", "unfused-attention"),
            ("attention-weights", "unfused-attention"),
            ("attention-dropout", "unfused-attention"),
            ("twice", "computed-twice"),
            ("table", "dense-embedding"),
        )
    ),
    Fault("frozen", ("unused-gradients",), (1, 2), "features", script=WORK),
    Fault("piles-up", ("piling-up", "slowing"), (1, 4), "hooks of block.1", script=SLOWING),
    Fault("fork-threads", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("fork-lock", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("full-queue", ("hang",), (1, 2), "aside", script=HANGS),
    Fault("dead-process", ("hang",), (1, 2), "aside", script=HANGS),
    Fault("dead-thread", ("hang",), (1, 2), "aside", script=HANGS),
    Fault("storage", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("collective", ("hang",), (1, 2), "main", ranks=2, script=HANGS),
    Fault("killed", ("died",), (20, 60), script=HANGS),
    Fault("crashed", ("died",), (20, 60), script=HANGS),
    Fault("exits", ("died",), (20, 60), script=HANGS),
    Fault("kept-tensors", ("open-files",), (1, 2), "hangs.py", script=HANGS),
    Fault("kept-files", ("open-files",), (1, 10), "hangs.py", script=HANGS),
    *(
        Fault(
            f"{name}-{fault}",
            causes,
            levels,
            function,
            script=FRAMEWORKS,
            package=package,
            seconds=GROWS_S if fault == "leak" else 14.0,
        )
        for name, package in (("lightning", "lightning"), ("trainer", "transformers"))
        for fault, causes, levels, function in (
            ("data", ("data-wait",), (2, 10), "work, called by Items.__getitem__"),
            ("leak", ("leak",), (0.5, 2), "frameworks.py"),
            ("not-finite", ("not-finite",), (1, 4), "NaN in column 3"),
            ("evaluation", ("evaluation",), (2, 10), "in work"),
            ("logging", ("logging",), (1, 4), ""),
            ("callback", ("slow-function",), (2, 10), "work, called by"),
            ("restart", ("worker-restart",), (2, 8), ""),
        )
    ),
)
# Causes that a script can have, and that nothing plants here.
UNPLANTED = {
    "near-limit": "is no finding of a run that has ended; `make faults` plants it in a control group",
    "out-of-memory": "ends the script",
    **dict.fromkeys(
        (
            "transfer", "device-copies", "launch-bound", "sync", "collectives", "queue-gaps", "gpu-idle", "throttling",
            "thrash", "cudnn-benchmark", "data-parallel", "fragmentation", "tf32", "amp",
        ),
        "needs a GPU: `make gpu`",
    ),
}  # fmt: skip
