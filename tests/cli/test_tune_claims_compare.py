"""The commands tune, claims and compare, run as a user does: output, rejected arguments, exit status."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path

import pytest

from ndd_console.cli.tune import ONLY
from ndd_engine.config import read
from ndd_engine.trial.candidates import Place, candidates

from .program import run, start

pytestmark = pytest.mark.long

# The verdicts of a claim, with the words that the engine used before they were reworded.
VERDICTS = (
    "confirmed", "not confirmed", "depends", "not measurable on this machine",
    "holds", "does not hold", "not measurable here",
)  # fmt: skip
# A model so small that collating takes several times its step, also on a machine that others use too.
NDD = (
    "--set", "workload.hidden=[8]", "--set", "workload.samples=3000", "--set", "workload.channels=4",
    "--set", "batch.micro=256", "--set", "run.threads=1", "--set", "log.window_s=0.05",
    "--set", "checkpoint.at_end=false",
)  # fmt: skip


def train(folder: Path, name: str, *sets: str, steps: int = 400) -> None:
    options = [part for item in sets for part in ("--set", item)]
    command = ("train", "--headless", "--workload", "eeg", "--run", name, "--max-steps", str(steps))
    done = run(*command, *NDD, *options, "--set", "run.epochs=1000", folder=folder)
    assert done.returncode == 0, done.stderr
    # Other tests run at the same time: without its counters, a record does not say so.
    events = folder / "runs" / name / "events.jsonl"
    kept = [line for line in events.read_bytes().splitlines(keepends=True) if b'"type":"sample"' not in line]
    events.write_bytes(b"".join(kept))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fast: batches in one gather; slow: the same, collated item by item, which costs several times the step."""
    folder = tmp_path_factory.mktemp("two")
    train(folder, "fast")
    train(folder, "slow", "loader.fetch=item", steps=200)
    return folder


# compare


def test_a_planted_slowdown_is_found_and_fails_the_check(two_runs: Path) -> None:
    done = run("compare", "fast", "slow", "--fail-if-slower", "5%", folder=two_runs)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "B is slower" in done.stdout
    assert "loader.fetch: auto -> item" in done.stdout
    assert "check: B is slower than A by more than 5 %" in done.stderr


def test_the_other_way_round_it_passes(two_runs: Path) -> None:
    done = run("compare", "slow", "fast", "--fail-if-slower", "0.05", "--json", folder=two_runs)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(done.stdout)
    assert body["verdict"] == "faster" and body["low"] > 1
    assert body["check"] == {"limit": 0.05, "result": "not slower"}
    assert body["a"]["warm_up_windows"] >= 1
    # The time went where it was planted.
    waits = [body[side]["phases_ns_per_step"]["data_wait"] for side in "ab"]
    assert waits[0] > 2 * waits[1]
    # The batches are the same, and so are the losses.
    assert all(point["a"] == pytest.approx(point["b"], rel=0.2) for point in body["losses"])


def test_several_runs_are_compared_with_the_first(two_runs: Path) -> None:
    train(two_runs, "again", steps=200)
    done = run("compare", "fast", "slow", "again", "--fail-if-slower", "5%", folder=two_runs)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "check: B is slower than A by more than 5 %" in done.stderr and "check: C is" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    body = json.loads(run("compare", "fast", "slow", "again", "--json", folder=two_runs).stdout)
    assert [each["run"]["run"] for each in body["candidates"]] == ["slow", "again"]
    assert body["candidates"][0]["verdict"] == "slower" and body["candidates"][0]["check"] is None


def test_runs_are_named_by_path_too(two_runs: Path, tmp_path: Path) -> None:
    paths = [str(two_runs / "runs" / name) for name in ("fast", "slow")]
    done = run("compare", *paths, folder=tmp_path)
    assert done.returncode == 0 and "B is slower" in done.stdout


