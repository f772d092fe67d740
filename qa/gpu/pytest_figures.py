"""A pytest plugin: every test becomes a figure, as soon as it has ended. Load it with `-p`.

The file for figures is named by the environment variable NDD_GPU_FIGURES.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .figures import FAIL, PASS, SKIPPED, Figure, append, one_line

VARIABLE = "NDD_GPU_FIGURES"


def pytest_configure(config: pytest.Config) -> None:
    """Tests may have a limit of their own, also where the plugin that knows the mark is not installed."""
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line(
            "markers", "timeout(seconds): the limit of a test; ignored without pytest-timeout"
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One phase of a test is done."""
    if report.when == "call" or not report.passed:
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            text = one_line(reason).removeprefix("Skipped: ")
            _put(Figure(name, "", "passes", SKIPPED, text))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            where = "" if report.when == "call" else f"{report.when}: "
            text = where + one_line(crash.message if crash is not None else report.longrepr)
            _put(Figure(name, f"{report.duration:.1f} s", "passes", FAIL, text))
        else:
            _put(Figure(name, f"{report.duration:.1f} s", "passes", PASS))


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported runs no test, which must not look like success."""
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E ")
        _put(Figure(report.nodeid, "", "can be imported", FAIL, one_line(last)))


def _put(figure: Figure) -> None:
    append(Path(os.environ[VARIABLE]), figure)
