"""The tiers of the tests, and what a test may cost.

A test that starts Python processes, or computes for over a second, is marked `long`. `make test` runs those that are
not, and those that are marked `promise` as well: for most promises of tests/PROMISES.md. A test that starts a process
without being marked fails. With NDD_TEST_BUDGET=1, which `make test-all` sets, a test fails that takes more processor
time than its tier allows, or than its mark `budget` says. What is marked `slow` is in no tier but `make test-slow`: of
each kind of long test at least one stays in `make test-all`, and the further ones and further cases (`few`) are slow.

Long tests begin first: those of FIRST, and of these the ones with the largest budget. NDD_TEST_UNTIL is a Unix time in
seconds, after which no `long` test begins: CI has 20 minutes, also on a slow machine. These tests are skipped, and the
summary says how many.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Processor seconds of a test, and of one that is marked `long`, on a machine that takes REFERENCE_S for `_work`.
SHORT_S, LONG_S = 2.0, 10.0
REFERENCE_S = 0.006
# A busy machine, with more processes that run than cores, takes up to this much more processor time for the same test,
# since caches and cores are shared.
BUSY = 2.0
# Folders whose long tests guard the most: others are skipped before them when time runs out.
FIRST = ("observe", "same", "script", "trial", "parallel")
# Test -> marks of each of its cases, of all that were collected, also of those that are not selected.
marks: dict[str, list[set[str]]] = {}
_tests = itertools.count()
_started: list[str] = []
_begin: list[float] = []


def _heard(event: str, given: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        command = given[1]
        words = list(command) if isinstance(command, (list, tuple)) else [command]
        if words and "python" in os.path.basename(os.fspath(words[0])):  # type: ignore[call-overload]  # noqa: PTH119
            _started.append(" ".join(str(word) for word in words[1:4]))


sys.addaudithook(_heard)


def few(cases: Sequence[Any], number: int) -> list[Any]:
    """The cases of a test, of which all but the first ones are slow."""
    slow = []
    for case in cases[number:]:
        values, more = getattr(case, "values", case), getattr(case, "marks", ())
        slow.append(
            pytest.param(
                *(values if isinstance(values, tuple) else (values,)), marks=[*more, pytest.mark.slow]
            )
        )
    return [*cases[:number], *slow]


def started(command: str) -> None:
    """A process was started in another way."""
    _started.append(command)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what most tests import, so that none of them pays for it."""
    if os.environ.get("NDD_TEST_BUDGET") and not session.config.getoption("collectonly"):
        import ndd_engine.train.checkpoint_tensors
        import ndd_engine.train.prepare  # noqa: F401


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        marks.setdefault(item.nodeid.partition("[")[0], []).append(
            {mark.name for mark in item.iter_markers()}
        )
    yield
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = [item for part in parts(items, workers) for item in part]


def parts(items: Sequence[pytest.Item], workers: int) -> list[list[pytest.Item]]:
    """What each worker of pytest-xdist begins with: an equal part of the list, with some of the long tests in front.

    Those of one file stay together where they can, since they may share what they made.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if _is_long(item):
            files.setdefault(item.path, []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    # As `--dist worksteal` divides them.
    room = [(len(items) + number) // workers for number in range(workers)]
    loads = [0.0] * workers
    for tests in sorted(
        files.values(), key=lambda tests: (not _guards(tests[0]), -max(map(_allowed_s, tests)))
    ):
        left = sorted(tests, key=lambda test: -_allowed_s(test))
        while left:
            least = min((number for number in range(workers) if room[number]), key=loads.__getitem__)
            taken, left = left[: room[least]], left[room[least] :]
            parts[least] += taken
            room[least] -= len(taken)
            loads[least] += sum(map(_allowed_s, taken))
    short = [item for item in items if not _is_long(item)]
    for part, more in zip(parts, room, strict=True):
        part += short[:more]
        del short[:more]
    return parts


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def _guards(item: pytest.Item) -> bool:
    return item.path.parent.name in FIRST


def _allowed_s(item: pytest.Item) -> float:
    """Processor seconds that a test may take."""
    more = item.get_closest_marker("budget")
    return more.args[0] if more is not None else LONG_S if _is_long(item) else SHORT_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _freeze()
    _started.clear()
    _begin[:] = [_spent_s()]
    until = float(os.environ.get("NDD_TEST_UNTIL") or "inf")
    if time.time() > until and _is_long(item):
        pytest.skip("no time is left for long tests (NDD_TEST_UNTIL)")
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if _started and not _is_long(item) and item.get_closest_marker("slow") is None:
        pytest.fail(f"mark this test with pytest.mark.long: it starts {_started[0]!r}", pytrace=False)
    if os.environ.get("NDD_TEST_BUDGET") and item.get_closest_marker("slow") is None:
        spent, limit = _spent_s() - _begin[0], _allowed_s(item)
        busy = BUSY if os.getloadavg()[0] > (os.cpu_count() or 1) else 1.0
        if spent > limit * busy and spent > limit * busy * (slowness := _slowness()):
            pytest.fail(
                f"takes {spent:.1f} s of processor time, more than {limit:g} s (x {busy:g} x {slowness:.1f})",
                pytrace=False,
            )


def _freeze() -> None:
    """Keep the collections of runs from looking at all that pytest and torch have made: that takes 0.4 seconds each.

    What the tests left in cycles is collected now and then.
    """
    if next(_tests) % 200 == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


def _spent_s() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _slowness() -> float:
    """How much longer this machine takes at present than the reference, at least 1: cores may be shared or slow."""
    return max(statistics.median(_work() for _ in range(9)) / REFERENCE_S, 1.0)


def _work() -> float:
    begin = time.thread_time()
    total = 0
    for number in range(300_000):
        total += number
    return time.thread_time() - begin
