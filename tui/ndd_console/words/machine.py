"""The detected hardware in words, with a reason for every value."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ndd_engine.hardware.gpus import Gpu, GpuProfile, Host, Machine
from ndd_engine.text import MISSING, number, size

from .blocks import Block, Facts, Text


def machine_blocks(machine: Machine) -> Iterator[Block]:
    """The GPUs and the host, and what is wrong with them."""
    for gpu in machine.gpus:
        yield Facts(tuple(_gpu(gpu)))
    why = machine.reasons["device"]
    if not machine.gpus:
        yield Text(f"no CUDA GPU: {machine.reasons['nvml']}")
        why = "" if why == machine.reasons["nvml"] else why
    yield Facts((_row("device", machine.device, why), *_host(machine.host)))
    yield from (Text(problem, "warn") for problem in machine.problems)


def _row(label: str, value: str, why: str | None = None) -> tuple[str, str]:
    return label, value + (f" ({why})" if why else "")


def _gpu(gpu: Gpu) -> Iterator[tuple[str, str]]:
    why = gpu.reasons.get
    yield _row("GPU", gpu.name)
    yield _row("device", f"cuda:{gpu.index}" if gpu.index is not None else "no PyTorch device", why("index"))
    memory = f"{size(gpu.memory_total_bytes)}, {size(gpu.free_bytes)} free"
    yield _row("memory", memory, why("memory"))
    if gpu.processes is None:
        users = why("processes", "processes are not listed")
    else:
        others = [process for process in gpu.processes if process.pid != os.getpid()]
        texts = (f"{other.name or 'process'} (pid {other.pid}) {size(other.used_bytes)}" for other in others)
        users = ", ".join(texts) or "no processes listed"
    yield _row("in use", f"{size(gpu.used_bytes)} used", users)
    if gpu.mig:
        yield _row("MIG", f"instance {gpu.mig_profile or MISSING} of {gpu.mig_parent or MISSING}")
    elif "mig" in gpu.reasons:
        yield _row("MIG", "on", why("mig"))
    versions = (("supports CUDA", gpu.cuda_driver), ("PyTorch built with CUDA", gpu.cuda_torch))
    cuda = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    yield _row("driver", gpu.driver or MISSING, cuda)
    capability = gpu.compute_capability
    shown = MISSING if capability is None else f"{capability[0]}.{capability[1]}"
    yield _row("compute", f"capability {shown}", why("compute_capability"))
    profile = gpu.profile
    if profile is None:
        yield _row("peak", MISSING, why("profile"))
    else:
        yield from peak_rows(profile, why("profile"))
    if gpu.uuid is not None:
        yield _row("id", gpu.uuid)


def peak_rows(profile: GpuProfile, why: str | None = None) -> Iterator[tuple[str, str]]:
    """What a GPU can reach at most, by its published specifications."""
    rates = ", ".join(f"{kind} {number(value)}" for kind, value in profile.dense_tflops.items())
    yield _row("peak", f"dense peak TFLOP/s: {rates}", why)
    yield _row("", f"memory {number(profile.bandwidth_gb_s)} GB/s; {profile.source}")


def _host(host: Host) -> list[tuple[str, str]]:
    limit = "" if host.memory_limit_bytes is None else f"{size(host.memory_limit_bytes)} of "
    memory, why = f"{limit}{size(host.memory_total_bytes)}", host.reasons.get("memory_limit_bytes")
    return [
        _row("host", host.hostname),
        _row("CPU", host.cpu, f"bf16: {', '.join(host.bf16_units)}" if host.bf16_units else None),
        _row("cores", f"{host.usable_cpus:g} usable", host.reasons.get("usable_cpus")),
        _row("memory", memory, why),
    ]
