"""CPU quota and memory limits of the control groups of this process: versions 1 and 2, nested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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

    Inactive file pages count as free: the kernel reclaims them first.
    """
    names = (("memory.current", "inactive_file "), ("memory.usage_in_bytes", "total_inactive_file "))
    for usage, inactive in names:
        used = _read(group / usage).strip()
        if used.isdecimal():
            lines = _read(group / "memory.stat").splitlines()
            given_up = next((int(line.split()[1]) for line in lines if line.startswith(inactive)), 0)
            return max(limit - max(int(used) - given_up, 0), 0)
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


def _counter(path: Path, name: str, unit: float) -> float | None:
    """A counter in a file of "name number" lines, times its unit; None if it is not there."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
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
