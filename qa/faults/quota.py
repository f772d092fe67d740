"""Control groups with a CPU quota or a memory limit, where the machine lets this process make some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# Where version 1 and version 2 of control groups are mounted; only the root group is used.
PLACES = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
COUNTING = Path("/sys/fs/cgroup/cpuacct")
MEMORY = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PERIOD_US = 100_000


def missing(group: AbstractContextManager[object]) -> str:
    """Why this control group cannot be had here; "" if it can."""
    try:
        with group:
            return ""
    except OSError as error:
        return f"no such control group can be made here ({error.strerror})"


@contextmanager
def limited(cores: float) -> Iterator[None]:
    """Within this, these cores are all that this process and those that it starts may use. Raises OSError."""
    root = next((one for one in PLACES if (one / "cgroup.procs").is_file()), PLACES[0])
    # Version 1 may count the time in a controller of its own, whose groups have the same paths.
    roots = [root, *(one for one in (COUNTING,) if root != PLACES[1] and one.resolve() != root.resolve())]
    befores = [one / _own_group("cpu") for one in roots if (one / _own_group("cpu")).is_dir()]
    name, me = f"ndd-faults-{os.getpid()}", str(os.getpid())
    made: list[Path] = []
    try:
        for before in befores:
            (before / name).mkdir()
            made.append(before / name)
        quota, version_1 = round(cores * PERIOD_US), made[0] / "cpu.cfs_quota_us"
        if version_1.exists():
            (made[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            version_1.write_text(str(quota))
        else:
            (made[0] / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        for group in made:
            (group / "cgroup.procs").write_text(me)
        yield
    finally:
        for group in made:
            (group.parent / "cgroup.procs").write_text(me)
            group.rmdir()


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group with this limit, below that of this process, for processes that have ended after this. Raises OSError."""
    root = next((one for one in MEMORY if (one / "cgroup.procs").is_file()), MEMORY[0])
    group = root / _own_group("memory") / f"ndd-faults-{os.getpid()}"
    group.mkdir()
    try:
        version_1 = group / "memory.limit_in_bytes"
        (version_1 if version_1.exists() else group / "memory.max").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def _own_group(controller: str) -> str:
    """The path of this process's group below the root, of a controller or of version 2."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines())
    groups = {name: path for _, names, path in lines for name in names.split(",")}
    return groups.get(controller, groups.get("", "/")).lstrip("/")
