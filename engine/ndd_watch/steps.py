"""Finds where a step of the script ends, whatever its loop looks like.

A step ends where the optimizer steps. With several optimizers, the one that steps most rarely ends it, and of those
that step equally often the last one. Without an optimizer, gradients that are zeroed after a backward pass end it, and
without that every backward pass does. Further backward passes of the only optimizer are micro-steps.

Timing the phases of a step costs 0.03 to 0.1 ms, mostly because our code is no longer in the caches of the processor.
Of short steps only one of `every` is timed by phase, and all of them as a whole. Which ones depends on their number
only, and is irregular: where a loader has four workers, every fourth batch may be a slow one.

Ranks that exchange data are compared step by step. A rank that times fewer steps times some of those that the others
time, and windows end at multiples of powers of two, without a word between the ranks.
"""

from __future__ import annotations

import gc
import os
from typing import Any, Callable

from . import clock
from .clock import (
    CHECKPOINT,
    CURRENT,
    EVALUATE,
    LAST,
    OTHER,
    TIMED,
    TRAINER,
    ZEROS,
    S,
    begun,
    now,
    numbers,
    rest,
    row,
    rows,
    wholes,
)  # fmt: skip

WINDOW_NS = int(float(os.environ.get("NDD_WATCH_WINDOW_S", "1")) * 1e9)
# From one loss that is kept to the next: keeping one costs several microseconds.
LOSS_NS = WINDOW_NS // 10
# From one profiled step to the next; 0: none.
PROFILE_NS = int(float(os.environ.get("NDD_WATCH_PROFILE_S", "30")) * 1e9)
# What timing the phases of a step costs, and the share of a step that it may cost.
COST_NS = 100_000
SHARE = float(os.environ.get("NDD_WATCH_SHARE", "0.0025"))
MOST_SKIPPED = 64
# Backward passes without an optimizer or zero_grad, after which each of them is a step.
FEW_BACKWARDS = 8
# The same where an optimizer exists but is never heard of: torch 2.1 and 2.2 take its hooks out in torch.compile.
SILENT_BACKWARDS = 100
# An optimizer that steps more rarely than this times the most frequent one does not end steps.
RARE = 8
_GOLDEN = 0x9E3779B9


