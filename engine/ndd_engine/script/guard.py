"""Runs a command of a trial: `python -I -S guard.py PARENT FOLDER COMMAND…`. Standard library only.

Ends the command with everything in its process group, and removes FOLDER, when the process PARENT is gone: if the trial
is killed, nobody else does. On SIGTERM it only ends the command. Exits as the command does.
"""

import os
import shutil
import signal
import sys
import time

POLL_S = 0.1


def main() -> None:
    """Run the command to its end, or to that of PARENT."""
    parent, folder, *command = sys.argv[1:]
    # Only the group of the command ends on a signal to it; this process stays until it has cleaned up.
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
        try:
            os.killpg(child, signal.SIGKILL)
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
