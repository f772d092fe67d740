"""The command line. Each command has a module of its own, imported when the command is used."""

from __future__ import annotations

import errno
import importlib
import inspect
import keyword
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import click
from click._textwrap import TextWrapper
from click.shell_completion import CompletionItem

from ndd_engine.errors import NddError, UsageError
from ndd_engine.text import printable
from ndd_engine.version import __version__

# Help texts are not broken at hyphens: a name on two lines cannot be found or copied.
TextWrapper.wordsep_re = TextWrapper.wordsep_simple_re
# Name of a command -> its line in --help, with which its own help begins. The module has the same name, with a _
# appended to a keyword.
COMMANDS = {
    "train": "Train a model, with a live screen or headless.",
    "run": "Observe a training script of your own: where its steps spend their time, and why.",
    "wizard": "Propose batch size, sequence length, model size and precision for this machine; write the TOML.",
    "check": "Check configuration, data and hardware; predict memory and step time.",
    "gpu": "Show the GPU and the host, and how each value was detected.",
    "attach": "Watch a run, live or finished; control a live one.",
    "log": "Print what a run has written: its own lines, warnings, and the output of your code.",
    "runs": "List the runs; delete some with `runs delete`.",
    "try": "Measure a change against a baseline in a paired A/B trial.",
    "tune": "Measure settings one after another and keep those that significantly help.",
    "scaling": "Measure 1, 2, ... ranks in turn: how much faster they train, and where the rest of the time goes.",
    "claims": "Measure on this machine what five notes on training speed claim.",
    "compare": "Compare two recorded runs: what differs, and the effect on speed and loss.",
    "report": "Write a run as one HTML page with plots, or as text.",
    "export": "Write the weights of a run for plain PyTorch, as .pt or .safetensors.",
    "trace": "Diagnose a trace of torch.profiler: idle time, collectives, longest kernels, findings.",
    "memory": "Explain a CUDA memory snapshot: owners at the peak, fragmentation, retries, other settings.",
    "config": "List the keys of a configuration: type, allowed values, default, effect.",
    "scaffold": "Write an example workload to replace with your own model and data.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}

# Commands that use neither the folder of the runs nor a screen.
STANDALONE = frozenset({"gpu", "config", "trace", "memory", "scaffold", "completion"})

# Options that work before and after the command: name -> how click reads and describes it.
GLOBAL: dict[str, dict[str, Any]] = {
    "runs": {
        "type": click.Path(file_okay=True, path_type=Path),
        "help": "Folder of the runs (default: $NDD_RUNS, otherwise ./runs).",
    },
    "ascii": {"is_flag": True, "help": "Draw with ASCII characters only."},
}


class LazyGroup(click.Group):
    """Lists its commands without importing them, so that --help stays fast."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line. Control characters in the messages of errors are escaped here, for every command."""
        try:
            return super().main(*args, **extra)
        except click.ClickException as error:
            hint = _setting(error) if isinstance(error, click.NoSuchOption) else ""
            error.message = _escaped(f"{error.message.rstrip('.')}{hint}" if hint else error.message)  # type: ignore[misc]
            raise
        except NddError as error:
            error.args = (_escaped(str(error)),)
            raise
        except OSError as error:
            if isinstance(error.filename, (str, Path)):
                error.filename = printable(str(error.filename))
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                raise UsageError(f"{error.filename}: {error.strerror}") from None
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from ndd_engine.config.loading import meant

            hint = meant(name, list(COMMANDS))
            if hint is None and name.endswith(".toml"):
                hint = f"to train a configuration: ndd-console train {name}"
            ctx.fail(f"there is no command {name!r}{f'; {hint}' if hint else ''}")
        return super().resolve_command(ctx, args)

    def _main_shell_completion(self, *args: Any, **extra: Any) -> None:
        if "_NDD_CONSOLE_COMPLETE" in os.environ:  # registers the completion of words with "="
            importlib.import_module(f"{__name__}.completion")
        super()._main_shell_completion(*args, **extra)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return names or click.Command.shell_complete(self, ctx, incomplete)


@cache
def _command(name: str) -> click.Command:
    """The command, imported, with its line of COMMANDS before its further help, and with the global options."""
    module = f"{name}_" if keyword.iskeyword(name) else name
    command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), module)
    command.help = f"{COMMANDS[name]}\n\n{inspect.cleandoc(command.help or '')}"
    if name not in STANDALONE:
        _add_globals(command)
    return command


def _add_globals(command: click.Command) -> None:
    """Accept --runs and --ascii after the command, too, also after the commands of a group."""
    for subcommand in command.commands.values() if isinstance(command, click.Group) else ():
        _add_globals(subcommand)
    command.params += [
        click.Option(
            [f"--{name}", f"{name}_after"], expose_value=False, is_eager=True, callback=_given, **how
        )
        for name, how in GLOBAL.items()
    ]


def _given(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a global option that was given after the command."""
    name = param.opts[0].removeprefix("--")
    if value:
        ctx.find_root().meta[name] = value
        if ctx.obj is not None:  # as while completing
            ctx.obj[name] = value


def _setting(error: click.NoSuchOption) -> str:
    """How to set the configuration key that an unknown option names, such as --epochs; "" if it names none."""
    command = error.ctx.command if error.ctx is not None else None
    if command is None or all(param.name != "sets" for param in command.params):
        return ""
    from ndd_engine.config.schema import keys

    name = error.option_name.lstrip("-").replace("-", "_")
    key = next((key.name for key in keys() if key.name.partition(".")[2] == name), None)
    return f"; to set this key: --set {key}=VALUE" if key else ""


def _escaped(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


EPILOG = """\b
Examples:
  ndd-console train --max-steps 200     train the default workload
  ndd-console try --set loader.workers=4
  ndd-console COMMAND --help            options and examples of a command

\b
Environment:
  NDD_RUNS   folder of the runs, unless --runs is given
  NO_COLOR   no colours

Exit status: 0 done, 1 failed, 2 usage or configuration error (also a GPU that does not exist),
3 insufficient memory or hardware, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="ndd-console")
@click.option("--runs", "runs_folder", **GLOBAL["runs"])
@click.option("--ascii", "ascii_only", **GLOBAL["ascii"])
@click.pass_context
def cli(ctx: click.Context, runs_folder: Path | None, ascii_only: bool) -> None:
    """Train PyTorch models in the terminal and see where every millisecond goes.

    Without a command, the home screen shows the hardware, recent runs and the workloads to start; without a terminal,
    the runs and this help are printed.
    """
    ctx.obj = {"runs": runs_folder, "ascii": ascii_only}
    if ctx.invoked_subcommand != "train":  # which handles it itself, once it has something to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if ctx.invoked_subcommand is None:
        from ndd_console.process.terminal import interactive

        if not interactive():
            from .runs import runs

            ctx.invoke(runs, as_json=False)
            click.echo(f"\n{ctx.get_help()}")
            return
        from ndd_console.sessions.training import home

        ctx.exit(home(runs_folder, ascii_only))
