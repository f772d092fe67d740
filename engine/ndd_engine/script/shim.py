"""Becomes the command: `python -I -S shim.py PARENT TELLS TERMINAL IGNORED CLOSED COMMAND…`. Standard library only.

PARENT: id of the process that must be alive, or the command ends; 0 for whichever starts it. TELLS: "" to become the
command in this process. Otherwise this process leads a session: the command is its child, as under a shell, and can
leave its group; the child's id is written to this descriptor. TERMINAL: "terminal" makes standard input the controlling
terminal, so that Ctrl-C reaches the command; "streams" does not. IGNORED: numbers of the signals that the command
ignores, separated by commas; all others have their default. CLOSED: numbers of the standard streams that the command
does not have.
"""

import ctypes
import fcntl
import os
import resource
import signal
import sys
import termios

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the command; exits with 127 if it cannot be executed, 126 if it may not be, and otherwise as it does."""
    parent, tells, terminal, ignored, closed, *command = sys.argv[1:]
    starter = int(parent)
    environment = given()
    if tells:
        _ends_with(starter, signal.SIGKILL)  # the command is told by the end of this process
        if terminal == "terminal":
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.set_inheritable(int(tells), False)
        # What is sent to all processes of the group, as Ctrl-C, is for the command.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        starter, child = os.getpid(), os.fork()
        if child:
            os.write(int(tells), b"%d\n" % child)
            _lead(child)
    _ends_with(starter, signal.SIGTERM)
    keep = {int(number) for number in ignored.split(",") if number}
    # Python itself ignores some.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN if number in keep else signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    if tells:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for stream in closed.split(","):
        if stream:
            os.close(int(stream))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _ends_with(parent: int, number: int) -> None:
    """Send this signal to this process when its parent is gone, which should be this one; 0 for any."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        except (OSError, AttributeError):
            pass
    if parent and os.getppid() != parent:
        sys.exit(1)


def _lead(child: int) -> None:
    """Wait for the command, and end as it does. Nothing is kept open: a reader of its output waits for its end only."""
    try:
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                os.close(int(name))
            except OSError:
                pass
    except OSError:
        os.closerange(0, 1024)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
    os.kill(os.getpid(), -code)


def given() -> "dict[bytes, bytes]":
    """The environment as this process got it: Python may have set LC_CTYPE since."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123  it starts faster without pathlib
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    except OSError:
        return dict(os.environb)
    return {name: value for name, found, value in pairs if found}


main()
