"""The glossary: an entry for every phase, idle cause, method and status, and no entry that is hard to read."""

from __future__ import annotations

import pytest

from ndd_console.screens.pages import help_lines
from ndd_console.view.glossary import GLOSSARY
from ndd_console.view.keys import LIVE_KEYS, WIZARD_KEYS, Key
from ndd_console.view.rows import width_of
from ndd_engine.record.events import PHASES
from ndd_engine.record.figures import CHECKPOINT, IDLE_CAUSES
from ndd_engine.record.snapshot import STATUSES

GROUPS = {title: dict(terms) for title, terms in GLOSSARY}


def test_every_phase_cause_method_and_status_has_an_entry() -> None:
    terms = {term for group in GROUPS.values() for term in group}
    assert {*PHASES, *IDLE_CAUSES, CHECKPOINT} <= terms
    assert {"kernels", "operators", "events", "nvml", "host clock"} <= set(GROUPS["idle time"])
    assert {term.split()[-1] for term in GROUPS["status"]} == set(STATUSES)


def test_entries_are_unique_short_and_plain() -> None:
    assert len(GROUPS) == len(GLOSSARY)
    for title, terms in GLOSSARY:
        assert len(dict(terms)) == len(terms), title
        for term, text in terms:
            assert term and text and not text.endswith("."), term


@pytest.mark.parametrize("keys", [LIVE_KEYS, WIZARD_KEYS])
def test_at_80_columns_a_definition_is_one_line(keys: tuple[Key, ...]) -> None:
    lines = help_lines(keys, 78)
    assert all(width_of(row) <= 78 for row in lines)
    terms = [term for _, terms in GLOSSARY for term, _ in terms]
    long_terms = [term for term in terms if len(term) >= 18]
    assert len(lines) == sum(1 for key in keys if key.help) + len(terms) + len(long_terms) + 2 * len(GLOSSARY)
