"""Each case does the same whether it is observed or not.

`make test` runs one or two of each kind, `make test-all` at least 150, and `make test-slow` all.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.same.cases import Case, Result, differences, lacks, parse, run_case, split, told

CASES = parse()
# Another Python with torch, whose scripts are observed.
PYTHON = os.environ.get("NDD_TEST_PYTHON", sys.executable)
# Of each kind, in `make test-all`; and kinds of which two are in `make test`, so that it has a tenth of those.
FIRST = 12
TWICE = {"counts", "exceptions", "inherited"}
# What docs/noticeable.md lists: how these lines of differences begin, and the reason.
LISTED = {
    "nobody_else_in_a_profile": ("output", "functions of the observer in results of a profiler"),
    "a_profile_function_in_one_step_of_many": ("output", "the same, from Python 3.12 on"),
    "torch_profiler_counts": ("output", "a loss is read ten times a second"),
    "torch_profiler_with_stacks": ("output", "the same"),
    "a_trace_function_that_counts_lines": ("output", "the end of a hooked function is another line event"),
    "coverage_by_tracing_torch": ("output", "the end of a hooked function is another line event"),
    "fingerprints_by_value": ("output", "the code of a function that makes batches, before Python 3.12"),
    "customize_module_in_front": (
        ("output", "steps"),
        "a sitecustomize in front of ours keeps the observer out",
    ),
    "import_system_is_the_same": ("output", "sitecustomize in sys.modules"),
    "fails_while_torch_is_imported": ("standard error", "a frame of the finder in a traceback"),
}


def _marked() -> Iterator[object]:
    seen: Counter[str] = Counter()
    for case in CASES:
        seen[case.kind] += 1
        number = seen[case.kind]
        marks = [pytest.mark.long if number <= FIRST else pytest.mark.slow]
        if number == 1 or (number == 2 and case.kind in TWICE):
            marks.append(pytest.mark.promise)
        yield pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", _marked())
def test_it_is_the_same(case: Case, tmp_path: Path) -> None:
    if reason := lacks(case, PYTHON):
        pytest.skip(reason)
    bare, observed = (run_case(case, one, tmp_path, PYTHON) for one in (False, True))
    listed, _ = LISTED.get(case.name, ((), ""))
    assert [line for line in differences(case, bare, observed) if not line.startswith(listed)] == []


def test_there_are_enough_cases_of_each_kind() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert len(kinds) == 13
    assert min(kinds.values()) >= 9
    assert sum(min(count, FIRST) for count in kinds.values()) >= 150


def test_the_lines_of_the_console_are_told_from_those_of_the_script() -> None:
    errors = (
        "done: mine\nwarning\nfailed: status 1\n1,200 optimizer steps in 2 s; last loss 3\nrecord: /r/a\n"
    )
    theirs, ours = split(errors, Path("/r"))
    assert theirs == ["done: mine", "warning"]
    assert told(ours) == 1200


def test_every_difference_is_found() -> None:
    case = Case("kind", "name", "RUN python train.py", {})
    bare, said = Result(0, "STEPS 5\n", ["warning"], {"a": "1"}), ["done: after {} steps"]
    same = Result(bare.status, bare.out, bare.errors, bare.files, [said[0].format(5)])
    assert differences(case, bare, same) == []
    other = Result(1, "STEPS 6\n", ["error"], {"b": "1"}, [said[0].format(6)])
    found = [line.partition(":")[0].split()[-1] for line in differences(case, bare, other)]
    assert found == ["status", "output", "also", "lacks", "files", "steps"]
