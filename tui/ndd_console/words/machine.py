"""The detected hardware in words, with a reason for every value."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ndd_engine.hardware.gpu import Gpu, Machine
from ndd_engine.hardware.host import Host
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


def _gpu(item: Gpu) -> list[tuple[str, str]]:
    why = item.reasons.get
    where = f"cuda:{item.index}" if item.index is not None else "no PyTorch device"
    memory = f"{size(item.memory_total_bytes)}, {size(item.free_bytes)} free"
    rows = [
        _row("GPU", item.name),
        _row("device", where, why("index")),
        _row("memory", memory, why("memory")),
    ]
    rows.append(_row("in use", f"{size(item.used_bytes)} used", _users(item)))
    if item.mig:
        mig = f"instance {item.mig_profile or MISSING} of {item.mig_parent or MISSING}"
        rows.append(_row("MIG", mig))
    elif "mig" in item.reasons:
        rows.append(_row("MIG", "on", why("mig")))
    versions = (("supports CUDA", item.cuda_driver), ("PyTorch built with CUDA", item.cuda_torch))
    cuda = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    rows.append(_row("driver", item.driver or MISSING, cuda))
    capability = item.compute_capability
    shown = MISSING if capability is None else f"{capability[0]}.{capability[1]}"
    rows.append(_row("compute", f"capability {shown}", why("compute_capability")))
    profile = item.profile
    if profile is None:
        rows.append(_row("peak", MISSING, why("profile")))
    else:
        rates = ", ".join(f"{kind} {number(value)}" for kind, value in profile.dense_tflops.items())
        rows.append(_row("peak", f"dense peak TFLOP/s: {rates}", why("profile")))
        rows.append(_row("", f"memory {number(profile.bandwidth_gb_s)} GB/s; {profile.source}"))
    return rows if item.uuid is None else [*rows, _row("id", item.uuid)]


def _users(item: Gpu) -> str:
    """The processes other than this one that use the memory."""
    if item.processes is None:
        return item.reasons.get("processes", "processes are not listed")
    texts = [
        f"{process.name or 'process'} (pid {process.pid}) {size(process.used_bytes)}"
        for process in item.processes
        if process.pid != os.getpid()
    ]
    return ", ".join(texts) or "no processes listed"


def _host(host: Host) -> list[tuple[str, str]]:
    limit = "" if host.memory_limit_bytes is None else f"{size(host.memory_limit_bytes)} of "
    memory, why = f"{limit}{size(host.memory_total_bytes)}", host.reasons.get("memory_limit_bytes")
    return [
        _row("host", host.hostname),
        _row("CPU", host.cpu, f"bf16: {', '.join(host.bf16_units)}" if host.bf16_units else None),
        _row("cores", f"{host.usable_cpus:g} usable", host.reasons.get("usable_cpus")),
        _row("memory", memory, why),
    ]
