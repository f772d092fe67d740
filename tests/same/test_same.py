"""Each case does the same whether it is observed or not. One of each kind runs by default, the others are slow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.same.cases import Case, Result, differences, lacks, parse, run_case, split, told

CASES = parse()
# Another Python with torch, whose scripts are observed.
PYTHON = os.environ.get("NDD_TEST_PYTHON", sys.executable)
# By default, besides the first case of each kind.
OFTEN = {"two_optimizers_late", "closures_of_lbfgs", "becomes_itself_again"}


# Kinds whose first case is in `make test`.
PROMISED = {"counts", "exceptions", "inherited", "replaced"}
# What docs/noticeable.md lists.
LISTED = {
    "nobody_else_in_a_profile": "functions of the observer in results of a profiler",
    "a_trace_function_that_counts_lines": "the end of a hooked function is another line event",
    "coverage_by_tracing_torch": "the end of a hooked function is another line event",
    "fingerprints_by_value": "the code of a function that makes batches, before Python 3.12",
    "customize_module_in_front": "a sitecustomize in front of ours keeps the observer out",
    "import_system_is_the_same": "sitecustomize in sys.modules",
    "fails_while_torch_is_imported": "a frame of the finder in a traceback",
}
# Differences that are not explained or not repaired yet.
OPEN = {
    "timeouts_never_lost": "one of 300 timeouts is lost in some runs",
}


def _marked(cases: list[Case]) -> list[object]:
    found: list[object] = []
    kinds: set[str] = set()
    for case in cases:
        often = case.kind not in kinds or case.name in OFTEN
        marks = [pytest.mark.long if often else pytest.mark.slow]
        if case.kind in PROMISED - kinds:
            marks.append(pytest.mark.promise)
        kinds.add(case.kind)
        if (reason := LISTED.get(case.name) or OPEN.get(case.name)) is not None:
            marks.append(pytest.mark.xfail(reason=reason, strict=False))
        found.append(pytest.param(case, id=str(case), marks=marks))
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", _marked(CASES))
def test_it_is_the_same(case: Case, tmp_path: Path) -> None:
    if reason := lacks(case, PYTHON):
        pytest.skip(reason)
    bare, observed = (run_case(case, one, tmp_path, PYTHON) for one in (False, True))
    assert differences(case, bare, observed) == []


def test_there_are_enough_cases_of_each_kind() -> None:
    kinds = [case.kind for case in CASES]
    assert len(set(kinds)) == 13
    assert len(kinds) >= 150
    assert min(map(kinds.count, kinds)) >= 9


def test_the_lines_of_the_console_are_told_from_those_of_the_script() -> None:
    errors = (
        "done: mine\nwarning\nfailed: status 1\n1,200 optimizer steps in 2 s; last loss 3\nrecord: /r/a\n"
    )
    theirs, ours = split(errors, Path("/r"))
    assert theirs == ["done: mine", "warning"]
    assert told(ours) == 1200


def test_every_difference_is_found() -> None:
    case = Case("kind", "name", "RUN python train.py", {})
    bare = Result(0, "STEPS 5\n", ["warning"], {"a": "1"})
    assert (
        differences(case, bare, Result(0, "STEPS 5\n", ["warning"], {"a": "1"}, ["done: after 5 steps"]))
        == []
    )
    other = Result(1, "STEPS 6\n", ["error"], {"b": "1"}, ["done: the command ended after 6 steps"])
    assert [line.partition(":")[0] for line in differences(case, bare, other)] == [
        "exit status",
        "output",
        "standard error has also",
        "standard error lacks",
        "files",
        "steps",
    ]
