"""Part "faults": `faults severe|other`, the planted faults that need a GPU; on the CPU one that does not.

The most severe form of each always runs; the others are left to --only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from qa.faults.cases import SEVERITIES, Case, chosen
from qa.faults.faulty import GPU_CASES
from qa.faults.innocent import all_cases
from qa.faults.outcome import Outcome
from qa.faults.suite import Suite, described

from .figures import FAIL, INFO, PASS, Task, one_line

# Seconds of a trial of the fix, what a case takes without and with it, and of imports before the first.
TRIAL_S = 12.0
CASE_S, TRIED_S = 35.0, 75.0
IMPORTS_S = 10.0
# Of the most severe ones, which --quick runs: launches and waiting for the GPU.
QUICK = 2


def wanted(which: str, effort: str) -> list[Case]:
    """The cases of a part. which: "severe" or "other"."""
    severe = which == "severe"
    found = [case for case in GPU_CASES if (case.severity == SEVERITIES[-1]) == severe]
    if effort == "quick" and severe:
        return found[:QUICK]
    return sorted(found, key=lambda case: -SEVERITIES.index(case.severity))


def measure(given: Task) -> None:
    """Run as many cases as the time allows."""
    severe = given.args[0] == "severe"
    cases = wanted(given.args[0], given.effort)
    trials = given.effort == "full"
    if not given.on_gpu:
        for case in cases:
            given.skip(case.name)
        cases = chosen(all_cases(), ["fault-user-code-high-own"]) if severe else []
    counts = [0, 0]
    with tempfile.TemporaryDirectory(prefix="ndd-gpu-faults-") as folder:
        suite = Suite(Path(folder), trials, TRIAL_S)
        for case in cases:
            if given.left_s < (TRIED_S if trials else CASE_S) and counts[1]:
                given.skip(case.name, "no time left")
                continue
            outcome = suite.carry_out(case)
            counts[0] += outcome.right
            counts[1] += 1
            put(given, case, outcome)
    verdict = INFO if not given.on_gpu else PASS if counts[0] == counts[1] else FAIL
    if counts[1]:
        given.put("correct", f"{counts[0]} of {counts[1]}", "all", verdict)


def put(given: Task, case: Case, outcome: Outcome) -> None:
    """The figure of one case."""
    if outcome.error:
        given.put(case.name, "not measured", case.truth, FAIL, one_line(outcome.error))
        return
    why = "" if outcome.right or outcome.cured else "its cost was not measured"
    verdict = INFO if not given.on_gpu else PASS if outcome.right else FAIL
    given.put(case.name, described(outcome), case.truth, verdict, why)
    if outcome.owes_a_cure and not outcome.cures:
        given.put(
            f"{case.name}: the fix", " ".join(outcome.fix) or "no setting", "gains", INFO, "no measured gain"
        )
