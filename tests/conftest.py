"""What all tests share: the same examples of hypothesis everywhere, no database, and a cache folder of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ndd_watch import probes
from tests.runs import finished_run as finished_run
from tests.runs import script_run as script_run
from tests.tiers import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.tiers import pytest_runtest_setup as pytest_runtest_setup
from tests.tiers import pytest_runtest_teardown as pytest_runtest_teardown
from tests.tiers import pytest_sessionstart as pytest_sessionstart

# A shell has what runs in its background ignore SIGINT; the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests on a GPU need no hypothesis, and run where it is not installed.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ndd",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=60,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("ndd")


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trials remember what they measured of this machine in a folder of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_alarms() -> Iterator[None]:
    """pytest-timeout handles SIGALRM; the observer would take it for a time limit of the script."""
    before, probes.ALARMS = probes.ALARMS, ()
    yield
    probes.ALARMS = before
