"""The figures in docs/statistics.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qa.trials.intervals import NOISES
from qa.trials.nulls import UNDECIDED

from ndd_engine.trial import estimates
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_watch.steps import timed_every

TEXT = " ".join((Path(__file__).parents[2] / "docs" / "statistics.md").read_text().split())
WORDS = {3: "three", 4: "four"}


@pytest.mark.parametrize(
    "words",
    [
        f"after {estimates.FIRST_LOOK} blocks",
        f"not before the {WORDS[estimates.ENOUGH]}th",
        f"With fewer than {WORDS[estimates.ENOUGH]} pairs",
        f"after {WORDS[estimates.FEWEST_EARLY]} blocks",
        f"the {estimates.EARLY:.1%} interval excludes 1 and the ratio is beyond {estimates.FLOOR:.0%}".replace(
            "%", " %"
        ),
        f"high < {1 + estimates.FLOOR:.2f}",
        f"a default of {estimates.Usual().sd * 100:g} % (standard deviation, {estimates.Usual().df:g} degrees",
        f"at least {estimates.OF_BLOCKS} of what the blocks of a pair differ by",
        f"differ by {estimates.Usual().sd * 100:g} % between processes, with {estimates.Usual().df:g} degrees",
        f"the {estimates.TRIMMED * 100:g} % trimmed mean",
        f"Of 100 real ones of {TrialRequest(Base('it'), ()).budget_s:g} s",
        f"At most {UNDECIDED * 100:g} % of trials",
        f"beyond {estimates.ALONE}, or below 1/{estimates.ALONE}",
    ],
)
def test_a_figure_is_that_of_the_code(words: str) -> None:
    assert words in TEXT


def test_looks_of_a_trial_in_one_process_are_those_of_the_code() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "trials.md").read_text().split())
    first, growth = estimates.FIRST_LOOK, estimates.GROWTH
    assert f"after {first}, {first * growth:g}, {first * growth**2:g}, … blocks" in page


def test_how_many_steps_are_timed_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text()
    told = re.findall(r"of (?:steps of )?(\d+) ms one of (\d+)", " ".join(page.split()))
    assert len(told) == 3
    assert all(timed_every(int(length) * 1_000_000) == int(every) for length, every in told)
    assert "shorter than about 0.4 s" in page and timed_every(300_000_000) > 1 == timed_every(400_000_000)


def test_the_tables_are_those_of_the_last_measurement() -> None:
    """Each row of the page has the figures of a line that the command printed, and all noise models have a row."""
    root = Path(__file__).parents[2]
    newest = max((root / "benchmarks" / "results").glob("*-coverage.txt"))
    printed = [re.findall(r"[\d.]+(?= %)", line) for line in newest.read_text().splitlines()]
    page = (root / "docs" / "statistics.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("|") and line.count("%") > 4]
    assert all(re.findall(r"[\d.]+(?= %)", row) in printed for row in rows)
    named = {row.split("|")[1].strip() for row in rows}
    assert named == {name.replace("processes ", "").replace("blocks ", "") for name in NOISES}
