"""The causes that a finding can have."""

from __future__ import annotations

from ndd_engine.record.events import Change, Confidence, Evidence, Finding

__all__ = ["CAUSES", "ENDINGS", "Change", "Confidence", "Evidence", "Finding"]

# What takes this part of a phase, a function, a growth or a skew is its cause.
MOST_OF = 0.5
# Every cause, with its label on a screen.
CAUSES: dict[str, str] = {
    "too-short": "too short to judge",
    "healthy": "no bottleneck found",
    # Data loading.
    "item-collate": "batches collated item by item",
    "on-the-fly": "items encoded on the fly",
    "few-workers": "too few loader workers",
    "many-workers": "too many loader workers",
    "in-memory-workers": "loader workers for in-memory data",
    "worker-restart": "workers restarted every epoch",
    "iterator-restart": "a new iterator for each batch",
    "short-epochs": "short epochs",
    "slow-storage": "slow storage",
    "data-wait": "waiting for data",
    # CPU.
    "oversubscribed": "more threads than cores",
    "few-threads": "fewer threads than cores",
    "many-threads": "threads that slow each other down",
    "neighbour-cores": "another process on the CPU cores",
    "quota": "throttled by the CPU quota",
    "gc": "garbage collection pauses",
    # GPU.
    "transfer": "exposed copies",
    "device-copies": "copies and fills within the GPU",
    "launch-bound": "kernel launch overhead",
    "sync": "host-device synchronisation",
    "collectives": "communication between GPUs",
    "queue-gaps": "gaps between queued kernels",
    "gpu-idle": "GPU idle for another reason",
    "gpu-unseen": "accelerator not recorded",
    "neighbour-gpu": "another process on the GPU",
    "throttling": "GPU throttling",
    "thrash": "allocator retries",
    # Several ranks.
    "straggler": "straggler",
    "exchange": "exposed communication",
    "skew": "ranks of uneven speed",
    # Training step.
    "small-micro": "micro-batches too small",
    "stepwise": "repeated work in the decoder loop",
    "sequential-loop": "a loop of sequential steps",
    "large-vocabulary": "projection onto many outputs",
    "small-operations": "many small operators",
    "unfused-attention": "attention without a fused kernel",
    "computed-twice": "a module computed twice",
    "unused-gradients": "gradients that nothing uses",
    "optimizer": "optimizer step",
    "dense-embedding": "gradients of unused rows",
    "denormals": "slow denormal numbers",
    "clip": "gradient clipping",
    "evaluation": "frequent evaluations",
    "checkpoint": "frequent checkpoints",
    "logging": "frequent logging",
    "user-code": "host code between operators",
    "slow-function": "a slow function",
    "slowing": "slower over time",
    "data-parallel": "DataParallel instead of one process per GPU",
    "anomaly": "anomaly detection is on",
    "recompile": "repeated recompilation",
    "compile-cost": "compile time exceeds the gain",
    "deterministic": "deterministic algorithms",
    "tf32": "TF32 is off",
    "amp": "mixed precision is off",
    "cudnn-benchmark": "cuDNN algorithms not benchmarked",
    "cudnn-shapes": "cuDNN benchmarks every new shape",
    "no-effect": "setting not in effect",
    # Hazards: no cost in time until they end the run.
    "hang": "no progress",
    "died": "a process died",
    "open-files": "open files grow steadily",
    "not-finite": "losses or gradients not finite",
    "leak": "memory grows steadily",
    "worker-memory": "memory of loader workers grows",
    "fragmentation": "memory in pieces",
    "evaluation-memory": "evaluations take much memory",
    "checkpoint-memory": "checkpoints take much memory",
    "near-limit": "memory almost full",
    "out-of-memory": "out of memory",
    "piling-up": "hooks or handlers pile up",
    "retain-graph": "graphs kept without need",
    "repeated-items": "items repeated within an epoch",
}
# Causes that keep a run from going on or make it worthless, the first one first: a summary begins with them.
ENDINGS = ("hang", "died", "open-files", "not-finite")


def advice_of(finding: Finding) -> tuple[object, ...]:
    """What a finding advises: it is reported again when this changes."""
    measured = tuple(change.measured.verdict for change in finding.changes if change.measured is not None)
    return finding.sets, bool(finding.leave), finding.from_steps is None, measured
