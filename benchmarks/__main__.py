"""`python -m benchmarks [NAME ...] [--quick] [-o [FILE]]`: measure, print tables, judge nothing by exit status."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

from ndd_engine.config.workload_sections import WORKLOADS

from .common import Environment, Options, command_line, machine_slug, report, say

NAMES = ("loop", "screen", "keys", "start", "clock", "rivals", "best", "quality", "memory", "steps", "wizard")
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run what was asked for. Returns 1 when a benchmark could not be carried out, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which to run, of {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a rough answer, each within a minute")
    parser.add_argument(
        "--device", default="cpu", help="device of what trains workloads, as run.device (default: cpu)"
    )
    parser.add_argument(
        "--workload", action="append", default=[], choices=WORKLOADS,
        help="only this one in rivals, best, quality, steps and wizard; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", type=int, metavar="N",
        help="pairs of blocks for each ratio of rivals and best, for narrower intervals (default: by time)",
    )  # fmt: skip
    parser.add_argument(
        "-o", nargs="?", const="", metavar="FILE", dest="output",
        help="also write the tables to FILE, or without FILE to benchmarks/results/<date>-<machine>-<name>.txt",
    )  # fmt: skip
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if given.pairs is not None and given.pairs < 2:
        parser.error("--pairs needs 2 or more: a pair in each order")
    options = Options(given.quick, given.device, tuple(given.workload), given.pairs)
    failed: list[str] = []
    texts: list[str] = []
    for name in given.names or NAMES:
        module = importlib.import_module(f"{__package__}.{name}")
        try:
            text = _carry_out(module, options)
        except Exception:  # noqa: BLE001  the others are measured nevertheless
            traceback.print_exc()
            say(f"{name}: could not be measured")
            failed.append(name)
            continue
        print(text, flush=True)
        texts.append(text)
        if given.output == "":
            _write(RESULTS / f"{time.strftime('%Y-%m-%d')}-{machine_slug()}-{name}.txt", [text])
    if given.output:
        _write(Path(given.output), texts)
    return 1 if failed else 0


def _carry_out(module: ModuleType, options: Options) -> str:
    environment = Environment(command_line())
    begin = time.perf_counter()
    tables = module.measure(options)
    say(f"{module.__name__.rpartition('.')[2]}: took {time.perf_counter() - begin:.0f} s")
    return report(tables, environment)


def _write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")
    say(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
