"""Limits of source files that CONTRIBUTING.md names, and lists of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "tui", "profiles", "docs", "screenshots", "benchmarks", "qa", "tests")
LONGEST = 700  # lines
# Names of classes that two modules have: most are the same idea in the observer, the engine or the console.
SHARED = {
    "Captures", "Change", "Column", "Draft", "Entry", "Facts", "Finite", "Interval", "Key", "Line", "Lines", "Look",
    "Memory", "Moment", "NddCallback", "Observed", "OutputLog", "Place", "Reader", "Recording", "Requests", "Result",
    "Script", "Section", "Signals",
}  # fmt: skip


def test_no_source_file_is_too_long() -> None:
    assert f"at most {LONGEST} lines" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 500
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_every_part_of_the_observer_is_described() -> None:
    folder = ROOT / "engine" / "ndd_watch"
    parts = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    listed = (folder / "__init__.py").read_text("utf-8").split('"""')[1]
    assert parts <= set(re.findall(r"^    (\w+) ", listed, re.MULTILINE))


def test_no_further_class_shares_its_name() -> None:
    names = Counter(
        node.name
        for folder in ("engine", "tui", "profiles")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SHARED
