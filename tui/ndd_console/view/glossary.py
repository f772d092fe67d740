"""Definitions of every term, unit and symbol on the screens, for the help page and the documentation."""

from __future__ import annotations

from .style import STATUS

# (title of the group, ((term, definition), ...)).
Group = tuple[str, tuple[tuple[str, str], ...]]

_STATUS_TEXT = {
    "preparing": "reading data, building and compiling the model",
    "training": "optimizer steps are running",
    "evaluating": "evaluating on held-out data",
    "checkpointing": "saving a checkpoint",
    "paused": "paused by a key, a command or a trial",
    "stopping": "saving a checkpoint, then stopping",
    "done": "all steps are done",
    "stopped": "stopped on request, after a checkpoint",
    "failed": "ended with an error",
    "interrupted": "ended by Ctrl-C (SIGINT)",
    "terminated": "ended by SIGTERM",
    "lost": "the process ended unexpectedly",
}

GLOSSARY: tuple[Group, ...] = (
    ("status", tuple((f"{STATUS[name][0]} {name}", text) for name, text in _STATUS_TEXT.items())),
    (
        "steps and units",
        (
            ("item", "one training example, such as a clip or a window"),
            ("window", "an item cut from a longer text or signal"),
            ("token", "a part of an item, such as a character or a sample"),
            ("micro-step", "forward and backward pass of one micro-batch"),
            ("2 micro 27.3", "2 micro-steps per step, of 27.3 ms each"),
            ("step", "one optimizer step: all its micro-steps and the update"),
            ("micro x accum.", "micro-batch size and micro-steps per step"),
            ("epoch", "one pass over the training data"),
            ("warnings", "number of warnings so far; see the log (key l)"),
            ("left", "estimated time until the run ends"),
            ("left with +", "evaluations or checkpoints are not included yet"),
        ),
    ),
    (
        "phases of a step",
        (
            ("data_wait", "waiting for the next batch of the data loader"),
            ("to_device", "copying the batch to the device"),
            ("forward", "forward pass of the model"),
            ("loss", "computing the loss"),
            ("backward", "backward pass"),
            ("clip", "gradient clipping"),
            ("optimizer", "the optimizer's update, optimizer.step()"),
            ("zero_grad", "resetting the gradients, optimizer.zero_grad()"),
            ("log", "reading back losses and writing the record"),
            ("evaluate", "evaluating on held-out data"),
            ("checkpoint", "saving a checkpoint"),
            ("other", "wall time outside all other phases"),
            ("N smaller", "sum of the N smallest phases, where rows are short"),
            ("ms", "mean time per step, by the host clock"),
            ("share", "share of wall time; the phases add up to 100 %"),
            ("device", "GPU time of the phase, by CUDA events"),
            ("p50, p95, max", "median, 95th percentile and maximum per step"),
        ),
    ),
    (
        "idle time",
        (
            ("GPU idle", "share of wall time in which the GPU computes nothing"),
            ("(compute) idle", "the same for a run on the CPU"),
            ("kernels", "method: profiler capture of a few steps; exact (key k)"),
            ("operators", "method: profiler capture on the CPU (key k)"),
            ("events", "method: CUDA events around the phases"),
            ("nvml", "method: utilisation as in nvidia-smi; no causes"),
            ("host clock", "method: phases in which the CPU computes nothing"),
            (">", "a lower bound: gaps between kernels are not included"),
        ),
    ),
    (
        "causes of idle time",
        (
            ("waiting for data", "the next batch is not ready"),
            ("copying", "a batch is copied while nothing is computed"),
            ("launch gaps", "the CPU launches kernels or operators too slowly"),
            ("synchronising", "the CPU waits for the GPU, then the GPU for the CPU"),
            ("evaluation or checkpoint", "idle time in or around one of them"),
            ("checkpoint", "saving a checkpoint"),
            ("other", "none of the above"),
        ),
    ),
    (
        "memory",
        (
            ("used", "GPU memory reserved by PyTorch in this run"),
            ("this run", "host memory of this run and its workers"),
            ("peak", "highest reserved memory so far"),
            ("reserved", "memory held by the allocator, in use or cached"),
            ("others", "used by other processes"),
            ("free, available", "can still be allocated on the GPU, on the host"),
            ("about batch N fits", "largest micro-batch predicted to fit; not measured"),
            ("retries", "the allocator emptied its cache to find memory"),
            ("RSS", "resident host memory of the run's process"),
        ),
    ),
    (
        "machine",
        (
            ("busy", "GPU utilisation as in nvidia-smi"),
            ("61 °C, 212/320 W", "GPU temperature, power draw and power limit"),
            ("MHz", "clock of the GPU's multiprocessors (SM)"),
            ("throttled", "the GPU reduces its clocks, with the reason"),
            ("cpu", "utilisation of all cores that the run may use"),
            ("process", "CPU use of the run; 100 % is one core"),
            ("workers", "running data loader processes"),
            ("cores", "load of each core, one character per core"),
        ),
    ),
    (
        "speed",
        (
            ("steps/s", "optimizer steps per second"),
            ("FLOP/s", "floating-point operations per second, as counted"),
            ("MFU", "model FLOPs utilisation: FLOP/s / dense peak of the GPU"),
            ("intensity", "FLOP per byte read or written, without fusion"),
            ("bandwidth-bound", "memory bandwidth limits the speed (roofline)"),
            ("compute-bound", "the GPU's peak FLOP/s limits the speed (roofline)"),
        ),
    ),
    (
        "metrics",
        (
            ("lr", "learning rate"),
            ("gradient norm", "norm of all gradients before clipping"),
            ("loss scale", "factor of the gradient scaler (fp16)"),
            ("evaluation", "latest and best result on held-out data"),
        ),
    ),
    (
        "findings and trials",
        (
            ("finding", "a bottleneck, according to this run's measurements"),
            ("at most 1.4x", "ceiling: speed-up if the cause vanished completely"),
            ("certain, likely, possible", "how well the evidence supports it"),
            ("trial", "candidate vs. baseline, measured in separate processes"),
            ("ABBA block", "runs: baseline, candidate, candidate, baseline"),
            ("95 % CI", "confidence interval of the speed ratio"),
            ("├──●──┤", "the ratio and its interval; ┼ is 1x (no difference)"),
            ("gain, loss", "the whole interval is above, or below, 1"),
            ("no significant gain", "the interval is narrow and contains 1"),
            ("inconclusive", "the interval is too wide; allow more time"),
            ("break-even", "steps after which extra setup time is recovered"),
            ("tuning", "settings are tried in turn and kept if they help"),
        ),
    ),
    (
        "wizard",
        (
            ("● · ▲", "best trade-offs; the others; the selected row"),
            ("≥ ≤", "bounds from the GPU's published peaks"),
            ("x", "micro-batches per optimizer step"),
            ("low confidence", "a prediction to verify by a measurement"),
        ),
    ),
    (
        "symbols",
        (
            ("n/a", "not measured; never the same as 0"),
            ("<1 %", "more than 0 and less than 0.5 %"),
            ("✔ ✖ ·", "settings: in effect, not in effect, left at default"),
            ("█ ▒ ░", "memory: used by this run, by others, free"),
            ("▸", "the selected entry"),
        ),
    ),
)
