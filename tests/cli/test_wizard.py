"""`ndd-console wizard` without a screen: output and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndd_console.cli.wizard import WizardProgress
from ndd_engine.config import read

from .program import call, run


@pytest.mark.long
@pytest.mark.budget(30)
def test_the_written_file_trains(tmp_path: Path) -> None:
    tiny = ("--set", "workload.size=tiny", "--set", "run.device=cpu", "--set", "run.max_steps=5")
    written = run("wizard", "--workload", "chartext", *tiny, "--headless", "--no-verify", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    # stdout has nothing else, so it can be redirected to a file.
    (tmp_path / "mine.toml").write_text(written.stdout)
    assert read(tmp_path / "mine.toml").resolve().workload.name == "chartext"
    assert "# predicted" in written.stdout
    trained = run("train", "mine.toml", "--headless", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    again = call("wizard", "--headless", "-o", "mine.toml", folder=tmp_path)
    assert again.returncode == 2 and (tmp_path / "mine.toml").read_text() == written.stdout


@pytest.mark.slow
@pytest.mark.long
def test_for_a_gpu_that_is_not_in_this_machine(tmp_path: Path) -> None:
    done = run(
        "wizard", "--workload", "chartext", "--set", "workload.size=mini", "--set", "precision.amp=bf16", "--gpu",
        "RTX 4080 SUPER", "--headless", "--json", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu"].endswith("RTX 4080 SUPER")
    assert found["verified"] is False
    assert all(row["step_is_lower_bound"] for row in found["proposals"])
    assert all(row["predicted_memory_bytes"] > 500 << 20 for row in found["proposals"])
    # Peak FLOP/s do not depend on the micro-batch: the largest that fits gets closest to them.
    assert found["chosen"]["micro"] == max(
        row["micro"] for row in found["proposals"] if not row["missing_bytes"]
    )


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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.budget(25)
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
    done = call("wizard", "--workload", "eeg", *arguments, folder=tmp_path)
    assert done.returncode == 2 and mine.read_text() == "[batch\n"
    assert "mine.toml" in done.stderr and "probing" not in done.stderr
