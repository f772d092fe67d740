"""Limits of source files that CONTRIBUTING.md names."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "tui", "profiles", "docs", "screenshots", "benchmarks", "qa", "tests")
LONGEST = 700  # lines


def test_no_source_file_is_too_long() -> None:
    assert f"at most {LONGEST} lines" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 500
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}
