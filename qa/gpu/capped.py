"""Part "capped": `capped AMP`, the largest batch predicted to fit under a memory limit runs, one 12 % larger does not.

The limits emulate GPUs of 8 to 48 GB, then follow random ones. On the CPU the "runs" are recordings replayed in the
simulated allocator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.predict.allocator import Rules, SimulatedOutOfMemoryError
from ndd_engine.predict.estimate import MANY, Memory
from ndd_engine.predict.step_probes import Prober

from .figures import FAIL, PASS, SKIPPED, Task
from .memory import probed

GIB = 1 << 30
EMULATED = (8, 12, 16, 24, 48)
# Batches are multiples of this.
STEP = 8
# One that is larger by this factor has to fail: then the proposal reaches 90 % of the largest that runs.
BEYOND = 1 / 0.9
# Part of the free memory that a limit may take: other processes may need some, too.
USABLE = 0.9


@dataclass(frozen=True)
class Result:
    """micro: proposed. runs: whether it runs; larger: the smallest batch tried above it that does not, or None."""

    micro: int
    runs: bool
    larger: int | None

    @property
    def why(self) -> str:
        """Why it is no good proposal, "" if it is."""
        if not self.runs:
            return "out of memory"
        return "" if self.larger is not None else f"{beyond(self.micro)} runs, too"


def measure(given: Task) -> None:
    """Measure as many limits as the time allows."""
    amp = given.args[0]
    if not given.on_gpu:
        given.skip("steps on the GPU under a limit")
    free = int(torch.cuda.mem_get_info()[0] * USABLE) if given.on_gpu else 64 * GIB
    done: list[Result] = []
    for size, limits in settings(given, free):
        sets = (f"workload.size={size}", "workload.dropout=0.0", f"precision.amp={amp}")
        prober, memory = probed("chartext", sets, given.device)
        items = len(prober.workload.train_data)  # type: ignore[arg-type]
        for cap in limits:
            if given.left_s < 15:
                break
            name = f"{size}, {cap / GIB:.3g} GiB"
            if cap > free:
                given.skip(name, f"this GPU has {free / GIB:.1f} GiB to use")
                continue
            micro = proposal(memory, cap, items)
            if micro is None:
                given.skip(name, "the limit is too small, or larger than all data needs")
                continue
            retries = memory.fit(micro, 2, cap).retries
            found = tried(prober, micro, cap, given.on_gpu)
            done.append(found)
            shown = f"micro-batch {micro}" + (f", {retries} retries predicted" if retries else "")
            given.check(name, shown, "runs, and is ≥ 90 % of the largest", not found.why, found.why)
    short = sum(not found.runs for found in done)
    low = sum(bool(found.why) for found in done) - short
    for what, bad in (("out of memory", short), ("below 90 % of the largest that runs", low)):
        verdict = SKIPPED if not done else FAIL if bad else PASS
        given.put(f"{what}, of {len(done)}", str(bad), "0", verdict)


def settings(given: Task, free: int) -> Iterator[tuple[str, list[int]]]:
    """(model size, limits in bytes): the emulated GPUs with a large model, random limits with a smaller one."""
    if given.effort == "smoke":
        yield "tiny", [GIB // 64]
        return
    if given.effort == "full":
        yield "guide", [gigabytes * GIB for gigabytes in EMULATED]
    generator = random.Random(0)
    top = max(min(free, 8 * GIB), GIB)
    yield "small", [2 * GIB, *(int(GIB * (top / GIB) ** generator.random()) for _ in range(200))]


def proposal(memory: Memory, cap: int, items: int) -> int | None:
    """The largest multiple of STEP that is predicted to fit, if need be with retries of the allocator.

    None if none fits, or all data does.
    """

    def fit(micro: int) -> bool:
        return bool(memory.fit(micro, 2, cap).fits)

    if not fit(STEP):
        return None
    low, high = 1, 2
    while fit(high * STEP):
        low, high = high, high * 2
        if (high + 1) * STEP * BEYOND > items:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle * STEP) else (low, middle)
    return low * STEP


def tried(prober: Prober, micro: int, cap: int, on_gpu: bool) -> Result:
    """Train the proposal, and a larger batch, under the limit."""
    runs = fits(prober, micro, cap, on_gpu)
    larger = beyond(micro)
    return Result(micro, runs, None if runs and fits(prober, larger, cap, on_gpu) else larger)


def beyond(micro: int) -> int:
    """A batch that has to fail if this one is the right proposal."""
    return max(round(micro * BEYOND), micro + STEP)


def fits(prober: Prober, micro: int, cap: int, on_gpu: bool) -> bool:
    """Whether the steps run within the limit."""
    try:
        if on_gpu:
            with limited(cap):
                prober.trace(micro)
        else:
            prober.trace(micro).until(MANY).on_gpu(Rules.of_environment(), cap)
    except SimulatedOutOfMemoryError:
        return False
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@contextmanager
def limited(cap: int) -> Iterator[None]:
    """Let the allocator reserve at most `cap` bytes."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
