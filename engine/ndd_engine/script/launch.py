"""Starts the command in a session of its own, on a pseudo-terminal or with the streams of this process.

Streams of this process that are a terminal are replaced by the pseudo-terminal, so that colours and progress bars keep
working, and so that the command survives when the terminal is lost. Other streams go through unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from ndd_engine import processes

from .command import Command

_SHIM = str(Path(__file__).with_name("shim.py"))
CHUNK = 1 << 16
# Seconds to read the rest of the output after the end of the command; a process that it left behind may keep the
# terminal open.
LAST_WORDS_S = 1.0


def becoming(words: Sequence[str], parent: int, tells: str = "", terminal: str = "streams") -> list[str]:
    """A command that becomes another one as a shell would start it. parent, tells, terminal: see `shim`."""
    ignored, closed = (",".join(map(str, numbers)) for numbers in (processes.ignored(), processes.closed()))
    return [sys.executable, "-I", "-S", _SHIM, str(parent), tells, terminal, ignored, closed, *words]


def inherited_descriptors() -> list[int]:
    """Open descriptors that were passed to this program; its own ones are not passed on."""
    found = []
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if int(entry.name) > 2 and os.get_inheritable(int(entry.name)):
                    found.append(int(entry.name))
    return found


class Launched:
    """A started command. output: called in a thread with what it writes to its terminal. pid: of the command."""

    def __init__(
        self,
        command: Command,
        environment: Mapping[str, str],
        output: Callable[[bytes], None],
        screen: bool,
        size: tuple[int, int] = (80, 24),
    ) -> None:
        """screen: a screen occupies this terminal, so that all streams of the command go to its own terminal.

        Raises OSError if no process or no terminal can be made.
        """
        self._output = output
        self.master = -1
        replaced = [screen or os.isatty(stream) for stream in range(3)]
        slave = -1
        if any(replaced):
            self.master, slave = pty.openpty()
            self.resize(*size)
        stdin, stdout, stderr = (slave if ours else None for ours in replaced)
        controlling = "terminal" if replaced[0] else "streams"
        told, tells = os.pipe()
        words = becoming(command.words, os.getpid(), str(tells), controlling)
        try:
            self._leader = subprocess.Popen(
                words, cwd=command.folder, env=dict(environment), start_new_session=True, stdin=stdin, stdout=stdout,
                stderr=stderr, pass_fds=[*inherited_descriptors(), tells],
            )  # fmt: skip
        except BaseException:
            os.close(told)
            self._close_master()
            raise
        finally:
            os.close(tells)
            if slave >= 0:
                os.close(slave)
        with os.fdopen(told) as lines:  # empty if no process could be made
            self.pid = int(lines.readline() or self._leader.pid)
        self._reader = threading.Thread(target=self._read, name="ndd-output", daemon=True)
        if self.master >= 0:
            self._reader.start()

    @property
    def interactive(self) -> bool:
        """Whether the command reads from its own terminal."""
        return self.master >= 0

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the command's terminal."""
        if self.master >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        """Input for the command, as if typed."""
        if self.master >= 0:
            with contextlib.suppress(OSError):
                os.write(self.master, data)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the command's group, also when it has left the first one."""
        groups = {self._leader.pid}
        if self._leader.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(self.pid))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def pass_on(self, number: int) -> None:
        """Send a signal to the command's own process, as a shell or a batch system would."""
        if self._leader.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill every process of the command's session, and what it has started in others (torchrun's ranks)."""
        every = set(session_of(self._leader.pid))
        with contextlib.suppress(psutil.Error):
            every |= {child.pid for child in psutil.Process(self._leader.pid).children(recursive=True)}
        for pid in every:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status as a shell has it (128 + the signal), or None after the timeout."""
        try:
            code: int = self._leader.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """Read the rest of the output. Call after the end of the command."""
        if self.master >= 0:
            self._reader.join(LAST_WORDS_S)
            self._close_master()

    def _close_master(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def _read(self) -> None:
        master = self.master
        while True:
            try:
                ready = select.select([master], [], [], 0.2)[0]
                data = os.read(master, CHUNK) if ready else b""
            except (OSError, ValueError):  # the last process has closed the terminal, or we have
                return
            if data:
                self._output(data)
            elif ready or self._leader.returncode is not None:
                return


def session_of(leader: int) -> list[int]:
    """Ids of the processes in the session of a process, besides itself. Linux only; [] elsewhere."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and int(entry.name) != leader:
                with contextlib.suppress(OSError):
                    if os.getsid(int(entry.name)) == leader:
                        found.append(int(entry.name))
    return found
