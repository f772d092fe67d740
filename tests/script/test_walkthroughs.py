"""The page docs/walkthroughs.md and what `python -m benchmarks walkthroughs` records for it."""

from __future__ import annotations

import re

from benchmarks.walkthroughs import PAGE, STORIES, replaced


def test_the_page_has_the_blocks_that_are_recorded() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- recorded: (\S+) (\S+) -->", page)
    assert {name for name, _ in blocks} == set(STORIES)
    for name, part in blocks:
        story = STORIES[name]
        parts = {str(number + 1) for number in range(len(story.tries + story.after))}
        assert part in parts | {"live", "diagnosis", "change"}
        assert "\nnew\n```" in replaced(page, f"{name} {part}", ["new"])
