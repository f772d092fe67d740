"""The detected hardware as lines of text, with a reason for every value."""

from __future__ import annotations

import os

from ndd_engine.hardware.gpu import Gpu, Machine, Process
from ndd_engine.hardware.host import Host
from ndd_engine.text import MISSING, number, printable, size

_LABEL = 12


def machine_lines(machine: Machine) -> list[str]:
    """The GPUs and the host, with control characters escaped."""
    lines: list[str] = []
    for item in machine.cards:
        lines += [*_gpu_lines(item), ""]
    if not machine.cards:
        lines += [f"no CUDA GPU: {machine.reasons['nvml']}", ""]
    lines += [_line("device", machine.device, machine.reasons["device"]), *_host_lines(machine.host)]
    lines += [f"warning: {problem}" for problem in machine.problems]
    return [printable(line) for line in lines]


def _line(label: str, value: str, why: str | None = None) -> str:
    return f"{label:<{_LABEL}}{value}" + (f"  ({why})" if why else "")


def _gpu_lines(item: Gpu) -> list[str]:
    where = f"cuda:{item.index}" if item.index is not None else "no PyTorch device"
    lines = [
        item.name,
        _line("  device", where, item.reasons.get("index")),
        _line(
            "  memory",
            f"{size(item.memory_total_bytes)}, {size(item.free_bytes)} free",
            item.reasons.get("memory"),
        ),
        _line("  in use", *_in_use(item)),
    ]
    if item.mig:
        lines.append(
            _line("  MIG", f"instance {item.mig_profile or MISSING} of {item.mig_parent or MISSING}")
        )
    elif "mig" in item.reasons:
        lines.append(_line("  MIG", "on", item.reasons["mig"]))
    cuda = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("supports CUDA", item.cuda_driver),
            ("PyTorch built with CUDA", item.cuda_torch),
        )
        if version is not None
    )
    lines.append(_line("  driver", item.driver or MISSING, cuda))
    capability = item.compute_capability
    shown = MISSING if capability is None else f"{capability[0]}.{capability[1]}"
    lines.append(_line("  compute", f"capability {shown}", item.reasons.get("compute_capability")))
    profile = item.profile
    if profile is None:
        lines.append(_line("  peak", MISSING, item.reasons.get("profile")))
    else:
        rates = ", ".join(f"{kind} {number(value)}" for kind, value in profile.dense_tflops.items())
        lines.append(_line("  peak", f"dense peak TFLOP/s: {rates}", item.reasons.get("profile")))
        lines.append(_line("", f"memory {number(profile.bandwidth_gb_s)} GB/s; {profile.source}"))
    if item.uuid is not None:
        lines.append(_line("  id", item.uuid))
    return lines


def _in_use(item: Gpu) -> tuple[str, str | None]:
    """Memory in use, and the processes other than this one that use it."""
    if item.processes is None:
        return f"{size(item.used_bytes)} used", item.reasons.get("processes", "processes are not listed")
    there = [process for process in item.processes if process.pid != os.getpid()]
    who = ", ".join(_process(process) for process in there) or "no processes listed"
    return f"{size(item.used_bytes)} used", who


def _process(process: Process) -> str:
    return f"{process.name or 'process'} (pid {process.pid}) {size(process.used_bytes)}"


def _host_lines(host: Host) -> list[str]:
    limit, why = host.memory_limit_bytes, host.reasons.get("memory_limit_bytes")
    memory = (
        size(host.memory_total_bytes)
        if limit is None
        else f"{size(limit)} of {size(host.memory_total_bytes)}"
    )
    return [
        _line("host", host.hostname),
        _line("CPU", host.cpu, f"bf16: {', '.join(host.bf16_units)}" if host.bf16_units else None),
        _line("cores", f"{host.usable_cpus:g} usable", host.reasons.get("usable_cpus")),
        _line("memory", memory, why),
    ]
