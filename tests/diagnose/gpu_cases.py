"""GPU-only causes, each with a similar run without the cause."""

from __future__ import annotations

from dataclasses import replace

from pairs import GPU_RUN, GPU_STEP, Pair, capture, gpu, memory
from planted_runs import NVML, alone, healthy, work

# A GPU without formats faster than TF32.
OLD_GPU = {
    **GPU_RUN,
    "precision": "fp32",
    "gpu": {"profile": {"dense_tflops": {"tf32": 494.7, "fp32": 66.9}}},
}
_COMMAND = {
    "config": {"script": {"command": ["python", "train.py"]}, "batch": {"accumulation": 1, "micro": 8}},
    "precision": "",
}
SCRIPT, SCRIPT_ON_OLD_GPU = {**GPU_RUN, **_COMMAND}, {**OLD_GPU, **_COMMAND}
TF32_WORK = work(flops_per_step=600 * 10**9, peak_tflops=66.9, peak_kind="fp32", accumulation=1)
CONVOLUTION_NS = 60_000_000
UNPINNED = ("precision.amp=bf16", "loader.pin_memory=false")
TIMED = ("precision.amp=bf16", "speed.cudnn_benchmark=true")

GPU = [
    Pair(
        "transfer",
        gpu(device={**GPU_STEP, "to_device": 4.0}, sets=UNPINNED),
        gpu(sets=UNPINNED),
        ("loader.pin_memory=true",),
    ),
    Pair(
        "launch-bound",
        gpu(kernels=capture("kernels", launch_gaps=40)),
        gpu(kernels=capture("kernels", launch_gaps=2)),
        ("speed.cuda_graph=true",),
        "capture",
    ),
    Pair(
        "launch-bound",
        gpu(gpu={**NVML, "util_percent": 45, "power_w": 200.0}),
        gpu(gpu={**NVML, "util_percent": 99, "power_w": 200.0}),
        ("speed.cuda_graph=true",),
        "counters",
    ),
    Pair(
        "sync",
        gpu(kernels=capture("kernels", synchronising=20), sets=("precision.amp=bf16", "log.every_steps=1")),
        gpu(kernels=capture("kernels", synchronising=1), sets=("precision.amp=bf16", "log.every_steps=1")),
        ("log.every_steps=10",),
        "capture",
    ),
    Pair(
        "queue-gaps",
        gpu(kernels=replace(
            capture("kernels", between_queued_kernels=30),
            queued=[("another stream", 25_000_000, 40), ("short", 5_000_000, 900)],
        )),
        gpu(kernels=capture("kernels", between_queued_kernels=3)),
    ),
    Pair("gpu-idle", gpu(kernels=capture("kernels", other=20)), gpu(kernels=capture("kernels", other=2)), (), "host"),
    Pair(
        "gpu-idle",
        gpu(kernels=capture("kernels", launch_gaps=8, other=7)), gpu(kernels=capture("kernels", launch_gaps=4)), (),
        "mixed",
    ),
    # Copies that the GPU waits for, by a capture: from the host clock alone nothing of them is seen.
    Pair(
        "transfer",
        gpu(kernels=replace(capture("kernels", copying=20), exposed_copy_ns=16_000_000), sets=UNPINNED),
        gpu(kernels=replace(capture("kernels", copying=1), exposed_copy_ns=1_000_000), sets=UNPINNED),
        ("loader.pin_memory=true",), "capture",
    ),
    # A synchronisation empties the queue: what the host needs to fill it again belongs to it.
    Pair(
        "sync",
        gpu(
            kernels=replace(capture("kernels", synchronising=2, launch_gaps=20), after_waits_ns=18_000_000),
            sets=("precision.amp=bf16", "log.every_steps=1"),
        ),
        gpu(kernels=capture("kernels", synchronising=2), sets=("precision.amp=bf16", "log.every_steps=1")),
        ("log.every_steps=10",),
        "after",
    ),
    Pair(
        "collectives",
        gpu(kernels=replace(capture("kernels"), collective_ns=30_000_000, exposed_ns=20_000_000)),
        gpu(kernels=replace(capture("kernels"), collective_ns=30_000_000, exposed_ns=1_000_000)),
        (),
    ),
    Pair(
        "sync",
        gpu(device={**GPU_STEP, "log": 3.0}, sets=("precision.amp=bf16", "log.every_steps=1")),
        # The host waits there while the GPU computes.
        gpu(phases=healthy(log=8.0), sets=("precision.amp=bf16", "log.every_steps=1")),
        ("log.every_steps=10",),
        "clock",
    ),
    Pair(
        "tf32",
        gpu(sets=("precision.amp=off", "precision.tf32=false"), run=OLD_GPU, work=TF32_WORK),
        gpu(
            sets=("precision.amp=off", "precision.tf32=false"), run=OLD_GPU,
            work=replace(TF32_WORK, flops_per_step=10**9),
        ),
        ("precision.tf32=true",),
    ),
    Pair(
        "amp",
        gpu(
            sets=("precision.amp=off",), run={**GPU_RUN, "precision": "tf32"},
            work=work(flops_per_step=4000 * 10**9, peak_tflops=494.7, peak_kind="tf32"),
        ),
        gpu(
            sets=("precision.amp=off",), run={**GPU_RUN, "precision": "tf32"},
            work=work(flops_per_step=10**9, peak_tflops=494.7, peak_kind="tf32"),
        ),
        ("precision.amp=bf16",),
    ),
    # A script's operations are not counted: the kernels of a capture show the format.
    Pair(
        "tf32",
        gpu(run=SCRIPT_ON_OLD_GPU, kernels=replace(capture("kernels"), products_ns={"fp32": 50_000_000})),
        gpu(run=SCRIPT_ON_OLD_GPU, kernels=replace(capture("kernels"), products_ns={"tf32": 50_000_000})),
        ("precision.tf32=true",),
        "script",
    ),
    Pair(
        "amp",
        gpu(run=SCRIPT, kernels=replace(capture("kernels"), products_ns={"fp32": 1_000, "tf32": 50_000_000})),
        gpu(run=SCRIPT, kernels=replace(capture("kernels"), products_ns={"tf32": 1_000_000})),
        ("precision.amp=bf16",),
        "script",
    ),
    Pair(
        "cudnn-benchmark",
        gpu(workload="antispoof", kernels=capture("kernels", convolution_ns=CONVOLUTION_NS)),
        gpu(workload="antispoof", kernels=capture("kernels")),
        ("speed.cudnn_benchmark=true",),
    ),
    Pair(
        "cudnn-shapes",
        gpu(
            workload="my.model:make", sets=TIMED, kernels=capture("kernels", convolution_ns=CONVOLUTION_NS),
            baseline=alone(threads=16, micro_ns=10e6),
        ),
        # One shape: timed once, and as fast as before training.
        gpu(workload="my.model:make", sets=TIMED, kernels=capture("kernels", convolution_ns=CONVOLUTION_NS)),
        ("speed.cudnn_benchmark=false",),
    ),
    Pair(
        "neighbour-gpu",
        gpu(gpu={**NVML, "processes": 1, "memory_others_bytes": 9 << 30}, baseline=alone(micro_ns=10e6)),
        gpu(gpu={**NVML, "processes": 1, "memory_others_bytes": 9 << 30}),
    ),
    Pair(
        "throttling",
        gpu(gpu={**NVML, "throttle": ["thermal"], "sm_clock_mhz": 1100}),
        gpu(gpu={**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1900}),
    ),
    Pair(
        "thrash",
        gpu(memory=memory(retries=40), sets=("precision.amp=bf16", "batch.micro=32")),
        gpu(memory=memory(retries=1), sets=("precision.amp=bf16", "batch.micro=32")),
        ("batch.micro=16", "batch.accumulation=2"),
    ),
]  # fmt: skip
