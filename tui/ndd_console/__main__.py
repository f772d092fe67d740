"""Entry point of `ndd-console` and `python -m ndd_console`. User errors become one message and an exit status."""

from __future__ import annotations

import atexit
import os
import sys

# Nothing else is imported here: on Windows, modules such as fcntl and termios do not exist, and Ctrl-C during an import
# would print a traceback.

# Libraries read these on import, so they are set first; values set by the user win.
ENVIRONMENT = {
    # Textual paints at its next frame: at its default of 60 per second that adds up to 17 ms to a key press.
    "TEXTUAL_FPS": "240",
    # Milliseconds after which a lone escape byte counts as the escape key rather than the start of a sequence.
    "ESCDELAY": "30",
}
NO_WINDOWS = (
    "ndd-console needs Linux or macOS (it uses POSIX file locks, terminals and signals); on Windows, use WSL2"
)


def main(arguments: list[str] | None = None) -> None:
    if sys.platform == "win32":
        print(NO_WINDOWS, file=sys.stderr)  # noqa: T201  click may not even import
        sys.exit(2)
    import _signal  # type: ignore[import-not-found]  # signal itself imports more

    from ndd_engine import processes

    processes.note()
    # Until a command begins, there is nothing to clean up.
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, lambda number, _frame: os._exit(128 + number))
    # Registered first, this runs last. Python ends by putting signals back to their defaults unless they are ignored,
    # so that a late Ctrl-C would replace the exit status.
    atexit.register(_ignore_signals)
    open_standard_streams()
    status = status_of(arguments)
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, lambda *_: os._exit(status))
    sys.exit(status)


def _ignore_signals() -> None:
    import _signal

    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_IGN)


def open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams (`>&-`); else the run's own files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(handle, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    # Names of files and foreign text may contain what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def status_of(arguments: list[str] | None = None) -> int:
    """The exit status of a command line. Prints errors to standard error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from ndd_engine.errors import EXIT_FAILED

    try:
        status = _status_of(arguments)
        sys.stdout.flush()
    except OSError as error:
        # A reader that closes the pipe (`ndd-console runs | head`) needs no message.
        if not isinstance(error, BrokenPipeError):
            _report(f"{error.strerror or error}: {error.filename or 'standard output'}")
        status = EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python flushes at exit, and would change the status
            handle = os.open(os.devnull, os.O_WRONLY)
            os.dup2(handle, stream.fileno())
            os.close(handle)
    return status


def _status_of(arguments: list[str] | None) -> int:
    import click

    from ndd_console.cli import cli
    from ndd_engine.errors import EXIT_INTERRUPTED, EXIT_USAGE, NddError

    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:  # native libraries that torch needs do not load there
        _report("the working folder was deleted: change to another one")
        return EXIT_USAGE
    try:
        result = cli.main(args=arguments, prog_name="ndd-console", standalone_mode=False)
    except click.ClickException as error:
        try:
            error.show()
        except OSError:
            pass  # standard error cannot be written: the status still says it
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except NddError as error:
        _report(*(str(error).splitlines() or ["failed"]))
        return error.exit_status
    return result if isinstance(result, int) else 0


def _report(*lines: str) -> None:
    """Print errors to standard error. One that cannot be written does not change the status."""
    try:
        for line in lines:
            print(f"ndd-console: {line}", file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        pass


if __name__ == "__main__":
    main()
