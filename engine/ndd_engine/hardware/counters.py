"""Counters of the host, of the process that trains and its children, and of other processes on the cores."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ndd_engine.record.event import HOST_KEYS
from ndd_engine.record.rundir import all_runs
from ndd_engine.text import printable
from ndd_watch import CAPTURES

from .gpus import Host, free_in_group, read_limits, throttled_s, usable_cores, used_s
from .process_state import ProcessState, own_memory, state_of

# Minimum cores used by others to start a search.
NOTICEABLE = 0.3
# Minimum cores used by a process to report it.
LEAST = 0.05
MOST = 3
# Before the name of a run, in place of that of its process.
YOUR_RUN = "your run "
# Smallest user id of a person; see login.defs(5).
PEOPLE = 1000
# Processes of a user that belong to the session or to a job scheduler rather than to a computation.
SYSTEM = frozenset({
    "systemd", "init", "(sd-pam)", "dbus-daemon", "dbus-broker", "gnome-shell", "Xorg", "Xwayland", "kwin_x11",
    "kwin_wayland", "plasmashell", "pipewire", "pulseaudio", "wireplumber", "sshd", "sshd-session", "login", "screen",
    "tmux: server", "containerd", "containerd-shim", "dockerd", "docker-init", "tini", "slurmstepd", "slurmd",
    "kubelet",
})  # fmt: skip
# Samples from one search to the next.
EVERY = 5
# A search may take at most this share of the time, however many processes there are.
SHARE = 1e-3
# Minimum seconds between the two measurements: CPU time is counted in ticks of 10 ms.
_APART_S = 0.2

# (process id, start time in ticks): process ids are reused.
_Key = tuple[int, int]


class Neighbours:
    """Finds the busiest other processes by reading /proc twice, one sample apart. Not thread-safe.

    cores: those that this process may run on; processes on other cores are ignored. run: processes of the same run,
    which are no neighbours either, as this one and all that these have started.
    """

    def __init__(
        self, root: Path, cores: frozenset[int], run: Sequence[int] = (), runs: Path | None = None
    ) -> None:
        """runs: the folder of the runs, whose processes are called after them."""
        self._proc, self._cores, self._run, self._runs = root / "proc", cores, run, runs
        self._first: tuple[dict[_Key, float], float] | None = None
        self._found: list[dict[str, Any]] | None = None
        self._samples = EVERY
        self._spent = 0.0
        self._next = 0.0

    def read(self, others: float | None) -> list[dict[str, Any]] | None:
        """Call once per sample with the cores that others used in it (None if unknown).

        Returns [{"pid", "name", "cores", "stoppable"}, …], the busiest first; empty if none is visible (other
        containers); None while others use few cores or before the first search. stoppable: it is the user's own, not
        one of the system's, and none that this process depends on. Raises OSError without /proc.
        """
        self._samples += 1
        now = time.monotonic()
        if self._first is not None:
            if now - self._first[1] >= _APART_S:
                self._finish(now)
        elif others is None or others <= NOTICEABLE:
            self._found = None
        elif self._samples >= EVERY and now >= self._next:
            self._samples = 0
            begin = time.thread_time()
            spent = {(item.pid, item.began): item.cpu_s for item in self._processes()}
            self._spent = time.thread_time() - begin
            self._first = (spent, now)
        return self._found

    def _finish(self, now: float) -> None:
        assert self._first is not None
        (before, then), self._first = self._first, None
        begin = time.thread_time()
        processes = list(self._processes())
        parents = {item.pid: item.parent for item in processes}
        ours = set().union(*(family(pid, parents) for pid in (os.getpid(), *self._run)))
        found: list[tuple[float, ProcessState]] = []
        for item in processes:
            # A new process started between the two reads.
            cores = (item.cpu_s - before.get((item.pid, item.began), 0.0)) / (now - then)
            if cores >= LEAST and item.pid not in ours and item.core in self._cores:
                found.append((cores, item))
        found.sort(key=lambda pair: pair[0], reverse=True)
        here = next((item for item in processes if item.pid == os.getpid()), None)
        above = ancestors(os.getpid(), parents)
        runs = self._live_runs() if found else {}
        self._found = []
        for cores, item in found[:MOST]:
            pid = item.pid
            owners = [self._observed(pid), *map(runs.get, (pid, *ancestors(pid, parents)))]
            run = next(filter(None, owners), None)
            may = pid not in above and (run is not None or self._stoppable(item, here))
            name = printable(item.name) if run is None else f'{YOUR_RUN}"{printable(run)}"'
            self._found.append({"pid": pid, "name": name, "cores": round(cores, 2), "stoppable": may})
        self._spent += time.thread_time() - begin
        self._next = now + self._spent / SHARE

    def _live_runs(self) -> dict[int, str]:
        """Id of the process that records a live run -> its name."""
        owners = {run.name: run.live_owner() for run in (all_runs(self._runs) if self._runs else ())}
        here = os.uname().nodename
        return {owner["pid"]: name for name, owner in owners.items() if owner and owner["host"] == here}

    def _observed(self, pid: int) -> str:
        """The run of an observed script, by the environment of its process; "" for others."""
        try:
            variables = (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's
            return ""
        named = next((one for one in variables if one.startswith(f"{CAPTURES}=".encode())), b"")
        return Path(os.fsdecode(named)).name if named else ""

    def _stoppable(self, item: ProcessState, here: ProcessState | None) -> bool:
        """Whether the user may stop it: their own process, and no part of the system.

        In a container everything may run as root: then only processes with a terminal or of the same session count.
        """
        pid = item.pid
        if pid == 1 or item.session == 0 or item.name in SYSTEM:
            return False  # kernel threads have session 0
        try:
            owner = (self._proc / str(pid)).stat().st_uid
        except OSError:
            return False
        if owner != os.getuid():
            return False
        same_session = here is not None and item.session == here.session
        return owner >= PEOPLE or item.terminal != 0 or same_session

    def _processes(self) -> list[ProcessState]:
        """All processes that are not hidden."""
        pids = (int(entry) for entry in os.listdir(self._proc) if entry.isdecimal())  # noqa: PTH208
        return [state for pid in pids if (state := state_of(pid, self._proc)) is not None]


def ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    """The process's parent, its parent, and so on."""
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) > 0 and pid not in found:
        found.add(pid)
    return found


