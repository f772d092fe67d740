"""Starts the program as a fork of a process that has imported torch, in place of a new interpreter.

Importing torch and Textual takes two thirds of the processor time of a short run. A program started here is a child of
the test with its own arguments, folder, environment, streams, terminal, session and signals. What differs:
/proc/PID/environ and cmdline are those of the server. Tests of the start execute the program.

As a program, `python forked.py DESCRIPTOR` is the server. Each request on its socket is answered with a process id.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import runpy
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ptyprocess

# Environment variables that libraries and Python itself read before a program begins: each combination needs a server.
READ_EARLY = (
    "PYTHON",
    "LC_",
    "LANG",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "CUDA_",
    "LD_",
    "TEXTUAL",
    "NDD_WATCH",
)
# A request: JSON, at most so long, with the three standard streams.
MOST_BYTES, STREAMS = 1 << 17, 3
_CHILD_SUBREAPER = 36  # prctl

_servers: dict[tuple[tuple[str, str], ...], Server] = {}


class Server:
    """A process that forks programs. It ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=dict(environment),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._libc = ctypes.CDLL(None)

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """The process id of a new program, which is a child of this process. Raises OSError."""
        from tests import tiers  # the server cannot import it

        tiers.started("-m ndd_console")
        # The process between the server and the program ends at once: the kernel gives its child to this process.
        self._libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(
                self._socket, [json.dumps(request).encode("utf-8", "surrogateescape")], list(streams)
            )
            answer = self._socket.recv(64)
        finally:
            self._libc.prctl(_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise OSError("the server of programs has ended")
        return int(answer)


def _server(environment: Mapping[str, str]) -> Server | None:
    """The server for programs with this environment; None if the program cannot be forked."""
    variables = dict(environment)
    folders = variables.pop("PYTHONPATH", "").split(os.pathsep)
    if sys.platform != "linux" or any(
        (Path(folder) / "sitecustomize.py").exists() for folder in folders if folder
    ):
        return None
    key = tuple(sorted(item for item in variables.items() if item[0].startswith(READ_EARLY)))
    if key not in _servers:
        _servers[key] = Server(variables)
    return _servers[key]


class Popen(subprocess.Popen[Any]):
    """A running program. arguments: of `ndd-console`; options: of subprocess.Popen, env and cwd among them."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        super().__init__([sys.executable, "-m", "ndd_console", *arguments], **options)

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        server = None if preexec_fn or pass_fds or shell else _server(environment)
        if server is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = _request(args[3:], cwd, environment, session=start_new_session)
        self.pid = server.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    arguments: Sequence[str], timeout: float, text: bool = True, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """The finished program and its output."""
    with Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=text, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def in_terminal(
    arguments: Sequence[str], environment: Mapping[str, str], rows: int, columns: int
) -> ptyprocess.PtyProcess:
    """The program in a new terminal."""
    server = _server(environment)
    if server is None:
        command = [sys.executable, "-m", "ndd_console", *arguments]
        return ptyprocess.PtyProcess.spawn(command, env=dict(environment), dimensions=(rows, columns))
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    request = _request(arguments, None, dict(environment), session=True, terminal=True)
    try:
        return ptyprocess.PtyProcess(server.fork(request, [theirs] * STREAMS), ours)
    finally:
        os.close(theirs)


def _request(
    arguments: Sequence[str],
    folder: Any,
    environment: dict[str, str],
    *,
    session: bool,
    terminal: bool = False,
) -> dict[str, Any]:
    return {
        "arguments": [os.fspath(word) for word in arguments],
        "folder": str(Path(folder or ".").absolute()),
        "environment": environment,
        "session": session,
        "terminal": terminal,
    }


# The server.


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Returns, in the program's process, its request and its standard streams."""
    while True:
        data, streams, *_ = socket.recv_fds(connection, MOST_BYTES, STREAMS)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            program = os.fork()
            if not program:
                connection.close()
                os.close(read)
                os.close(write)
                return json.loads(data.decode("utf-8", "surrogateescape")), streams
            os.write(write, b"%d" % program)
            os._exit(0)
        os.close(write)
        os.waitpid(between, 0)
        answer = os.read(read, 64)
        for descriptor in (read, *streams):
            os.close(descriptor)
        connection.send(answer)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Turn this process into the one that the request describes."""
    if request["session"]:
        os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in streams]
    os.closerange(3, min(high))
    for target, source in enumerate(high):
        os.dup2(source, target)
    os.closerange(3, max(high) + 1)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = [path for path in sys.path[1:] if path not in before]
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request["folder"], *map(os.path.abspath, more), *paths]
    sys.argv[:] = ["ndd_console", *request["arguments"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, before: Any) -> Any:
    """A standard stream as Python makes it at its start."""
    return open(
        number, "w" if number else "r", encoding=before.encoding, errors=before.errors, closefd=False,
        newline=None if number == 0 else "\n",
        buffering=1 if number == 2 or (number == 1 and os.isatty(1)) else -1,
    )  # fmt: skip


def prepare() -> int:
    """Import what takes long. No thread may begin here: a fork has only one. Returns torch's number of threads."""
    import ndd_console.__main__ as entry

    del sys.modules["ndd_console.__main__"]
    for name, value in entry.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    threads = torch.get_num_threads()
    # A workload computes when it is imported, which would begin OpenMP's threads.
    torch.set_num_threads(1)
    import ndd_engine.train.checkpoint_tensors
    import ndd_engine.train.prepare  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1
    return threads


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    threads = prepare()
    become(*serve(connection))
    sys.modules["torch"].set_num_threads(threads)
    runpy.run_module("ndd_console", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
