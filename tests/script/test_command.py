"""Commands: what they are called, which ones keep the observer out, and their arguments and variables as changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import (
    LINKED,
    Command,
    check_contained,
    command_of,
    environment,
    in_copy,
    kept_out,
    scratch,
)
from ndd_engine.script.trials import started
from ndd_watch.outside import Outside


def command(text: str, folder: Path = Path("/somewhere")) -> Command:
    return Command(tuple(text.split()), folder)


@pytest.mark.parametrize(
    ("text", "title", "name"),
    [
        ("python train.py --lr 3", "train.py", "train"),
        ("python -u -m my.package.fit", "my.package.fit", "fit"),
        ("torchrun --nproc-per-node 2 my/train.py", "train.py", "train"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", "train.py", "train"),
        ("accelerate launch train.py", "train.py", "train"),
        ("bash run/all.sh", "all.sh", "all"),
        ("fit-model --fast", "fit-model", "fit-model"),
        ("python -c pass", "python -c", "python-c"),
    ],
)
def test_a_run_is_called_like_its_script(text: str, title: str, name: str) -> None:
    assert (command(text).title, command(text).run_name) == (title, name)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("python -I train.py", True),
        ("python3.11 -uE train.py", True),
        ("/usr/bin/python -W error -S t.py", True),
        ("python -u train.py -I", False),
        ("python -m fit -E", False),
        ("python -c S", False),
        ("bash -I", False),
        ("python -X dev -W Ignore t.py", False),
        ("python", False), ("python -", False), ("python3 -u -", False), ("python -X dev", False),
        ("python - 7", False), ("python train.py -", True), ("python -m train", True), ("python -c pass", True),
        ("bash train.sh", True), ("python -u train.py", True), ("torchrun train.py", True),
    ],
)  # fmt: skip
def test_a_script_from_standard_input_cannot_be_started_again(text: str, repeatable: bool) -> None:
    command = Command(tuple(text.split()), Path())
    if repeatable:
        command.check_repeatable()
        return
    with pytest.raises(UsageError, match="read from standard input"):
        command.check_repeatable()
