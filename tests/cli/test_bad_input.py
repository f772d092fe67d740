"""User mistakes: one message for all of them, exit status 2, nothing written, no traceback."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.trial.written_runs import steady, windows, write_run

from .program import call, refused

MISTAKES = """
[run]
epochs = 0
device = "cuda:7"
[batch]
sequence = 9000000
micor = 3
[loader]
prefetch = 2
[optimizer]
lr = "fast"
betas = [0.9, 2.0]
"""


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MISTAKES)
    problems = json.loads(call("check", "run.toml", "--json", folder=tmp_path).stdout)["problems"]
    assert {problem["key"]: problem["where"] for problem in problems} == {
        key: f"run.toml line {line}"
        for key, line in {
            "run.epochs": 3, "run.device": 4, "batch.sequence": 6, "batch.micor": 7, "loader": 8, "optimizer.lr": 11,
            "optimizer.betas.1": 12,
        }.items()
    }  # fmt: skip
    for command in ("train", "check"):
        message = refused(command, "run.toml", folder=tmp_path)
        assert len(message.splitlines()) == len(problems)
        for problem in problems:
            named = (problem["where"], problem["key"], problem["found"], problem["allowed"])
            assert all(part in message for part in named if part), (problem, message)


def test_check_reports_mistakes_in_the_file_and_in_the_factory_at_once(tmp_path: Path) -> None:
    (tmp_path / "half_a_workload.py").write_text("def factory(settings):\n    return {'model': 3}\n")
    sets = ("--set", "batch.micro=0", "--set", "optimizer.lr=fast")
    done = call("check", "--workload", "half_a_workload:factory", *sets, "--json", folder=tmp_path)
    problems = json.loads(done.stdout)["problems"]
    assert {problem["key"] for problem in problems} >= {"batch.micro", "optimizer.lr", "train_data"}


@pytest.mark.parametrize(
    "command", ["train", "check", "try", "tune", pytest.param("wizard", marks=pytest.mark.long)]
)
def test_a_gpu_that_does_not_exist_is_a_configuration_error(tmp_path: Path, command: str) -> None:
    assert "cuda:63" in refused(command, "--set", "run.device=cuda:63", folder=tmp_path)


# A command line, and what its error names.
COMMAND_LINES = {
    "tain": "did you mean train?",
    "run.toml": "ndd-console train run.toml",
    "train missing.toml": "missing.toml",
    "train --epochs 3": "--set run.epochs=VALUE",
    "train --set batch.micro": "section.key=value",
    "train --set workload.data=/nowhere/at/all.txt": "/nowhere/at/all.txt",
    "train --set workload.data=binary.txt": "binary.txt",
    "train --set run.name=../../etc": "run.name",
    "train --set log.trace=no/such/t.json": "log.trace",
    "train --workload nope": "allowed: antispoof",
    "train --max-steps 0": "--max-steps",
    "train --kernels-every -1": "--kernels-every",
    "train --from-step 3": "--resume",
    "train --resume nope": "nope",
    "train --resume-or-start --resume one": "--resume-or-start",
    "attach nope": "nope",
    "report three": "three",
    "report fifo": "events.jsonl",
    "report one -o no/such/folder/page.html": "no/such/folder/page.html",
    "report one --text --json": "--json",
    "compare nope one": "nope",
    "compare one one": "same run",
    "compare one empty": "empty",
    "compare one": "Missing argument",
    "compare one two --fail-if-slower 5": "5% or 0.05",
    "try": "--set KEY=VALUE",
    "try --set batch.mico=32": "did you mean micro?",
    "try gone.toml --set batch.micro=32": "gone.toml",
    "tune --set batch.micro=0": "batch.micro",
    "tune --workload eeg --only nonsense": "allowed: gather",
    "tune --run nope": "nope",
    "tune --run one x.toml": "omit CONFIG",
    "claims Z1": "Z1; allowed: N1",
    "config bacth.micro": "did you mean batch",
    "runs delete": "--older-than",
    "runs delete no-*": "no-*",
    "runs delete --older-than=30 --yes": "30d",
    "wizard --gpu 'Voodoo 2'": "Voodoo 2",
    "wizard --goal time": "--items N",
    "wizard --keep colour": "batch, sequence, size",
    "wizard --size huge": "huge",
    "wizard --min-sequence 9999": "allowed: 2 to",
    "wizard -o /proc/a.toml": "/proc/a.toml",
    "wizard /dev/zero": "/dev/zero",
    "wizard --reserve-memory inf": "--reserve-memory",
    "try one --set run.threads=1 --budget 20x": "90s",
    "try one --set run.threads=1 --budget 0.5s": "0.5",
    "wizard --workload nope": "workload.name",
    "trace .": "no trace",
    "trace none.json": "none.json",
    "memory .": "folder",
}


@pytest.mark.parametrize(("line", "named"), COMMAND_LINES.items(), ids=COMMAND_LINES)
def test_command_line_mistakes(tmp_path: Path, line: str, named: str) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, windows(steady(9, 1.0)))
    write_run(tmp_path / "runs" / "empty", [])
    (tmp_path / "runs" / "fifo").mkdir()
    os.mkfifo(tmp_path / "runs" / "fifo" / "events.jsonl")
    (tmp_path / "binary.txt").write_bytes(b"abc\x00def" * 100)
    assert named in refused(*shlex.split(line), folder=tmp_path)


def test_runs_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    assert str(tmp_path / "runs") in refused("train", "--headless", folder=tmp_path)


def test_mistakes_name_the_option_that_was_typed(tmp_path: Path) -> None:
    for command in (("train",), ("run", "--", "python", "train.py")):
        message = refused(command[0], "--run", "../x", *command[1:], folder=tmp_path)
        assert message.startswith("ndd-console: --run ../x: ") and "--set" not in message
    assert "--set" not in refused("train", "--nonsense", folder=tmp_path)
    assert r"'\x1b[31m'" in refused("config", "\x1b[31m", folder=tmp_path)
    assert "workers-N" in refused("tune", "--only", "worker", folder=tmp_path)
