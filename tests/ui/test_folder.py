"""What the home screen and the wizard find in the current folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from ndd_console.jobs.folder import StartRow, details, folder_rows
from ndd_console.jobs.run_sources import HomeFolder
from ndd_console.jobs.wizard import WizardJob
from ndd_console.screens.home import entries
from ndd_engine.wizard.proposals import Answers

OTHER = """
import torch

def build(settings, width=3):
    "Builds a net."
    from types import SimpleNamespace
    return SimpleNamespace(model=torch.nn.Linear(1, 1), train_data=[], loss=None)

def helper(a, b):
    return {"model": a, "train_data": b}

def _hidden(settings):
    return {"model": 1, "train_data": 2}

raise SystemExit("importing this is a mistake")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[workload]\nname = "chartext"\nsize = "tiny"\n[batch]\nmicro = 8\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "nets.py").write_text(OTHER)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "not-a-module.py").write_text(OTHER)
    (tmp_path / "my_workload.py").write_text(
        files("ndd_console.cli").joinpath("example_workload.py").read_text("utf-8")
    )
    return tmp_path


def test_a_file_that_extends_another_shows_the_workload_of_both(folder: Path) -> None:
    (folder / "child.toml").write_text('extends = "mine.toml"\n[batch]\nmicro = 4\n')
    (folder / "orphan.toml").write_text('extends = "missing.toml"\n')
    titles = {row.name: row.title for row in folder_rows()}
    assert titles["child.toml"] == titles["mine.toml"] != titles["orphan.toml"]
    assert titles["mine.toml"].endswith("chartext tiny") and "chartext" not in titles["orphan.toml"]


def test_configurations_and_factories_are_found_without_importing(folder: Path) -> None:
    rows = folder_rows()
    assert [(row.name, row.kind) for row in rows] == [
        ("mine.toml", "file"), ("my_workload:factory", "own"), ("nets:build", "own"),
    ]  # fmt: skip
    assert [row.name for row in HomeFolder(folder / "runs").workloads()][:4] == [
        *(row.name for row in rows),
        "chartext",
    ]


def test_details(folder: Path) -> None:
    rows = {row.name: row for row in folder_rows()}
    file = details(rows["mine.toml"])
    assert file[0].endswith("mine.toml") and "micro = 8" in file
    assert "Builds a net." in details(rows["nets:build"])
    (folder / "mine.toml").write_text("[batch]\nmicro = 0\n")
    assert any("batch.micro" in line and "line 2" in line for line in details(rows["mine.toml"]))
    built_in = details(StartRow("chartext", "text", "sizes tiny"))
    assert built_in[0].endswith("--workload chartext") and "[run]" in built_in


def test_the_screen_has_a_group_for_the_folder(folder: Path) -> None:
    rows = (*folder_rows(), StartRow("chartext", "text", "sizes tiny"))
    shown = entries(rows, (), 80)
    titles = [
        "".join(text for row in item.rows for text, _ in row) if item.value is None else item.value.name
        for item in shown
    ]
    assert "this folder" in titles[0] and "built-in" in titles[4] and "runs" in titles[6]
    assert [*titles[1:4], titles[5]] == ["mine.toml", "my_workload:factory", "nets:build", "chartext"]


def test_the_wizard_offers_them_and_changes_a_chosen_file(folder: Path) -> None:
    made = WizardJob(Answers(), None, 10.0)
    names = [row.name for row in made.workloads()]
    assert names[:4] == ["mine.toml", "my_workload:factory", "nets:build", "chartext"]
    made.choose(0)
    assert made.answers.config == Path("mine.toml") and not made.problem()
    assert made._path == Path("mine.toml")
    made.choose(3)
    assert made.answers.config is None and made.answers.workload == "chartext" and made._path is None
    first = WizardJob(Answers(), None, 10.0, first=folder_rows()[1])
    assert first.workloads()[0].name == "my_workload:factory"
