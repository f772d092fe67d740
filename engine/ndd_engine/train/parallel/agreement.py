"""What the ranks agree on about once a second: to stop, pause, save or evaluate, all of them after the same step.

After a number of steps that all ranks know, each tells the others in one collective what it wants, and waits for them.
The number comes from the time that steps took. If they become slow, rank 0 brings the next agreement forward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ndd_engine.run.control import ONCE, STOPS

from .marks import GATHER
from .world import World

# "early": training ends before its last step. "not_finite": a loss or a parameter is not. "window": a window ends.
# "profile": Python's profiler sees the next step.
ASKS = (*STOPS, "kill", "pause", *ONCE, "early", "not_finite", "window", "profile")
# Seconds from one agreement to the next: those of a window, within these bounds.
MOST_OFTEN_S, LEAST_OFTEN_S = 0.25, 1.0
MOST_STEPS = 4096
# After this multiple of these seconds it is late, and rank 0 brings it forward.
LATE = 1.2


@dataclass(frozen=True)
class Losses:
    """Losses since the last agreement: their sum and number, and the last one if there is any."""

    total: float = 0.0
    count: float = 0.0
    last: float | None = None


class Agreement:
    """Which steps the ranks agree after, and what all of them want.

    Every rank takes part in every step: none can end a step before the others have begun to exchange its gradients.
    """

    def __init__(self, world: World, window_s: float) -> None:
        self._world = world
        self.every_s = min(max(window_s, MOST_OFTEN_S), LEAST_OFTEN_S)
        self._count = 0  # agreements so far
        self.begin(0)

    def begin(self, step: int) -> None:
        """Training begins after so many steps."""
        self._gap = 1
        self._goes_on(step, 1)

    def _goes_on(self, step: int, steps: int) -> None:
        self._since, self._next, self._told = step, step + steps, False
        self.rested()

    def rested(self) -> None:
        """The time so far says nothing about the speed of steps."""
        self._t = time.perf_counter()

    @property
    def since_s(self) -> float:
        """Seconds since the last agreement."""
        return time.perf_counter() - self._t

    def due(self, step: int) -> bool:
        """After each step: whether the ranks agree now."""
        if step < self._next and self.since_s > LATE * self.every_s:
            self._bring_forward(step)
        return step >= self._next

    def _bring_forward(self, step: int) -> None:
        """Agree after a step that no rank has ended, as soon as all of them look here for its number.

        None of them misses it: rank 0 chooses it before it takes part in the next step, which none can end without it.
        """
        world, name = self._world, f"agreement/{self._count}"
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # the host must not be ahead of the exchange
        ranks = [f"{name}/{rank}" for rank in range(world.size)]
        if not self._told:
            self._told = True
            world.store.set(ranks[world.rank], str(step))
        if world.place.first and world.store.check(ranks):
            world.store.set(name, str(max(step, *(int(world.store.get(key)) for key in ranks)) + 1))
        if world.store.check([name]):
            self._next = min(self._next, int(world.store.get(name)))

    def now(self, step: int, asks: Set[str], losses: Losses) -> tuple[Mapping[str, int], Losses]:
        """After the same step of all ranks: wait for all of them.

        Returns what they ask for, each with one of the ranks that do, and the losses of all.
        """
        regular, steps = step >= self._next, self._next - step
        if regular:
            fitting = round((step - self._since) * self.every_s / max(self.since_s, 1e-9))
            steps = min(max(fitting, 1), MOST_STEPS, 2 * self._gap)
        last = (0.0, 0.0) if losses.last is None else (losses.last, 1.0)
        mine = [*(float(name in asks) for name in ASKS), float(steps), losses.total, losses.count, *last]
        every = torch.empty(self._world.size, len(mine), dtype=torch.float64)
        getattr(dist, GATHER)(
            every.view(-1), torch.tensor(mine, dtype=every.dtype), group=self._world.control
        )
        columns = every.T.tolist()
        asked = {name: column.index(1.0) for name, column in zip(ASKS, columns, strict=False) if any(column)}
        counts, totals, numbers, lasts, known = columns[len(ASKS) :]
        steps = int(min(counts))
        if regular:
            self._gap = steps
        self._count += 1
        self._goes_on(step, steps)
        return asked, Losses(sum(totals), sum(numbers), sum(lasts) / sum(known) if any(known) else None)
