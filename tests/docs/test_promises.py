"""tests/PROMISES.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_promise_has_its_test() -> None:
    named = re.findall(r"`([\w/.]+\.py)::(\w+)`", (TESTS / "PROMISES.md").read_text("utf-8"))
    assert named
    for file, test in named:
        folder = TESTS.parent if file.startswith("qa/") else TESTS
        source = (folder / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"
