"""Becomes the command: `python -I -S shim.py PARENT TERMINAL COMMAND…`. Standard library only.

PARENT: id of the process that must be alive, or the command ends. TERMINAL: "terminal" makes standard input the
controlling terminal, so that Ctrl-C reaches the command; "streams" does not.
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
    parent, terminal, *command = sys.argv[1:]
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        except (OSError, AttributeError):
            pass
    if os.getppid() != int(parent):
        sys.exit(1)
    if terminal == "terminal":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


main()
