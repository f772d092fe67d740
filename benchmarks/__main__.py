"""`python -m benchmarks [NAME ...] [--quick | --smoke] [-o [FILE]]`: measure and print tables."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
import traceback
from dataclasses import fields
from types import ModuleType

from .common import Environment, Options, add_output, command_line, report, say, write

# The name of a benchmark, and its module; "module:function" if it is not `measure`.
NAMES = {
    **{
        name: f"benchmarks.{name}"
        for name in (
            "loop", "screen", "keys", "start", "clock", "rivals", "best", "quality", "memory", "budgets", "wizard",
            "switching", "observe", "trend", "recordings", "worker_cost",
        )
    },
    "steps": "benchmarks.wizard:steps",
    "budget_times": "benchmarks.budgets:times",
    "intervals": "qa.trials.intervals",
    "coverage": "qa.trials.intervals:coverage",
    "power": "qa.trials.nulls:power",
    **{f"ranks_{name}": f"qa.ranks.{name}" for name in ("faults", "late", "loop", "memory")},
    "ranks_fold": "qa.ranks.simulated",
    "leaks": "qa.faults.script_faults:leaks",
    "others": "qa.faults.others",
    "step_times": "qa.faults.step_times",
    "script_faults": "qa.faults.script_faults",
    "workers": "qa.faults.worker_pipelines",
    "grid": "qa.faults.loader_grid",
    "script_null": "qa.faults.script_faults:without_effect",
}  # fmt: skip


def main() -> int:
    """Run the selected benchmarks. Returns 1 if one of them failed to run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run: {', '.join(NAMES)} (default: all)"
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument(
        "--quick", dest="effort", action="store_const", const="quick", default="full",
        help="rough results, within a minute per benchmark",
    )  # fmt: skip
    effort.add_argument(
        "--smoke", dest="effort", action="store_const", const="smoke",
        help="only whether it runs: the first case, in one block of at most a few seconds",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device to train on, as in run.device (default: cpu)")
    parser.add_argument(
        "--pairs", type=int, metavar="N",
        help="pairs of blocks per ratio in rivals and best (default: by time), of runs in others, or rounds of "
        "switching (both: 4); more of them narrow the intervals",
    )  # fmt: skip
    parser.add_argument(
        "--real", type=int, default=0, metavar="N",
        help="intervals: also N real A/A trials over the five workloads, about a minute each; script_null, power: "
        "N trials; trend: also N real runs at each rate, 15 minutes each",
    )  # fmt: skip
    parser.add_argument(
        "--keep",
        default="",
        metavar="DIR",
        help="intervals: keep real trials in DIR, budget_times: results, and continue from there",
    )
    parser.add_argument(
        "--traceml", default="", metavar="PYTHON",
        help="observe: also whole runs, bare, under `ndd-console run` and under traceml, whose Python this is",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="CASE",
        help="limit budgets, budget_times, ranks_faults, script_faults, others, workers, grid or switching to this "
        "case, part or key; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--python", default="", metavar="PYTHON",
        help="script_faults: the Python of the scripts of Lightning and Trainer; workers: of all scripts, by fork only "
        "(default: this one)",
    )  # fmt: skip
    add_output(parser, "<name>")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    if given.pairs is not None and given.pairs < 2 and given.names != ["switching"]:
        parser.error("--pairs has to be at least 2, one pair in each order")
    for option, program, package in (
        ("--traceml", given.traceml, "traceml-ai"),
        ("--python", given.python, "lightning and transformers"),
    ):
        if program and shutil.which(program) is None:
            parser.error(
                f"{option} {program}: no such program; give the Python of an environment with {package}"
            )
    if given.only:
        allowed = [one for name in given.names or NAMES for one in getattr(_module(name), "ONLY", ())]
        if strange := [one for one in given.only if one not in allowed]:
            parser.error(f"--only {', '.join(strange)}: unknown; allowed: {', '.join(allowed) or 'none'}")
    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    failed: list[str] = []
    texts: list[str] = []
    for name in given.names or NAMES:
        try:
            text = _carry_out(name, options)
        except Exception:  # noqa: BLE001  continue with the others
            traceback.print_exc()
            say(f"{name}: failed")
            failed.append(name)
            continue
        print(text, flush=True)
        texts.append(text)
        if given.output == "":
            write(text, "", name)
    if given.output:
        write("\n".join(texts), given.output)
    return 1 if failed else 0


def _module(name: str) -> ModuleType:
    return importlib.import_module(NAMES[name].partition(":")[0])


def _carry_out(name: str, options: Options) -> str:
    environment = Environment(command_line())
    measure = getattr(_module(name), NAMES[name].partition(":")[2] or "measure")
    begin = time.perf_counter()
    tables = measure(options)
    say(f"{name}: took {time.perf_counter() - begin:.0f} s")
    return report(tables, environment)


if __name__ == "__main__":
    sys.exit(main())
