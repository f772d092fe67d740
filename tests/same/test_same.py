"""Each case does the same whether it is observed or not.

`make test` runs the first one of some files, `make test-all` one for each kind of difference, `make test-slow` all.
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
# Files whose first case is in `make test`.
PROMISED = {"counts", "exceptions", "files", "inherited", "threads", "values"}
# In `make test-all`, beside the first case of each file: one case for each kind of difference.
TOLD = {
    "compilers": ["compiled_model_and_loss", "traced_and_scripted", "subclasses_of_tensors"],
    "counts": ["forked_in_the_middle", "two_optimizers_late", "steps_by_hand", "gradients_without_backward"],
    "depth": ["limit_of_the_recursion"],
    "exceptions": ["timeouts_never_lost", "raised_in_the_thread_from_another", "a_step_that_fails_and_is_tried_again",
                   "uncaught_with_its_traceback"],
    "files": ["small_files_only", "limited_memory", "a_daemon_that_trains"],
    "inherited": ["reader_that_leaves_early", "environment_is_passed_on", "program_from_the_input",
                  "fails_while_torch_is_imported", "import_system_is_the_same"],
    "mocked": ["mocked_time_plain", "os_replaced_functions", "reading_a_value_is_an_error"],
    "profilers": ["a_profile_function_in_one_step_of_many", "torch_profiler_counts", "memory_by_place"],
    "references": ["objects_do_not_grow", "referrers_of_what_is_used", "the_function_that_makes_batches_is_freed"],
    "replaced": ["attributes_and_wraps", "inspected_functions", "patched_by_the_script"],
    "signatures": ["closures_of_lbfgs", "wrong_calls_say_the_same", "loader_arguments_by_any_name"],
    "threads": ["sigwait_in_a_thread", "daemon_thread_that_evaluates"],
    "workers": ["items_one_after_another_fork", "errors_of_items_and_batches", "what_items_can_see"],
    "values": ["batches_read_once", "objects_that_refuse_everything"],
}  # fmt: skip
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
    begun: set[str] = set()
    for case in CASES:
        first = case.kind not in begun
        marks = [pytest.mark.long if first or case.name in TOLD[case.kind] else pytest.mark.slow]
        if first and case.kind in PROMISED:
            marks.append(pytest.mark.promise)
        begun.add(case.kind)
        yield pytest.param(case, id=str(case), marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", _marked())
def test_it_is_the_same(case: Case, tmp_path: Path) -> None:
    if reason := lacks(case, PYTHON):
        pytest.skip(reason)
    bare, observed = (run_case(case, one, tmp_path, PYTHON) for one in (False, True))
    listed, _ = LISTED.get(case.name, ((), ""))
    assert [line for line in differences(case, bare, observed) if not line.startswith(listed)] == []


def test_there_are_enough_cases_of_each_kind() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert kinds.keys() == TOLD.keys()
    assert min(kinds.values()) >= 9
    assert {f"{kind}/{name}" for kind, names in TOLD.items() for name in names} <= set(map(str, CASES))


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