def family(pid: int, parents: dict[int, int]) -> set[int]:
    """The process and its descendants."""
    offspring: dict[int, list[int]] = {}
    for child, parent in parents.items():
        offspring.setdefault(parent, []).append(child)
    family, waiting = {pid}, [pid]
    while waiting:
        children = offspring.get(waiting.pop(), [])
        family.update(children)
        waiting.extend(children)
    return family


Json = dict[str, Any]

# Minimum seconds for a rate: the kernel counts CPU time in ticks of 10 ms.
SHORTEST_S = 0.05
SLOW_EVERY = 5
# From one search for child processes to the next, and the maximum share of the time for them: a search reads the state
# of all processes.
_SEARCH_S = 5.0
_SEARCH_SHARE = 2e-3
# Commands of the helper processes of multiprocessing, which load no data.
_TRACKER, _SERVER = "multiprocessing.resource_tracker", "multiprocessing.forkserver"

Note = Callable[[str, Exception], None]


class HostCounters:
    """Reads the counters. Not thread-safe.

    note: called with (counter, error) for every part that failed and is null. ranks: process ids of the other ranks of
    this run on this host.
    """

    def __init__(
        self,
        host: Host,
        run_dir: Path | None,
        note: Note,
        ranks: Sequence[int] = (),
        pid: int | None = None,
        root: Path = Path("/"),
    ) -> None:
        """pid: of the first process of the run; this one by default. root: folder with proc/ and sys/.

        Raises psutil.Error if the process has ended.
        """
        self._host, self._run_dir, self._note, self._root = host, run_dir, note, root
        self._first = psutil.Process(pid)
        self._trainer: psutil.Process | None = self._first
        self._ranks = tuple(ranks)
        self._limits = read_limits(root)
        self._cores = usable_cores() or frozenset(range(psutil.cpu_count() or 1))
        self._before: dict[str, Any] = {}
        self._count = 0
        self._disk_free: int | None = None
        self._next_search = 0.0
        self._family: list[psutil.Process] = [self._first]
        self._rank_family: list[psutil.Process] = []
        self._workers: list[psutil.Process] = []
        self._worker_memory = WorkerMemory(root)
        runs = run_dir.parent if run_dir is not None else None
        self._neighbours = Neighbours(root, self._cores, (self._first.pid, *self._ranks), runs)

    @property
    def family(self) -> set[int]:
        """Ids of the first process of the run and its descendants, as of the last search."""
        return {process.pid for process in self._family}

    def follow(self, pid: int | None) -> None:
        """Memory, storage and workers are those of this process from now on; of none for None."""
        self._trainer, self._workers, self._next_search = None, [], 0.0
        self._before.pop("io", None)
        if pid is not None:
            try:
                self._trainer = self._first if pid == self._first.pid else psutil.Process(pid)
            except psutil.Error as error:
                self._note("rss_bytes", error)

    def read(self, fresh: bool = False) -> Json:
        """All HOST_KEYS; rates are since the last call, null at the first. fresh: search for child processes now."""
        body: Json = dict.fromkeys(HOST_KEYS)
        slow = fresh or self._count % SLOW_EVERY == 0
        for counter, part in (
            ("cpu_percent", self._read_cores),
            ("process_cpu_percent", lambda: self._read_processes(fresh)),
            ("rss_bytes", self._read_trainer),
            ("swap_bytes", self._read_status),
            ("disk_read_bytes_s", self._read_io),
            ("memory_available_bytes", self._read_memory),
            ("disk_free_bytes", lambda: self._read_space(slow)),
            ("neighbours", lambda: self._read_neighbours(body)),
            ("cpu_throttled", self._read_throttled),
        ):
            try:
                body.update(part())
            except Exception as error:  # noqa: BLE001 - the observer never raises; the counter stays null
                self._note(counter, error)
        self._count += 1
        return body

    def _since(self, key: str, value: Any) -> tuple[Any, float] | None:
        """(previous value, seconds since then), and store this value; None at first or after less than SHORTEST_S."""
        now = time.monotonic()
        before = self._before.get(key)
        if before is not None and now - before[1] < SHORTEST_S:
            return None
        self._before[key] = (value, now)
        return (before[0], now - before[1]) if before is not None else None

    def _read_cores(self) -> Json:
        quota = self._limits.cpu_quota
        used = used_s(self._limits) if quota is not None and quota == self._host.usable_cpus else None
        share = None
        if used is not None and (earlier := self._since("quota", used)) is not None:
            share = min(100 * (used - earlier[0]) / (earlier[1] * self._host.usable_cpus), 100.0)
        times = {
            # Guest time is part of user already.
            core: (sum(spent) - getattr(spent, "guest", 0) - getattr(spent, "guest_nice", 0),
                   spent.idle + getattr(spent, "iowait", 0))
            for core, spent in enumerate(psutil.cpu_times(percpu=True))
            if core in self._cores
        }  # fmt: skip
        if (before := self._since("cores", times)) is None:
            return {}
        percents = []
        for core, (total, idle) in times.items():
            elapsed = total - before[0].get(core, (total, idle))[0]
            # iowait may run backwards on some kernels.
            busy = 1 - (idle - before[0][core][1]) / elapsed if elapsed > 0 else 0.0
            percents.append(100 * min(max(busy, 0.0), 1.0))
        if used is None and percents:
            share = sum(percents) / len(percents)
        return {
            "cpu_percent": None if share is None else round(share, 1),
            "cpu_per_core": [round(percent) for percent in percents],
        }

    def _read_processes(self, fresh: bool) -> Json:
        now = time.monotonic()
        if fresh or now >= self._next_search:
            self._search(now)
        return {
            "process_cpu_percent": self._percent("processes", self._family),
            "ranks_cpu_percent": self._percent("ranks", self._rank_family) if self._ranks else None,
        }

    def _percent(self, key: str, processes: list[psutil.Process]) -> float | None:
        """CPU time of these processes since the last sample, of one core.

        With that of children that have ended: loader workers may live for less than a second.
        """
        spent = 0.0
        for process in list(processes):
            try:
                spent += sum(process.cpu_times()[:4])
            except psutil.Error:  # it ended: search again next time
                processes.remove(process)
                self._next_search = 0.0
        earlier = self._since(key, spent)
        return None if earlier is None else round(max(100 * (spent - earlier[0]) / earlier[1], 0.0), 1)

    def _search(self, now: float) -> None:
        """Find the descendants; schedule the next search by the cost of this one, soon while there are none."""
        begin = time.thread_time()
        self._family = _with_descendants(self._first)
        self._rank_family = []
        for rank in self._ranks:
            try:
                self._rank_family += _with_descendants(psutil.Process(rank))
            except psutil.Error:  # it has ended
                continue
        trainer = self._trainer
        if trainer is not None:
            found = self._family if trainer == self._first else _with_descendants(trainer)
            known = set(self._workers)
            self._workers = [
                process for process in found[1:] if process in known or not _serves(process, trainer)
            ]
        alone = len(self._family) <= 1
        self._next_search = now + max(
            0.0 if alone else _SEARCH_S, (time.thread_time() - begin) / _SEARCH_SHARE
        )

    def _read_trainer(self) -> Json:
        if self._trainer is None:
            return {}
        rss, workers = 0, 0
        for process in self._workers:
            try:
                rss += process.memory_info().rss
                workers += 1
            except psutil.Error:
                self._next_search = 0.0
        return {
            "rss_bytes": self._trainer.memory_info().rss,
            "workers": workers,
            "workers_rss_bytes": rss,
            **self._worker_memory.read([process.pid for process in self._workers]),
        }

    def _read_status(self) -> Json:
        """Swap, which psutil reads from the map of all pages in milliseconds, and the peak of resident memory."""
        if self._trainer is None:
            return {}
        status = (self._root / "proc" / str(self._trainer.pid) / "status").read_text()
        found = {
            name: int(value) * 1024
            for name, value in re.findall(r"^(Vm\w+):\s*(\d+) kB", status, re.MULTILINE)
        }
        return {"swap_bytes": found.get("VmSwap"), "rss_peak_bytes": found.get("VmHWM")}

    def _read_io(self) -> Json:
        """Bytes per second that the process that trains reads from storage and writes to it, without its workers."""
        if self._trainer is None:
            return {}
        counts = self._trainer.io_counters()
        now = (counts.read_bytes, counts.write_bytes)
        if (earlier := self._since("io", now)) is None:
            return {}
        (read, written), seconds = earlier
        return {
            "disk_read_bytes_s": round((now[0] - read) / seconds),
            "disk_write_bytes_s": round((now[1] - written) / seconds),
        }

    def _read_memory(self) -> Json:
        free = [free_in_group(group, limit) for group, limit in self._limits.memory]
        limit = self._host.memory_limit_bytes or self._host.memory_total_bytes
        available = min((psutil.virtual_memory().available, *free))
        return {"memory_available_bytes": available, "memory_limit_bytes": limit}

    def _read_space(self, slow: bool) -> Json:
        if self._run_dir is not None and slow:
            self._disk_free = None
            self._disk_free = psutil.disk_usage(str(self._run_dir)).free
        return {"disk_free_bytes": self._disk_free}

    def _read_neighbours(self, body: Json) -> Json:
        """The busiest other processes, if others use a noticeable part of the cores."""
        used, own, ranks = body["cpu_percent"], body["process_cpu_percent"], body["ranks_cpu_percent"]
        known = used is not None and own is not None and not (self._ranks and ranks is None)
        others = used / 100 * self._host.usable_cpus - (own + (ranks or 0.0)) / 100 if known else None
        return {"neighbours": self._neighbours.read(others)}

    def _read_throttled(self) -> Json:
        """Share of time in which the CPU quota throttled the cgroup, 0..1; null without a quota.

        The kernel sums the throttled time over all cores, so it is taken relative to the requested CPU time, or to
        the elapsed time if the group needed less than a core.
        """
        held, spent = throttled_s(self._limits), used_s(self._limits)
        if held is None or spent is None or (earlier := self._since("throttled", (held, spent))) is None:
            return {}
        (held_before, spent_before), seconds = earlier
        withheld = max(held - held_before, 0.0)
        wanted = withheld + max(spent - spent_before, 0.0)
        share = min(withheld / wanted, withheld / seconds) if withheld else 0.0
        return {"cpu_throttled": round(share, 4)}


