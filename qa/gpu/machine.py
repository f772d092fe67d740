"""Part "machine": the GPU, its driver, the versions, and whether the GPU computes at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.common import version_of

from ndd_engine.hardware.detect import detect
from ndd_engine.version import __version__

from .figures import FACT, Task, one_line

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")


def measure(given: Task) -> None:
    """Record the facts, then compute something."""
    for name, value in facts(given):
        given.put(name, one_line(value), verdict=FACT)
    if given.on_gpu:
        computes(given)
    else:
        given.skip("a matrix product on the GPU")


def facts(given: Task) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a reader needs to judge the figures; nothing that names a person or a host."""
    machine = detect("auto" if given.on_gpu else "cpu")
    gpu = machine.chosen
    yield "date", time.strftime("%Y-%m-%d %H:%M %z")
    if gpu is None:
        yield "GPU", "none"
    else:
        yield "GPU", gpu.name + (f" (MIG {gpu.mig_profile})" if gpu.mig else "")
        yield "GPU memory", _gib(gpu.memory_total_bytes) + f", {_gib(gpu.free_bytes)} free"
        yield "compute capability", ".".join(map(str, gpu.compute_capability or ("unknown",)))
        yield "published figures", gpu.profile.name if gpu.profile else gpu.reasons.get("profile", "none")
        yield "driver", f"{gpu.driver}, for CUDA up to {gpu.cuda_driver}"
        yield "other processes on the GPU", "unknown" if gpu.processes is None else str(len(gpu.processes))
        if len(machine.gpus) > 1:
            yield "GPUs", str(len(machine.gpus))
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {_cudnn()}"
    yield "triton", version_of("triton")
    yield "ndd-console", f"{__version__}{_commit()}"
    yield "Python", platform.python_version()
    host = machine.host
    yield "CPU", f"{host.cpu}, {host.usable_cpus:g} of {host.logical_cores} cores usable"
    yield "system", f"{platform.system()} {platform.release()}"
    yield "nvidia-smi", "installed" if shutil.which("nvidia-smi") else "not installed"
    for name in VARIABLES:
        if value := os.environ.get(name):
            yield name, value
    if machine.problems:
        yield "problems", "; ".join(machine.problems)


def computes(given: Task) -> None:
    """A matrix product on the GPU, against the CPU's."""
    left = torch.randn(512, 512, dtype=torch.float64)
    found = (left.cuda() @ left.cuda()).cpu()
    error = float((found - left @ left).abs().max())
    given.check("a matrix product in fp64, GPU vs. CPU", f"{error:.1e}", "< 1e-9", error < 1e-9)


def _cudnn() -> str:
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return str(found or "none")


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False,
            cwd=Path(__file__).parent,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"