def test_a_different_effective_batch_is_warned_about(two_runs: Path) -> None:
    train(two_runs, "wide", "batch.accumulation=2", steps=60)
    done = run("compare", "fast", "wide", folder=two_runs)
    assert "not directly comparable: " in done.stderr and "(256, 512" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nope", "slow"), "no run nope"),
        (("fast", "fast"), "same run"),
        (("fast", "empty"), "run empty has no measured steps"),
        (("fast", "slow", "--fail-if-slower", "5"), "as in 5% or 0.05"),
        (("fast", "slow", "--fail-if-slower", "much%"), "as in 5% or 0.05"),
        (("fast", "slow", "--fail-if-slower", "-1%"), "as in 5% or 0.05"),
        (("fast",), "Missing argument"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_clear_error(
    two_runs: Path, arguments: tuple[str, ...], expected: str
) -> None:
    (two_runs / "runs" / "empty").mkdir(exist_ok=True)
    (two_runs / "runs" / "empty" / "events.jsonl").touch()
    done = run("compare", *arguments, folder=two_runs)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr and "Traceback" not in done.stderr


# tune


@pytest.mark.promise
@pytest.mark.slow
def test_tuning_prints_its_table_and_writes_its_configuration(
    tmp_path: Path,
) -> None:
    command = ("tune", "--workload", "eeg", *NDD, "--set", "loader.fetch=item", "--only", "gather")
    done = run(*command, "--budget", "8", "-o", "best.toml", folder=tmp_path, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "gather" in done.stdout and "vs. baseline" in done.stdout
    assert "not tried: " in done.stdout and "CUDA" in done.stdout
    assert "measuring" in done.stderr
    written = read(tmp_path / "best.toml").resolve()
    assert (written.batch.micro, written.workload.name) == (256, "eeg")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_prints_the_results_so_far(tmp_path: Path) -> None:
    process = start("tune", "--workload", "eeg", *NDD, "--budget", "60", "--json", folder=tmp_path)
    assert process.stderr is not None
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    for line in process.stderr:
        if line.startswith("measuring"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate()
    watchdog.cancel()
    assert process.returncode == 130, errors
    body = json.loads(output)
    assert body["stopped"] and {row["state"] for row in body["rows"]} == {"skipped"}
    assert "[batch]" in body["toml"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("missing.toml",), "missing.toml"),
        (("--set", "batch.micro=0"), "batch.micro"),
        (("--only", "nonsense", "--workload", "eeg"), "allowed: gather"),
        (("--run", "nope"), "no run"),
        (("--run", "nope", "x.toml"), "omit CONFIG"),
        (("-o", "no/such/folder/x.toml"), "does not exist"),
        (("--budget", "0"), "budget"),
    ],
)
def test_mistakes_in_tune_are_reported(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    done = run("tune", *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


# claims


def test_the_claims_are_listed_with_their_conditions(tmp_path: Path) -> None:
    done = run("claims", "--list", folder=tmp_path)
    assert done.returncode == 0
    for name in ("N1", "A7", "C8", "F3", "S8"):
        assert any(line.startswith(name) for line in done.stdout.splitlines())
    listed = json.loads(
        run("claims", "A4", "S8", "--list", "--json", "--budget", "10", folder=tmp_path).stdout
    )
    assert [claim["id"] for claim in listed["claims"]] == ["A4", "S8"]
    assert listed["claims"][1]["seconds_at_most"] == 10.0


@pytest.mark.promise
@pytest.mark.slow
def test_a_claim_is_really_measured(tmp_path: Path) -> None:
    done = run(
        "claims", "S8", "A4", "--budget", "20", "--json", "-o", "claims.json", folder=tmp_path, timeout=170
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert json.loads((tmp_path / "claims.json").read_text()) == body
    _, shares = body["claims"]
    assert [part["name"] for part in shares["parts"]] == [
        "encoder",
        "decoder",
        "attention",
        "pointer",
        "backward",
    ]
    assert 0.2 < sum(part["value"] for part in shares["parts"]) <= 1
    assert shares["verdict"] in VERDICTS
    assert "S8 (1 of 2)" in done.stderr or "S8 (2 of 2)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("Z1",), "Z1; allowed: N1"),
        (("N1", "-o", "."), "is a folder"),
        (("--budget", "x"), "budget"),
    ],
)
def test_mistakes_in_claims_are_reported(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    done = run("claims", *arguments, folder=tmp_path)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("workload", ["antispoof", "chartext", "finetune", "eeg", "summarise"])
def test_the_help_of_tune_lists_what_only_accepts(workload: str) -> None:
    listed = ", ".join(ONLY).split(", ")
    config = read(workload=workload, sets=["batch.accumulation=4", "loader.persistent=false"]).resolve()
    for candidate in candidates(config, Place(True, 4)):
        for name in filter(None, (candidate.name, candidate.group)):
            assert re.sub(r"\d+$", "N", name) in listed or name in listed, name
