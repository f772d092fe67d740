"""Writes files that users name: completely or not at all, through links, and into devices and pipes.

The files of a run are regular ones; `open_regular` opens nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .errors import UsageError
from .text import printable

# A FIFO accepts this many bytes without blocking once it is writable.
_CHUNK = min(select.PIPE_BUF, 4096)
_RETRY_S = 0.05
# Maximum wait of training for the reader of a FIFO.
PATIENCE_S = 10.0
# Errors of a folder whose files can be written but not replaced: no permission, or the file is a mount point.
_IN_PLACE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV})
NOT_REGULAR = "is not a regular file; move it away"
# What cannot be written, by the type of the file; the text follows the path.
_REFUSED = {
    stat.S_IFDIR: "is a folder; name a file in it",
    stat.S_IFBLK: "is a block device",
    stat.S_IFSOCK: "is a socket",
}


def expanded(path: str) -> Path:
    """The path with ~ replaced by the home folder; ~name of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises for an unknown user


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file without blocking on anything else. Raises OSError, also for a FIFO, a device or a folder."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link; move it away", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return handle


@contextlib.contextmanager
def replacing(path: Path, wait_s: float | None = None) -> Iterator[IO[bytes]]:
    """A file that replaces `path` completely or not at all. Raises OSError.

    A link stays, and its target is replaced. Devices, FIFOs and this program's own standard output are written to
    instead. wait_s: maximum wait for the reader of a FIFO or terminal; None: no limit.
    """
    target = _target(path)
    if target is None:
        with _stream(path, wait_s) as stream:
            yield stream
        return
    temporary = target.parent / f".ndd-{secrets.token_hex(6)}.tmp"
    handle = _created(temporary, target)
    try:
        if handle is None:
            with target.open("wb") as file:
                yield file
            return
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            _adopt(handle, target)
            os.fsync(handle)
        try:
            temporary.replace(target)
        except OSError as error:
            if error.errno not in _IN_PLACE or not target.exists():
                raise
            shutil.copyfile(temporary, target)
            temporary.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _created(temporary: Path, target: Path) -> int | None:
    """A new file beside the target; None if that is impossible but the target itself can be written."""
    try:
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _IN_PLACE or not target.exists():
            raise
        return None


def write_text(path: Path, text: str, option: str = "") -> None:
    """Replace the file, see `replacing`. Raises UsageError. option: "-o ", for its message."""
    try:
        with replacing(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"{option}{unwritable(path, error)}") from None


def create_text(path: Path, text: str) -> None:
    """Write a file that must not exist. Raises FileExistsError, UsageError."""
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise
    except OSError as error:
        raise UsageError(unwritable(path, error)) from None


def unwritable(path: Path, error: OSError) -> str:
    """ "run.toml cannot be written: No space left on device"."""
    return f"{printable(str(path))} cannot be written: {error.strerror or error}"


def write_problem(path: Path) -> str | None:
    """Why the path cannot be written, as text that follows it; None if it can. Leaves nothing behind."""
    try:
        target = _target(path)
        if target is None or target.exists():
            return None  # `_target` has checked the permission
        if not target.parent.is_dir():
            return f"cannot be written: the folder {printable(str(target.parent))} does not exist"
        trial = target.parent / f".ndd-{secrets.token_hex(6)}.tmp"
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        trial.unlink()
    except _RefusedError as error:
        return str(error.strerror)
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return None


def replaces(path: Path) -> bool:
    """Whether writing to the path replaces an existing file; False if it cannot be written."""
    with contextlib.suppress(OSError):
        target = _target(path)
        return target is not None and target.exists()
    return False


def folder_for_parts(path: Path) -> Path | None:
    """A folder for large intermediate files on the disk of `path`; None for the default. Raises OSError."""
    target = _target(path)
    return target.parent if target is not None and os.access(target.parent, os.W_OK) else None


class _RefusedError(OSError):
    """The path is something that makes no sense as a file to write."""


def _target(path: Path) -> Path | None:
    """The regular file to create or replace, links followed; None for something to write into. Raises OSError."""
    try:
        found = os.stat(path)  # noqa: PTH116  the path may be a link to an open file, which has no other path
    except FileNotFoundError:
        return _resolved(path)
    except ValueError as error:  # a null byte, or a lone surrogate
        raise OSError(errno.EINVAL, f"invalid name ({error})") from None
    if (why := _REFUSED.get(stat.S_IFMT(found.st_mode))) is not None:
        raise _RefusedError(errno.EINVAL, why)
    if not stat.S_ISREG(found.st_mode):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return None
    if _own_output(found) is not None:
        return None
    os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    target = _resolved(path)
    # Links in /proc/self/fd lead to open files, which may have been deleted or renamed since.
    return target if target.exists() and os.path.samestat(target.stat(), found) else None


def _resolved(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise OSError(errno.EINVAL, f"invalid name ({error})") from None


def _own_output(found: os.stat_result) -> int | None:
    """The descriptor of standard output or error if this file is one of them."""
    for handle in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(handle)):
                return handle
    return None


@contextlib.contextmanager
def _stream(path: Path, wait_s: float | None) -> Iterator[IO[bytes]]:
    """Something to write into, opened."""
    found = path.stat()
    own = _own_output(found)
    if own is not None:
        with contextlib.suppress(AttributeError, ValueError):
            (sys.stdout if own == 1 else sys.stderr).flush()
        handle = os.dup(own)
    else:
        handle = _opened(path, stat.S_ISFIFO(found.st_mode), wait_s)
    stream = _Stream(handle, wait_s)
    try:
        yield stream  # type: ignore[misc]
    finally:
        stream.close()


def _opened(path: Path, fifo: bool, wait_s: float | None) -> int:
    """Open it for writing; a FIFO as soon as something reads from it."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    deadline = None if wait_s is None else time.monotonic() + wait_s
    while True:
        try:
            handle = os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ENXIO or not fifo:
                raise
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "no process reads from this FIFO") from None
            time.sleep(_RETRY_S)
            continue
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.ftruncate(handle, 0)
        return handle


class _Stream(io.RawIOBase):
    """Writes everything, or raises OSError if nothing can be written for `wait_s` seconds."""

    def __init__(self, handle: int, wait_s: float | None) -> None:
        super().__init__()
        self._handle, self._wait_s = handle, wait_s

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            poll = select.poll()
            poll.register(self._handle, select.POLLOUT)
            if not poll.poll(None if self._wait_s is None else self._wait_s * 1000):
                raise TimeoutError(errno.ETIMEDOUT, "the process that reads from it has stopped reading")
            with contextlib.suppress(BlockingIOError):
                done += os.write(self._handle, view[done : done + _CHUNK])
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._handle)


def _adopt(handle: int, target: Path) -> None:
    """Give a new file the owner and the permissions of the one that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        before = target.stat()
        now = os.fstat(handle)
        if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(handle, before.st_uid, before.st_gid)
        with contextlib.suppress(OSError):
            os.fchmod(handle, stat.S_IMODE(before.st_mode))


def sync_folder(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
