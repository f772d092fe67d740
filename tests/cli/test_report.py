"""`ndd-console report`: output and files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.report.report_help import whole_life, write

from .program import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "runs", whole_life(cuda=False))
    return tmp_path


def test_the_page_is_written_into_the_runs_folder_and_its_path_is_printed(folder: Path) -> None:
    done = call("report", "one", folder=folder)
    path = Path(done.stdout.strip())
    assert path == folder / "runs" / "one" / "report.html"
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") >= 6 and "backward" in page
    # Written atomically: no temporary file is left.
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_run_is_found_by_its_path_from_anywhere(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    out = elsewhere / "page.html"
    done = call("report", str(folder / "runs" / "one"), "-o", str(out), folder=elsewhere)
    assert done.stdout.strip() == str(out) and out.stat().st_size > 10_000
    # The page has the permissions of any file that this user writes.
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


def test_text_goes_to_standard_output_in_100_columns(folder: Path) -> None:
    done = call("report", "--text", folder=folder)
    assert done.stdout.startswith("one: done") and "backward" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    plain = call("--ascii", "report", "--text", folder=folder)
    assert plain.stdout.isascii() and "backward" in plain.stdout


def test_json_is_one_document(folder: Path) -> None:
    body = json.loads(call("report", "one", "--json", folder=folder).stdout)
    assert (body["status"], body["step"]) == ("done", 4320)
    assert body["findings"] and body["findings"][0]["title"]
    # Phases add up to the measured time.
    tops = sum(seconds for name, seconds in body["phases_s"].items() if "/" not in name)
    assert tops == pytest.approx(body["measured_s"], rel=1e-6)
    assert [item["step"] for item in body["evaluations"]] == [864, 1728, 2592, 3456, 4320]
    # Training is told apart from preparation and pauses, and is the time that `runs` shows.
    assert body["preparation_s"] > 0 and body["paused_s"] == 30
    assert 0 < body["training_s"] < body["whole_s"]
    listed = json.loads(call("runs", "--json", folder=folder).stdout)["runs"]
    assert [row["training_s"] for row in listed] == [body["training_s"]]
