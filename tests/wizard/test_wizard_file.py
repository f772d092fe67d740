"""The file of the wizard's screen: what is shown before it is written, and a file that changes meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from situations import BASE, situation

from ndd_console.jobs.wizard import WizardJob
from ndd_engine.wizard.proposals import Answers, Batch
from ndd_engine.wizard.session import ProposalSet

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
