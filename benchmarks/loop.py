"""Engine headless vs. a bare hand-written loop: the overhead of the clock, the record and the sampler.

One process, one thread, two training states with the same model, data and optimizer. Blocks of the same number of
steps (about a second) alternate in the order A B B A; the steps per second of neighbouring blocks are compared.

- The engine's block is one call of `Loop.run` on a real run: phase clock, losses and windows, the recorder thread
  writing events.jsonl, the sampler thread at 1 Hz (first sample after 0.25 s), polling the control every step. The
  block is timed from outside, so the one-time work of Loop.run (restoring the epoch's order, the last window, reading
  the last losses) counts against the engine. Only evaluation and checkpoints are off.
- The bare block is the usual hand-written loop: DataLoader, forward, loss, backward, clip if configured, step,
  zero_grad, loss.item() every 10 steps. The sampler is stopped and the recorder idle while it runs. It profits
  from the engine's gc.freeze(), which also counts against the engine.
- glibc may return freed memory to the system and request it again within a step, depending on the heap layout. Up to
  a thousand page faults per step on either side then shift a ratio by several percent for the life of the process.
  For all rows but the first, mallopt disables this on both sides; the first row uses the default allocator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ndd_engine.config import Config
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.factory_data import prepare

from .common import (
    STATISTICS,
    Options,
    Table,
    Target,
    as_ratio,
    compared,
    say,
    statistics_cells,
)
from .engine import ONLY_STEPS, TINY, TINY_WORKLOAD, Engine, engine, now
from .rival_loops import Bare

TITLE = "loop: engine headless / bare loop (steps per second, neighbouring blocks)"
TARGET = Target(0.99, at_least=True)
_MINI = ("workload.size=mini",)
# (name, workload, settings); the first one runs with the default allocator.
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("chartext mini, default allocator", "chartext", _MINI),
    ("tiny step", TINY_WORKLOAD, TINY),
    ("eeg, the guide's settings", "eeg", ()),
    ("chartext mini", "chartext", _MINI),
    ("chartext, default size for this machine", "chartext", ()),
)


def measure(options: Options) -> Table:
    """All cases in one table."""
    table = Table(TITLE, ("case", "step, ms", "steps per block", *STATISTICS))
    cases = options.cases(CASES[1:-1] if options.quick else CASES)
    if options.quick:
        table.note(
            "--quick skips the first case, and the default size of chartext, which takes seconds to choose"
        )
    for case in cases:
        name, workload, sets = case
        say(f"loop: {name}")
        if case is not CASES[0] and not keep_memory():
            table.note(
                "this allocator cannot be configured to keep memory: ratios of the larger steps are rough"
            )
        settings = (*sets, *ONLY_STEPS, f"run.device={options.device}", "precision.amp=off")
        with engine(workload, settings) as subject:
            _case(table, name, subject, options)
    return table


class Beside:
    """The engine and the bare loop, both warm, in blocks of equally many steps."""

    def __init__(self, subject: Engine, block_s: float) -> None:
        self.subject, self.device = subject, subject.prepared.device
        self._bare = bare_loop(subject.prepared.config, self.device)
        subject.prepared.sampler.stop()
        self.steps = steps_of(block_s, lambda count: self._timed(self._bare.go_on, count))
        self._timed(subject.train, self.steps)  # the bare loop was warmed up by steps_of

    def _timed(self, train: Callable[[int], None], steps: int) -> float:
        begin = now(self.device)
        train(steps)
        return steps / (now(self.device) - begin)

    def engine(self) -> float:
        """Steps per second of a block of the engine."""
        self.subject.prepared.sampler.start()
        try:
            return self._timed(self.subject.train, self.steps)
        finally:
            self.subject.prepared.sampler.stop()

    def bare(self) -> float:
        """Steps per second of a block of the bare loop."""
        return self._timed(self._bare.go_on, self.steps)


def bare_loop(config: Config, device: torch.device) -> Bare:
    """The hand-written loop of a configuration, with a model and data of its own."""
    seed(config.run.seed)
    return Bare(config, prepare(config), device, witnessed=False)


def _case(table: Table, name: str, subject: Engine, options: Options) -> None:
    both = Beside(subject, options.seconds(1.0, 0.4, least=0.05))
    pairs, limit_s = options.repeats(28, 4, least=2), options.seconds(80.0, 4.0)
    found = compared(both.bare, both.engine, pairs, limit_s)
    size = subject.prepared.config.workload.size
    shown = f"{name} ({size})" if size is not None and size not in name else name
    step_ms = f"{1e3 / found.baseline:.2f}"
    table.add(shown, step_ms, str(both.steps), *statistics_cells(found.values, as_ratio, TARGET))
    table.note(f"{name}: {found.note}" if found.note else "")


def steps_of(block_s: float, rate: Callable[[int], float]) -> int:
    """The number of steps of a block of this length, measured; also warms up."""
    count = 2
    while count / rate(count) < block_s / 8:
        count *= 2
    # Other processes only make it slower, so take the fastest of several tries.
    return max(round(max(rate(count) for _ in range(4)) * block_s), 4)


def keep_memory() -> bool:
    """Keep glibc from returning freed memory to the system; False with other allocators."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 32 << 20)
    )
