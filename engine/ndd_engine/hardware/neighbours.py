"""Finds other processes that use the cores of this run; searches rarely, and only while cores are in use."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ndd_engine.text import printable

# Minimum cores used by others to start a search.
NOTICEABLE = 0.3
# Minimum cores used by a process to report it.
LEAST = 0.05
MOST = 3
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


class _Process(NamedTuple):
    """ticks: CPU time. core: the last one it ran on. terminal: device number, 0 without one."""

    key: _Key
    ticks: int
    parent: int
    core: int
    name: str
    session: int
    terminal: int


class Neighbours:
    """Finds the busiest other processes by reading /proc twice, one sample apart. Not thread-safe.

    cores: those that this process may run on; processes on other cores are ignored. run: processes of the same run,
    which are no neighbours either, as this one and all that these have started.
    """

    def __init__(self, root: Path, cores: frozenset[int], run: Sequence[int] = ()) -> None:
        self._proc, self._cores, self._run = root / "proc", cores, run
        self._tick = os.sysconf("SC_CLK_TCK")
        self._first: tuple[dict[_Key, int], float] | None = None
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
            ticks = {item.key: item.ticks for item in self._processes()}
            self._spent = time.thread_time() - begin
            self._first = (ticks, now)
        return self._found

    def _finish(self, now: float) -> None:
        assert self._first is not None
        (before, then), self._first = self._first, None
        begin = time.thread_time()
        processes = list(self._processes())
        parents = {item.key[0]: item.parent for item in processes}
        ours = set().union(*(family(pid, parents) for pid in (os.getpid(), *self._run)))
        found: list[tuple[float, _Process]] = []
        for item in processes:
            # A new process started between the two reads.
            cores = (item.ticks - before.get(item.key, 0)) / self._tick / (now - then)
            if cores >= LEAST and item.key[0] not in ours and item.core in self._cores:
                found.append((cores, item))
        found.sort(key=lambda pair: pair[0], reverse=True)
        here = next((item for item in processes if item.key[0] == os.getpid()), None)
        above = ancestors(os.getpid(), parents)
        self._found = [
            {
                "pid": item.key[0], "name": item.name, "cores": round(cores, 2),
                "stoppable": item.key[0] not in above and self._stoppable(item, here),
            }
            for cores, item in found[:MOST]
        ]  # fmt: skip
        self._spent += time.thread_time() - begin
        self._next = now + self._spent / SHARE

    def _stoppable(self, item: _Process, here: _Process | None) -> bool:
        """Whether the user may stop it: their own process, and no part of the system.

        In a container everything may run as root: then only processes with a terminal or of the same session count.
        """
        pid = item.key[0]
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

    def _processes(self) -> list[_Process]:
        """All processes; see proc_pid_stat(5)."""
        found = []
        for entry in os.listdir(self._proc):  # noqa: PTH208 - names are all that is needed
            if not entry.isdecimal():
                continue
            try:
                text = (self._proc / entry / "stat").read_bytes()
                left, right = text.index(b"("), text.rindex(b")")
                words = text[right + 2 :].split()
                name = printable(text[left + 1 : right].decode(errors="replace"))
                key = (int(entry), int(words[19]))
                ticks = int(words[11]) + int(words[12])
                parent, session, terminal = int(words[1]), int(words[3]), int(words[4])
                found.append(_Process(key, ticks, parent, int(words[36]), name, session, terminal))
            except (OSError, ValueError, IndexError):
                continue  # it has ended, or is hidden
        return found


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
