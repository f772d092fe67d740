"""What all ranks do after the same step, without a collective in each step and without waiting for each other.

A vote is cast after step s: a minimum over the ranks, on a group of its own, found while they train. It is read after
step s + gap, when every rank has passed s, so it is done by then. All ranks read the same result after the same step.
The gap is voted on, too: the steps of about a second. What cannot wait so long is voted on at once, see `calls`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndd_engine.run.control import Control

from .marks import GATHER
from .spans import SLOTS, Slots

# Up to so many ranks gather all votes, which takes fewer messages than gloo's all-reduce of them: half of its time.
FEW_RANKS = 8
MOST_STEPS = 4096  # between two votes
# What a rank can ask for; those of `_STOPS` are the statuses of a run that stops, and "kill" does so immediately.
_STOPS = ("stopped", "interrupted", "terminated", "failed")
ASKS = (
    *_STOPS, "kill", "pause", "checkpoint", "evaluate", "kernels", "early", "not_finite", "window", "profile",
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """The result of a vote. asked: request -> one of the ranks that asked. gap: steps to the next vote.

    least_wait_ns: sum over the steps of the least wait of any rank; infinite if no rank knows its waits. most_own_ns:
    of the longest own time of any rank.
    """

    asked: Mapping[str, int]
    gap: int
    least_wait_ns: float
    most_own_ns: float


class Votes:
    """Votes on a group. next: the step after which the vote is read and the next one is cast, on all ranks.

    gap: the steps from the vote before to that. every_s: about the seconds between two votes.
    """

    def __init__(self, group: Any, rank: int, every_s: float) -> None:
        self.next = self.gap = 1
        self._group, self._rank, self._every_s = group, rank, every_s
        self._few = dist.get_world_size(group) <= FEW_RANKS
        self._begun, self._t = 0, time.perf_counter()
        self._flying: tuple[Tensor, Any] | None = None

    def begin(self, step: int) -> None:
        """Training begins after so many steps."""
        self.continues(step, 1)

    def continues(self, step: int, gap: int) -> None:
        """So many steps are done, and all ranks know it: the next vote is cast after so many more."""
        self._begun, self._t, self.gap = step, time.perf_counter(), gap
        self.next = step + gap

    def place(self, step: int) -> int:
        """In which of `SLOTS` parts of the time between two votes a step is."""
        return min((step - 1 - self._begun) * SLOTS // self.gap, SLOTS - 1)

    @property
    def since_s(self) -> float:
        """Seconds since the last vote was cast, without pauses."""
        return time.perf_counter() - self._t

    def cast(self, step: int, asks: Mapping[str, bool], spans: Slots, gap: int | None) -> None:
        """After step `next`: begin the next vote. gap: what the vote before decided, None if that is not known."""
        gap = gap or self.gap
        wanted = min(self._wanted(step), 2 * gap)
        self._flying = self._sent(self._vote(asks, spans, wanted))
        self.continues(step, gap)

    def _wanted(self, step: int) -> int:
        rate = (step - self._begun) / max(self.since_s, 1e-9)
        return min(max(round(rate * self._every_s), 1), MOST_STEPS)

    def read(self) -> Decision | None:
        """The vote in flight, if there is one; waits for it. On all ranks after the same step."""
        if self._flying is None:
            return None
        (votes, work), self._flying = self._flying, None
        work.wait()
        return _decision(votes)

    def now(self, step: int, asks: Mapping[str, bool], spans: Slots) -> Decision:
        """A vote that waits for all ranks, after the same step of all."""
        votes, work = self._sent(self._vote(asks, spans, self._wanted(step)))
        work.wait()
        return _decision(votes)

    def _sent(self, vote: Tensor) -> tuple[Tensor, Any]:
        """(the votes of all ranks or their minimum, one in a row; what to wait for)."""
        if not self._few:
            return vote[None], dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group, async_op=True)
        every = vote.new_empty(dist.get_world_size(self._group), len(vote))
        return every, getattr(dist, GATHER)(every.view(-1), vote, group=self._group, async_op=True)

    def paused(self) -> None:
        """The time since the last vote says nothing about the speed of steps."""
        self._t = time.perf_counter()

    def _vote(self, asks: Mapping[str, bool], spans: Slots, gap: int) -> Tensor:
        # One minimum for everything: where the largest value counts, its sign is turned.
        asked = [-float(self._rank + 1) if asks.get(name) else 0.0 for name in ASKS]
        waits, works = spans
        return torch.tensor([*asked, float(gap), *waits, *(-work for work in works)], dtype=torch.float64)


def _decision(votes: Tensor) -> Decision:
    values = votes.amin(dim=0).tolist()
    asked = {name: int(-value) - 1 for name, value in zip(ASKS, values, strict=False) if value}
    first = len(ASKS) + 1
    waits, owns = values[first : first + SLOTS], values[first + SLOTS :]
    return Decision(asked, int(values[first - 1]), sum(waits), -sum(owns))


class SharedControl(Control):
    """Requests that the ranks have agreed on. own: the requests to this rank, from its signals or its socket.

    agree: called while all ranks pause: lets them vote, and obeys.
    """

    def __init__(self, own: Control, agree: Callable[[], None]) -> None:
        super().__init__()
        self.own, self._agree = own, agree

    @property
    def unheard(self) -> bool:
        """Whether this rank was asked for something that the ranks have not agreed on."""
        own = self.own
        return own.pending and (
            own.has_once
            or own.paused != self._paused
            or own.stopping != self.stopping
            or own.kill != self.kill
        )

    def asks(self) -> dict[str, bool]:
        """What this rank asks for: requests once, a pause as long as it lasts."""
        own = self.own
        asked = dict.fromkeys(own.take_once(), True) if own.pending else {}
        asked["pause"], asked["kill"] = own.paused, own.kill
        if own.stop_status is not None:
            asked[own.stop_status] = True
        return asked

    def obey(self, decision: Decision, pauses: bool = True) -> None:
        """Take over what was agreed on. pauses: also whether the ranks pause."""
        asked = decision.asked
        for name in ("checkpoint", "evaluate", "kernels"):
            if name in asked:
                self.request(name)
        if pauses and ("pause" in asked) != self._paused:
            self.request("pause" if "pause" in asked else "resume")
        for status in _STOPS:
            if status in asked and self.stop_status is None:
                # Requested here, too: the run ends with the reason of its own control.
                self.own.request("stop", f"{status} at rank {asked[status]}", status)
                self.request("stop", self.own.stop_reason, status)
        if "kill" in asked:
            self.own.request("kill")
            self.request("kill")

    @property
    def holders(self) -> tuple[int, ...]:
        return self.own.holders

    def wait(self, timeout_s: float) -> None:
        """While all ranks are paused: wait, then vote on what happens next."""
        own = self.own
        if own.paused or not own.pending:
            own.wait(timeout_s)
        self._agree()
