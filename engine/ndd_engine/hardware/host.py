"""CPU cores and memory available to this process, after affinity and control groups, with reasons."""

from __future__ import annotations

import os
import platform
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .cgroup import free_in_group, read_limits

# Flags of /proc/cpuinfo, of x86 and ARM.
_BF16 = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU and the memory available to this process.

    usable_cpus: cores, fractional under a quota. memory_limit_bytes: None without a limit below the total. reasons:
    field -> explanation of its value. bf16_units: CPU instructions for bfloat16 products.
    """

    hostname: str
    cpu: str
    logical_cores: int
    usable_cpus: float
    memory_total_bytes: int | None
    memory_limit_bytes: int | None
    reasons: dict[str, str] = field(default_factory=dict)
    bf16_units: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def usable_threads(host: Host) -> int:
    """Number of threads that can run in parallel: whole usable cores, at least one."""
    return max(1, int(host.usable_cpus))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can allocate: available memory, limited by its control groups."""
    available = int(psutil.virtual_memory().available)
    return min((available, *(free_in_group(group, limit) for group, limit in read_limits(root).memory)))


def resident_peak() -> int | None:
    """Peak resident bytes of this process since its start or the last reset in /proc; None if unknown."""
    if (peak := _counted_bytes(Path("/proc/self/status"), "VmHWM:")) is not None:
        return peak
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def detect_host(root: Path = Path("/"), affinity: int | None = None) -> Host:
    """Detect the host. root: folder with proc/ and sys/. affinity: cores this process may run on; None: detect."""
    reasons: dict[str, str] = {}
    logical = _logical_cores(root)
    usable: float = logical
    reasons["usable_cpus"] = f"all {logical} cores: no CPU affinity, no quota"
    allowed = affinity if affinity is not None else _affinity()
    if allowed is not None and allowed < logical:
        usable = allowed
        reasons["usable_cpus"] = f"{allowed} of {logical} cores: CPU affinity"
    limits = read_limits(root)
    if limits.cpu_quota is not None and limits.cpu_quota < usable:
        usable = limits.cpu_quota
        reasons["usable_cpus"] = f"cgroup quota {usable:g} cores (of {logical})"
    total = _memory_total(root)
    limit = limits.memory_limit_bytes
    if total is None:
        reasons["memory_total_bytes"] = "the system does not report its total memory"
    if limit is None:
        reasons["memory_limit_bytes"] = "no cgroup memory limit"
    elif total is not None and limit >= total:
        limit = None
        reasons["memory_limit_bytes"] = "the cgroup memory limit exceeds the total memory"
    else:
        reasons["memory_limit_bytes"] = f"cgroup v{limits.version} memory limit"
    return Host(
        hostname=socket.gethostname(),
        cpu=_cpu_model(root),
        logical_cores=logical,
        usable_cpus=int(usable) if usable == int(usable) else usable,
        memory_total_bytes=total,
        memory_limit_bytes=limit,
        reasons=reasons,
        bf16_units=tuple(unit for unit in _BF16 if unit in _cpu_flags(root)),
    )


def _affinity() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no affinity
        return None


def _logical_cores(root: Path) -> int:
    try:
        lines = (root / "proc/stat").read_bytes().splitlines()
        counted = sum(line.startswith(b"cpu") and line[3:4].isdigit() for line in lines)
    except OSError:
        counted = 0
    return counted or os.cpu_count() or 1


def _cpu_model(root: Path) -> str:
    found = _cpu_line(root, "model name", "cpu model", "hardware")
    return " ".join(found.split()) or platform.processor() or platform.machine() or "unknown"


def _cpu_flags(root: Path) -> list[str]:
    return _cpu_line(root, "flags", "features").split()


def _cpu_line(root: Path, *keys: str) -> str:
    """The value of the first line with one of the keys, or ""."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next(
        (value.strip() for key, _, value in pairs if key.strip().lower() in keys and value.strip()), ""
    )


def _memory_total(root: Path) -> int | None:
    if (total := _counted_bytes(root / "proc/meminfo", "MemTotal:")) is not None:
        return total
    try:
        return int(psutil.virtual_memory().total)
    except (OSError, RuntimeError, psutil.Error):
        return None


def _counted_bytes(path: Path, key: str) -> int | None:
    """Bytes of the line "key 123 kB" in a file of /proc; None without one."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return None
