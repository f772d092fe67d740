"""Arguments and environment variables of a script as changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.script.command import Command
from ndd_engine.script.starting import started


def command(text: str) -> Command:
    return Command(tuple(text.split()), Path("/work"))


@pytest.mark.parametrize(
    ("before", "name", "after", "old"),
    [
        ("python t.py --batch-size 32 --lr 1", "batch-size", "python t.py --batch-size 64 --lr 1", "32"),
        ("python t.py --batch_size=32", "batch-size", "python t.py --batch_size=64", "32"),
        ("python t.py -b 32", "b", "python t.py -b 64", "32"),
        ("python t.py train.batch=32 seed=1", "train.batch", "python t.py train.batch=64 seed=1", "32"),
        ("python t.py", "batch-size", "python t.py --batch-size 64", "default"),
        ("python t.py seed=1", "batch", "python t.py seed=1 batch=64", "default"),
        ("torchrun --nnodes=1 t.py seed=1", "batch", "torchrun --nnodes=1 t.py seed=1 batch=64", "default"),
        ("python t.py seed=1 -v", "batch", "python t.py seed=1 -v --batch 64", "default"),
    ],
)
def test_an_argument_is_replaced_where_it_stands(before: str, name: str, after: str, old: str) -> None:
    found = started(command(before), [f"arg.{name}=64"], {})
    assert " ".join(found.command.words) == after
    assert found.changed == {f"arg.{name}": (old, "64")}
    assert found.advice == [f"start it as: {after}"]


def test_a_variable_is_set() -> None:
    found = started(
        command("python t.py"), ["env.OMP_NUM_THREADS=2", "loader.workers=1"], {"OMP_NUM_THREADS": "8"}
    )
    assert found.environment == {"OMP_NUM_THREADS": "2"} and found.changed == {
        "env.OMP_NUM_THREADS": ("8", "2")
    }
    assert found.command == command("python t.py")


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("arg.batch", "--arg batch: expected NAME=VALUE"),
        ("env.=1", "--env =1: expected NAME=VALUE"),
        ("arg.b=32", "b is 32 already; there is nothing to compare"),
    ],
)
def test_what_changes_nothing_is_refused(item: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("=", "=")):
        started(command("python t.py -b 32"), [item], {})
