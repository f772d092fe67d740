"""The workload eeg was called ndd: its old name works in files, on the command line, in records and on a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndd_engine.config import read
from ndd_engine.record.events import parse
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.preflight import preflight
from ndd_engine.train.request import RunRequest
from ndd_engine.train.run import Run

SETS = ("workload.samples=400", "batch.sequence=8", "batch.micro=16", "run.device=cpu", "workload.hidden=[8]")


def test_files_options_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[workload]\nname = "ndd"\nhidden = [8]\n')
    wanted = read(workload="eeg", sets=["workload.hidden=[8]"]).resolve()
    assert read(file).resolve() == wanted
    assert read(workload="ndd", sets=["workload.hidden=[8]"]).resolve() == wanted
    assert read(sets=["workload.name=ndd", "workload.hidden=[8]"]).resolve() == wanted
    assert read(overrides={"workload": {"name": "ndd", "hidden": [8]}}).resolve() == wanted
    assert read(file).workload == "eeg"


def old(text: str) -> str:
    """A record or a file as the earlier release wrote it."""
    return text.replace('"eeg"', '"ndd"')


@pytest.mark.timeout(120)
def test_an_old_run_is_shown_with_todays_name_and_resumes(tmp_path: Path) -> None:
    draft = read(None, [*SETS, "run.max_steps=4"], "eeg")
    run = Run.open(RunRequest(draft, tmp_path))
    assert run.execute().status == "done"
    run.close()
    directory = RunDir(run.directory.path.rename(tmp_path / "ndd-001"))
    for path in (directory.events, directory.config):
        path.write_text(old(path.read_text()))
    assert '"ndd"' in directory.events.read_text() and 'name = "ndd"' in directory.config.read_text()
    reader = RunReader(directory)
    reader.poll()
    known = reader.snapshot().run
    assert known is not None and (known.workload, known.config["workload"]["name"]) == ("eeg", "eeg")
    line = next(
        line for line in directory.events.read_text().splitlines() if json.loads(line)["type"] == "run"
    )
    found = parse(line)
    assert found is not None and getattr(found[1], "workload") == "eeg"  # noqa: B009
    longer = read(directory.config, ["run.max_steps=6"])
    preflight(longer)
    again = Run.open(RunRequest(longer, tmp_path, directory))
    end = again.execute()
    again.close()
    assert (end.status, end.step) == ("done", 6), end.reason
