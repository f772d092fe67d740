"""Planted faults are found where they are real, in a script.

Other findings may come first on a busy machine: `python -m benchmarks script_faults` plants all faults, and counts what
is named first. All rules, with what is recorded of each kind of run: tests/diagnose/test_causes.py. Ranks:
test_torchrun.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from qa.faults.script_faults import FAULTS, Fault, observe
from tests.tiers import few

# The faults that the stack and the garbage collector show; a leak shows in the samples of the memory.
FOUND = [
    fault
    for name in ("slow-item", "garbage", "leak")
    for fault in FAULTS
    if (fault.name, fault.ranks) == (name, 1)
]


@pytest.mark.long
@pytest.mark.budget(40)
@pytest.mark.parametrize("fault", few(FOUND, 2), ids=lambda fault: fault.name)
def test_of_a_script(tmp_path: Path, fault: Fault) -> None:
    seconds = fault.seconds if fault.name == "leak" else 6.0
    findings = observe(tmp_path, "planted.py", fault.name, f"{fault.levels[-1]:g}", seconds=seconds)
    found = next((item for item in findings if item["cause"] in fault.causes), None)
    assert found is not None, findings
    assert fault.function in found["title"] + "".join(change["where"] or "" for change in found["changes"])
