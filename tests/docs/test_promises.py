"""tests/PROMISES.md names tests that exist, and in which target they run. The most important tests begin first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import tiers

TESTS = Path(__file__).parents[1]
PROMISES = (TESTS / "PROMISES.md").read_text("utf-8")
ROW = re.compile(r"^\| .+ \| `([\w/.]+\.py)::(\w+)` \|(.*)\|$", re.MULTILINE)
TARGETS = ("", "make test-all", "make test-slow")


def test_every_promise_has_its_test() -> None:
    rows = ROW.findall(PROMISES)
    assert len(rows) == len(re.findall(r"\.py::", PROMISES)) > 100
    for file, test, _ in rows:
        folder = TESTS.parent if file.startswith("qa/") else TESTS
        source = (folder / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"


def test_every_promise_says_where_its_test_runs() -> None:
    """Of those that were collected. Of several cases of a test, the first target that runs one of them counts."""
    for file, test, note in ROW.findall(PROMISES):
        found = re.search(r"`(make [\w-]+)`", note)
        name = f"{file if file.startswith('qa/') else f'tests/{file}'}::{test}"
        if cases := tiers.marks.get(name):
            assert (found[1] if found else "") == min(map(target, cases), key=TARGETS.index), name


def target(marks: set[str]) -> str:
    if "slow" in marks:
        return "make test-slow"
    return "make test-all" if "long" in marks and "promise" not in marks else ""


def test_the_targets_select_by_these_marks() -> None:
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    for selected in ("not slow and (promise or not long)", "not slow and long and not promise"):
        assert f'-m "{selected}"' in makefile


class Item:
    """A collected test, as far as its order needs it."""

    def __init__(self, file: str, number: int, *marks: pytest.MarkDecorator) -> None:
        self.path, self.number = TESTS / file, number
        self.get_closest_marker = {each.name: each.mark for each in marks}.get


@pytest.mark.parametrize("short", [0, 200])
def test_long_tests_that_guard_the_most_begin_first(short: int) -> None:
    """Each worker has some of them, and the slowest of its own begins first."""
    long, costs = pytest.mark.long, pytest.mark.budget
    items: Any = [
        *(Item(f"cli/test_{number % 7}.py", number, long) for number in range(40)),
        *(Item("same/test_same.py", number, long) for number in range(3)),
        *(Item(f"script/test_{number % 4}.py", number, long, costs(10 + number)) for number in range(12)),
        *(Item("ui/test_app.py", number) for number in range(short)),
    ]
    parts: Any = tiers.parts(items, 4)
    assert sorted(map(id, items)) == sorted(id(item) for part in parts for item in part)
    # As pytest-xdist divides a list.
    assert [len(part) for part in parts] == [(len(items) + number) // 4 for number in range(4)]
    for part in parts:
        order = [item.path.parent.name for item in part]
        assert order[0] == "script" and order == sorted(order, key=["script", "same", "cli", "ui"].index)
        of_scripts = [item.number for item in part if item.path.parent.name == "script"]
        assert of_scripts == sorted(of_scripts, reverse=True)
    assert sum(len({item.path for item in part if "script" in str(item.path)}) for part in parts) == 4
