"""What is known from inside loader workers: which function takes their time, and what a change would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.worker_events import WAITS, WorkerFigures, WorkerFunction, WorkersEvent
from ndd_engine.text import counted, number, percent, printable, size, span, times
from ndd_watch.changes import MOST_WORKERS, PREFETCH
from ndd_watch.mapped import FIRST_BATCH

from .data_facts import any_order, further_ahead, here_too, in_host_memory, off_device, untold_cache
from .finding import Change, Evidence
from .loader_plan import LoaderPlan, batch_ns, enough
from .view import CONFIG, FLOOR, PROFILER, View, place

INSIDE = "loader workers"
# A function is named that takes this part of a batch, and is called most of it from this part on.
NAMED, MOSTLY = 0.2, 0.5
# Workers that wait so much for the training are not what it waits for.
IDLE = 0.6
# Workers that work for more than this part of their time have none left to make batches earlier.
FULL = 0.95
# Settings that change which batch is made or taken first.
ORDERING = frozenset({"loader.prefetch", "loader.in_order"})
# Workers that neither compute nor wait for anything in at least this part of a batch lack a processor. With one, they
# would keep up if they made batches in less than this part of the time between two.
LACKING, KEEPS_UP = 0.5, 0.5
# Sending is told that takes this part of making a batch; items and workers, that take so many times the usual.
SENDING, UNEVEN, SLOWER = 0.5, 10.0, 1.7
# Nanoseconds of a page that is touched first, at least; the part of a batch from which on it is told.
FAULT_NS, TOUCHING = 250.0, 0.1
# A change that is predicted to bring less comes after all others.
LITTLE = 0.03
# Beside a change that is known to help, others are proposed that are predicted to bring so much more.
MUCH = 0.25
# Receiving a batch, or waiting behind an earlier one, is told from this part of the time of a batch on.
RECEIVING = 0.1
DOES = {
    "computes": "computing", "storage": "in files", "lock": "waiting for a lock", "sleeps": "sleeping",
    "connection": "waiting for a connection", "pickle": "pickling", "waits": "waiting, as for storage",
    "touches": "touching memory for the first time", "collects": "collecting garbage", "device": "waiting for the GPU",
}  # fmt: skip


def inside(view: View) -> WorkersEvent | None:
    """What the workers told; None if there are none, or nothing is known of them."""
    found = view.snapshot.workers
    return found if found is not None and found.workers and view.workers else None


def busy(found: WorkersEvent) -> bool:
    """Whether the workers work most of the time."""
    return min(worker.idle for worker in found.workers) < IDLE


def unscheduled(view: View) -> bool:
    """Whether batches take long only because the workers are not scheduled.

    With a processor whenever they are ready to run, they would make batches far faster than these are wanted: they
    compute as long as the processor says, and wait for anything else, such as storage, as their profiles say. Without a
    profile, what Linux says of the time in which they were ready is no such wait.
    """
    found = inside(view)
    if found is None:
        return False
    count, use = len(found.workers), view.snapshot.cores
    made = sum(one.batch_ns for one in found.workers) / count
    cpu = sum(one.cpu_ns for one in found.workers) / count
    sending = sum(one.pickle_ns + one.send_ns for one in found.workers) / count
    waits = sum(part for function in found.functions for kind, part in function[6].items() if kind in WAITS)
    waiting = cpu * waits / (1 - waits) if waits < 1 else made
    if not found.functions:
        late = sum((one.late or 0.0) * (one.batch_ns + one.idle_ns) for one in found.workers) / count
        waiting = max(made - cpu - late, 0.0)
    needed = (cpu + waiting) / max(made, 1.0)
    if needed > 1 - LACKING:
        return False
    at_once = min(count, view.whole_cores or count)
    each = max(waiting / count + cpu / at_once, needed * sending / at_once) * view.micro_steps
    computes = view.step_ns - view.wait.ns
    if use is not None and not view.gpu:  # it may lack a processor, too
        computes = min(computes, use.by_run * view.step_ns - cpu * view.micro_steps)
    return each < KEEPS_UP * computes


def crowded_out(view: View) -> bool:
    """Whether it is for the load by others, or for the quota of the run, that workers are late."""
    use = view.snapshot.cores
    throttled = use is not None and use.throttled is not None and use.throttled >= FLOOR
    return (view.disturbed or view.neighboured or throttled) and unscheduled(view)


def slowest(view: View) -> WorkerFunction | None:
    """The function that takes most of a batch in workers that the training waits for; None if none does.

    What takes long only because it is not scheduled is none.
    """
    found = inside(view)
    if found is None or not busy(found) or unscheduled(view):
        return None
    large = [function for function in found.functions if function[4] >= NAMED]
    # What of a library none of the user's functions calls comes after these.
    return min(large, key=lambda function: "-packages" in function[0], default=None)


def where(function: WorkerFunction) -> str:
    """ "clips.py:14 in Clips.decode"."""
    return place(printable(function[0]), function[1], printable(function[2]))


def does(function: WorkerFunction) -> str:
    """What a function spends most of its time with: "computing"; two kinds if both take much."""
    kinds = sorted(function[6].items(), key=lambda item: -item[1])
    told = [DOES.get(kind, kind) for kind, share in kinds[:2] if share >= 0.3 * function[4]]
    return " and ".join(told)


def function_evidence(function: WorkerFunction) -> Evidence:
    """ "in the loader workers, clips.py:14 in Clips.decode takes 73 % of the time of a batch (computing)"."""
    doing = f" ({does(function)})" if function[6] else ""
    return Evidence(
        f"in {INSIDE}, {where(function)} takes {percent(function[4])} of a batch{doing}", PROFILER
    )


def evidence(view: View) -> list[Evidence]:
    """What the workers spend their time with, besides functions."""
    found = inside(view)
    if found is None:
        return []
    workers, told = found.workers, []
    made = sum(worker.batch_ns for worker in workers) / len(workers)
    idle = sum(worker.idle for worker in workers) / len(workers)
    rate = f"a worker makes a batch in {span(made)}"
    told.append(f"{rate}, and waits {percent(idle)} of its time until one is wanted")
    sending = sum(worker.pickle_ns + worker.send_ns for worker in workers) / len(workers)
    if sending >= SENDING * made:
        bytes_of = sum(worker.batch_bytes for worker in workers) / len(workers)
        told.append(f"pickling and sending a batch of {size(round(bytes_of))} takes {span(sending)}")
    if (text := uneven_items(workers)) or (text := uneven_workers(workers)):
        told.append(text)
    faults = [worker.faults for worker in workers if worker.faults is not None]
    if faults and FAULT_NS * max(faults) >= TOUCHING * made:
        told.append(f"a batch touches {number(round(max(faults)))} pages of memory for the first time")
    return [*(Evidence(text, INSIDE) for text in told), *received(view)]


def uneven_items(workers: Sequence[WorkerFigures]) -> str:
    """The slowest items, if they take many times as long as usual ones."""
    median = max(worker.item_ns[0] for worker in workers)
    slow = sorted(((ns, name) for worker in workers for ns, name in worker.slow), reverse=True)
    if not slow or max(worker.item_ns[2] for worker in workers) < UNEVEN * median:
        return ""
    names = ", ".join(dict.fromkeys(f"{printable(name)} ({span(ns)})" for ns, name in slow[:3]))
    return f"the slowest items are {names}; the median is {span(median)}"


def uneven_workers(workers: Sequence[WorkerFigures]) -> str:
    """The worker that takes much longer for a batch than the others, if one does."""
    if len(workers) < 2:
        return ""
    slow = max(workers, key=lambda one: one.batch_ns)
    others = [one.batch_ns for one in workers if one is not slow]
    ratio = slow.batch_ns / max(sum(others) / len(others), 1.0)
    text = f"worker {slow.number} takes {ratio:.1f} times as long for a batch as the others"
    return text if ratio >= SLOWER else ""


def plan_of(view: View) -> LoaderPlan | None:
    """The loader of a run as it is; None without measured times."""
    found = inside(view)
    if found is None or not found.batch_quantiles_ns or view.step_ns <= 0:
        return None
    micro, workers, totals = max(view.micro_steps, 1.0), found.workers, view.snapshot.totals
    count = len(workers)
    sends = [worker.pickle_ns + worker.send_ns for worker in workers]
    collates = [worker.collate_ns for worker in workers if worker.collate_ns is not None]
    receive_ns, pin_ns = received_ns(view)
    pinned = pin_ns > 0
    passes = max(totals.passes, 1)
    return LoaderPlan(
        found.batch_quantiles_ns, max(view.step_ns - view.wait.ns, 1.0) / micro, view.workers,
        view.whole("loader.prefetch") or PREFETCH, view.get("loader.in_order") is not False, sum(sends) / count,
        0.0 if pinned else receive_ns, receive_ns + pin_ns if pinned else 0.0,
        sum(worker.send_ns for worker in workers) / count, sum(worker.cpu_ns for worker in workers) / count,
        float(view.whole_cores or 0), view.get("loader.persistent") is not False,
        totals.phases.get(FIRST_BATCH, 0) / passes, totals.steps * micro / passes if totals.passes else 0.0,
        sum(collates) / len(collates) if collates else None,
    )  # fmt: skip


def received_ns(view: View) -> tuple[float, float]:
    """Nanoseconds of a batch: receiving it, and pinning it; 0 where no batch was seen."""
    found = view.snapshot.totals.received
    batches = max(found.get("batches", 0), 1)
    return found.get("receive_ns", 0) / batches, found.get("pin_ns", 0) / batches


def received(view: View) -> list[Evidence]:
    """What the process that trains does with batches of workers.

    Waiting behind an earlier batch is told with what another order is predicted to bring: it may be much less.
    """
    found, told = view.snapshot.totals.received, []
    batches = found.get("batches", 0)
    receive_ns, pin_ns = received_ns(view)
    if not batches:
        return []
    each = view.step_ns / max(view.micro_steps, 1.0)
    if receive_ns + pin_ns >= RECEIVING * each:
        text = f"receiving a batch takes {span(receive_ns)}"
        told.append(f"{text}, and pinning it {span(pin_ns)} in another thread" if pin_ns else text)
    behind, plan = found.get("behind_ns", 0) / batches, plan_of(view)
    if behind >= RECEIVING * each and plan is not None:
        gain = batch_ns(plan) - batch_ns(replace(plan, in_order=False))
        told.append(
            f"for {span(behind)} a batch, the training waits while a later batch is ready; taking it at once "
            f"is predicted to bring {span(max(gain, 0.0))}"
        )
    return [Evidence(text, "times of batches in the training process") for text in told]


def ranked(view: View, changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes with what is predicted of them, the largest gain first, and one to enough workers if that gains.

    Those that cannot be played keep their place before those that are predicted to bring little; fewer workers than
    now are left out where they are predicted to slow the run down.
    """
    plan = plan_of(view)
    if plan is None:
        return tuple(changes)
    changes = [one for change in changes for one in (*_with_cache(view, plan, change), change)]
    known = {change.sets for change in changes}
    more = [change for change in _further(view, plan, changes) if change.sets not in known]
    now = batch_ns(plan)
    rows: list[tuple[float, Change]] = []
    for change in _helping(view, [*changes, *more]):
        other = plan.with_settings(change.sets) if change.sets else None
        if other is None or other == plan:
            rows.append((LITTLE, change))
            continue
        gain = now / max(batch_ns(other), 1.0) - 1
        if gain < -LITTLE and other.workers < plan.workers:
            continue
        told = f"predicted: {times(1 + gain)}" if gain >= LITTLE else "predicted: little or nothing"
        rows.append((gain if gain >= LITTLE else 0.0, replace(change, text=f"{change.text} ({told})")))
    rows.sort(key=lambda row: -row[0])
    if (both := _together(view, plan, [change for gain, change in rows if gain > LITTLE])) is not None:
        rows.insert(0, both)
    return tuple(change for _, change in rows)


