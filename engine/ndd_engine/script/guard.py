"""Runs a command of a trial: `python -I -S guard.py PARENT FOLDER COMMAND…`. Standard library only.

Ends the command with everything that it has started, and removes FOLDER, when the process PARENT is gone: if the trial
is killed, nobody else does. On SIGTERM it only ends the command. Exits as the command does. A launcher may start its
ranks in sessions of their own, and they outlive it: this process becomes the parent of what loses its own.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


def descendants() -> "list[int]":
    """What this process has started, with all that it has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text("ascii", "replace")
                parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                pass
    found = newest = [os.getpid()]
    while newest:
        newest = [process for process, parent in parents.items() if parent in newest]
        found = found + newest
    return found[1:]


def main() -> None:
    """Run the command to its end, or to that of PARENT."""
    parent, folder, *command = sys.argv[1:]
    # Only the group of the command ends on a signal to it; this process stays until it has cleaned up.
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not on this system
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
            sys.stderr.flush()
        os._exit(127)

    def end(*_: object) -> None:
        for process in descendants():
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    signal.signal(signal.SIGTERM, end)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if os.getppid() != int(parent):
            end()
            os.waitpid(child, 0)
            shutil.rmtree(folder, ignore_errors=True)
            return
        time.sleep(POLL_S)
    end()  # workers that it has left behind
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
