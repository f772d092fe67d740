"""The wizard's file: it reads back as proposed, keeps what the user wrote, and is not overwritten unasked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli
from situations import BASE, situation

from ndd_console.jobs.wizard import WizardJob
from ndd_engine.config import read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.files import write_text
from ndd_engine.wizard.proposals import Answers, Batch, Model
from ndd_engine.wizard.session import ProposalSet, configuration, difference, into, written_into

THEIRS = """# my run, do not touch
[workload]
name = "chartext"   # the novels
size = "tiny"

[batch]
# 32 was too much for the old GPU
micro = 16 # fits

[run]
epochs = 3
"""


def test_an_edited_file_keeps_its_comments_and_its_order() -> None:
    text = into(
        THEIRS, {"batch.micro": 48, "batch.accumulation": 2, "precision.amp": "bf16"}, {"batch.micro": "why"}
    )
    assert tomli.loads(text)["batch"] == {"micro": 48, "accumulation": 2}
    assert tomli.loads(text)["precision"] == {"amp": "bf16"}
    kept = [line for line in THEIRS.splitlines() if line and "micro" not in line]
    assert [line for line in text.splitlines() if line in kept] == kept
    (changed,) = [line for line in text.splitlines() if line.startswith("micro")]
    assert changed.endswith("# fits | why")


def test_equal_values_are_not_changed() -> None:
    assert into(THEIRS, {"batch.micro": 16, "run.epochs": 3}, {"batch.micro": "why"}) == THEIRS
    assert difference(THEIRS, THEIRS, "a.toml") == []


def test_a_key_can_be_removed() -> None:
    assert "micro" not in tomli.loads(into(THEIRS, {"batch.micro": None}, {}))["batch"]


def test_the_difference_is_a_unified_diff() -> None:
    lines = difference(THEIRS, into(THEIRS, {"batch.micro": 48}, {}), "a.toml")
    assert lines[0].startswith("--- a.toml")
    assert {line[:11] for line in lines if line[1:].startswith("micro")} == {"-micro = 16", "+micro = 48"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("[batch\nmicro", "not valid TOML"), ('batch = "x"\n', r"\[batch\] must be a section")],
)
def test_invalid_files_are_rejected(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        into(text, {"batch.micro": 1}, {})


def test_nested_sections_are_found() -> None:
    mine = '[workload]\nname = "a:b"\n[workload.options]\ndepth = 2 # mine\n'
    text = into(mine, {"workload.options.depth": 4, "workload.options.width": 8}, {})
    assert tomli.loads(text)["workload"]["options"] == {"depth": 4, "width": 8}
    assert "# mine" in text


# The file, and the proposal to write into it.
@pytest.mark.parametrize(
    "mine",
    [
        "",
        'size = "auto"',
        'size = "tiny"',
        'size = "guide"',
        'size = "tiny"\n[batch]\nmicro = 16',
        'size = "tiny"\n[batch]\nmicro = 16\neffective = 96',
        'size = "guide"\n[batch]\neffective = 512\n[run]\npreset = "fastest"',
    ],
)
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Model("tiny", 64, "off"), Batch(16, 1)),
        (Model("tiny", 64, "off"), Batch(16, 6)),
        (Model("guide", 256, "bf16"), Batch(16, 8)),
        (Model("medium", 64, "off"), Batch(16, 8)),
    ],
)
def test_the_changed_file_equals_the_proposal(tmp_path: Path, mine: str, model: Model, batch: Batch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'# mine\n[workload]\nname = "chartext"\n{mine}\n')
    answers = Answers(config=path)
    one = replace(BASE, model=model, batch=batch)
    text = written_into(answers, situation(gpu=None), one, path)
    assert text.startswith("# mine\n")
    again = tmp_path / "new.toml"
    again.write_text(text)
    assert read(again).size == model.size
    found = read(again).resolve()
    assert found == configuration(answers, one)
    assert (found.batch.micro, found.batch.items) == (batch.micro, batch.items)


@pytest.mark.parametrize("base", ['size = "guide"', 'size = "auto"\n[batch]\nmicro = 16\neffective = 96'])
@pytest.mark.parametrize("batch", [Batch(16, 1), Batch(16, 6), Batch(8, 8)])
def test_a_file_that_extends_another_one_keeps_doing_so(tmp_path: Path, base: str, batch: Batch) -> None:
    (tmp_path / "base.toml").write_text(f'[workload]\nname = "chartext"\n{base}\n')
    path = tmp_path / "mine.toml"
    path.write_text('# mine\nextends = "base.toml"\n\n[run]\nepochs = 7\n')
    before = (tmp_path / "base.toml").read_text()
    answers = Answers(config=path)
    one = replace(BASE, model=Model("tiny", 64, "off"), batch=batch)
    text = written_into(answers, situation(gpu=None), one, path)
    assert tomli.loads(text)["extends"] == "base.toml" and text.startswith("# mine\n")
    assert (tmp_path / "base.toml").read_text() == before
    path.write_text(text)
    found = read(path).resolve()
    assert found == configuration(answers, one)
    assert (found.batch.micro, found.batch.items, found.run.epochs) == (batch.micro, batch.items, 7)


def test_saving_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["a.toml"]
    with pytest.raises(NddError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "a.toml", "text")


# The screen.


MINE = '# mine\n[workload]\nname = "chartext"\nsize = "tiny"\n[run]\ndevice = "cpu"\n'
WANTED = replace(BASE, batch=Batch(4, 4))


def job(path: Path, text: str | None) -> WizardJob:
    if text is not None:
        path.write_text(text)
    config = None if text is None else path
    made = WizardJob(Answers(config=config, workload=None if config else "chartext"), path, 10.0)
    made._proposed = ProposalSet(situation(gpu=None), (), (WANTED,))
    return made


def test_a_file_that_is_edited_meanwhile_is_not_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    made = job(path, MINE)
    shown = made.preview(WANTED)
    assert shown.there and any(line.startswith("+micro = 4") for line in shown.diff)
    assert not made.changed()
    path.write_text(MINE + "seed = 7\n")
    assert made.changed()
    # The new diff keeps the edit.
    again = made.preview(WANTED)
    assert "seed = 7" in again.text and not made.changed()
    assert made.save(WANTED) == str(path)
    assert "seed = 7" in path.read_text() and "micro = 4" in path.read_text()


@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_appears_or_disappears_meanwhile_is_not_overwritten_unasked(
    tmp_path: Path, there: bool
) -> None:
    path = tmp_path / "mine.toml"
    made = job(path, MINE if there else None)
    assert made.preview(WANTED).there == there and not made.changed()
    if there:
        path.unlink()
    else:
        path.write_text(MINE)
    assert made.changed()
