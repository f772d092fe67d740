"""GPU-only causes, each with a similar run without the cause."""

from __future__ import annotations

from dataclasses import replace

from pairs import CARD_RUN, CARD_STEP, Pair, capture, card, memory
from planted_runs import NVML, alone, healthy, work

# A GPU without formats faster than TF32.
OLD_CARD = {
    **CARD_RUN,
    "precision": "fp32",
    "card": {"profile": {"dense_tflops": {"tf32": 494.7, "fp32": 66.9}}},
}
TF32_WORK = work(flops_per_step=600 * 10**9, peak_tflops=66.9, peak_kind="fp32", accumulation=1)
CUDNN_TOP = [["cudnn_convolution_kernel", 60_000_000, 300]]
TIMED = ("precision.amp=bf16", "speed.cudnn_benchmark=true")

CARD = [
    Pair(
        "transfer",
        card(device={**CARD_STEP, "to_device": 4.0}, sets=("precision.amp=bf16", "loader.pin_memory=false")),
        card(sets=("precision.amp=bf16", "loader.pin_memory=false")),
        ("loader.pin_memory=true",),
    ),
    Pair(
        "launch-bound",
        card(kernels=capture("kernels", launch_gaps=40)),
        card(kernels=capture("kernels", launch_gaps=2)),
        ("speed.cuda_graph=true",),
        "capture",
    ),
    Pair(
        "launch-bound",
        card(card={**NVML, "util_percent": 45, "power_w": 200.0}),
        card(card={**NVML, "util_percent": 99, "power_w": 200.0}),
        ("speed.cuda_graph=true",),
        "counters",
    ),
    Pair(
        "sync",
        card(kernels=capture("kernels", synchronising=20), sets=("precision.amp=bf16", "log.every_steps=1")),
        card(kernels=capture("kernels", synchronising=1), sets=("precision.amp=bf16", "log.every_steps=1")),
        ("log.every_steps=10",),
        "capture",
    ),
    Pair(
        "collectives",
        card(kernels=replace(capture("kernels"), collective_ns=30_000_000, exposed_ns=20_000_000)),
        card(kernels=replace(capture("kernels"), collective_ns=30_000_000, exposed_ns=1_000_000)),
        (),
    ),
    Pair(
        "sync",
        card(device={**CARD_STEP, "log": 3.0}, sets=("precision.amp=bf16", "log.every_steps=1")),
        # The host waits there while the GPU computes.
        card(phases=healthy(log=8.0), sets=("precision.amp=bf16", "log.every_steps=1")),
        ("log.every_steps=10",),
        "clock",
    ),
    Pair(
        "tf32",
        card(sets=("precision.amp=off", "precision.tf32=false"), run=OLD_CARD, work=TF32_WORK),
        card(
            sets=("precision.amp=off", "precision.tf32=false"), run=OLD_CARD,
            work=replace(TF32_WORK, flops_per_step=10**9),
        ),
        ("precision.tf32=true",),
    ),
    Pair(
        "amp",
        card(
            sets=("precision.amp=off",), run={**CARD_RUN, "precision": "tf32"},
            work=work(flops_per_step=4000 * 10**9, peak_tflops=494.7, peak_kind="tf32"),
        ),
        card(
            sets=("precision.amp=off",), run={**CARD_RUN, "precision": "tf32"},
            work=work(flops_per_step=10**9, peak_tflops=494.7, peak_kind="tf32"),
        ),
        ("precision.amp=bf16",),
    ),
    Pair(
        "cudnn-benchmark",
        card(workload="antispoof", kernels=capture("kernels", top=CUDNN_TOP)),
        card(workload="antispoof", kernels=capture("kernels", top=[["gemm", 60_000_000, 300]])),
        ("speed.cudnn_benchmark=true",),
    ),
    Pair(
        "cudnn-shapes",
        card(
            workload="my.model:make", sets=TIMED, kernels=capture("kernels", top=CUDNN_TOP),
            baseline=alone(threads=16, micro_ns=10e6),
        ),
        # One shape: timed once, and as fast as before training.
        card(workload="my.model:make", sets=TIMED, kernels=capture("kernels", top=CUDNN_TOP)),
        ("speed.cudnn_benchmark=false",),
    ),
    Pair(
        "neighbour-card",
        card(card={**NVML, "processes": 1, "memory_others_bytes": 9 << 30}, baseline=alone(micro_ns=10e6)),
        card(card={**NVML, "processes": 1, "memory_others_bytes": 9 << 30}),
    ),
    Pair(
        "throttling",
        card(card={**NVML, "throttle": ["thermal"], "sm_clock_mhz": 1100}),
        card(card={**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1900}),
    ),
    Pair(
        "thrash",
        card(memory=memory(retries=40), sets=("precision.amp=bf16", "batch.micro=32")),
        card(memory=memory(retries=1), sets=("precision.amp=bf16", "batch.micro=32")),
        ("batch.micro=16", "batch.accumulation=2"),
    ),
]  # fmt: skip
