"""The parts of `python -m benchmarks.gpu`: each is a process of its own with a time limit.

The process of a part: `… -m qa.gpu.parts MODULE [ARGS]` calls `measure` of this module (see Part.command).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .setup import ROOT

# Time limits of the whole command, in seconds.
FULL_S, QUICK_S = 60 * 60.0, 15 * 60.0
MODULE = "qa.gpu"
# Words in the names of tests that --quick leaves out: others cover most of them.
SLOW_TESTS = ("compile", "schedule", "foreach", "loop", "efficient", "fp16")


FIRST = "First checks"
TESTS = "tests/gpu"
OVERHEAD = "Overhead of the engine and of device timing"
MEMORY = "Memory predictions vs. max_memory_reserved"
CAPPED = "Proposals under a memory limit"
FAULTS = "Planted faults that need a GPU"
CLAIMS = "Claims of the guides"
MACHINE = "Machine"
# What a section shows, in one sentence.
ABOUT = {
    FIRST: "What everything else depends on, the most important first.",
    TESTS: "Device clock, memory counters, precision, CUDA graphs and several ranks on the real GPU.",
    OVERHEAD: "Steps per second, medians of neighbouring blocks: engine / bare loop, and device timing on / off.",
    MEMORY: "Predicted from two small batches / reserved by the allocator for larger ones, minus 1.",
    CAPPED: "The largest batch predicted to fit runs under the limit, and one 12 % larger does not.",
    FAULTS: "The planted cause is named first, and its fix gains.",
    CLAIMS: "Measured ratio with its 95 % CI vs. the range that a guide claims. The verdict is about the guide.",
}


@dataclass(frozen=True)
class Part:
    """One process. section: the heading of its figures. what: a module of this package and its arguments, or a file
    of tests.

    full_s, quick_s: time limits in seconds; 0 leaves the part out. decides: what is known after it, for the first
    checks. modules: what it imports that other parts do not need. named_only: whether only --only runs it.
    """

    section: str
    name: str
    what: str
    full_s: float
    quick_s: float
    decides: str = ""
    modules: tuple[str, ...] = ()
    named_only: bool = False

    @property
    def tests(self) -> str:
        """Its file of tests, "" if it has none."""
        return self.what if self.what.endswith(".py") else ""

    @property
    def words(self) -> set[str]:
        """What --only may call it: its name, its section, its module ("tests" for a test file), "first"."""
        module = "tests" if self.tests else self.what.partition(" ")[0]
        return {self.name, self.section, module, *(["first"] if self.section == FIRST else [])}

    @property
    def lacking(self) -> str:
        """Those of its modules that are not installed, "" if none."""
        needed = (*self.modules, "pytest") if self.tests else self.modules
        return ", ".join(name for name in needed if find_spec(name) is None)

    def limit_s(self, effort: str) -> float:
        """The time limit; 0 leaves the part out. On the CPU nothing is promised."""
        return {"full": self.full_s, "quick": self.quick_s}.get(effort, 4 * self.full_s)

    def command(self, python: str, out: str, device: str, effort: str, limit_s: float) -> list[str]:
        """The command line of its process."""
        if self.tests:
            # The plugin may be missing on a machine that has pytest; then only the limit of the part holds.
            own = ("--timeout", str(max(round(limit_s * 0.8), 10))) if find_spec("pytest_timeout") else ()
            return [
                python, "-m", "pytest", "-p", f"{MODULE}.pytest_figures", "-p", "no:cacheprovider", "-p", "no:xdist",
                "--tb", "short", *own, "--rootdir", str(ROOT), self.tests,
                *(("-k", f"not ({' or '.join(SLOW_TESTS)})") if effort == "quick" else ()),
            ]  # fmt: skip
        return [
            python, "-m", f"{MODULE}.parts", *self.what.split(), "--out", out, "--device", device,
            "--effort", effort, "--limit", f"{limit_s:.0f}",
        ]  # fmt: skip


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they run: the most important ones first."""

    def first(name: str, what: str, full_s: float, quick_s: float, decides: str) -> Part:
        return Part(FIRST, name, what, full_s, quick_s, decides, ("click",))

    return (
        Part(MACHINE, "machine", "machine", 90, 30),
        first(
            "plain", "first plain", 120, 60, "Whether a run works at all: clocks, memory, settings, findings."
        ),
        first(
            "graph", "first graph", 120, 50, "Whether a CUDA graph trains like eager steps; speed and memory."
        ),
        first("fallback", "first fallback", 90, 40, "What happens to a step that cannot be captured."),
        first(
            "script", "first_scripts script", 150, 80, "Whether the phases of an observed script are timed."
        ),
        first(
            "trial", "first_scripts trial", 120, 70, "Whether a trial of a script times more than launches."
        ),
        first(
            "captures", "tests/gpu/test_capture_gpu.py", 150, 45, "Permissions of CUPTI, fields of a capture."
        ),
        first(
            "memory", "tests/gpu/test_memory_gpu.py", 150, 45, "Whether predicted memory is reserved memory."
        ),
        first(
            "hardware", "tests/gpu/test_hardware_gpu.py", 60, 30, "Whether NVML, nvidia-smi and torch agree."
        ),
        first("load", "first load", 60, 30, "Which clocks and power limits are normal under load."),
        first("overlap", "first overlap", 90, 40, "Whether a loader is blamed while the GPU is busy."),
        first("tf32", "first tf32", 60, 30, "Which products use TF32, and whether all switches can be read."),
        Part(TESTS, "training", "tests/gpu/test_train_gpu.py", 340, 70),
        Part(TESTS, "ranks", "tests/gpu/test_ranks_gpu.py", 150, 0, modules=("click",)),
        Part(OVERHEAD, "overhead", "overhead loop", 240, 45),
        Part(OVERHEAD, "screen", "overhead screen", 120, 0, modules=("click", "pexpect", "textual")),
        Part(OVERHEAD, "marks of ranks", "ranks", 90, 0),
        Part(MEMORY, "chartext", "memory chartext", 90, 40),
        Part(MEMORY, "antispoof", "memory antispoof", 90, 0),
        Part(MEMORY, "finetune", "memory finetune", 80, 0),
        Part(MEMORY, "eeg", "memory eeg", 50, 0),
        Part(MEMORY, "summarise", "memory summarise", 80, 0),
        Part(CAPPED, "bf16", "capped bf16", 200, 40),
        Part(CAPPED, "fp32", "capped off", 120, 0),
        Part(FAULTS, "severe faults", "faults severe", 390, 80),
        Part(FAULTS, "other faults", "faults other", 780, 370, named_only=True),
        Part(CLAIMS, "decisive claims", "claims decisive", 300, 60),
        Part(CLAIMS, "other claims", "claims other", 600, 600, named_only=True),
    )


def main() -> None:
    """The process of a part: measure with the task of the command line."""
    import psutil  # may be missing where only the parts are listed

    from .figures import EFFORTS, Task

    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("args", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", choices=EFFORTS, default="full")
    parser.add_argument("--limit", type=float, required=True, help="seconds")
    given = parser.parse_args()
    module = import_module(f"{MODULE}.{given.module}")
    # The limit includes the time that imports have taken.
    deadline = time.monotonic() + given.limit - (time.time() - psutil.Process().create_time())
    module.measure(Task(given.out, given.device, given.effort, deadline, tuple(given.args)))


if __name__ == "__main__":
    main()
