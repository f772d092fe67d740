"""`ndd-console wizard` without a screen: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli

from ndd_console.cli.wizard import WizardProgress
from ndd_engine.config import read

from .program import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(170)]

TINY = ("--set", "workload.size=tiny", "--set", "run.device=cpu", "--set", "run.max_steps=5")


def test_the_written_file_trains(tmp_path: Path) -> None:
    written = run(
        "wizard",
        "--workload",
        "chartext",
        *TINY,
        "--headless",
        "--no-verify",
        "-o",
        "mine.toml",
        folder=tmp_path,
    )
    assert written.returncode == 0, written.stderr
    assert "total time" in written.stdout and "*" in written.stdout
    assert "train with: ndd-console train mine.toml" in written.stderr
    text = (tmp_path / "mine.toml").read_text()
    assert "Not verified by a measurement." in text
    assert "# predicted" in text
    trained = run("train", "mine.toml", "--headless", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    again = run("wizard", "--headless", "-o", "mine.toml", folder=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_for_a_gpu_that_is_not_in_this_machine(tmp_path: Path) -> None:
    done = run(
        "wizard", "--workload", "chartext", "--set", "workload.size=mini", "--set", "precision.amp=bf16", "--gpu",
        "RTX 4080 SUPER", "--headless", "--json", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu"] == "NVIDIA GeForce RTX 4080 SUPER"
    assert found["verified"] is False
    assert all(row["step_is_lower_bound"] for row in found["proposals"])
    assert all(row["predicted_memory_bytes"] > 500 << 20 for row in found["proposals"])
    # Peak FLOP/s do not depend on the micro-batch: the largest that fits gets closest to them.
    assert found["chosen"]["micro"] == max(
        row["micro"] for row in found["proposals"] if not row["missing_bytes"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "Voodoo 2"], "there is no profile of this GPU"),
        (["--goal", "time"], "--items N"),
        (["--effective-batch", "8", "--free-batch"], "cannot be combined"),
        (["--size", "huge"], "unknown size"),
        (["--min-sequence", "9999"], "allowed: 2 to"),
        (["-o", "nowhere/a.toml"], "does not exist"),
        (["-o", ".", "--force"], "is a folder"),
        (["-o", "/proc/a.toml"], "cannot be written"),
        (["/dev/zero"], "is a device"),
        (["--budget", "nan"], "finite number"),
        (["--reserve-memory", "inf"], "finite number"),
        (["--set", "workload.data=gone.txt"], "gone.txt"),
        (["gone.toml"], "gone.toml"),
        (["--set", "batch.micro=0"], "batch.micro"),
        (["--workload", "nope"], "there is no such workload"),
    ],
)
def test_mistakes_are_reported_before_probing(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run("wizard", "--headless", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_prints_each_stage_once() -> None:
    told: list[str] = []
    clock = iter(range(0, 1000, 1))
    progress = WizardProgress(told.append, lambda: float(next(clock)))
    for text, share in (
        ("probing a: reading", 0.0),
        ("probing a: reading", 0.1),
        ("probing b: \x1b[1mx", 0.5),
    ):
        progress.look(text, share)
    assert len(told) == 2
    assert "\x1b" not in told[1]


def test_the_written_file_is_toml(tmp_path: Path) -> None:
    small = ("workload.samples=400", "batch.sequence=8", "batch.micro=16", "run.device=cpu")
    sets = [part for item in small for part in ("--set", item)]
    done = run("wizard", "--workload", "eeg", *sets, "--headless", "--no-verify", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # stdout has nothing else, so it can be redirected to a file.
    assert tomli.loads(done.stdout)["workload"]["name"] == "eeg"
    assert "total time" in done.stderr


def test_a_file_is_changed_and_an_invalid_one_is_rejected_first(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '# mine\n[workload]\nname = "eeg" # the recordings\nsamples = 400\n[batch]\nsequence = 8\nmicro = 16\n'
        '[run]\ndevice = "cpu"\nmax_steps = 5\n'
    )
    arguments = ("--headless", "--no-verify", "--effective-batch", "32", "--force", "-o", "mine.toml")
    done = run("wizard", "mine.toml", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = mine.read_text()
    assert text.startswith("# mine\n") and "# the recordings" in text
    batch = read(mine).resolve().batch
    assert batch.micro * batch.accumulation == 32
    mine.write_text("[batch\n")
    done = run("wizard", "--workload", "eeg", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "not valid TOML" in done.stderr and "probing" not in done.stderr


def test_an_effective_batch_larger_than_the_data_is_rejected(tmp_path: Path) -> None:
    small = (
        "workload.samples=400",
        "batch.sequence=8",
        "batch.micro=16",
        "run.device=cpu",
        "run.max_steps=5",
    )
    sets = [part for item in small for part in ("--set", item)]
    done = run(
        "wizard", "--workload", "eeg", *sets, "--headless", "--effective-batch", "100000", folder=tmp_path
    )
    assert done.returncode == 2
    assert "training data has only" in done.stderr
