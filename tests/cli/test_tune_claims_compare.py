"""The commands tune, claims and compare, run as a user does: output and exit status."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path
from typing import get_args

import pytest

from ndd_console.cli.tune import ONLY
from ndd_engine.config import read
from ndd_engine.trial.claims import Verdict
from ndd_engine.trial.tuning import trained
from ndd_watch.changes import Place, candidates
from tests.trial.written_runs import steady, windows, write_run

from .program import call, run, start

# A model so small that collating takes several times its step, also on a machine that others use too.
NDD = (
    "--set", "workload.hidden=[8]", "--set", "workload.samples=3000", "--set", "workload.channels=4",
    "--set", "batch.micro=256", "--set", "run.threads=1", "--set", "log.window_s=0.05",
    "--set", "checkpoint.at_end=false",
)  # fmt: skip


# compare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs: "slow" and "again" take three times as long as "fast"; "wide" has another batch and other data."""
    runs = tmp_path / "runs"
    write_run(runs / "fast", windows(steady(60, 1.0)))
    write_run(
        runs / "slow",
        windows(steady(60, 3.0, seed=1)),
        config={"batch": {"micro": 16}, "loader": {"workers": 2}},
    )
    write_run(runs / "again", windows(steady(60, 1.0, seed=2)))
    write_run(runs / "wide", windows(steady(60, 1.0, seed=3)), items_per_step=32, data="other data")
    return tmp_path


@pytest.mark.parametrize(
    ("runs", "status", "result"), [(("fast", "slow"), 1, "slower"), (("slow", "fast"), 0, "not slower")]
)
def test_a_planted_slowdown_is_found_and_fails_the_check(
    folder: Path, runs: tuple[str, ...], status: int, result: str
) -> None:
    for share, limit in (("5%", 0.05), ("0.05", 0.05)):
        done = call("compare", *runs, "--fail-if-slower", share, "--json", folder=folder)
        body = json.loads(done.stdout)
        assert done.returncode == status
        assert body["check"] == {"limit": limit, "result": result} and "5 %" in done.stderr
        assert body["verdict"] == ("slower" if status else "faster")
    # Without a limit, a slower run is a result like any other; runs are named by their paths too.
    assert call("compare", *(str(folder / "runs" / name) for name in runs), folder=Path("/")).returncode == 0


def test_several_runs_are_compared_with_the_first(folder: Path) -> None:
    runs = ("fast", "slow", "again")
    done = call("compare", *runs, "--fail-if-slower", "5%", "--json", folder=folder)
    assert done.returncode == 1
    candidates = json.loads(done.stdout)["candidates"]
    assert [each["run"]["run"] for each in candidates] == ["slow", "again"]
    assert [each["check"]["result"] for each in candidates] == ["slower", "not slower"]
    assert max(map(len, call("compare", *runs, folder=folder).stdout.splitlines())) <= 80


def test_what_is_not_comparable_is_warned_about_in_one_line(folder: Path) -> None:
    warning = call("compare", "fast", "wide", folder=folder).stderr
    assert "(16, 32" in warning and "data" in warning and warning.count("comparable") == 1


# tune


@pytest.mark.promise
@pytest.mark.slow
def test_tuning_prints_its_table_and_writes_its_configuration(tmp_path: Path) -> None:
    command = ("tune", "--workload", "eeg", *NDD, "--set", "loader.fetch=item", "--only", "gather")
    done = run(*command, "--budget", "8", "-o", "best.toml", folder=tmp_path, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "gather" in done.stdout and "measuring" in done.stderr
    written = read(tmp_path / "best.toml").resolve()
    assert (written.batch.micro, written.workload.name) == (256, "eeg")
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
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


@pytest.mark.parametrize("workload", ["antispoof", "chartext", "finetune", "eeg", "summarise"])
@pytest.mark.parametrize(("gpu", "attention"), [(True, "auto"), (True, "math"), (False, "auto")])
def test_the_help_of_tune_lists_what_only_accepts(workload: str, gpu: bool, attention: str) -> None:
    listed = ", ".join(ONLY).split(", ")
    sets = ["batch.accumulation=4", "loader.persistent=false", f"speed.attention={attention}"]
    config = read(workload=workload, sets=sets).resolve()
    for candidate in candidates(trained(Place(gpu, 4), config)):
        for name in filter(None, (candidate.name, candidate.group)):
            assert re.sub(r"\d+$", "N", name) in listed or name in listed, name


# claims


def test_the_claims_are_listed_with_their_conditions(tmp_path: Path) -> None:
    names = {line.partition(" ")[0] for line in call("claims", "--list", folder=tmp_path).stdout.splitlines()}
    assert names >= {"N1", "A7", "C8", "F3", "S8"}
    done = call("claims", "A4", "S8", "--list", "--json", "--budget", "10", folder=tmp_path)
    listed = json.loads(done.stdout)["claims"]
    assert [claim["id"] for claim in listed] == ["A4", "S8"]
    assert listed[1]["seconds_at_most"] == 10.0


@pytest.mark.promise
@pytest.mark.slow
def test_a_claim_is_really_measured(tmp_path: Path) -> None:
    done = run(
        "claims", "S8", "A4", "--budget", "20", "--json", "-o", "claims.json", folder=tmp_path, timeout=170
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert json.loads((tmp_path / "claims.json").read_text()) == body
    shares = body["claims"][1]
    parts = {part["name"]: part["value"] for part in shares["parts"]}
    assert set(parts) == {"encoder", "decoder", "attention", "pointer", "backward"}
    assert 0.2 < sum(parts.values()) <= 1
    assert shares["verdict"] in get_args(Verdict)
