"""The examples in --help are accepted: their commands, options and values exist, and the quick ones run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from ndd_console.cli import COMMANDS, cli
from ndd_engine.config import read
from ndd_engine.trial.claims import chosen
from ndd_engine.wizard.proposals import gpu_named
from tests.trial.written_runs import steady, windows, write_run

from .program import call

EXAMPLES = [
    shlex.split(line)
    for name in ("", *COMMANDS)
    for command in [cli.get_command(click.Context(cli), name) if name else cli]
    for line in re.findall(r"^  ndd-console (.+?)(?:   .*)?$", (command and command.epilog) or "", re.M)
    if "COMMAND" not in line
]
# Those that start no training and read nothing but the runs of the folder below.
QUICK = ("gpu", "log", "runs", "compare", "report", "config", "scaffold", "attach", "claims --list")


def test_every_command_has_examples() -> None:
    assert {words[0] for words in EXAMPLES if not words[0].startswith("--")} == {*COMMANDS} - {"completion"}


@pytest.mark.parametrize("words", EXAMPLES, ids=shlex.join)
def test_an_example_has_valid_options_and_values(words: list[str], tmp_path: Path) -> None:
    with cli.make_context("ndd-console", list(words)) as context:
        name, command, rest = cli.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None and command is not None
        given = command.make_context(name, rest, parent=context).params
    if given.get("sets"):
        read(None, given["sets"]).resolve()
    if given.get("gpu"):
        gpu_named(given["gpu"])
    if name == "claims":
        assert chosen(given["ids"])


@pytest.mark.parametrize(
    "words", [words for words in EXAMPLES if shlex.join(words).startswith(QUICK)], ids=shlex.join
)
def test_a_quick_example_runs(words: list[str], tmp_path: Path) -> None:
    if "--follow" in words or "delete" in words:
        pytest.skip("waits, or asks")
    for place, name in enumerate(("baseline", "candidate", "lr-2", "lr-4", "lr-8", "chartext-001")):
        run = write_run(tmp_path / "runs" / name, windows(steady(20, 1.0, seed=place)))
        run.console_log.write_text("a line\n")
    (tmp_path / "models").mkdir()
    done = call(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
