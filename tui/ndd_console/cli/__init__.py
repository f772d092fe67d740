"""The command line: one module a command, imported only when it is the one that is asked for."""

from __future__ import annotations

import importlib
import keyword
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ndd_engine import __version__

# Name of a command -> (its line in --help). Each lives in the module of the same name; a keyword has a _ behind it.
COMMANDS = {
    "train": "Train a model: in the live screen, or headless without a terminal.",
    "wizard": "Propose batch, sequence, size and precision for this card, measure the best, write the TOML.",
    "check": "Preflight: configuration, data, card, rough memory and time; every problem at once.",
    "gpu": "Show the GPU and the host, with the reason for every detected value.",
    "attach": "Watch a run, live or finished, and steer a live one.",
    "runs": "List the runs here.",
    "try": "Measure a change against the present: gain, no gain, loss or undecided.",
    "tune": "Try the settings one by one, each on top of what helped so far; keep what measurably helps.",
    "claims": "Measure the guides' claims on this machine.",
    "compare": "Compare two recorded runs: what was changed, and what it did.",
    "report": "Write a run as one HTML page with plots, or as text.",
    "scaffold": "Write an example of your own model and data, ready to run and to be changed.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}

# Names of earlier releases: hidden, they still work for one release and warn.
RENAMED = {"card": "gpu", "ladder": "tune"}


class LazyGroup(click.Group):
    """Knows its commands by name and imports one when it is used, so that --help starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in RENAMED:
            click.echo(f"warning: {cmd_name} is now called {RENAMED[cmd_name]}", err=True)
            cmd_name = RENAMED[cmd_name]
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return names or click.Command.shell_complete(self, ctx, incomplete)


EPILOG = """\b
Exit status: 0 done, 1 the run failed, 2 usage or configuration, 3 the machine
lacks what was asked for, 130 interrupted, 143 terminated.
Environment: NDD_RUNS (the runs folder), NO_COLOR (no colours)."""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="ndd-console")
@click.option(
    "--runs",
    "runs_folder",
    type=click.Path(file_okay=True, path_type=Path),
    help="Folder of the runs (default: ./runs).",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII only.")
@click.pass_context
def cli(ctx: click.Context, runs_folder: Path | None, ascii_only: bool) -> None:
    """Train PyTorch models in the terminal and see where every millisecond goes.

    Without a command: the home screen with the detected card, recent runs and what can be started.
    """
    ctx.obj = {"runs": runs_folder, "ascii": ascii_only}
    if ctx.invoked_subcommand is None:
        from ndd_console.jobs.training import home

        ctx.exit(home(runs_folder, ascii_only))
