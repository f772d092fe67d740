"""A few hostile attempts of every kind; `make hostile` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.record.events import EVENT_TYPES, parse
from qa.hostile.attempts import Kind, all_kinds, attack
from qa.hostile.records import written

KINDS = all_kinds()

# In `make test`; the others take several seconds each.
PROMISED = {"kills", "messages", "records", "screens", "texts", "writers"}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.promise if name in PROMISED else ())
        for name, kind in KINDS.items()
    ],
    ids=list(KINDS),
)
def test_nothing_falls_short(kind: Kind, tmp_path: Path) -> None:
    outcome = attack(kind, kind.short, tmp_path / "attempts", seed=1)
    assert outcome.made == kind.short
    assert outcome.shortfalls == []


def test_the_damaged_records_have_every_type_of_event(tmp_path: Path) -> None:
    lines = written(tmp_path).events.read_bytes().splitlines()
    assert {item[1].type for line in lines if (item := parse(line)) is not None} == set(EVENT_TYPES)
