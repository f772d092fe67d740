"""Becomes the command: `python -I -S shim.py PARENT TERMINAL IGNORED CLOSED COMMAND…`. Standard library only.

PARENT: id of the process that must be alive, or the command ends; 0 for whichever starts it. TERMINAL: "terminal" makes
standard input the controlling terminal, so that Ctrl-C reaches the command; "streams" does not. IGNORED: numbers of the
signals that the command ignores, separated by commas; all others have their default. CLOSED: numbers of the standard
streams that the command does not have.
"""

import ctypes
import fcntl
import os
import signal
import sys
import termios

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process; exits with 127 if the command cannot be executed, 126 if it may not be."""
    parent, terminal, ignored, closed, *command = sys.argv[1:]
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        except (OSError, AttributeError):
            pass
    if int(parent) and os.getppid() != int(parent):
        sys.exit(1)
    if terminal == "terminal":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    environment = given()
    keep = {int(number) for number in ignored.split(",") if number}
    # Python itself ignores some.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN if number in keep else signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    for stream in closed.split(","):
        if stream:
            os.close(int(stream))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def given() -> "dict[bytes, bytes]":
    """The environment as this process got it: Python may have set LC_CTYPE since."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123  it starts faster without pathlib
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    except OSError:
        return dict(os.environb)
    return {name: value for name, found, value in pairs if found}


main()
