"""Snapshots and events with fixed figures for the tests of the screens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ndd_engine.diagnose import Change, Evidence, Finding
from ndd_engine.record.events import (
    BaselineEvent,
    EndEvent,
    FunctionsEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    TrialEvent,
    WorkEvent,
)
from ndd_engine.record.figures import throughput
from ndd_engine.record.snapshot import Evaluation, Headroom, Idle, PhaseShare, Snapshot, TimedMark, TimeLeft
from ndd_engine.record.worker_events import WorkerFigures, WorkersEvent

GB = 1024**3
T0 = 1_750_000_000.0

CONFIG: dict[str, Any] = {
    "batch": {"micro": 128, "accumulation": 2, "sequence": 256},
    "loader": {"workers": 4},
    "speed": {"compile": "default"},
}

# Milliseconds of a step's phases, and the GPU time in them.
MILLISECONDS = {
    "data_wait": (31.2, 31.3),
    "to_device": (0.9, 0.7),
    "forward": (6.4, 7.1),
    "loss": (0.6, 0.4),
    "backward": (12.6, 12.9),
    "clip": (0.3, 0.4),
    "optimizer": (2.1, 1.8),
    "zero_grad": (0.1, 0.1),
    "log": (0.2, None),
    "evaluate": (0.0, None),
    "other": (0.2, None),
}


def run_event(cuda: bool = True, **changes: Any) -> RunEvent:
    """A run of the text model, on a GPU or on the CPU."""
    event = RunEvent(
        name="charlm-001",
        workload="chartext",
        config=CONFIG,
        pid=4242,
        host="trainer",
        device="cuda:0" if cuda else "cpu",
        device_name="NVIDIA GeForce RTX 4080 SUPER" if cuda else "AMD EPYC 7543 32-Core Processor",
        gpu={"name": "NVIDIA GeForce RTX 4080 SUPER", "memory_total_bytes": 16 * GB} if cuda else None,
        versions={"torch": "2.6.0", "ndd-console": "0.1.0", "python": "3.11.7", "cuda": "12.4"},
        parameters=10_788_929,
        precision="bf16" if cuda else "float32",
        item="segment",
        token="character",
        tokens_per_item=256,
        items_per_step=256,
        items_per_epoch=70_656,
        steps_per_epoch=276,
        epochs=25,
        total_steps=6_900,
        model="transformer: 6 layers, 6 heads, width 384",
        data="465,231 characters, 1,723 segments of 256 a pass",
        threads=16 if cuda else 8,
        usable_cores=16.0,
    )
    return replace(event, **changes)


def phases(cuda: bool = True, jitter: float = 1.0) -> tuple[PhaseShare, ...]:
    total = sum(host for host, _ in MILLISECONDS.values())
    return tuple(
        PhaseShare(
            name=name,
            host_ns=host * 1e6 * jitter,
            share=host / total,
            p50_ns=int(host * 0.98e6 * jitter),
            p95_ns=int(host * 1.21e6 * jitter),
            max_ns=int(host * 2.4e6 * jitter),
            device_ns=device * 1e6 * jitter if cuda and device is not None else None,
        )
        for name, (host, device) in MILLISECONDS.items()
    )


def loss_curve(count: int = 120) -> tuple[tuple[int, float], ...]:
    return tuple((35 * i, 1.3 + 3.1 * math.exp(-i / 22) + 0.05 * math.sin(i * 1.7)) for i in range(1, count))


def rate_curve(count: int = 120) -> tuple[tuple[int, float], ...]:
    return tuple(
        (35 * i, 4680 + 240 * math.sin(i / 9) - (900 if i % 37 == 0 else 0)) for i in range(1, count)
    )


def sample(cuda: bool = True, cores: int = 16) -> SampleEvent:
    gpu = {
        "util_percent": 37, "temperature_c": 61, "power_w": 212.4, "power_limit_w": 320.0,
        "sm_clock_mhz": 2505,
        "throttle": [], "memory_free_bytes": 7 * GB, "memory_total_bytes": 16 * GB,
    }  # fmt: skip
    host = {
        "cpu_percent": 53.0, "cpu_per_core": [(i * 37) % 101 for i in range(cores)],
        "process_cpu_percent": 101.0,
        "rss_bytes": 2.1 * GB, "workers": 4, "workers_rss_bytes": 1.2 * GB,
        "memory_available_bytes": 24.1 * GB,
        "memory_limit_bytes": 64 * GB, "disk_free_bytes": 180.0 * GB,
    }  # fmt: skip
    return SampleEvent(gpu if cuda else None, host)


SETTINGS = (
    SettingEvent("loader.workers", "4", "4", True, "4 worker processes answered the first batch"),
    SettingEvent("optimizer.implementation", "auto", "fused", None),
    SettingEvent("loader.pin_memory", "true", "true", True, "the first batch was in pinned memory"),
    SettingEvent("precision.amp", "bf16", "bf16", True, "98 % of the products were computed in bfloat16"),
    SettingEvent("speed.attention", "flash", "efficient", False, "the mask needs another back end"),
)


def work_event(cuda: bool = True) -> WorkEvent:
    """What a step of the text model computes; without a GPU there is no peak."""
    peak: dict[str, Any] = {
        "peak_tflops": 104.4, "peak_kind": "bf16", "bandwidth_gb_s": 736.0, "peak_source": "the vendor's sheet",
    }  # fmt: skip
    return WorkEvent(
        flops_per_step=1_940_000_000_000, bytes_per_step=31_000_000_000, flops_forward=640_000_000_000,
        parameters=10_788_929, micro=128, accumulation=2, precision="bf16",
        attention=["flash"], dtypes={"bfloat16": 950_000_000_000, "float32": 20_000_000_000},
        method="one forward and backward pass, operation by operation",
        **(peak if cuda else {"reason": "no published peak for this CPU"}),
    )  # fmt: skip


def mark(step: int, kind: str, text: str, **data: Any) -> TimedMark:
    return TimedMark(T0 + step / 18, MarkEvent(kind, step, text, data))


MARKS = (
    mark(276, "epoch", "epoch 1 ended"),
    mark(276, "checkpoint", "checkpoint saved: checkpoints/step-00000276", file="checkpoints/step-00000276"),
    mark(3_800, "evaluation", "evaluation: loss 1.498"),
    mark(4_140, "warning", "2 losses were not finite; the scaler skipped their steps"),
    mark(4_140, "evaluation", "evaluation: loss 1.520"),
    mark(
        4_140, "checkpoint", "checkpoint saved: checkpoints/step-00004140", file="checkpoints/step-00004140"
    ),
)


def snapshot(cuda: bool = True, **changes: Any) -> Snapshot:
    """A run in the middle of training, with every figure known."""
    step_ns = sum(host for host, _ in MILLISECONDS.values()) * 1e6
    shares = phases(cuda)
    causes = (("waiting for data", 0.571), ("synchronising", 0.004), ("checkpoint", 0.0), ("other", 0.043))
    host_causes = (("waiting for data", 0.571), ("copying", 0.016), ("other", 0.008))
    head = (
        Headroom(int(7.9 * GB), 16 * GB, int(6.9 * GB), int(1.2 * GB), int(7.4 * GB), 288, "gpu")
        if cuda
        else Headroom(int(24.1 * GB), 64 * GB, int(3.3 * GB), int(36.6 * GB), None, None, "host")
    )
    best, last = (
        Evaluation(3_800, {"loss": 1.498, "bits": 2.161}, 2.1),
        Evaluation(4_140, {"loss": 1.52, "bits": 2.193}, 2.1),
    )
    value = Snapshot(
        run=run_event(cuda), status="training", stage="", reason="", end=None, started_t=T0, t=T0 + 250,
        step=4_218, epoch=15, items=1_079_808, tokens=276_430_848,
        step_ns=step_ns, steps_per_s=18.3, items_per_s=4_687.0, tokens_per_s=1_199_872.0,
        left=TimeLeft(146.5, 3, 2.1, 10, 0.4), elapsed_s=231.4,
        phases=shares,
        idle=Idle(0.618, "events", causes) if cuda else Idle(0.595, "host", host_causes),
        headroom=head,
        loss=1.482, lr=7.3e-4, grad_norm=0.8321, loss_scale=None,
        evaluations=(best, last), best=best, checkpoint=MARKS[-1], sample=sample(cuda),
        memory=MemoryEvent(6 * GB, 7 * GB, 7 * GB, 7 * GB, GB, 0, 0, 7 * GB, 16 * GB, GB) if cuda else None,
        loss_trend=loss_curve(), rate_trend=rate_curve(), marks=MARKS, warnings=1,
        settings=SETTINGS, work=work_event(cuda), throughput=throughput(work_event(cuda), step_ns), micro_steps=2.0,
    )  # fmt: skip
    return replace(value, **changes)


def empty_snapshot(**changes: Any) -> Snapshot:
    """Before anything is known."""
    value = Snapshot(
        run=None, status="preparing", stage="importing torch", reason="", end=None, started_t=None, t=None,
        step=0, epoch=0, items=0, tokens=0, step_ns=None, steps_per_s=None, items_per_s=None,
        tokens_per_s=None, left=TimeLeft(), elapsed_s=0.0, phases=(), idle=Idle(None, "host", (),
        "nothing measured yet"),
        headroom=Headroom(None, None, None, None, None, None, "gpu"), loss=None, lr=None, grad_norm=None,
        loss_scale=None, evaluations=(), best=None, checkpoint=None, sample=None, memory=None, loss_trend=(),
        rate_trend=(), marks=(), warnings=0,
    )  # fmt: skip
    return replace(value, **changes)


def ended(
    status: str, reason: str, saved: str | None = "checkpoints/step-00004218", **changes: Any
) -> Snapshot:
    """A run that has ended."""
    end = None if status == "lost" else EndEvent(status, reason, 4_218, 0 if status == "done" else 1, saved)
    return snapshot(status=status, reason=reason, end=end, **changes)


FINDING = Finding(
    "few-workers",
    "input-bound: the GPU waits 57 % of each step for the loader",
    (
        Evidence(
            "the loader runs in this process (loader.workers 0) and one item takes 29 ms", "loader probe"
        ),
        Evidence("waiting for data takes 57 % of wall time", "host clock"),
    ),
    "certain",
    0.57,
    2.33,
    (
        Change("set loader.workers to 4 and pin the memory", ("loader.workers=4", "loader.pin_memory=true")),
        Change("encode each item once", ("loader.cache=true",)),
        Change("decode less in __getitem__", (), "clips.py:41 in load"),
    ),
)
SECOND = Finding(
    "optimizer",
    "the optimizer's step takes 4 % of each step",
    (Evidence("2.1 ms of 54.6 ms", "host clock"),),
    "likely",
    0.04,
    1.04,
    (Change("use the fused implementation", ("optimizer.implementation=fused",)),),
    "the run ends in 2 min 26 s, before the change breaks even",
)
HEALTHY = Finding("healthy", "no bottleneck found: 97 % of the time is computing", (), "certain")


def found(*findings: Finding) -> Any:
    """Rules that always return these findings."""
    return lambda _snapshot: findings


def trial_event(verdict: str = "faster", **changes: Any) -> TrialEvent:
    """The result of a trial."""
    event = TrialEvent(
        sets=["loader.workers=4", "loader.pin_memory=true"],
        against="run charlm-001",
        verdict=verdict,
        text="faster: 1.42 times as many segments per second as the baseline",
        ratio=1.42, low=1.35, high=1.49, abba_blocks=7, seconds=24.2, budget_s=60.0, device="RTX 4080 SUPER",
        in_effect=True, loss="same", loss_text="20 steps, bit for bit", break_even_steps=310,
        cause="few-workers",
        base={"peak_bytes": 2.1 * GB, "step_s": 0.0546, "prepare_s": 6.1},
        change={"peak_bytes": 2.4 * GB, "step_s": 0.0385, "prepare_s": 8.9},
    )  # fmt: skip
    return replace(event, **changes)


MEASURED = {
    "loader": LoaderEvent(1_723, 128, False, None, False, 262_144, 29e6, 4.1e6, 1.2e6, None, 16),
    "baseline": BaselineEvent(128, 23.1e6, 5, 64, 12.4e6, 16, [[8, 24.0e6], [16, 23.1e6]], 842),
    "kernels": KernelsEvent(
        163_800_000, 64_000_000, 2_100_000,
        {"waiting for data": 93_000_000, "launch gaps": 6_800_000}, 2_526,
        [["ampere_bf16_gemm_128x128", 31_000_000, 216], ["flash_fwd_kernel", 12_000_000, 36]],
        method="kernels", step=4_200, steps=3, trace="trace.json",
    ),
    "functions": FunctionsEvent(
        4_210, 58_200_000,
        [
            ["clips.py", 41, "load", 128, 31_400_000, 31_400_000, "Clips.__getitem__", "data_wait"],
            ["clips.py", 30, "Clips.__getitem__", 128, 33_000_000, 1_600_000, "", "data_wait"],
            ["model.py", 12, "Net.forward", 1, 6_100_000, 210_000, "", "forward"],
        ],
    ),
}  # fmt: skip


_PLACE = "/home/u/net.py", 31, "Block.forward"
# A capture with the parts of a model.
MODEL_WORK = replace(
    MEASURED["kernels"], method="operators", model_ns=60_000_000,
    passes={"forward": 22_000_000, "backward": 35_000_000},
    modules=[
        ("embed", "Embedding", 900_000, 1_400_000, 1, 16 << 20, 3 << 20),
        ("blocks.*.attention", "Attention", 7_200_000, 11_800_000, 6, 96 << 20, 14 << 20),
        ("blocks.*.mlp", "MLP", 9_100_000, 14_900_000, 6, 128 << 20, 28 << 20),
        ("head", "Linear", 3_300_000, 5_900_000, 1, 48 << 20, 9 << 20),
    ],
    lines=[(*_PLACE, 7_200_000, 11_800_000, 36)],
    operations=[("linear", "64x384, 1536x384", "float", "", *_PLACE, "blocks.*.mlp", "MLP", 6e6, 9e6, 12, 0.5e6)],
    loops=[("/home/u/net.py", 58, "Net.forward", 256, 1, 4e6, 6e6, 2_560, 9_000, 40, 1, "cell", "GRUCell")],
)  # fmt: skip


def workers_event(**changes: Any) -> WorkersEvent:
    """Two workers, of which one has an item that takes long."""
    pair = [
        WorkerFigures(
            number, 4_712 + number, 1, 410, 13_120, 38.2e6 + number * 2e6, 37.1e6, (1.1e6, 1.6e6, 3.2e6), 1.9e6,
            0.8e6, 0.0, 0.2e6, 4.1e6, 3.1e6, 61e6, 92e6, [(50_300_000, "77"), (6_200_000, "1204")], 212_000_000,
            140_000_000, 41, 210.0, 1_200_000.0, 0.03,
        )
        for number in range(2)
    ]  # fmt: skip
    functions = [
        ("/home/u/clips.py", 14, "Clips.decode", 640, 0.71, 0.71, {"computes": 0.71}),
        ("/home/u/clips.py", 31, "Clips.load", 640, 0.18, 0.18, {"storage": 0.15, "computes": 0.03}),
        ("/home/u/clips.py", 8, "Clips.__getitem__", 640, 0.05, 0.96, {"computes": 0.05}),
    ]
    quantiles = [34e6 + number * 0.5e6 for number in range(20)]
    event = WorkersEvent(4_200, pair, 20, functions, [("Compose[0] Crop", 0.06)], quantiles)
    return replace(event, **changes)
