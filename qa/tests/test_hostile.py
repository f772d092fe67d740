"""A few hostile attempts of every kind; `make hostile` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from qa.hostile.__main__ import all_kinds
from qa.hostile.attempts import Kind, attack

KINDS = all_kinds()

# In `make test`; the others take several seconds each.
PROMISED = {"configurations", "kills", "messages", "records", "screens", "texts", "writers"}


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
