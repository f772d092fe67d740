"""The detected hardware as lines of text, with a reason for every value."""

from __future__ import annotations

import os

from ndd_engine.hardware.gpu import Gpu, Machine
from ndd_engine.hardware.host import Host
from ndd_engine.text import MISSING, number, printable, size

_LABEL = 12


def machine_lines(machine: Machine) -> list[str]:
    """The GPUs and the host, with control characters escaped."""
    lines: list[str] = []
    for item in machine.gpus:
        lines += [*_gpu_lines(item), ""]
    if not machine.gpus:
        lines += [f"no CUDA GPU: {machine.reasons['nvml']}", ""]
    why = machine.reasons["device"]
    if not machine.gpus and why == machine.reasons["nvml"]:
        why = ""  # said above
    lines += [_line("device", machine.device, why), *_host_lines(machine.host)]
    lines += [f"warning: {problem}" for problem in machine.problems]
    return [printable(line) for line in lines]


def _line(label: str, value: str, why: str | None = None) -> str:
    return f"{label:<{_LABEL}}{value}" + (f"  ({why})" if why else "")


def _gpu_lines(item: Gpu) -> list[str]:
    why = item.reasons.get
    where = f"cuda:{item.index}" if item.index is not None else "no PyTorch device"
    memory = f"{size(item.memory_total_bytes)}, {size(item.free_bytes)} free"
    lines = [item.name, _line("  device", where, why("index")), _line("  memory", memory, why("memory"))]
    lines.append(_line("  in use", f"{size(item.used_bytes)} used", _users(item)))
    if item.mig:
        mig = f"instance {item.mig_profile or MISSING} of {item.mig_parent or MISSING}"
        lines.append(_line("  MIG", mig))
    elif "mig" in item.reasons:
        lines.append(_line("  MIG", "on", why("mig")))
    versions = (("supports CUDA", item.cuda_driver), ("PyTorch built with CUDA", item.cuda_torch))
    cuda = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    lines.append(_line("  driver", item.driver or MISSING, cuda))
    capability = item.compute_capability
    shown = MISSING if capability is None else f"{capability[0]}.{capability[1]}"
    lines.append(_line("  compute", f"capability {shown}", why("compute_capability")))
    profile = item.profile
    if profile is None:
        lines.append(_line("  peak", MISSING, why("profile")))
    else:
        rates = ", ".join(f"{kind} {number(value)}" for kind, value in profile.dense_tflops.items())
        lines.append(_line("  peak", f"dense peak TFLOP/s: {rates}", why("profile")))
        lines.append(_line("", f"memory {number(profile.bandwidth_gb_s)} GB/s; {profile.source}"))
    return lines if item.uuid is None else [*lines, _line("  id", item.uuid)]


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


def _host_lines(host: Host) -> list[str]:
    limit = "" if host.memory_limit_bytes is None else f"{size(host.memory_limit_bytes)} of "
    memory, why = f"{limit}{size(host.memory_total_bytes)}", host.reasons.get("memory_limit_bytes")
    return [
        _line("host", host.hostname),
        _line("CPU", host.cpu, f"bf16: {', '.join(host.bf16_units)}" if host.bf16_units else None),
        _line("cores", f"{host.usable_cpus:g} usable", host.reasons.get("usable_cpus")),
        _line("memory", memory, why),
    ]
