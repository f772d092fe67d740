"""Other processes on the cores: how many cores they use, which they are, and never the run's own; and quotas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import LIMIT_S

from ndd_engine.hardware.counters import MOST, HostCounters, Neighbours, ancestors
from ndd_engine.hardware.gpus import detect_host, read_limits
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.record.rundir import RunDir, RunLock


@pytest.mark.parametrize(
    ("busy", "own", "foreign", "taken"),
    [
        (20.0, 4.0, 1.6, "other processes used 1.6 of 2 cores"),
        (20.0, 20.0, 0.0, ""),  # nobody else
        (12.0, 4.0, 0.8, ""),  # cores are free
        (20.0, 21.0, 0.0, ""),  # the clocks of the kernel tick by 10 ms
        (30.0, 4.0, 2.6, "other processes used 2.0 of 2 cores"),
    ],
)
def test_cores_of_others_count_where_none_is_left(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, foreign: float, taken: str
) -> None:
    watch = LoadWatch()
    looks = iter([(0.0, 100.0, 5.0), (10.0, 100.0 + busy, 5.0 + own), (10.0, 100.0 + busy, 5.0 + own)])
    monkeypatch.setattr(watch, "_cores", frozenset({0, 1}))
    monkeypatch.setattr(watch, "_look", lambda: next(looks))
    watch.restart()
    assert watch.foreign() == pytest.approx(foreign)
    assert watch.taken() == taken


def test_the_clocks_are_read() -> None:
    watch = LoadWatch()
    now, busy, own = watch._look()
    assert now > 0 and busy > 0 and own > 0 and watch.foreign() >= 0


ALL = frozenset(range(4096))
SPIN = "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end: pass"
# Starts a process that computes, says its id and ends: the process then belongs to nobody here.
ORPHAN = (
    "import subprocess, sys\n"
    "quiet = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)\n"
    f"print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], start_new_session=True, **quiet).pid)"
)


@pytest.fixture
def neighbour() -> Iterator[int]:
    """A real process of somebody else that keeps a core busy."""
    pid = int(subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, check=True).stdout)
    # It may wait for a core itself; a search that comes too early is not repeated soon where there are many processes.
    deadline = time.monotonic() + LIMIT_S
    while psutil.Process(pid).cpu_times().user < 0.3 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_samples_name_a_busy_process_from_the_third_on(neighbour: int) -> None:
    found = HostCounters(detect_host(), None, lambda *_: None)
    samples = []
    deadline = time.monotonic() + LIMIT_S
    while len(samples) < 3 or (not named(samples[-1], neighbour) and time.monotonic() < deadline):
        samples.append(found.read()["neighbours"])
        found._neighbours._next = 0.0
        time.sleep(0.5)
    assert samples[:2] == [None, None]
    assert named(samples[-1], neighbour)
    for item in samples[-1]:
        assert item["pid"] != neighbour or (item["name"].startswith("python") and 0 < item["cores"] < 1.5)


def named(sample: list[dict[str, Any]] | None, pid: int) -> bool:
    """Whether a sample names the process, or as many others as it names at most."""
    return sample is not None and (pid in {item["pid"] for item in sample} or len(sample) == MOST)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_the_run_started_itself_is_no_neighbour() -> None:
    worker = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        neighbours = Neighbours(Path("/"), ALL)
        neighbours.read(0.9)
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:  # this process is busy as well
            pass
        found = neighbours.read(0.9)
    finally:
        worker.kill()
        worker.wait()
    assert found is not None
    assert not {worker.pid, os.getpid()} & {item["pid"] for item in found}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_another_rank_of_the_run_is_no_neighbour_and_its_cores_are_not_used_by_others(neighbour: int) -> None:
    found = HostCounters(detect_host(), None, lambda *_: None, ranks=(neighbour,))
    samples = []
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and not (samples and (samples[-1]["ranks_cpu_percent"] or 0) > 10):
        samples.append(found.read())
        found._neighbours._next = 0.0
        time.sleep(0.5)
    assert samples[0]["ranks_cpu_percent"] is None
    assert 10 < samples[-1]["ranks_cpu_percent"] < 150
    assert all(item["pid"] != neighbour for sample in samples for item in sample["neighbours"] or ())


def put(
    root: Path,
    pid: int,
    ticks: int,
    name: str,
    parent: int = 1,
    core: int = 0,
    session: int = 0,
    terminal: int = 0,
) -> None:
    """A process in /proc that has computed for so long."""
    words = ["R", parent, 0, session, terminal, *[0] * 6, ticks, 0, *[0] * 6, 77, *[0] * 16, core, 0]
    (root / f"proc/{pid}").mkdir(exist_ok=True)
    (root / f"proc/{pid}/stat").write_text(f"{pid} ({name}) {' '.join(map(str, words))}\n")


def test_the_three_busiest_on_our_cores_with_names_that_cannot_steer_a_terminal(
    tree: Callable[[dict[str, str]], Path],
) -> None:
    names = {11: "a) (b", 12: "\x1b[31mred", 13: "c", 14: "d", 15: "elsewhere", 16: "idle"}
    root = tree({"proc/loadavg": "\n"})

    def write(spent: dict[int, int]) -> None:
        for pid, ticks in spent.items():
            put(root, pid, ticks, names[pid], core=9 if pid == 15 else 0)

    write({11: 100, 12: 0, 13: 500, 15: 0, 16: 10_000})
    neighbours = Neighbours(root, frozenset({0, 1}))
    assert neighbours.read(2.0) is None
    time.sleep(0.25)
    # 14 began meanwhile; 16 did nothing; 15 ran on a core that is not ours.
    write({11: 120, 12: 40, 13: 510, 14: 30, 15: 900})
    found = neighbours.read(2.0)
    assert found is not None
    assert [(item["pid"], item["name"]) for item in found] == [(12, "\\x1b[31mred"), (14, "d"), (11, "a) (b")]


def test_own_runs_are_called_by_their_names(tree: Callable[[dict[str, str]], Path], tmp_path: Path) -> None:
    root, run = tree({"proc/loadavg": "\n"}), RunDir(tmp_path / "runs" / "mine-001")
    run.path.mkdir(parents=True)
    run.config.write_text("")
    lock = RunLock(run)
    lock.acquire()  # as the process that trains, or that observes one

    def write(ticks: int) -> None:
        # 21 is a worker of the run; 22 is a script that another console observes; 23 is neither.
        for pid, name, parent in ((21, "python", os.getpid()), (22, "python", 1), (23, "make", 1)):
            put(root, pid, ticks * pid, name, parent)
        (root / "proc" / "22" / "environ").write_bytes(b"A=b\0NDD_WATCH_CAPTURES=/elsewhere/runs/train-7\0")

    class Others(Neighbours):
        def _finish(self, now: float) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 4_194_999)  # this process is that of the other run
                super()._finish(now)

    try:
        neighbours = Others(root, frozenset({0}), runs=tmp_path / "runs")
        write(0)
        neighbours.read(2.0)
        time.sleep(0.25)
        write(1)
        found = {item["pid"]: (item["name"], item["stoppable"]) for item in neighbours.read(2.0) or ()}
    finally:
        lock.release()
    assert found[21] == ('your run "mine-001"', True) and found[22] == ('your run "train-7"', True)
    assert found[23][0] == "make"


def counters(root: Path) -> HostCounters:
    def note(signal: str, error: Exception) -> None:
        assert signal != "cpu_throttled", error

    return HostCounters(detect_host(root, 8), None, note, root=root)


V1 = {
    "proc/self/cgroup": "2:cpuacct:/job\n1:cpu:/job\n",
    "proc/self/mountinfo": (
        "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "31 23 0:27 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct\n"
    ),
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
    "sys/fs/cgroup/cpuacct/job/cpuacct.usage": "0\n",
}
V2 = {
    "proc/self/cgroup": "0::/job\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/job/cpu.max": "100000 100000\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
}


@pytest.mark.parametrize(
    ("files", "after"),
    [
        (
            V1,
            {
                "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 9\nthrottled_time 3000000000\n",
                "sys/fs/cgroup/cpuacct/job/cpuacct.usage": "1000000000\n",
            },
        ),
        (
            V2,
            {"sys/fs/cgroup/job/cpu.stat": "usage_usec 1000000\nnr_throttled 9\nthrottled_usec 3000000\n"},
        ),
    ],
)
def test_time_that_a_quota_takes(
    tree: Callable[[dict[str, str]], Path], files: dict[str, str], after: dict[str, str]
) -> None:
    root = tree(files)
    found = counters(root)
    assert found.read()["cpu_throttled"] is None
    time.sleep(0.1)
    for path, text in after.items():
        (root / path).write_text(text)
    # 3 s throttled on all cores and 1 s granted: three quarters of the requested time.
    assert found.read()["cpu_throttled"] == 0.75
    time.sleep(0.1)
    assert found.read()["cpu_throttled"] == 0.0


def test_without_a_quota_nothing_is_said_of_throttling(tree: Callable[[dict[str, str]], Path]) -> None:
    root = tree({**V2, "sys/fs/cgroup/job/cpu.max": "max 100000\n"})
    assert read_limits(root).cpu_stat is None
    found = counters(root)
    found.read()
    time.sleep(0.1)
    assert found.read()["cpu_throttled"] is None


def test_only_the_users_own_processes_may_be_stopped(
    tree: Callable[[dict[str, str]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pid -> (name, parent, session, terminal)
    listed = {
        1: ("systemd", 0, 1, 0), 20: ("kworker", 2, 0, 0), 30: ("training", 1, 30, 0), 31: ("sshd", 1, 31, 0),
        32: ("shell", 1, 32, 34816),
    }  # fmt: skip
    root = tree({"proc/loadavg": "\n"})

    def found(uid: int, *pids: int) -> dict[int, bool]:
        monkeypatch.setattr(os, "getuid", lambda: uid)
        neighbours = Neighbours(root, frozenset({0}))
        for ticks in (0, 50):
            for pid in pids:
                name, parent, session, terminal = listed[pid]
                put(root, pid, ticks, name, parent, session=session, terminal=terminal)
            if not ticks:
                neighbours.read(2.0)
                time.sleep(0.25)
        return {item["pid"]: item["stoppable"] for item in neighbours.read(2.0) or ()}

    owner = (root / "proc").stat().st_uid
    monkeypatch.setattr("ndd_engine.hardware.counters.PEOPLE", 0)
    assert found(owner, 1, 20, 30) == {1: False, 20: False, 30: True}
    assert found(owner, 31, 32) == {31: False, 32: True}
    assert found(owner + 1, 30, 32) == {30: False, 32: False}  # of another user
    # As root, as in a container, a process without a terminal may be a part of the system.
    monkeypatch.setattr("ndd_engine.hardware.counters.PEOPLE", owner + 1)
    assert found(owner, 30, 32) == {30: False, 32: True}


def test_what_this_process_depends_on_is_not_to_be_stopped() -> None:
    parents = {9: 8, 8: 5, 5: 1, 1: 0, 7: 1}
    assert ancestors(9, parents) == {8, 5, 1}
    assert ancestors(3, {3: 3}) == {3}
