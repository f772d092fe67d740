"""`try`, `tune`, `claims`, `compare` and `wizard`, as a user calls them: what they print, record and write."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndd_console.cli.printing import say, stoppable
from ndd_console.cli.try_ import TrialProgress
from ndd_console.cli.tune import ONLY, check_names
from ndd_console.cli.wizard import WizardProgress
from ndd_engine.config import WORKLOADS, read
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.trial.outcome import MEASURING, Progress
from ndd_engine.trial.tuning import trained
from ndd_watch.changes import Conditions, candidates
from tests.records import events_of, snapshot_of
from tests.trial.trial_help import with_lengths
from tests.trial.written_runs import steady, windows, write_run
from tests.waiting import LIMIT_S, until

from .program import call, run, start

# try

TINY = (
    "--workload", "eeg", "--set", "workload.samples=400", "--set", "batch.sequence=8", "--set", "batch.micro=16",
    "--set", "run.threads=1", "--set", "run.device=cpu", "--set", "evaluate.every_epochs=0",
)  # fmt: skip


def snapshot(folder: Path) -> Snapshot:
    return snapshot_of(RunDir(folder / "runs" / "one"))


@pytest.mark.long
@pytest.mark.budget(40)
def test_a_live_run_is_paused_then_resumes_and_records_the_result(tmp_path: Path) -> None:
    training = start(
        "train", "--headless", "--run", "one", *TINY, "--set", "run.epochs=1000000", folder=tmp_path
    )
    try:
        until(lambda: snapshot(tmp_path).step >= 5)
        change = ("--set", "batch.micro=64", "--cause", "small-micro")
        done = run("try", "one", *change, "--json", folder=tmp_path, timeout=150)
        assert done.returncode == 0, done.stderr
        step = snapshot(tmp_path).step
        until(lambda: snapshot(tmp_path).step >= step + 5)
    finally:
        training.send_signal(signal.SIGINT)
        training.communicate(timeout=LIMIT_S)
    event = json.loads(done.stdout)
    assert (event["type"], event["against"], event["sets"]) == ("trial", "run one", ["batch.micro=64"])
    assert event["verdict"] != "failed" and event["low"] <= event["ratio"] <= event["high"], event["text"]
    assert event["cause"] == "small-micro"
    found = snapshot(tmp_path)
    assert [trial.text for trial in found.trials] == [event["text"]]
    events = events_of(RunDir(tmp_path / "runs" / "one"))
    (pause,) = [event.text for event in events if event.type == "mark" and event.kind == "pause"]
    assert re.search(r"process \d+", pause)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def figures(text: str) -> list[list[str]]:
    """The numbers of each line."""
    return [re.findall(r"[0-9.]+", line) for line in text.splitlines()]


def test_progress_moves_on_a_terminal_and_is_lines_within_the_budget_elsewhere() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        shown = TrialProgress(stream)
        for second in range(8):
            shown.look(Progress(MEASURING, float(second), 60.0, second // 4, 1.5, 1.4, 1.6))
        for second, stage in ((64, MEASURING), (70, MEASURING), (75, "warming up the candidate")):
            shown.look(Progress(stage, float(second), 60.0, 3))
        shown.finish()
    assert figures(plain.getvalue()) == [
        ["0", "60", "1.50", "1.40", "1.60"], ["4", "60", "1", "1.50", "1.40", "1.60"], ["60", "60", "3"],
        ["60", "60", "3"],
    ]  # fmt: skip
    assert len(set(plain.getvalue().splitlines())) == 4
    assert "\n" not in terminal.getvalue() and terminal.getvalue().count("\r\x1b[K") == 12
    assert "60 of 60 s" in terminal.getvalue() and "70 of" not in terminal.getvalue()


@pytest.mark.long
@pytest.mark.promise
def test_ctrl_c_prints_the_result_so_far(tmp_path: Path) -> None:
    trial = start(
        "try",
        *TINY,
        "--set",
        "workload.dropout=0.5",
        "--budget",
        "1000",
        "--json",
        folder=tmp_path,
        group=True,
    )
    assert trial.stderr is not None and trial.stdout is not None
    trial.stderr.readline()
    trial.send_signal(signal.SIGINT)
    out, err = trial.communicate(timeout=LIMIT_S)
    assert trial.returncode == 130, err
    assert json.loads(out)["verdict"] == "stopped"


class Interrupted(io.RawIOBase):
    """A stream in whose first write Ctrl-C arrives."""

    def __init__(self) -> None:
        self.written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += len(data)
        if self.written == len(data):
            os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_ctrl_c_while_a_line_is_printed_stops_after_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = Interrupted()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BufferedWriter(stream), line_buffering=True))
    with stoppable("the trial") as stop:
        say("a line")
        assert stop.is_set() and stop.exit_status == 130 and stream.written == len("a line\n")
    assert capfd.readouterr().err


def test_waiting_for_another_trial_is_one_line() -> None:
    """Its text has how long the other one has lasted, which was a new line every tenth of a second."""
    stream = io.StringIO()
    shown = TrialProgress(stream)
    for process, tenths in ((7, 1), (7, 2), (7, 3), (9, 1), (9, 2)):
        text = f"waiting for the trial of a=1 (process {process}, for {tenths}00 ms) on cpu"
        shown.look(Progress(text, 0.0, 60.0))
    shown.look(Progress("preparing", 1.0, 60.0))
    first, second, last = stream.getvalue().splitlines()
    assert "process 7" in first and "process 9" in second and last.endswith("preparing")


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


@pytest.mark.long
@pytest.mark.budget(40)
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


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("gpu", "attention"), [(True, "auto"), (True, "math"), (False, "auto")])
def test_every_setting_that_can_be_tried_can_be_named_and_is_in_the_help(
    workload: str, gpu: bool, attention: str
) -> None:
    listed = ", ".join(ONLY).split(", ")
    sets = ["batch.accumulation=4", "loader.persistent=false", f"speed.attention={attention}"]
    draft = read(workload=workload, sets=sets)
    here = trained(Conditions(gpu, 4), draft.resolve(), draft.model)
    for place in (here, replace(here, script=True)):
        for name in (name for one in candidates(place) for name in (one.name, one.group) if name):
            assert place.script or re.sub(r"\d+$", "N", name) in listed or name in listed, name
            check_names([name])


# claims


def test_the_claims_are_listed_with_their_conditions(tmp_path: Path) -> None:
    names = {line.partition(" ")[0] for line in call("claims", "--list", folder=tmp_path).stdout.splitlines()}
    assert names >= {"N1", "A7", "C8", "F3", "S8"}
    done = call("claims", "A4", "S8", "--list", "--json", "--budget", "10", folder=tmp_path)
    listed = json.loads(done.stdout)["claims"]
    assert [claim["id"] for claim in listed] == ["A4", "S8"]
    assert listed[1]["seconds_at_most"] == 10.0


@pytest.mark.long
@pytest.mark.budget(30)
def test_a_claim_is_really_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process trains both sides; only how long their steps take is given, and the budget is of these times."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with_lengths(monkeypatch, 3.0, 3.75)
    done = call("claims", "N6", "--budget", "60", "--json", "-o", "claims.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert json.loads((tmp_path / "claims.json").read_text()) == body
    (claim,) = body["claims"]
    (part,) = claim["parts"]
    assert part["change"] == ["precision.amp=bf16"] and part["claimed_high"] == 1.0
    assert part["value"] == pytest.approx(0.8) and part["outcome"] == "confirmed"
    # The guide measured on a GPU.
    assert part["where"] and claim["verdict"] == "depends"


# wizard


@pytest.mark.long
@pytest.mark.budget(30)
def test_the_written_file_trains(tmp_path: Path) -> None:
    sets = ("--set", "run.max_steps=5", "--set", "precision.amp=off")
    written = run("wizard", *TINY, *sets, "--headless", "--no-verify", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    # stdout has nothing else, so it can be redirected to a file.
    (tmp_path / "mine.toml").write_text(written.stdout)
    assert read(tmp_path / "mine.toml").resolve().workload.name == "eeg"
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
    for row in found["proposals"]:
        low, high = row["predicted_step_range_s"]
        assert low < row["predicted_step_s"] < high and row["decides"]
    assert all(row["predicted_memory_bytes"] > 500 << 20 for row in found["proposals"])
    assert found["chosen"]["set"] in found["table"] and len(found["table"]) <= 12
    # Half of the sequence and the sizes beside are shown, and not chosen.
    shown = {(row["size"], row["sequence"]) for row in found["proposals"] if row["alternative"]}
    assert shown == {("mini", 64), ("tiny", 128), ("small", 128)}
    assert (found["chosen"]["size"], found["chosen"]["sequence"]) == ("mini", 128)


def test_progress_prints_each_stage_once() -> None:
    told: list[str] = []
    clock = iter(range(0, 1000, 1))
    progress = WizardProgress(told.append, lambda: float(next(clock)))
    for text, share in (("probing a", 0.0), ("probing a", 0.1), ("probing b: \x1b[1mx", 0.5)):
        progress.look(text, share)
    assert len(told) == 2
    assert "\x1b" not in told[1]
