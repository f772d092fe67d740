"""Options, arguments and help texts that several commands share, and what was asked for with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from inspect import cleandoc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import click

from ndd_engine.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, INTERRUPTED, TERMINATED, UsageError
from ndd_engine.record.rundir import NAME, runs_root

from .completion import run_names, sets, workload_names

Command = TypeVar("Command", bound=Callable[..., Any])
_RUN = "RUN is the name of a run or the path of its folder (default: the newest live run, otherwise the newest run)."


class Asked(SimpleNamespace):
    """What a command was asked for: its arguments and options by their names, and `ascii`: ASCII characters only."""

    @property
    def root(self) -> Path:
        return runs_root(self.runs)


def gathered(function: Callable[[Asked], Any]) -> Callable[..., Any]:
    """Pass the arguments and options of a command as one object."""

    def call(**given: Any) -> Any:
        return function(Asked(**click.get_current_context().obj, **given))

    return update_wrapper(call, function)


class FiniteNumber(click.FloatRange):
    """A number in a range; "nan" and "inf" are rejected."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Seconds(FiniteNumber):
    """A time such as "90", "90s", "8m", "1h", "30d" or "2w", in seconds. bare: whether it may have no unit."""

    name = "time: a number with s, m, h, d or w, as in 90s or 30d"
    _UNITS: ClassVar = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

    def __init__(self, bare: bool = True, **more: Any) -> None:
        super().__init__(**more)
        self.bare = bare

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        timed = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([smhdw])", str(value).strip())
        if timed is not None:
            value = float(timed[1]) * self._UNITS[timed[2]]
        elif not self.bare:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return super().convert(value, param, ctx)


flag = partial(click.option, is_flag=True)
count = partial(click.option, type=int, metavar="N")
set_option = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, shell_complete=sets,
    help="Set a configuration value, e.g. batch.micro=64; repeatable. `ndd-console config` lists the keys.",
)  # fmt: skip


side_effects_option = click.option(
    "--allow-side-effects", is_flag=True,
    help="Allow trials of an observed script to write outside its folder, to use the network and to start other "
    "programs, as the script does.",
)  # fmt: skip


workload_option = click.option(
    "--workload", metavar="NAME", shell_complete=workload_names,
    help="Workload (default: chartext), or your own as package.module:factory.",
)  # fmt: skip
json_option = flag("--json", "as_json", help="Print one JSON document.")
pause_option = flag("--pause", help="Pause other runs on the same device during the measurement.")


def budget_option(text: str, default: float = 60.0) -> Callable[[Command], Command]:
    return click.option(
        "--budget", type=Seconds(min=1), default=default, show_default=True, metavar="SECONDS", help=text
    )


def output_option(text: str) -> Callable[[Command], Command]:
    """-o FILE with its help text, passed as `output`."""
    return click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help=text)


def name_option(default: str) -> Callable[[Command], Command]:
    """--run NAME, passed as `name`. default: what a run is called without it."""
    return click.option(
        "--run", "name", metavar="NAME", callback=_run_name, help=f"Name of the run (default: {default})."
    )


def _run_name(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name is not None and not NAME.fullmatch(name):
        raise UsageError(
            f"--run {name}: not a name; allowed: at most 64 letters, digits, '.', '_' and '-'; the first is a letter "
            "or a digit"
        )
    return name


def run_argument(command: Command) -> Command:
    """The argument RUN, passed as `run`. What it may be is the first sentence of the help."""
    command.__doc__ = f"{_RUN}\n\n{cleandoc(command.__doc__ or '')}"
    return click.argument("run", required=False, shell_complete=run_names)(command)


def configuration(command: Command) -> Command:
    """The argument CONFIG and the options --workload and --set, passed as `config`, `workload` and `sets`."""
    argument = click.argument("config", required=False, type=click.Path(path_type=Path))
    return argument(workload_option(set_option(command)))


def command(
    status: str, *examples: str, stops: bool = False, **more: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with examples and exit status after its help. stops: it can be interrupted and terminated."""
    return click.command(epilog=epilog(status, examples, stops), **more)


def epilog(status: str, examples: Sequence[str], stops: bool = False) -> str:
    shown = "\n".join(f"  ndd-console {line}" for line in examples)
    stopped = f", {EXIT_INTERRUPTED} {INTERRUPTED}, {EXIT_TERMINATED} {TERMINATED}" if stops else ""
    return f"\b\nExamples:\n{shown}\n\nExit status: {status}{stopped}."
