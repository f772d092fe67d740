"""Time of a step on a GPU that is not there: the host issues operations in order, and the GPU executes their kernels.

The slower of the two decides. How long a host takes to launch a kernel is the largest unknown, so there are three
estimates: for a fast, a usual and a slow host. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ndd_engine.hardware.kernels import Card, Op, fitted, kernels_of

from .estimate import StepTime, TimedBatch, at

Decides = Literal["host", "GPU", "data", "host or GPU"]
# The slower of host and GPU decides alone if the other needs less than this share of its time.
_CLEAR = 0.9


class Issue(NamedTuple):
    """An operation: seconds of a fast host to issue it, and the seconds of each of its kernels."""

    host_s: float
    kernels_s: tuple[float, ...]


class Spent(NamedTuple):
    """Seconds: from the first launch to the end of the last kernel; in which the GPU computes; of the host."""

    wall_s: float
    busy_s: float
    host_s: float


def issues(ops: Sequence[Op], card: Card, tf32: bool) -> list[Issue]:
    """What host and GPU do for the operations, in order."""
    known: dict[Op, Issue] = {}
    # A repeated part of a loop has the same objects.
    seen: dict[int, Issue] = {}
    found = []
    for op in ops:
        issue = seen.get(id(op))
        if issue is None:
            issue = known.get(op)
            if issue is None:
                issue = known[op] = _issue(op, card, tf32)
            seen[id(op)] = issue
        found.append(issue)
    return found


def _issue(op: Op, card: Card, tf32: bool) -> Issue:
    host = fitted().host
    kernels = kernels_of(op, tf32 and card.tf32)
    if not kernels:
        return Issue(host["view_us"] * 1e-6, ())
    steps = sum(kernel.steps for kernel in kernels)
    if steps:
        us = host["recurrent_us"] + host["recurrent_step_us"] * steps
    else:
        us = host["backward_us" if op.phase == "backward" else "forward_us"]
        us += host["kernel_us"] * (sum(kernel.launches for kernel in kernels) - 1)
    return Issue(us * 1e-6, tuple(card.seconds(kernel) for kernel in kernels))


def spent(found: Sequence[Issue], slower: float = 1.0) -> Spent:
    """How long they take. slower: how many times as long as a fast host this one takes for each launch."""
    host = done = busy = 0.0
    latency = fitted().host["latency_us"] * 1e-6
    for issue in found:
        host += issue.host_s * slower
        for kernel_s in issue.kernels_s:
            done = max(done, host + latency) + kernel_s
            busy += kernel_s
    return Spent(max(host, done), busy, host)


@dataclass(frozen=True)
class StepEstimate:
    """Estimated step time of a GPU that is not there, for a fast, a usual and a slow host.

    busy: of each micro-batch, seconds in which the GPU computes. update_s: of the update.
    """

    low: StepTime
    middle: StepTime
    high: StepTime
    busy: tuple[tuple[int, float], ...]

    def decides(self, micro: int, workers: int = 0, placed: bool = False) -> Decides:
        """What the time of a micro-batch depends on, as far as the range of hosts tells."""
        busy = at(micro, *zip(*self.busy, strict=True))
        fast, slow = (time.host_s(micro) for time in (self.low, self.high))
        if self.middle.micro_s(micro, workers, placed) > self.middle.micro_s(micro, placed=True) / _CLEAR:
            return "data"
        if slow < _CLEAR * busy:
            return "GPU"
        return "host" if busy < _CLEAR * fast else "host or GPU"

    def with_data(self, data_s: Sequence[tuple[int, float]]) -> StepEstimate:
        """With the seconds that this machine takes to create a micro-batch, by micro-batch."""
        low, middle, high = (_with_data(time, dict(data_s)) for time in (self.low, self.middle, self.high))
        return replace(self, low=low, middle=middle, high=high)


def _with_data(time: StepTime, data_s: dict[int, float]) -> StepTime:
    points = tuple(replace(point, data_s=data_s.get(point.micro, 0.0)) for point in time.points)
    return replace(time, points=points)


# A host whose launches were timed takes up to this many times as long, or as short, for another model.
TIMED_RANGE = 1.2


def step_estimate(
    micros: Sequence[tuple[int, Sequence[Op]]],
    update: Sequence[Op],
    card: Card,
    tf32: bool,
    slower: float | None = None,
) -> StepEstimate:
    """The estimate of micro-batches of these sizes, from the operations of each. update: the operations of the update.

    slower: how many times as long as a fast host this one takes for a launch; None if unknown.
    The GPU's part of a range is widened by the error that 90 % of the programs left out of the fit stay below.
    """
    hosts = (
        fitted().host["slower"] if slower is None else (slower / TIMED_RANGE, slower, slower * TIMED_RANGE)
    )
    error = 1 + fitted().p90_error
    plans = [(micro, issues(ops, card, tf32)) for micro, ops in micros]
    closing = issues(update, card, tf32)
    busy = tuple((micro, sum(sum(issue.kernels_s) for issue in plan)) for micro, plan in plans)

    def of(slower: float, kernels: float) -> StepTime:
        points = []
        for micro, plan in plans:
            took = spent(_slowed(plan, kernels), slower)
            points.append(TimedBatch(micro, took.wall_s, took.host_s, 0.0))
        return StepTime(tuple(points), spent(_slowed(closing, kernels), slower).wall_s, on_gpu=True)

    low, middle, high = of(hosts[0], 1 / error), of(hosts[1], 1.0), of(hosts[2], error)
    return StepEstimate(low, middle, high, busy)


def _slowed(plan: Sequence[Issue], times: float) -> Sequence[Issue]:
    if times == 1.0:
        return plan
    known: dict[int, Issue] = {}
    return [
        known.get(id(issue))
        or known.setdefault(id(issue), Issue(issue.host_s, tuple(one * times for one in issue.kernels_s)))
        for issue in plan
    ]
