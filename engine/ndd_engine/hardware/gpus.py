"""The machine: its CPU cores and memory, and its GPUs with their published specifications.

Cores and memory are those available to this process, after affinity and control groups. Each value has its reason.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

import ndd_profiles

# Version 1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits from the group of this process up to the root.

    cpu_quota: in cores (such as 1.5), None without a quota. cpu_usage: file with the CPU time under that quota;
    cpu_stat: file with the throttled time. memory: (group folder, limit in bytes) of each group with a limit.
    """

    version: int | None
    cpu_quota: float | None = None
    cpu_usage: Path | None = None
    memory: tuple[tuple[Path, int], ...] = ()
    cpu_stat: Path | None = None

    @property
    def memory_limit_bytes(self) -> int | None:
        """The tightest memory limit, None without one."""
        return min((limit for _, limit in self.memory), default=None)


def read_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process; none if the control groups are not readable. root: folder with proc/ and sys/."""
    memberships = _memberships(root)
    mounts = _mounts(root)
    groups = list(_chain(root, memberships, mounts, "cpu"))
    quotas = [(quota, depth) for depth, group in enumerate(groups) if (quota := _quota(group)) is not None]
    tightest = min(quotas, default=None)
    usage = stat = None
    if tightest is not None:
        usage = stat = groups[tightest[1]] / "cpu.stat"
        if (groups[tightest[1]] / "cpu.cfs_quota_us").exists():  # version 1 counts in a controller of its own
            counting = list(_chain(root, memberships, mounts, "cpuacct"))
            usage = counting[tightest[1]] / "cpuacct.usage" if len(counting) == len(groups) else None
    memory = []
    for group in _chain(root, memberships, mounts, "memory"):
        limit = _memory_limit(group)
        if limit is not None:
            memory.append((group, limit))
    version = None if not memberships else 1 if set(memberships) & {"cpu", "memory"} else 2
    return Limits(version, tightest[0] if tightest else None, usage, tuple(memory), stat)


def free_in_group(group: Path, limit: int) -> int:
    """Free bytes below a memory limit; the whole limit if the group's use is unknown.

    Pages of files count as free, also the active ones of a dataset that is read again and again: the kernel reclaims
    them before it ends a process. Pages of shared memory do not.
    """
    for usage, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        used = _read(group / usage).strip()
        if used.isdecimal():
            stat = group / "memory.stat"
            files = sum(_counter(stat, f"{prefix}{kind}_file", 1) or 0 for kind in ("inactive", "active"))
            return max(limit - max(int(used) - int(files), 0), 0)
    return limit


def used_s(limits: Limits) -> float | None:
    """Seconds of CPU time that the group with the quota has used; None without a quota or if they are not counted."""
    if limits.cpu_usage is None:
        return None
    text = _read(limits.cpu_usage).strip()
    return int(text) * 1e-9 if text.isdecimal() else _counter(limits.cpu_usage, "usage_usec", 1e-6)


def throttled_s(limits: Limits) -> float | None:
    """Seconds for which the quota has kept cores from the group, over all cores; None if they are not counted."""
    if limits.cpu_stat is None:
        return None
    found = _counter(limits.cpu_stat, "throttled_usec", 1e-6)
    return _counter(limits.cpu_stat, "throttled_time", 1e-9) if found is None else found


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed as memory ran out: in the control group of this process, or else in all.

    None if the kernel does not count them.
    """
    for group in _chain(root, _memberships(root), _mounts(root), "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (found := _counter(group / name, "oom_kill", 1)) is not None:
                return int(found)
    found = _counter(root / "proc/vmstat", "oom_kill", 1)
    return None if found is None else int(found)


def _counter(path: Path, name: str, unit: float) -> float | None:
    """A counter in a file of "name number" or "name: number kB" lines, times its unit; None if it is not there."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit
    return None


def _memberships(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" is version 2."""
    found: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _mounts(root: Path) -> dict[str, tuple[str, Path]]:
    """Controller -> (group at the root of the mount, mount point); "" is version 2."""
    found: dict[str, tuple[str, Path]] = {}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or not right or right[0] not in ("cgroup", "cgroup2"):
            continue
        place = (left[3], root / left[4].lstrip("/"))
        if right[0] == "cgroup2":
            found.setdefault("", place)
        else:
            for option in right[-1].split(","):
                found.setdefault(option, place)
    return found


def _chain(
    root: Path, memberships: dict[str, str], mounts: dict[str, tuple[str, Path]], controller: str
) -> Iterator[Path]:
    """Folders of the group of this process and of its parents up to the mount, innermost first."""
    key = controller if controller in memberships else ""
    if key not in memberships or key not in mounts:
        return
    top, place = mounts[key]
    group = PurePosixPath(memberships[key])
    try:
        inner = group.relative_to(top)
    except ValueError:  # a container's mount shows its own group as the root, under another path
        inner = PurePosixPath()
    if ".." in inner.parts:
        inner = PurePosixPath()
    folder = place / inner
    if not folder.is_dir():
        folder = place
    while True:
        yield folder
        if folder == place:
            return
        folder = folder.parent


def _quota(group: Path) -> float | None:
    """CPU quota of a group in cores; None without one."""
    words = _read(group / "cpu.max").split()
    if not words:
        words = [_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group / name).strip()
        if text.isdecimal():
            return int(text) if int(text) < _UNLIMITED else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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
    if (peak := _counter(Path("/proc/self/status"), "VmHWM:", 1024)) is not None:
        return int(peak)
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def detect_host(root: Path = Path("/"), affinity: int | None = None) -> Host:
    """Detect the host. root: folder with proc/ and sys/. affinity: cores this process may run on; None: detect."""
    reasons: dict[str, str] = {}
    try:
        lines = (root / "proc/stat").read_bytes().splitlines()
        counted = sum(line.startswith(b"cpu") and line[3:4].isdigit() for line in lines)
    except OSError:
        counted = 0
    logical = counted or os.cpu_count() or 1
    usable: float = logical
    reasons["usable_cpus"] = f"all {logical} cores: no CPU affinity, no quota"
    cores = usable_cores()
    allowed = affinity if affinity is not None else len(cores) if cores is not None else logical
    if allowed < logical:
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
    flags = _cpu_line(root, "flags", "features").split()
    return Host(
        hostname=socket.gethostname(),
        cpu=_cpu_model(root),
        logical_cores=logical,
        usable_cpus=int(usable) if usable == int(usable) else usable,
        memory_total_bytes=total,
        memory_limit_bytes=limit,
        reasons=reasons,
        bf16_units=tuple(unit for unit in _BF16 if unit in flags),
    )


def usable_cores() -> frozenset[int] | None:
    """The cores that this process may run on; None where the system has no affinity, as macOS."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def _cpu_model(root: Path) -> str:
    found = _cpu_line(root, "model name", "cpu model", "hardware")
    return " ".join(found.split()) or platform.processor() or platform.machine() or "unknown"


def _cpu_line(root: Path, *keys: str) -> str:
    """The value of the first line with one of the keys, or ""."""
    pairs = (line.partition(":") for line in _read(root / "proc/cpuinfo").splitlines())
    return next(
        (value.strip() for key, _, value in pairs if key.strip().lower() in keys and value.strip()), ""
    )


def _memory_total(root: Path) -> int | None:
    if (total := _counter(root / "proc/meminfo", "MemTotal:", 1024)) is not None:
        return int(total)
    try:
        return int(psutil.virtual_memory().total)
    except (OSError, RuntimeError, psutil.Error):
        return None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. used_bytes and name are None if the system hides them."""

    pid: int
    used_bytes: int | None
    name: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one MIG instance of it.

    index: torch's number ("cuda:0" is 0), None if torch does not see it or the order is unknown. nvml_index: NVML's
    number of the whole GPU (PCI bus order). uuid: begins with "GPU-" or "MIG-". mig_parent: UUID of the whole GPU.
    cuda_driver: newest CUDA version that the driver supports; cuda_torch: the version torch was built with. profile:
    published figures, None for an unknown GPU. free_bytes, used_bytes: at detection. reasons: where each value comes
    from, or why it is missing.
    """

    index: int | None
    nvml_index: int | None
    uuid: str | None
    name: str
    memory_total_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None = None
    cuda_driver: str | None = None
    cuda_torch: str | None = None
    mig: bool = False
    mig_parent: str | None = None
    mig_profile: str | None = None
    profile: GpuProfile | None = None
    processes: tuple[GpuProcess, ...] | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def because(self, key: str, reason: str, **changes: Any) -> Gpu:
        """A copy with the reason of a value, and changed fields."""
        return replace(self, reasons={**self.reasons, key: reason}, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; the `gpu` field of the run event."""
        body = asdict(replace(self, profile=None))
        body["profile"] = self.profile.to_dict() if self.profile is not None else None
        body["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        body["processes"] = [asdict(item) for item in self.processes] if self.processes is not None else None
        return body


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that a run can use.

    gpus: all GPUs found, including those torch does not see. chosen: the GPU of the run. device: "cpu" or "cuda:N", as
    for torch. reasons: "device" explains the choice; "nvml" and "torch" give their answers. problems: warnings.
    """

    gpus: tuple[Gpu, ...]
    chosen: Gpu | None
    device: str
    reasons: dict[str, str]
    host: Host
    problems: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """Free memory for a run: of the chosen GPU at detection, else of the host now; None if unknown."""
        return self.chosen.free_bytes if self.chosen is not None else free_memory()

    def to_dict(self) -> dict[str, Any]:
        """A JSON object. chosen: position in gpus, or null."""
        return {
            "device": self.device,
            "chosen": next((place for place, gpu in enumerate(self.gpus) if gpu is self.chosen), None),
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "host": self.host.to_dict(),
            "reasons": dict(self.reasons),
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """All GPUs and which of them are visible to torch. order: positions in gpus, in torch's order."""

    gpus: tuple[Gpu, ...]
    order: tuple[int, ...]
    reason: str
    problems: tuple[str, ...] = ()
    certain: bool = True


def names(gpus: Sequence[Gpu]) -> str:
    """The GPUs' names in one line, equal ones counted."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


_GIB = 1 << 30
# "NVIDIA A100-SXM4-80GB MIG 3g.40gb", with variants such as "1g.10gb+me" and "1c.3g.40gb".
_MIG = re.compile(r"^(?P<gpu>.+?)\s+MIG\s+(?P<profile>\S+)$")


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Published specifications of a GPU.

    memory_gb: nominal. bandwidth_gb_s: 10^9 bytes per second. sms: streaming multiprocessors. l2_mb: L2 cache in 10^6
    bytes. dense_tflops: format (bf16, fp16, tf32, fp32) -> peak in 10^12 operations per second without sparsity;
    unsupported formats are absent. note: why the peaks may not be reachable, or None.
    """

    slug: str
    name: str
    memory_gb: float
    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float]
    compute_capability: tuple[int, int]
    source: str
    match: tuple[str, ...]
    sms: int
    l2_mb: float
    memory_range_gb: tuple[float, float] | None = None
    note: str | None = None

    def peak_tflops(self, kind: str) -> float | None:
        """Dense peak TFLOP/s of "bf16", "fp16", "tf32" or "fp32"; None if the GPU does not support it."""
        return self.dense_tflops.get(kind)

    def is_named(self, name: str, flags: re.RegexFlag = re.NOFLAG) -> bool:
        """Whether an NVML name is that of this GPU. Others may have the same, with a different amount of memory."""
        return any(re.fullmatch(pattern, name, flags) for pattern in self.match)

    def to_dict(self) -> dict[str, Any]:
        """The specifications as JSON."""
        body = {key: value for key, value in asdict(self).items() if key not in ("match", "memory_range_gb")}
        return body | {"compute_capability": list(self.compute_capability)}


@cache
def load() -> tuple[GpuProfile, ...]:
    """All known GPUs. Raises ValueError or KeyError if a profile is malformed (a packaging error)."""
    return tuple(_parse(slug, ndd_profiles.read("gpus", slug)) for slug in ndd_profiles.names("gpus"))


def match(name: str, memory_bytes: int | None) -> GpuProfile | None:
    """The profile of the GPU with this NVML name, or None if unknown.

    memory_bytes distinguishes GPUs with the same name (RTX 3080 with 10 or 12 GB); without it they are unknown. A MIG
    instance gets the profile of its whole GPU with a note.
    """
    whole, mig = split_mig(name)
    for profile in load():
        if not profile.is_named(whole):
            continue
        if profile.memory_range_gb is not None and mig is None:
            low, high = profile.memory_range_gb
            if memory_bytes is None or not low <= memory_bytes / _GIB <= high:
                continue
        if mig is None:
            return profile
        return replace(profile, note=f"peaks of the whole GPU, of which MIG instance {mig} is a part")
    return None


def split_mig(name: str) -> tuple[str, str | None]:
    """(name of the whole GPU, MIG profile such as "3g.40gb" or None)."""
    found = _MIG.match(name.strip())
    return (found["gpu"], found["profile"]) if found else (name.strip(), None)


def _parse(slug: str, body: dict[str, Any]) -> GpuProfile:
    major, minor = body["compute_capability"].split(".")
    bounds = body.get("memory_range_gb")
    return GpuProfile(
        slug=slug,
        name=body["name"],
        memory_gb=body["memory_gb"],
        bandwidth_gb_s=body["bandwidth_gb_s"],
        dense_tflops=dict(body["dense_tflops"]),
        compute_capability=(int(major), int(minor)),
        source=body["source"],
        match=tuple(body["match"]),
        sms=body["sms"],
        l2_mb=body["l2_mb"],
        memory_range_gb=(float(bounds[0]), float(bounds[1])) if bounds else None,
        note=body.get("note"),
    )
