"""The wizard: keys and errors of its seven pages, its questions and answers, and what the current folder offers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import WizardApp
from ndd_console.jobs import wizard as wizard_job
from ndd_console.jobs.folder import StartRow, details, folder_rows
from ndd_console.jobs.run_sources import HomeFolder
from ndd_console.jobs.wizard import WizardJob, live_run_notes
from ndd_console.render.text import lines
from ndd_console.screens.home import entries
from ndd_console.screens.pages import HelpScreen
from ndd_console.screens.wizard import BY_SPEED, WizardScreen, columns_of, ordered
from ndd_console.words.wizard import PROPOSAL_COLUMNS
from ndd_engine.hardware.named_gpus import gpu_named, usable_bytes
from ndd_engine.wizard.proposals import Answers, Measured
from tests import waiting

from . import pilots
from .fake_wizard import ROWS, TOML, FakeWizard
from .pilots import press, until


def screen_of(pilot: Pilot[Any]) -> WizardScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WizardScreen)
    return screen


def text_of(pilot: Pilot[Any]) -> str:
    return pilots.text_of(pilot.app)


async def seen(pilot: Pilot[Any], text: str) -> None:
    await until(pilot, lambda: text in text_of(pilot))


@asynccontextmanager
async def at_the_table(
    app: WizardApp, wizard: FakeWizard, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[Pilot[Any]]:
    """On the page of the trade-offs."""
    async with app.run_test(size=size) as pilot:
        await press(pilot, "enter", "enter", "enter")
        wizard.go_on()
        await until(pilot, lambda: screen_of(pilot).page == "trade-offs")
        yield pilot


async def test_from_the_machine_to_the_file() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await seen(pilot, "(pid 812)")
        await press(pilot, "enter", "down", "up", "enter")
        assert screen_of(pilot).page == "goal"
        await press(pilot, "right")
        assert wizard.fields()[0].value in text_of(pilot) and wizard.goal == 1
        await press(pilot, "left", "enter")
        assert screen_of(pilot).page == "probing"
        await seen(pilot, "40 %")
        assert "micro-batch 16" in text_of(pilot) and "9.0 s" in text_of(pilot)
        wizard.go_on()
        await until(pilot, lambda: screen_of(pilot).page == "trade-offs")
        await pilot.resize_terminal(160, 30)
        await seen(pilot, "low confidence")
        await press(pilot, "v")
        assert screen_of(pilot).page == "verify"
        wizard.go_on()
        await seen(pilot, "-2.9 %")
        await press(pilot, "enter")
        assert "-micro = 64" in text_of(pilot)
        await press(pilot, "d")
        assert TOML[2] in text_of(pilot)
        await press(pilot, "w")
        assert wizard.saved == [screen_of(pilot)._proposal]
        await press(pilot, "t")
    assert app.to_train == "mine.toml" and len(wizard.saved) == 1


async def test_only_the_named_key_writes_and_a_changed_file_asks() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with at_the_table(app, wizard) as pilot:
        await press(pilot, "enter", "enter", "enter")
        assert screen_of(pilot).page == "file" and not wizard.saved
        wizard.edited = True
        await press(pilot, "t")
        assert not wizard.saved and not app.to_train
        await press(pilot, "enter")
        assert not wizard.saved
        await press(pilot, "w")
        assert len(wizard.saved) == 1


async def test_back_goes_one_page_and_closes_at_the_first() -> None:
    app = WizardApp(FakeWizard())
    async with app.run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter")
        for page in ("goal", "workload", "machine"):
            assert screen_of(pilot).page == page
            await press(pilot, "b")
    assert app.return_value == "quit" and app.to_train == ""


async def test_stopping_keeps_the_answers() -> None:
    wizard = FakeWizard()
    async with WizardApp(wizard).run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter", "right")
        for count in (1, 2):
            await press(pilot, "enter")
            await seen(pilot, "40 %")
            wizard.error = "stopped"
            await press(pilot, "b")
            assert wizard.stopped == count
            await until(pilot, lambda: screen_of(pilot).message == ("stopped", "bad"))
        await press(pilot, "b")
        assert screen_of(pilot).page == "goal" and wizard.goal == 1


async def test_a_problem_is_shown_and_nothing_starts() -> None:
    wizard = FakeWizard()
    wizard.trouble = "--effective-batch 7: \x1b[31m8"
    async with WizardApp(wizard).run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter")
        assert screen_of(pilot).page == "workload"
        assert "--effective-batch 7" in text_of(pilot) and "\x1b" not in text_of(pilot)
        wizard.trouble = ""
        await press(pilot, "enter")
        wizard.trouble = "no"
        await press(pilot, "right", "enter")
        assert screen_of(pilot).page == "goal" and not wizard.busy


async def test_a_file_that_cannot_be_shown_or_written_says_why() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    wizard.cannot_show = "no TOML \x1b[1m"
    async with at_the_table(app, wizard) as pilot:
        await press(pilot, "enter")
        assert screen_of(pilot).page == "trade-offs"
        assert "no TOML" in text_of(pilot) and "\x1b" not in text_of(pilot)
        wizard.cannot_show, wizard.there = "", False
        await press(pilot, "enter")
        assert screen_of(pilot).page == "file" and "-micro = 64" not in text_of(pilot)
        wizard.cannot_save = "No space"
        await press(pilot, "w")
        assert "No space" in text_of(pilot)
        await press(pilot, "q")
    assert app.to_train == ""


async def test_what_does_not_fit_or_failed_cannot_be_written_and_stays_marked() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard), wizard, (120, 40)) as pilot:
        keys = {one.key for one in screen_of(pilot).marked}
        first = ROWS[4]  # the second fastest
        failed = replace(first, measured=Measured(None, None, "2 GiB more"))
        wizard.rows = tuple(failed if row is first else row for row in wizard.rows)
        await until(pilot, lambda: failed in screen_of(pilot).marked)
        assert {one.key for one in screen_of(pilot).marked} == keys
        assert failed.key in keys and "✔" in text_of(pilot)
        await press(pilot, "home", "down", "enter")
        assert screen_of(pilot).page == "trade-offs" and "2 GiB more" in text_of(pilot)
        await press(pilot, "end", "enter")
        assert screen_of(pilot).page == "trade-offs"
        await press(pilot, "home", "enter")
        assert screen_of(pilot).page == "file"


async def test_for_another_gpu_training_is_not_available() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard, can_train=False), wizard, (120, 40)) as pilot:
        await press(pilot, "enter")
        assert all(key != "t" for key, _ in screen_of(pilot).key_words())
        await press(pilot, "t")
        assert screen_of(pilot).page == "file"
        await press(pilot, "?")
        assert isinstance(pilot.app.screen, HelpScreen)


async def test_marking_and_sorting() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard), wizard, (120, 40)) as pilot:
        await press(pilot, "end", "up", "up", "space")
        marked = len(screen_of(pilot).marked)
        await press(pilot, "space")
        assert abs(len(screen_of(pilot).marked) - marked) == 1
        for count, _ in enumerate(columns_of(ROWS, BY_SPEED), 1):
            await press(pilot, "s")
            assert (screen_of(pilot).column is BY_SPEED) == (count == len(columns_of(ROWS, BY_SPEED)))
        x = text_of(pilot).split("\n")[2].index("memory")
        await pilot.click(offset=(x, 2))
        await pilot.pause()
        assert screen_of(pilot).column.name == "memory" and "memory▾" in text_of(pilot)
        await press(pilot, "p")
        assert not screen_of(pilot).plot


def test_proposals_that_fit_come_first_in_every_order() -> None:
    for column in PROPOSAL_COLUMNS:
        assert ordered(ROWS, column)[-1] == ROWS[2]
    assert ordered(ROWS, BY_SPEED)[0] == ROWS[5]


# Questions and answers


def job(workload: str = "chartext", **options: Any) -> WizardJob:
    made = WizardJob(Answers(workload="chartext", **options), None, 10.0)
    made.choose([row.name for row in made.workloads()].index(workload))
    return made


def value(made: WizardJob, name: str) -> str:
    return next(field.value for field in made.fields() if field.name == name)


def change(made: WizardJob, name: str, by: int = 1) -> str:
    place = next(index for index, field in enumerate(made.fields()) if field.name == name)
    return made.change(place, by)


def test_the_goal_time_asks_for_the_number_of_items() -> None:
    made = job()
    while value(made, "goal") != "shortest total time":
        change(made, "goal")
    before = made.answers.items
    assert before and not change(made, "number of items")
    assert made.answers.items == 2 * before
    change(made, "number of items", -1)
    assert made.answers.items == before
    change(made, "effective batch")
    assert made.answers.items == before  # a different question
    change(made, "goal")
    assert made.answers.items is None  # another goal needs none


@pytest.mark.parametrize("name", ["effective batch", "minimum sequence", "model sizes"])
def test_choices_wrap_around(name: str) -> None:
    made = job()
    first = value(made, name)
    seen = [first]
    while (len(seen) < 2 or seen[-1] != first) and len(seen) < 22:
        assert change(made, name) == ""
        seen.append(value(made, name))
    assert seen[-1] == first and len(set(seen)) > 2
    change(made, name, -1)
    assert value(made, name) != first


def test_an_invalid_file_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "mine.toml"
    broken.write_text("[batch]\nmicro = 0\n")
    made = WizardJob(Answers(config=broken), broken, 10.0)
    assert made.workloads()[0].name == str(broken)
    assert made.choose(0) == ()
    assert "batch.micro" in made.problem()


@pytest.mark.parametrize(
    ("runs", "words"), [([], ""), (["a-001"], "a-001:"), (["a-001", "b-002"], "a-001, b-002:")]
)
def test_live_runs_are_mentioned(
    runs: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SimpleNamespace(name=name, live_owner=lambda: 1) for name in runs]
    ended = SimpleNamespace(name="ended", live_owner=lambda: None)
    monkeypatch.setattr(wizard_job, "all_runs", lambda root: [*found, ended])
    assert words in (told := " ".join(live_run_notes(tmp_path))) and "ended" not in told
    assert "a-001" not in " ".join(live_run_notes(tmp_path, "a-001"))


def test_another_workload_has_its_own_data_and_resets_the_answers() -> None:
    made = job(sizes=("mini",), min_sequence=32, effective_batch=64)
    names = [row.name for row in made.workloads()]
    assert set(names) == {"eeg", "chartext", "antispoof", "finetune", "summarise"}
    assert (made.answers.sizes, made.answers.min_sequence, made.answers.effective_batch) == (
        ("mini",),
        32,
        64,
    )
    assert "segments" in " ".join(made.choose(names.index("eeg")))
    assert made.answers.workload == "eeg" and not made.problem()
    assert (made.answers.sizes, made.answers.min_sequence, made.answers.effective_batch) == ((), None, None)


def test_the_effective_batch_is_limited_by_the_data() -> None:
    made = job(sets=("workload.size=tiny", "batch.sequence=64", "batch.micro=2000"))  # of 6,903 segments
    seen = set()
    for _ in range(6):
        change(made, "effective batch")
        seen.add(value(made, "effective batch"))
    assert seen == {"2000", "4000", "any"}


def test_a_gpu_that_is_not_in_this_machine_is_shown_from_the_first_page_on() -> None:
    made = job(gpu="RTX 4080 SUPER")
    waiting.until(lambda: made.machine is not None)
    text = "\n".join(lines(made.machine or []))
    assert "RTX 4080 SUPER" in text and "14.6 GiB" in text
    change(made, "reserved memory")
    change(made, "reserved memory")
    assert made.answers.reserve_bytes == int(0.2 * usable_bytes(gpu_named("RTX 4080 SUPER")))


# The current folder

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
    example = files("ndd_console.cli").joinpath("example_workload.py").read_text("utf-8")
    for name, text in {
        "mine.toml": '[workload]\nname = "chartext"\nsize = "tiny"\n[batch]\nmicro = 8\n',
        "pyproject.toml": '[project]\nname = "x"\n',
        "broken.toml": "[run\n",
        "nets.py": OTHER,
        "broken.py": "def (",
        "not-a-module.py": OTHER,
        "my_workload.py": example,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_that_extends_another_shows_the_workload_of_both(folder: Path) -> None:
    (folder / "child.toml").write_text('extends = "mine.toml"\n[batch]\nmicro = 4\n')
    (folder / "orphan.toml").write_text('extends = "missing.toml"\n')
    titles = {row.name: row.title for row in folder_rows()}
    assert titles["child.toml"] == titles["mine.toml"] != titles["orphan.toml"]
    assert "tiny" in titles["mine.toml"] and "chartext" not in titles["orphan.toml"]


def test_configurations_and_factories_are_found_without_importing_and_offered(folder: Path) -> None:
    rows = folder_rows()
    found = [("mine.toml", "file"), ("my_workload:factory", "own"), ("nets:build", "own")]
    assert [(row.name, row.kind) for row in rows] == found
    names = [*(name for name, _ in found), "chartext"]
    assert [row.name for row in HomeFolder(folder / "runs").workloads()][:4] == names
    # On the home screen below the name of their group.
    items = entries((*rows, StartRow("chartext", "text", "sizes tiny")), (), 80)
    assert [item.value.name for item in items if item.value is not None] == names
    assert [item.value is None for item in items] == [True, False, False, False, True, False, True]
    # And by the wizard, which changes a chosen file.
    made = WizardJob(Answers(), None, 10.0)
    assert [row.name for row in made.workloads()][:4] == names
    made.choose(0)
    assert made.answers.config == made._path == Path("mine.toml") and not made.problem()
    made.choose(3)
    assert made.answers.config is None and made.answers.workload == "chartext" and made._path is None
    first = WizardJob(Answers(), None, 10.0, first=rows[1])
    assert first.workloads()[0].name == "my_workload:factory"


def test_details(folder: Path) -> None:
    rows = {row.name: row for row in folder_rows()}
    file = details(rows["mine.toml"])
    assert file[0].endswith("mine.toml") and "micro = 8" in file
    assert "Builds a net." in details(rows["nets:build"])
    (folder / "mine.toml").write_text("[batch]\nmicro = 0\n")
    assert any("batch.micro" in line and "line 2" in line for line in details(rows["mine.toml"]))
    built_in = details(StartRow("chartext", "text", "sizes tiny"))
    assert built_in[0].split()[-2:] == ["--workload", "chartext"] and "[run]" in built_in
