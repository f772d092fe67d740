"""The parts of `make gpu`: each is a process of its own with a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Time limits of the whole command, in seconds.
FULL_S, QUICK_S = 60 * 60.0, 8 * 60.0
MODULE = "benchmarks.gpu"
# Words in the names of tests that --quick leaves out: others cover most of them.
SLOW_TESTS = ("compile", "schedule", "foreach", "loop", "efficient", "fp16")


@dataclass(frozen=True)
class Part:
    """One process. section: the heading of its figures. module: run with -m, with `args`.

    full_s, quick_s: time limits in seconds. about: what it shows, in one sentence. in_quick: whether --quick runs it.
    """

    section: str
    name: str
    module: str
    args: tuple[str, ...]
    full_s: float
    quick_s: float
    about: str = ""

    @property
    def words(self) -> set[str]:
        """What --only may call it: its name, its section, its module ("tests" for a test file)."""
        module = "tests" if self.module == "pytest" else self.module.rpartition(".")[2]
        return {self.name, self.section, module}

    def limit_s(self, effort: str) -> float:
        """The time limit; 0 leaves the part out. On the CPU nothing is promised."""
        return {"full": self.full_s, "quick": self.quick_s}.get(effort, 4 * self.full_s)

    def command(self, python: str, out: Path, device: str, effort: str, limit_s: float) -> list[str]:
        """The command line of its process."""
        if self.module == "pytest":
            return [
                python, "-m", "pytest", "-p", f"{MODULE}.pytest_figures", "-p", "no:cacheprovider", "-p", "no:xdist",
                "--timeout", str(max(round(limit_s * 0.8), 10)), "--rootdir", str(ROOT), *self.args,
                *(("-k", f"not ({' or '.join(SLOW_TESTS)})") if effort == "quick" else ()),
            ]  # fmt: skip
        return [
            python, "-m", self.module, *self.args, "--out", str(out), "--device", device, "--effort", effort,
            "--limit", f"{limit_s:.0f}",
        ]  # fmt: skip


TESTS = "tests/gpu"
OVERHEAD = "Overhead of the engine and of device timing"
MEMORY = "Memory predictions vs. max_memory_reserved"
CAPPED = "Proposals under a memory limit"
FAULTS = "Planted faults that need a GPU"
CLAIMS = "Claims of the guides"
MACHINE = "Machine"

_ABOUT = {
    MACHINE: "",
    TESTS: "Device clock, captures, memory counters, precision, CUDA graphs and NVML on the real GPU.",
    OVERHEAD: "Steps per second, medians of neighbouring blocks: engine / bare loop, and device timing on / off.",
    MEMORY: "Predicted from two small batches / reserved by the allocator for larger ones, minus 1.",
    CAPPED: "The largest batch predicted to fit runs under the limit, and one 12 % larger does not.",
    FAULTS: "The planted cause is named first, and its fix gains.",
    CLAIMS: "Measured ratio with its 95 % CI vs. the range that a guide claims. The verdict is about the guide.",
}


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they run: the most important ones first."""
    rows: Sequence[tuple[str, str, str, tuple[str, ...], float, float]] = (
        (MACHINE, "machine", f"{MODULE}.machine", (), 60, 30),
        (TESTS, "hardware", "pytest", ("tests/gpu/test_hardware_gpu.py",), 60, 30),
        (TESTS, "training", "pytest", ("tests/gpu/test_train_gpu.py",), 480, 80),
        (TESTS, "captures", "pytest", ("tests/gpu/test_capture_gpu.py",), 150, 40),
        (TESTS, "memory", "pytest", ("tests/gpu/test_memory_gpu.py",), 180, 40),
        (TESTS, "ranks", "pytest", ("tests/gpu/test_ranks_gpu.py",), 240, 0),
        (OVERHEAD, "overhead", f"{MODULE}.overhead", (), 270, 45),
        (OVERHEAD, "screen", f"{MODULE}.screen", (), 120, 0),
        (OVERHEAD, "marks of ranks", f"{MODULE}.ranks", (), 90, 0),
        (MEMORY, "chartext", f"{MODULE}.memory", ("chartext",), 90, 40),
        (MEMORY, "antispoof", f"{MODULE}.memory", ("antispoof",), 150, 0),
        (MEMORY, "finetune", f"{MODULE}.memory", ("finetune",), 90, 0),
        (MEMORY, "eeg", f"{MODULE}.memory", ("eeg",), 60, 0),
        (MEMORY, "summarise", f"{MODULE}.memory", ("summarise",), 90, 0),
        (CAPPED, "bf16", f"{MODULE}.capped", ("bf16",), 240, 40),
        (CAPPED, "fp32", f"{MODULE}.capped", ("off",), 180, 0),
        (FAULTS, "faults", f"{MODULE}.faults", (), 450, 60),
        (CLAIMS, "claims", f"{MODULE}.claims", (), 600, 60),
    )
    return tuple(Part(*row, about=_ABOUT[row[0]]) for row in rows)