class Steps:
    """The steps of a process.

    done: steps so far. backwards: backward passes in the current step. has_optimizer: one exists. ends_known: something
    else than a backward pass ends the steps. loss: of a recent backward pass, detached; loss_due: when the next one is
    kept, on the clock. shape: of the model's first input. caller: code of the function that contains the training loop.
    every: one of so many steps is timed by phase; skip: number of further steps that are not. ranks: this process
    exchanges data with other ranks.
    """

    def __init__(self) -> None:
        self.done = self.backwards = self.micro = self.skipped_updates = 0
        self.has_optimizer = self.ends_known = False
        self.loss: Any = None
        self.loss_due = 0
        self.shape: tuple[int, ...] | None = None
        self.caller: Any = None
        self.optimizer: Any = None
        # The optimizer that steps at present, and the phase around it.
        self.stepping: Any = None
        self.outer = OTHER
        self.every, self.skip, self.usual_backwards = 1, 0, 1
        # Backward passes happen within others, as of checkpointed activations. Only steps that are timed by phase tell
        # them apart.
        self.nested = False
        self.ranks = False
        # Set by `install`: ends a window; learns from a step; called at the end of each step by a trial; called with
        # our own errors.
        self.window: Callable[..., None] = lambda *taken: None
        self.study: Callable[[int], None] | None = None
        self.gate: Callable[[int], None] | None = None
        self.give_up: Callable[[BaseException], None] = lambda error: None
        # Whether the current step is observed more closely, and when the next one is.
        self.studying = False
        self.next_study = 0
        self.last_row = ZEROS
        # Collect garbage after every so many steps; 0: Python decides.
        self.collect_every = 0
        self._live: dict[int, Any] = {}
        self._counts: dict[int, int] = {}
        self._all_backwards = 0
        # Steps before the present window, and, of a rank, after which it ends; 0 before that is known.
        self._window_begin = self._window_end = 0

    def keep(self, loss: Any) -> None:
        """Keep a loss. Detached: nothing of the graph may stay alive."""
        self.loss = loss.detach() if hasattr(loss, "detach") else None
        self.loss_due = S[LAST] + LOSS_NS

    def ended_backward(self) -> None:
        """A backward pass has ended, and nothing else is known to end the steps."""
        self._all_backwards += 1
        if self.has_optimizer and self._all_backwards < SILENT_BACKWARDS:
            return
        if self._all_backwards > FEW_BACKWARDS:
            self.end(now())

    def zeroed(self) -> None:
        """Gradients of a module were zeroed."""
        if not self.has_optimizer:
            self.ends_known = True
            if self.backwards:
                self.end(now())

    def count_of(self, optimizer: object) -> int:
        """How often an optimizer has stepped since the newest one appeared."""
        return self._counts.get(id(optimizer), 0)

    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped."""
        return list(self._live.values())

    def stepped(self, optimizer: object, t: int) -> None:
        """An optimizer has stepped, or skipped a step because of infinite gradients. t: when, on the clock."""
        key, counts = id(optimizer), self._counts
        if key not in counts:
            if counts and self.done == 1:
                self._resume_first()
            # Begin to count anew: earlier steps say nothing about how often the new one steps.
            counts = self._counts = {**dict.fromkeys(counts, 0), key: 0}
            self.ends_known = True
            self._live[key] = optimizer
        counts[key] += 1
        if len(counts) > 1:
            live = {one: count for one, count in counts.items() if count}
            most = max(live.values())
            ends = [one for one, count in live.items() if count * RARE >= most]
            if most > RARE:  # too few steps tell nothing about their frequency
                # In the middle of a step, equally frequent optimizers differ by one.
                least = min(live[one] for one in ends)
                ends = [one for one in ends if live[one] <= least + 1]
            if key != ends[-1]:
                return
        self.optimizer = optimizer
        self.end(t)

    def _resume_first(self) -> None:
        """Another optimizer steps after what was taken for the whole first step: it is the same step."""
        self.done = self.micro = 0
        if rows:
            row[:] = [a + b for a, b in zip(row, rows.pop())]
            numbers.pop()

    def finish(self) -> None:
        """Training has ended: without an optimizer, nothing else ends the last step."""
        if self.backwards and not self.has_optimizer:
            self.end(now())

    def end(self, t: int) -> None:
        """The step ends now, on the clock."""
        row[S[CURRENT]] += t - S[LAST]
        S[LAST] = t
        if row[EVALUATE] or row[CHECKPOINT]:  # they do not belong to the step in which they happen
            for phase in (EVALUATE, CHECKPOINT):
                rest[phase] += row[phase]
                row[phase] = 0
        if self.skip:
            wholes.append(sum(row))
            self.skip -= 1
            if self.nested:
                self.backwards = self.usual_backwards
            if not self.skip:
                self._time_next()
        else:
            rows.append(row[:])
            numbers.append(self.done)
            if self.every > 1 and not self.studying and len(self._counts) == 1:
                self.skip, self.usual_backwards = untimed(self.done + 1, self.every), self.backwards
                if self.skip:
                    S[TIMED] = 0
        row[:] = ZEROS
        self.done += 1
        # Of several optimizers, each has backward passes of its own on the same batch.
        self.micro += 1 if len(self._counts) > 1 else self.backwards
        self.backwards = 0
        if self.studying or t > self.next_study or t - begun[0] >= WINDOW_NS or self.gate is not None:
            self._sometimes(t)

    def _time_next(self) -> None:
        """The next step is timed by phase."""
        self.skip = 0
        S[TIMED] = S[TRAINER]

    def _sometimes(self, t: int) -> None:
        """What happens after some steps only."""
        ends = self._window_ends(t)
        # Ranks profile the first step of a window, so that most of the time all of them profile the same one.
        due = t > self.next_study and (ends if self.ranks and self.next_study else not self.skip)
        if due and self.skip:
            self._time_next()
        if self.study is not None and (self.studying or due):
            self.last_row = rows[-1] if rows else ZEROS
            if self.studying and rows:  # such a step is slower than the others
                rest[:] = [a + b for a, b in zip(rest, rows.pop())]
                numbers.pop()
            self.study(t)
            # What we do to look closely is no part of the next step.
            t = now()
            rest[S[CURRENT]] += t - S[LAST]
            S[LAST] = t
        if ends:
            taken = clock.take()
            lengths = sorted([*map(sum, taken[1]), *taken[2]])
            step_ns = lengths[len(lengths) // 2] if lengths else 0
            self.every = min(int(COST_NS / (SHARE * step_ns)) + 1, MOST_SKIPPED) if step_ns and SHARE else 1
            self._window_begin, self._window_end = self.done, 0
            self.window(*taken)
        if self.collect_every and not self.done % self.collect_every:
            gc.collect()
        if self.gate is not None:
            self.gate(self.done)

    def _window_ends(self, t: int) -> bool:
        """Whether the window ends after this step; of a rank, at the next multiple of about as many steps as it has."""
        if t - begun[0] < WINDOW_NS:
            return False
        if not self.ranks:
            return True
        if not self._window_end:
            size = _power(max(self.done - self._window_begin, self.every))
            self._window_end = -(-self.done // size) * size
        return self.done >= self._window_end


def untimed(number: int, every: int) -> int:
    """How many steps, from this number on, are not timed by phase.

    Multiples of the golden ratio spread evenly, never repeat, and those below 1/16 are among those below 1/8.
    """
    count, limit, place = 0, (1 << 32) // every, number * _GOLDEN & 0xFFFFFFFF
    while place >= limit:
        place, count = place + _GOLDEN & 0xFFFFFFFF, count + 1
    return count


def _power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (max(count, 1) - 1).bit_length()
