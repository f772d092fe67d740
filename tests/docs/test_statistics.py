"""The figures in docs/statistics.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.trial import estimates

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
        f"beyond {estimates.ALONE}, or below 1/{estimates.ALONE}",
    ],
)
def test_a_figure_is_that_of_the_code(words: str) -> None:
    assert words in TEXT
