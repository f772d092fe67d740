"""User mistakes: one message for all of them, exit status 2, nothing written, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from .program import run

pytestmark = pytest.mark.long


def refused(folder: Path, *arguments: str, status: int = 2) -> str:
    done = run(*arguments, folder=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists(), "something was written"
    return done.stderr


@pytest.mark.promise
def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nepochs = 0\ndevice = "cuda:7"\n[batch]\nsequence = 9000000\nmicor = 3\n'
        '[loader]\nprefetch = 2\n[optimizer]\nlr = "fast"\n'
    )
    for command in ("train", "check"):
        message = refused(tmp_path, command, str(config))
        for expected in (
            "run.toml line 2: run.epochs = 0",
            "run.toml line 3: run.device",
            "cuda:7",
            "run.toml line 5: batch.sequence = 9000000",
            "run.toml line 6: batch.micor",
            "did you mean micro?",
            "prefetch needs workers",
            'optimizer.lr = "fast"',
            "allowed: a number",
        ):
            assert expected in message, message


def test_check_reports_mistakes_in_the_file_and_in_the_factory_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def factory(settings):\n    return {'model': 3}\n")
    message = refused(
        tmp_path,
        "check",
        "--workload",
        "mine:factory",
        "--set",
        "batch.micro=0",
        "--set",
        "optimizer.lr=fast",
    )
    for expected in (
        "batch.micro = 0",
        'optimizer.lr = "fast"',
        "set run.epochs or run.max_steps",
        "train_data",
    ):
        assert expected in message, message


def test_an_unknown_option_that_names_a_key_says_how_to_set_it(tmp_path: Path) -> None:
    assert "to set this key: --set run.epochs=VALUE" in refused(tmp_path, "train", "--epochs", "3")
    assert "--set" not in refused(tmp_path, "train", "--nonsense")


@pytest.mark.promise
@pytest.mark.parametrize("command", ["train", "check", "try", "tune", "wizard"])
def test_a_gpu_that_does_not_exist_is_a_configuration_error(tmp_path: Path, command: str) -> None:
    assert "cuda:63 is not available" in refused(tmp_path, command, "--set", "run.device=cuda:63")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[run\nepochs = 1\n", "line 1"),
        (b"\x00\x01\xff", "UTF-8"),
        (b'[workload]\nname = "chartxt"\n', "did you mean chartext?"),
        (b'[workload]\nsize = "enormous"\n', "allowed: tiny"),
    ],
)
def test_broken_config_files(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    assert expected in refused(tmp_path, "train", "run.toml")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "empty"), (b"abc\x00def" * 100, "binary"), (b"\xff\xfe" * 500, "UTF-8")],
)
def test_broken_text_files(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    message = refused(tmp_path, "train", "--set", "workload.data=text.txt")
    assert expected in message and "text.txt" in message


@pytest.mark.promise
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "missing.toml"], "missing.toml"),
        (["train", "--set", "batch.micro"], "section.key=value"),
        (["train", "--set", "workload.data=/nowhere/at/all.txt"], "/nowhere/at/all.txt"),
        (["train", "--workload", "nope"], "allowed: antispoof, chartext"),
        (["train", "--from-step", "3"], "--resume"),
        (["train", "--resume", "nope"], "no run"),
        (["attach", "nope"], "no run"),
        (["attach"], "no run"),
        (["train", "--max-steps", "0"], "max-steps"),
        (["tain"], "did you mean train?"),
        (["train", "--set", "run.name=../../etc"], "run.name"),
    ],
)
def test_command_line_mistakes(tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused(tmp_path, *arguments)


def test_runs_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    done = run("train", "--headless", folder=tmp_path)
    assert done.returncode == 2 and "cannot write runs" in done.stderr and "Traceback" not in done.stderr


def test_taken_name_and_finished_run(tmp_path: Path) -> None:
    short = ("--set", "workload.size=tiny", "--set", "evaluate.at_end=false")
    assert run("train", "--run", "one", "--max-steps", "3", *short, folder=tmp_path).returncode == 0
    before = (tmp_path / "runs" / "one" / "events.jsonl").read_bytes()
    again = run("train", "--run", "one", *short, folder=tmp_path)
    assert again.returncode == 2 and "--resume one" in again.stderr
    finished = run("train", "--resume", "one", folder=tmp_path)
    assert finished.returncode == 2 and "all 3 steps" in finished.stderr
    seed = run("train", "--resume", "one", "--set", "run.seed=5", "--max-steps", "9", folder=tmp_path)
    assert seed.returncode == 2 and "run.seed was 1337, now 5" in seed.stderr
    assert (tmp_path / "runs" / "one" / "events.jsonl").read_bytes() == before
