"""Entry point of `ndd-console` and `python -m ndd_console`. Reports user errors as messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from ndd_console.cli import cli
from ndd_engine.errors import EXIT_FAILED, EXIT_INTERRUPTED, NddError

# Set before the libraries are imported, which read them; values set by the user take precedence.
ENVIRONMENT = {
    # Textual paints in its next frame; at the default 60 per second that takes up to 17 ms after a key.
    "TEXTUAL_FPS": "240",
    # Milliseconds after which a single escape byte is the escape key.
    "ESCDELAY": "30",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; messages go to standard error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        result = cli.main(args=arguments, prog_name="ndd-console", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except NddError as error:
        lines = str(error).splitlines() or ["failed"]
        for line in lines:
            click.echo(f"ndd-console: {line}", err=True)
        return error.exit_status
    except BrokenPipeError:
        # The reader has closed the pipe (`ndd-console runs | head`); Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except OSError as error:
        click.echo(f"ndd-console: {error.strerror}: {error.filename or 'standard output'}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
