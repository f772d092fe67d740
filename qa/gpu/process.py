"""The process of a part: `… -m qa.gpu.process MODULE [ARGS]` calls `measure` of this module (see Part.command)."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

import psutil

from .figures import EFFORTS, Task


def main() -> None:
    """Measure with the task of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("args", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", choices=EFFORTS, default="full")
    parser.add_argument("--limit", type=float, required=True, help="seconds")
    given = parser.parse_args()
    module = import_module(f"{__package__}.{given.module}")
    # The limit includes the time that imports have taken.
    deadline = time.monotonic() + given.limit - (time.time() - psutil.Process().create_time())
    module.measure(Task(given.out, given.device, given.effort, deadline, tuple(given.args)))


if __name__ == "__main__":
    main()
