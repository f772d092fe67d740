"""Planted faults are found where they are real, in a script and in a run of one's own model.

Other findings may come first on a busy machine: `make faults` counts what is named first.
All rules, with what is recorded of each kind of run: tests/diagnose/test_kinds_of_runs.py. Ranks: test_torchrun.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from qa.faults.cases import Case, chosen
from qa.faults.innocent import all_cases
from qa.faults.script_faults import FAULTS, Fault, observe

# The others run with `make test-slow`.
QUICK = {"slow-item", "garbage"}
OWN = ("worker-restart:high", "leak:high", "gc:high", "slow-storage:high", "user-code:high", "recompile:high")
# These show in the samples of the memory.
SECONDS, LEAK_SECONDS = 6.0, 14.0


@pytest.mark.budget(40)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.name, marks=pytest.mark.long if fault.name in QUICK else pytest.mark.slow
        )
        for fault in FAULTS
        if fault.ranks == 1
    ],
)
def test_of_a_script(tmp_path: Path, fault: Fault) -> None:
    seconds = LEAK_SECONDS if fault.name in ("leak", "python-objects") else SECONDS
    findings = observe(tmp_path, "planted.py", fault.name, f"{fault.levels[-1]:g}", seconds=seconds)
    found = next((item for item in findings if item["cause"] in fault.causes), None)
    assert found is not None, findings
    assert fault.function in found["title"] + "".join(change["where"] or "" for change in found["changes"])


def cases() -> list[Case]:
    found = chosen([case for case in all_cases(gpu=False) if case.kind == "fault"], OWN, [])
    return list({case.fault: case for case in found}.values())
