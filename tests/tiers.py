"""The tiers of the tests, and what a test may cost.

A test that starts Python processes, or computes for over a second, is marked `long`. `make test` runs those that are
not, and those that are marked `promise` as well: for most promises of tests/PROMISES.md. A test that starts a process
without being marked fails. With NDD_TEST_BUDGET=1, which `make test-all` sets, a test fails that takes more processor
time than its tier allows, or than its mark `budget` says. What is marked `slow` is in no tier but `make test-slow`.

NDD_TEST_UNTIL is a Unix time in seconds, after which no `long` test begins: CI has 20 minutes, also on a slow machine.
These tests are skipped, and the summary says how many.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator

import pytest

# Processor seconds of a test, and of one that is marked `long`, on a machine that takes REFERENCE_S for `_work`.
SHORT_S, LONG_S = 2.0, 10.0
REFERENCE_S = 0.006
# A busy machine takes up to this much more processor time for the same test, since caches and cores are shared.
BUSY = 2.0
_started: list[str] = []
_begin: list[float] = []


def _heard(event: str, given: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        command = given[1]
        words = list(command) if isinstance(command, (list, tuple)) else [command]
        if words and "python" in os.path.basename(os.fspath(words[0])):  # type: ignore[call-overload]  # noqa: PTH119
            _started.append(" ".join(str(word) for word in words[1:4]))


sys.addaudithook(_heard)


def started(command: str) -> None:
    """A process was started in another way."""
    _started.append(command)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what most tests import, so that none of them pays for it."""
    if os.environ.get("NDD_TEST_BUDGET") and not session.config.getoption("collectonly"):
        import ndd_engine.train.checkpoint_tensors
        import ndd_engine.train.prepare  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _started.clear()
    _begin[:] = [_spent_s()]
    until = float(os.environ.get("NDD_TEST_UNTIL") or "inf")
    if time.time() > until and item.get_closest_marker("long") is not None:
        pytest.skip("no time is left for long tests (NDD_TEST_UNTIL)")
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    long = item.get_closest_marker("long") is not None
    if _started and not long and item.get_closest_marker("slow") is None:
        pytest.fail(f"mark this test with pytest.mark.long: it starts {_started[0]!r}", pytrace=False)
    if os.environ.get("NDD_TEST_BUDGET") and item.get_closest_marker("slow") is None:
        more = item.get_closest_marker("budget")
        spent = _spent_s() - _begin[0]
        limit = more.args[0] if more is not None else LONG_S if long else SHORT_S
        if spent > limit * BUSY and spent > limit * BUSY * (slowness := _slowness()):
            pytest.fail(
                f"takes {spent:.1f} s of processor time, more than {limit:g} s (x {BUSY:g} x {slowness:.1f})",
                pytrace=False,
            )


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
