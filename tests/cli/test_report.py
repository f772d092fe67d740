"""`ndd-console report` on real runs: output, files and errors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from .program import ENDLESS, run, start
from .test_headless import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real run of a few hundred steps."""
    path = tmp_path_factory.mktemp("report")
    done = run(
        "train", "--run", "one", "--max-steps", "300", "--set", "workload.size=tiny", "--set", "run.threads=1",
        "--set", "log.window_s=0.1", "--set", "evaluate.every_steps=100", folder=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def test_the_page_is_written_into_the_runs_folder_and_its_path_is_printed(folder: Path) -> None:
    done = run("report", "one", folder=folder)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == folder / "runs" / "one" / "report.html"
    page = path.read_text(encoding="utf-8")
    for part in ("Verdict", "Where the time goes", "Idle time by cause", "Learning", "Memory", "Settings"):
        assert part in page
    assert "finished all 300 steps" in page and page.count("<svg") >= 6
    assert "bits_per_char" in page and "backward" in page
    # Written atomically: no temporary file is left.
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_run_is_found_by_its_path_from_anywhere(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = run("report", str(folder / "runs" / "one"), "-o", str(out), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out) and out.stat().st_size > 10_000
    # The page has the permissions of any file that this user writes.
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_text_goes_to_standard_output_in_100_columns(folder: Path) -> None:
    done = run("report", "--text", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one: done") and "Verdict" in done.stdout and "backward" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    plain = run("--ascii", "report", "--text", folder=folder)
    assert plain.stdout.isascii() and "backward" in plain.stdout


@pytest.mark.promise
def test_json_is_one_document(folder: Path) -> None:
    done = run("report", "one", "--json", folder=folder)
    body = json.loads(done.stdout)
    assert body["status"] == "done" and body["step"] == 300
    assert body["findings"] and body["findings"][0]["title"]
    # Phases add up to the measured time.
    tops = sum(seconds for name, seconds in body["phases_s"].items() if "/" not in name)
    assert tops == pytest.approx(body["measured_s"], rel=1e-6)
    assert [item["step"] for item in body["evaluations"]] == [100, 200, 300]
    # Training is told apart from preparation, and is the time that `runs` shows.
    assert body["preparation_s"] > 0 and body["paused_s"] == 0
    assert 0 < body["training_s"] < body["whole_s"]
    listed = json.loads(run("runs", "--json", folder=folder).stdout)["runs"]
    assert [row["training_s"] for row in listed] == [body["training_s"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("report", "two"), "there is no run two"),
        (("report", "one", "-o", "no/such/folder/page.html"), "no/such/folder/page.html"),
        (("report", "one", "-o", "."), "-o"),
        (("report", "one", "--text", "--json"), "exclude each other"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments, folder=folder)
    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_a_live_run_has_a_report_and_continues(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, folder=tmp_path)
    try:
        wait_for(tmp_path, '"type":"window"')
        done = run("report", "one", "--text", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "one: training" in done.stdout and "the run is live" in done.stdout
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
