"""Options that several commands share: which configuration is meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .completion import workload_names

Command = TypeVar("Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number in a range, which neither "nan" nor "inf" is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


def configuration(command: Command) -> Command:
    """The argument CONFIG and the options --workload and --set, passed as `config`, `workload` and `sets`."""
    for decorate in (
        click.option(
            "--set",
            "sets",
            metavar="KEY=VALUE",
            multiple=True,
            help="Set a value, as in batch.micro=64; may be repeated.",
        ),
        click.option(
            "--workload",
            metavar="NAME",
            help="Workload (default: chartext), or your own as module:factory.",
            shell_complete=workload_names,
        ),
        click.argument("config", required=False, type=click.Path(path_type=Path)),
    ):
        command = decorate(command)
    return command
