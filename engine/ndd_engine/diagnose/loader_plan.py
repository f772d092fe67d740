"""A loader, played with measured times: what workers, prefetch, order, persistent workers or a cache would bring.

As in torch, each batch that the training takes gives one out, by turns to the workers, or to the one with the fewest
where the order is free. What it predicts only ranks what a trial measures.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ndd_watch.changes import PREFETCH

# Batches that are played, of which the first ones do not count; and the most workers that are played.
BATCHES, FIRST, MOST = 400, 60, 64
# So many workers are enough with which steps take at most this part longer than with all that are played.
ENOUGH = 0.03


@dataclass(frozen=True)
class LoaderPlan:
    """A loader, with times in nanoseconds.

    made_ns: times of batches, as quantiles. between_ns: of the training from one batch to the next one that it wants.
    sending_ns: of a batch in the thread of its worker that pickles and sends, beside the one that makes the next.
    receive_ns: of a batch in the thread that trains. pin_ns: of a batch in the thread that receives and pins, 0 without
    one. send_ns: of a batch in the pipe that all workers share. cpu_ns: processor time of a batch in a worker. cores:
    that all of them share; 0 for any number. start_ns: from the begin of a pass to its first batch with new workers,
    where `pass_batches` are a pass; 0 if passes cost nothing. cached_ns: of a batch whose items are in memory; None if
    that is not known.
    """

    made_ns: Sequence[float]
    between_ns: float
    workers: int
    prefetch: int = PREFETCH
    in_order: bool = True
    sending_ns: float = 0.0
    receive_ns: float = 0.0
    pin_ns: float = 0.0
    send_ns: float = 0.0
    cpu_ns: float = 0.0
    cores: float = 0.0
    persistent: bool = True
    start_ns: float = 0.0
    pass_batches: float = 0.0
    cached_ns: float | None = None

    def with_settings(self, sets: Sequence[str]) -> LoaderPlan | None:
        """With settings such as "loader.workers=4"; None if one of them cannot be played."""
        found = self
        for one in sets:
            name, _, value = one.partition("=")
            if name == "loader.workers" and value.isdecimal():
                found = replace(found, workers=int(value))
            elif name == "loader.prefetch" and (value == "none" or value.isdecimal()):
                found = replace(found, prefetch=PREFETCH if value == "none" else int(value))
            elif name == "loader.in_order":
                found = replace(found, in_order=value != "false")
            elif name == "loader.persistent":
                found = replace(found, persistent=value != "false")
            elif name == "loader.cache" and value == "true" and found.cached_ns is not None:
                found = replace(found, made_ns=[found.cached_ns], cpu_ns=found.cached_ns)
            else:
                return None
        return found


def batch_ns(plan: LoaderPlan) -> float:
    """Nanoseconds from one batch to the next, with the part of each that begins a pass."""
    service = _mixed(plan.made_ns)
    if not service:
        return plan.between_ns
    mean = sum(service) / len(service)
    if not plan.workers:
        return plan.between_ns + mean
    # The slower of its two threads limits a worker.
    service = [max(made, plan.sending_ns) for made in service]
    mean = sum(service) / len(service)
    played = max(_play(plan, service), plan.pin_ns, plan.send_ns)
    if plan.cores:
        # The training has one core, or what it needs of it.
        played = max(played, (plan.cpu_ns + plan.between_ns) / plan.cores)
    if plan.start_ns and plan.pass_batches:
        # Workers that are there already make the first batch of a pass like any other.
        begins = min(plan.start_ns, mean) if plan.persistent else plan.start_ns
        played += begins / plan.pass_batches
    return played


def enough(plan: LoaderPlan) -> int:
    """The fewest workers with which more of them would bring little."""
    best = batch_ns(replace(plan, workers=MOST))
    for workers in range(1, MOST):
        if batch_ns(replace(plan, workers=workers)) <= (1 + ENOUGH) * best:
            return workers
    return MOST


def _mixed(quantiles: Sequence[float]) -> list[float]:
    """Times of batches in an order without a pattern, the same for each plan."""
    found, state = [], 12345
    for _ in range(BATCHES + MOST * 16 if quantiles else 0):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        found.append(quantiles[(state >> 8) % len(quantiles)])
    return found


def _play(plan: LoaderPlan, service: list[float]) -> float:
    free, tasks = [0.0] * plan.workers, [0] * plan.workers
    # Batches in the pipe: when they came, their numbers and workers; and those that were received before their turn.
    arriving: list[tuple[float, int, int]] = []
    waiting: dict[int, int] = {}
    sent = turn = 0
    now = begin = 0.0

    def give() -> None:
        nonlocal sent, turn
        worker = turn
        for _ in range(plan.workers):
            worker, turn = turn, (turn + 1) % plan.workers
            if plan.in_order or tasks[worker] < plan.prefetch:
                break
        free[worker] = max(free[worker], now) + service[sent % len(service)]
        tasks[worker] += 1
        heapq.heappush(arriving, (free[worker] + plan.pin_ns, sent, worker))
        sent += 1

    for _ in range(plan.prefetch * plan.workers):
        give()
    for taken in range(BATCHES):
        if taken == FIRST:
            begin = now
        while taken not in waiting:
            at, number, worker = heapq.heappop(arriving)
            now = max(now, at) + plan.receive_ns
            # In any order, the first one that comes is the next one.
            waiting[number if plan.in_order else taken] = worker
        tasks[waiting.pop(taken)] -= 1
        give()
        now += plan.between_ns
    return (now - begin) / (BATCHES - FIRST)
