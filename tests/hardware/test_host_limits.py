"""Cores and memory are those that this process may use, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ndd_engine.hardware.gpus import detect_host, free_memory, usable_threads

Tree = Callable[[dict[str, str]], Path]
GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "33 31 0:29 {0} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:30 {0} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def machine(cores: int = 64, gib: int = 256) -> dict[str, str]:
    stat = "cpu  1 0 1 8 0 0 0 0 0 0\n" + "".join(f"cpu{core} 1 0 1 8 0 0 0 0 0 0\n" for core in range(cores))
    return {
        "proc/stat": stat + "intr 1 2 3\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC  9654\n",
        "proc/meminfo": f"MemTotal:       {gib * GIB // 1024} kB\n",
    }


def test_without_limits_everything_is_usable(tree: Tree) -> None:
    host = detect_host(tree(machine()), affinity=64)
    assert (host.logical_cores, host.usable_cpus, host.cpu) == (64, 64, "AMD EPYC 9654")
    assert host.memory_total_bytes == 256 * GIB and host.memory_limit_bytes is None
    assert "no cgroup" in host.reasons["memory_limit_bytes"]


@pytest.mark.parametrize(
    ("line", "units"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16", ("amx_bf16", "avx512_bf16")),
        ("Features\t: fp asimd bf16", ("bf16",)),
        ("flags\t\t: fpu avx2", ()),
        ("", ()),
    ],
)
def test_instructions_for_bf16(tree: Tree, line: str, units: tuple[str, ...]) -> None:
    files = machine()
    files["proc/cpuinfo"] += line + "\n"
    assert detect_host(tree(files), affinity=64).bf16_units == units


def test_affinity(tree: Tree) -> None:
    host = detect_host(tree(machine()), affinity=2)
    assert host.usable_cpus == 2 and "affinity" in host.reasons["usable_cpus"]


def test_v2_takes_the_tightest_of_nested_groups(tree: Tree) -> None:
    files = machine() | {
        "proc/self/cgroup": "0::/kube/pod/container\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/kube/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/kube/pod/memory.max": "max\n",
        "sys/fs/cgroup/kube/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/kube/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kube/pod/container/memory.max": f"{32 * GIB}\n",
    }
    host = detect_host(tree(files), affinity=64)
    assert host.usable_cpus == 1.5 and "quota 1.5" in host.reasons["usable_cpus"]
    assert host.memory_limit_bytes == 16 * GIB and "v2" in host.reasons["memory_limit_bytes"]
    assert usable_threads(host) == 1


@pytest.mark.parametrize(("quota", "cores", "threads"), [(400_000, 4, 4), (50_000, 0.5, 1)])
def test_v2_container_that_sees_its_group_as_the_root(
    tree: Tree, quota: int, cores: float, threads: int
) -> None:
    files = machine() | {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpu.max": f"{quota} 100000\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
    }
    host = detect_host(tree(files), affinity=64)
    assert (host.usable_cpus, host.memory_limit_bytes) == (cores, 8 * GIB)
    assert usable_threads(host) == threads


@pytest.mark.parametrize("version", [1, 2])
def test_what_others_in_the_group_use_is_not_free(tree: Tree, version: int) -> None:
    mib = 1 << 20
    if version == 2:
        groups = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT}
        folder, names, prefix = "sys/fs/cgroup", ("memory.max", "memory.current"), ""
    else:
        groups = {"proc/self/cgroup": "4:memory:/\n", "proc/self/mountinfo": V1_MOUNTS.format("/")}
        folder, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        prefix = "total_"
    stat = f"anon {4 * mib}\n{prefix}inactive_file {2 * mib}\n{prefix}active_file {mib}\n"
    files = machine() | groups | {f"{folder}/{names[0]}": f"{8 * mib}\n"}
    assert free_memory(tree(files)) == 8 * mib
    files |= {f"{folder}/{names[1]}": f"{7 * mib}\n", f"{folder}/memory.stat": stat}
    assert free_memory(tree(files)) == 4 * mib  # pages of files are reclaimed


@pytest.mark.parametrize("top", ["/", "/docker/abc"])
def test_v1_on_the_host_and_in_a_container(tree: Tree, top: str) -> None:
    below = "docker/abc/" if top == "/" else ""
    files = machine() | {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS.format(top),
        f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_quota_us": "250000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_period_us": "100000\n",
        f"sys/fs/cgroup/memory/{below}memory.limit_in_bytes": f"{4 * GIB}\n",
    }
    host = detect_host(tree(files), affinity=64)
    assert (host.usable_cpus, host.memory_limit_bytes) == (2.5, 4 * GIB)
    assert "v1" in host.reasons["memory_limit_bytes"] and usable_threads(host) == 2


def test_v1_without_limits(tree: Tree) -> None:
    files = machine() | {
        "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
        "proc/self/mountinfo": V1_MOUNTS.format("/"),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    host = detect_host(tree(files), affinity=64)
    assert (host.usable_cpus, host.memory_limit_bytes) == (64, None)


def test_garbage_and_absence_are_no_limits(tree: Tree) -> None:
    files = {"proc/self/cgroup": "nonsense\n", "proc/self/mountinfo": "x - cgroup2\n", "proc/stat": ""}
    host = detect_host(tree(files), affinity=None)
    assert host.logical_cores >= 1 and host.memory_limit_bytes is None and usable_threads(host) >= 1


def test_this_machine() -> None:
    host = detect_host()
    assert 1 <= usable_threads(host) <= host.logical_cores
    assert host.memory_total_bytes is not None and host.memory_total_bytes > 64 << 20
    assert host.to_dict()["reasons"] == host.reasons
