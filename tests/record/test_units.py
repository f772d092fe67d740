"""Plurals and counts in everything a person reads."""

from __future__ import annotations

import pytest

from ndd_engine.text import counted, plural


@pytest.mark.parametrize(
    ("word", "many"),
    [
        ("window", "windows"), ("batch", "batches"), ("entry", "entries"), ("series", "series"), ("day", "days"),
        ("box", "boxes"), ("class", "classes"), ("mesh", "meshes"), ("thread", "threads"),
        ("epoch", "epochs"),
    ],
)  # fmt: skip
def test_plurals(word: str, many: str) -> None:
    assert plural(word) == many


def test_counts() -> None:
    assert counted(1, "thread") == "1 thread"
    assert counted(2, "batch") == "2 batches" and counted(1600, "item") == "1,600 items"
    assert counted(0, "warning") == "0 warnings"
