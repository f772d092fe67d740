"""The parts of `python -m benchmarks.gpu`: each is a process of its own with a time limit."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from .needs import ROOT

# Time limits of the whole command, in seconds.
FULL_S, QUICK_S = 60 * 60.0, 15 * 60.0
MODULE = "qa.gpu"
# Words in the names of tests that --quick leaves out: others cover most of them.
SLOW_TESTS = ("compile", "schedule", "foreach", "loop", "efficient", "fp16")


@dataclass(frozen=True)
class Part:
    """One process. section: the heading of its figures. module: run with -m, with `args`.

    full_s, quick_s: time limits in seconds; 0 leaves the part out. about: what its section shows, in one sentence.
    decides: what is known after it, for the first checks. named_only: whether only --only runs it. modules: what it
    imports that other parts do not need.
    """

    section: str
    name: str
    module: str
    args: tuple[str, ...]
    full_s: float
    quick_s: float
    about: str = ""
    decides: str = ""
    named_only: bool = False
    modules: tuple[str, ...] = ()

    @property
    def words(self) -> set[str]:
        """What --only may call it: its name, its section, its module ("tests" for a test file), "first"."""
        module = "tests" if self.module == "pytest" else self.module.rpartition(".")[2]
        return {self.name, self.section, module, *(["first"] if self.section == FIRST else [])}

    @property
    def lacking(self) -> str:
        """Those of its modules that are not installed, "" if none."""
        return ", ".join(name for name in self.modules if find_spec(name) is None)

    def limit_s(self, effort: str) -> float:
        """The time limit; 0 leaves the part out. On the CPU nothing is promised."""
        return {"full": self.full_s, "quick": self.quick_s}.get(effort, 4 * self.full_s)

    def command(self, python: str, out: str, device: str, effort: str, limit_s: float) -> list[str]:
        """The command line of its process."""
        if self.module == "pytest":
            # The plugin may be missing on a machine that has pytest; then only the limit of the part holds.
            own = ("--timeout", str(max(round(limit_s * 0.8), 10))) if find_spec("pytest_timeout") else ()
            return [
                python, "-m", "pytest", "-p", f"{MODULE}.pytest_figures", "-p", "no:cacheprovider", "-p", "no:xdist",
                "--tb", "short", *own, "--rootdir", str(ROOT), *self.args,
                *(("-k", f"not ({' or '.join(SLOW_TESTS)})") if effort == "quick" else ()),
            ]  # fmt: skip
        return [
            python, "-m", self.module, *self.args, "--out", out, "--device", device, "--effort", effort,
            "--limit", f"{limit_s:.0f}",
        ]  # fmt: skip


FIRST = "First checks"
TESTS = "tests/gpu"
OVERHEAD = "Overhead of the engine and of device timing"
MEMORY = "Memory predictions vs. max_memory_reserved"
CAPPED = "Proposals under a memory limit"
FAULTS = "Planted faults that need a GPU"
CLAIMS = "Claims of the guides"
MACHINE = "Machine"

_ABOUT = {
    MACHINE: "",
    FIRST: "What everything else depends on, the most important first.",
    TESTS: "Device clock, memory counters, precision, CUDA graphs and several ranks on the real GPU.",
    OVERHEAD: "Steps per second, medians of neighbouring blocks: engine / bare loop, and device timing on / off.",
    MEMORY: "Predicted from two small batches / reserved by the allocator for larger ones, minus 1.",
    CAPPED: "The largest batch predicted to fit runs under the limit, and one 12 % larger does not.",
    FAULTS: "The planted cause is named first, and its fix gains.",
    CLAIMS: "Measured ratio with its 95 % CI vs. the range that a guide claims. The verdict is about the guide.",
}


def _check(name: str, full_s: float, quick_s: float, decides: str) -> Part:
    module = f"{MODULE}.first_scripts" if name in ("script", "trial") else f"{MODULE}.first"
    return Part(FIRST, name, module, (name,), full_s, quick_s, _ABOUT[FIRST], decides, modules=("click",))


def _test(
    section: str,
    name: str,
    file: str,
    full_s: float,
    quick_s: float,
    decides: str = "",
    modules: tuple[str, ...] = (),
) -> Part:
    args, modules = (f"tests/gpu/{file}",), ("pytest", *modules)
    return Part(section, name, "pytest", args, full_s, quick_s, _ABOUT[section], decides, modules=modules)


def _part(
    section: str,
    name: str,
    module: str,
    args: tuple[str, ...],
    full_s: float,
    quick_s: float,
    named_only: bool = False,
    modules: tuple[str, ...] = (),
) -> Part:
    about = _ABOUT[section]
    return Part(section, name, f"{MODULE}.{module}", args, full_s, quick_s, about, "", named_only, modules)


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they run: the most important ones first."""
    return (
        _part(MACHINE, "machine", "machine", (), 90, 30),
        _check("plain", 120, 60, "Whether a run works at all: both clocks, memory, settings, findings."),
        _check("graph", 120, 50, "Whether a CUDA graph trains like eager steps, and its speed and memory."),
        _check("fallback", 90, 40, "What happens to a step that cannot be captured."),
        _check(
            "script", 150, 80, "Whether the phases of an observed script are timed, and what is said of them."
        ),
        _check("trial", 120, 70, "Whether a trial of a script times the work, or only the launches."),
        _test(
            FIRST,
            "captures",
            "test_capture_gpu.py",
            150,
            45,
            "Permissions of CUPTI, and fields of a capture.",
        ),
        _test(FIRST, "memory", "test_memory_gpu.py", 150, 45, "Whether predicted memory is reserved memory."),
        _test(FIRST, "hardware", "test_hardware_gpu.py", 60, 30, "Whether NVML, nvidia-smi and torch agree."),
        _check("load", 60, 30, "Which clocks and power limits are normal under load."),
        _check("overlap", 90, 40, "Whether a loader is blamed while the GPU is busy."),
        _check("tf32", 60, 30, "Which products use TF32, and whether all switches can be read."),
        _test(TESTS, "training", "test_train_gpu.py", 380, 70),
        _test(TESTS, "ranks", "test_ranks_gpu.py", 150, 0, modules=("click",)),
        _part(OVERHEAD, "overhead", "overhead", (), 240, 45),
        _part(OVERHEAD, "screen", "screen", (), 120, 0, modules=("click", "pexpect", "textual")),
        _part(OVERHEAD, "marks of ranks", "ranks", (), 90, 0),
        _part(MEMORY, "chartext", "memory", ("chartext",), 90, 40),
        _part(MEMORY, "antispoof", "memory", ("antispoof",), 90, 0),
        _part(MEMORY, "finetune", "memory", ("finetune",), 80, 0),
        _part(MEMORY, "eeg", "memory", ("eeg",), 50, 0),
        _part(MEMORY, "summarise", "memory", ("summarise",), 80, 0),
        _part(CAPPED, "bf16", "capped", ("bf16",), 200, 40),
        _part(CAPPED, "fp32", "capped", ("off",), 120, 0),
        _part(FAULTS, "severe faults", "faults", ("severe",), 330, 80),
        _part(FAULTS, "other faults", "faults", ("other",), 640, 320, named_only=True),
        _part(CLAIMS, "decisive claims", "claims", ("decisive",), 300, 60),
        _part(CLAIMS, "other claims", "claims", ("other",), 600, 600, named_only=True),
    )
