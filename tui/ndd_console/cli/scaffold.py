"""`ndd-console scaffold`."""

from __future__ import annotations

import keyword
import shlex
import sys
from importlib.resources import files
from pathlib import Path

import click

from ndd_engine.errors import UsageError
from ndd_engine.files import create_text, write_text
from ndd_engine.text import printable

from .options import command, flag
from .printing import say, show

DEFAULT = "my_workload.py"


@command(
    "0 written, 2 the file exists, cannot be imported or cannot be written",
    "scaffold",
    "scaffold models/net.py",
)
@click.argument("path", required=False, type=click.Path(path_type=Path), default=DEFAULT)
@flag("--force", help="Overwrite an existing file.")
def scaffold(path: Path, force: bool) -> None:
    """PATH is a Python file (default: my_workload.py). Prints the command that trains it."""
    _check_name(path)
    module, folder = _importable(path)
    text = files("ndd_console.cli").joinpath("example_workload.py").read_text("utf-8")
    text = text.replace(DEFAULT.removesuffix(".py"), module)
    try:
        (write_text if force else create_text)(path, text)
    except FileExistsError:
        why = "already exists; choose another name, or overwrite it with --force"
        raise UsageError(f"{_shown(path)} {why}") from None
    say(f"wrote {path}; train it for 20 steps with:")
    command = f"ndd-console train --workload {module}:factory --max-steps 20"
    show([command if folder is None else f"cd {shlex.quote(str(folder))} && {command}"])


def _check_name(path: Path) -> None:
    """Raises UsageError if a file of this name cannot be imported."""
    name, why = path.name.removesuffix(".py"), ""
    if path.is_dir():
        why = f" is a folder; use a file in it, such as {_shown(path / DEFAULT)}"
    elif not name.isidentifier() or keyword.iskeyword(name):
        why = f": a module name has only letters, digits and _, as in {DEFAULT}"
    elif path.suffix != ".py":
        why = f": the name must end in .py: {_shown(path.with_name(f'{name}.py'))}"
    elif name in sys.stdlib_module_names:
        why = f": {name} is the name of a standard library module; choose another name"
    if why:
        raise UsageError(_shown(path) + why)


def _importable(path: Path) -> tuple[str, Path | None]:
    """(the module's name, the folder to run in, or None for the current one)."""
    full, here = path.parent.resolve() / path.name, Path.cwd()
    if full.is_relative_to(here):
        parts = full.relative_to(here).with_suffix("").parts
        names = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
        if names and parts[0] not in sys.stdlib_module_names:
            return ".".join(parts), None
    return full.stem, full.parent


def _shown(path: Path) -> str:
    return printable(str(path))