def _with_descendants(process: psutil.Process) -> list[psutil.Process]:
    """The process and those that it has started, directly or not; none if it has ended."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _serves(process: psutil.Process, trainer: psutil.Process) -> bool:
    """Whether it is a helper process of multiprocessing. The workers that a fork server forks have its command, too."""
    try:
        command = " ".join(process.cmdline())
        return _TRACKER in command or (_SERVER in command and process.ppid() == trainer.pid)
    except psutil.Error:
        return False


# Workers that are read. Of more, the others count as the mean of these.
MOST_WORKERS = 4
# Maximum share of the time for reading: at first, for so many readings, and later.
FEW, FIRST_SHARE, MEMORY_SHARE = 6, 2e-2, 2e-3


class WorkerMemory:
    """Reads /proc/PID/smaps_rollup, for which Linux goes through all pages of a process. Not thread-safe.

    Of 1 GiB that takes 5 to 20 ms, so it is read less often where there is more.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._readings, self._due = 0, 0.0

    def read(self, pids: Sequence[int]) -> dict[str, int]:
        """Call once per sample. workers_private_bytes, workers_shared_bytes: sums over all workers.

        {} if it is too early, there are no workers, one of them has ended, or the system does not tell.
        """
        now = time.monotonic()
        if not pids or now < self._due:
            return {}
        begin = time.thread_time()
        read = [own_memory(pid, self._proc) for pid in sorted(pids)[:MOST_WORKERS]]
        self._readings += 1
        share = FIRST_SHARE if self._readings <= FEW else MEMORY_SHARE
        self._due = now + (time.thread_time() - begin) / share
        found = [one for one in read if one is not None]
        if len(found) < len(read):
            return {}
        private, shared = (sum(values) * len(pids) // len(found) for values in zip(*found, strict=True))
        return {"workers_private_bytes": private, "workers_shared_bytes": shared}
