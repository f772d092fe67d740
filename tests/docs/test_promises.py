"""tests/PROMISES.md names tests that exist, and in which target they run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROMISES = (TESTS / "PROMISES.md").read_text("utf-8")
ROW = re.compile(r"^\| .+ \| `([\w/.]+\.py)::(\w+)` \|(.*)\|$", re.MULTILINE)
# As the Makefile selects them; what neither selects is in test-slow.
TARGETS = {"": "not slow and (promise or not long)", "make test-all": "not slow and long and not promise"}


def test_every_promise_has_its_test() -> None:
    rows = ROW.findall(PROMISES)
    assert len(rows) == len(re.findall(r"\.py::", PROMISES)) > 100
    for file, test, _ in rows:
        folder = TESTS.parent if file.startswith("qa/") else TESTS
        source = (folder / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"


@pytest.mark.long
@pytest.mark.budget(40)
def test_every_promise_says_where_its_test_runs() -> None:
    """Of several cases of a test, the first target that runs one of them counts."""
    runs: dict[str, str] = {}
    for target, marks in TARGETS.items():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "-m", marks]
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if "::" in line:
                runs.setdefault(line.partition("[")[0], target)
    told = {}
    for file, test, note in ROW.findall(PROMISES):
        found = re.search(r"`(make [\w-]+)`", note)
        told[file if file.startswith("qa/") else f"tests/{file}", test] = found[1] if found else ""
    assert told == {(file, test): runs.get(f"{file}::{test}", "make test-slow") for file, test in told}
