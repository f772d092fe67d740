"""Entry point of `ndd-console` and `python -m ndd_console`. User errors become one message and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Nothing else is imported here: on Windows, modules such as fcntl and termios do not exist.

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    if sys.platform == "win32":
        print(NO_WINDOWS, file=sys.stderr)  # noqa: T201  click may not even import
        sys.exit(2)
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line. Prints errors to standard error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import click

    from ndd_console.cli import cli
    from ndd_engine.errors import EXIT_FAILED, EXIT_INTERRUPTED, NddError

    try:
        result = cli.main(args=arguments, prog_name="ndd-console", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except NddError as error:
        for line in str(error).splitlines() or ["failed"]:
            click.echo(f"ndd-console: {line}", err=True)
        return error.exit_status
    except BrokenPipeError:
        # The reader has closed the pipe (`ndd-console runs | head`); keep Python from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except OSError as error:
        click.echo(f"ndd-console: {error.strerror}: {error.filename or 'standard output'}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
