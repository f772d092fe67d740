"""Commands: what they are called, and which ones keep the observer out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.script.command import Command, environment, kept_out


def command(text: str) -> Command:
    return Command(tuple(text.split()), Path("/somewhere"))


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
    "text", ["python -I train.py", "python3.11 -uE train.py", "/usr/bin/python -W error -S t.py"]
)
def test_options_that_keep_the_observer_out_are_refused(text: str) -> None:
    assert "Python" in kept_out(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "python -u train.py -I",
        "python -m fit -E",
        "python -c S",
        "bash -I",
        "python -X dev -W Ignore t.py",
        "python",
    ],
)
def test_other_options_are_the_scripts_own(text: str) -> None:
    assert kept_out(text.split()) == ""


def test_a_command_that_does_not_exist_says_how_to_run_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no such command; to run a Python file: python missing\.py"
    ):
        command("missing.py --x").check()
    with pytest.raises(UsageError, match="name the command"):
        Command((), tmp_path).check()


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for words in (
        "python train.py --x",
        "python -u -W ignore train.py",
        "python -m fit",
        "python -c 1",
        "python",
    ):
        Command(tuple(words.split()), tmp_path).check()
    with pytest.raises(UsageError, match=r"trian\.py: there is no such file in "):
        Command(("python", "-u", "trian.py"), tmp_path).check()
    with pytest.raises(UsageError, match="--fast: run has no such option"):
        Command(("--fast", "python", "train.py"), tmp_path).check()


def test_a_path_of_the_user_stays() -> None:
    made = environment(Path("/r"), Path("/s"), {"PYTHONPATH": "/mine", "A": "b"})
    assert made == {"PYTHONPATH": "/s:/mine", "A": "b", "NDD_WATCH": "/r"}
