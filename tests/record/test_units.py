"""Plurals, counts and sizes in everything a person reads."""

from __future__ import annotations

import pytest

from ndd_engine.text import MISSING, counted, plural, size


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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (10 << 10, "10 KiB"), (3 << 19, "1.5 MiB"),
        (512 << 20, "512 MiB"), (1000 << 20, "1,000 MiB"), (16 << 30, "16.0 GiB"), (3 << 39, "1.5 TiB"),
        (2000 << 40, "2,000.0 TiB"), (-3 << 19, "-1.5 MiB"), (None, MISSING), (float("nan"), MISSING),
    ],
)  # fmt: skip
def test_sizes_have_binary_units(count: float | None, text: str) -> None:
    assert size(count) == text