def beside_first(view: View, changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes, after the first one together with others that are predicted to gain much beside it."""
    plan = plan_of(view)
    first = plan.with_settings(changes[0].sets) if plan is not None and changes and changes[0].sets else None
    if plan is None or first is None:
        return tuple(changes)
    more = _helping(view, _further(view, first, ()))
    both = _together(view, plan, [changes[0], *more])
    if both is None or batch_ns(first) < (1 + MUCH) * batch_ns(plan) / (1 + both[0]):
        return tuple(changes)
    return (both[1], *changes)


def _together(view: View, plan: LoaderPlan, changes: Sequence[Change]) -> tuple[float, Change] | None:
    """(gain, the changes that are predicted to gain more together than the first one alone); None without any.

    changes: that gain, the largest gain first. Each of the others is added if it still gains beside those before it.
    """
    sets: dict[str, str] = {}
    best, count = plan, 0
    for change in changes:
        added = dict(one.split("=", 1) for one in change.sets)
        other = plan.with_settings([f"{name}={value}" for name, value in {**sets, **added}.items()])
        if sets.keys() & added.keys() or other is None:
            continue
        if batch_ns(best) >= (1 + LITTLE) * batch_ns(other):
            sets, best, count = {**sets, **added}, other, count + 1
    if count < 2:
        return None
    gain = batch_ns(plan) / max(batch_ns(best), 1.0) - 1
    text = f"make {number(count)} of these changes together (predicted: {times(1 + gain)})"
    return gain, Change(text, tuple(f"{name}={value}" for name, value in sets.items()), view.loader_place)


def _helping(view: View, changes: Sequence[Change]) -> list[Change]:
    """Those that may help: workers that work all the time make no more batches in another order, or further ahead."""
    found = inside(view)
    if found is None or min(1 - worker.idle for worker in found.workers) <= FULL:
        return [*changes]
    return [change for change in changes if not ORDERING & {one.partition("=")[0] for one in change.sets}]


def _further(view: View, plan: LoaderPlan, changes: Sequence[Change]) -> list[Change]:
    """Changes beside these that are predicted to gain."""
    found = (further_ahead(view), any_order(view), _persistent(view, plan))
    gaining = [
        change
        for change in found
        if change is not None
        and (other := plan.with_settings(change.sets)) is not None
        and batch_ns(plan) >= (1 + LITTLE) * batch_ns(other)
    ]
    return [*gaining, *_enough_workers(view, plan, changes)]


def _with_cache(view: View, plan: LoaderPlan, change: Change) -> list[Change]:
    """A cache with workers that only join its items, if that is predicted to gain beside the one without workers."""
    alone = plan.with_settings(change.sets)
    if alone is None or "loader.cache=true" not in change.sets or alone.workers:
        return []
    sets = ["loader.cache=true", *(() if plan.persistent else ("loader.persistent=true",))]
    several = plan.with_settings(sets) or plan
    several = replace(several, workers=min(enough(several), view.whole_cores or MOST_WORKERS, MOST_WORKERS))
    if batch_ns(alone) < (1 + LITTLE) * batch_ns(several):
        return []
    if several.workers != plan.workers:
        sets.append(f"loader.workers={several.workers}")
    joins = f", and join them to batches in {counted(several.workers, 'worker')}"
    return [replace(change, text=change.text.removesuffix(here_too(view)) + joins, sets=tuple(sets))]


def _persistent(view: View, plan: LoaderPlan) -> Change | None:
    if plan.persistent or not plan.start_ns:
        return None
    return Change("keep workers between epochs", ("loader.persistent=true",), view.loader_place)


def predictions(view: View) -> list[tuple[Change, float]]:
    """(change, predicted nanoseconds of a batch) of each change of the loader that can be played, the best first."""
    plan = plan_of(view)
    if plan is None:
        return []
    more = Change("", (f"loader.workers={min(enough(plan), MOST_WORKERS)}",))
    fewer = Change("", (f"loader.workers={max(plan.workers - 1, 0)}",))
    cache = untold_cache(view)
    more_cached = [] if cache is None else _with_cache(view, plan, cache)
    each = (more, fewer, further_ahead(view), any_order(view), _persistent(view, plan), cache, *more_cached)
    rows: dict[tuple[str, ...], tuple[Change, float]] = {}
    for change in _helping(view, [one for one in each if one is not None]):
        other = plan.with_settings(change.sets)
        if other is not None and other != plan:
            rows[change.sets] = change, batch_ns(other)
    return sorted(rows.values(), key=lambda row: row[1])


def _enough_workers(view: View, plan: LoaderPlan, changes: Sequence[Change]) -> list[Change]:
    """A change to as many workers as are enough, unless one to more workers is there, or they would bring little."""
    if any((found := plan.with_settings(change.sets)) and found.workers > plan.workers for change in changes):
        return []
    count = min(enough(plan), MOST_WORKERS)
    more = replace(plan, workers=count)
    if count <= plan.workers or batch_ns(plan) < (1 + LITTLE) * batch_ns(more):
        return []
    text = f"load with {counted(count, 'worker')}{in_host_memory(view)}"
    return [Change(text, (f"loader.workers={count}", *off_device(view)), view.loader_place)]


def workers_figures(snapshot: Snapshot) -> dict[str, Any] | None:
    """What is known of workers as JSON values; None without any."""
    if snapshot.workers is None:
        return None
    predicted = [{"sets": change.sets, "batch_ns": each} for change, each in predictions(View(snapshot))]
    return {**asdict(snapshot.workers), "received": dict(snapshot.totals.received), "predicted": predicted}


def needed(view: View) -> Evidence | None:
    """How many workers would be enough, by the measured times."""
    plan = plan_of(view)
    if plan is None:
        return None
    count = enough(plan)
    if count > MOST_WORKERS:
        text = f"predicted from the times of batches: with {MOST_WORKERS} workers, steps would still wait for data"
        return Evidence(text, CONFIG)
    text = f"predicted from the times of batches: {counted(count, 'worker')} would be enough"
    return Evidence(text, CONFIG) if count != view.workers else None
