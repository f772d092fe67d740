"""CPU: threads, other processes, quotas and Python's garbage collection."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ndd_engine.text import printable

from .finding import Change, Confidence, Evidence, Finding
from .loader_facts import slower
from .view import (
    BASELINE,
    CONFIG,
    FLOOR,
    OTHERS,
    SAMPLES,
    SLOWED,
    Cost,
    View,
    ceiling,
    finding,
    percent,
    span,
    times,
)

# Minimum speedup of another thread count before it is proposed.
FASTER = 1.1
# The same for times from the run itself, which are noisier.
FASTER_IN_RUN = 1.35
# Minimum cores used by unidentified processes, and minimum samples.
UNNAMED = 0.6
LEAST_SAMPLES = 3
# From this utilization on all cores count as busy.
FULL = 0.9
# Factor for threads that wait for each other: they lose more than the CPU time taken from one of them.
WAITING = 1.6
# Maximum share of one collection in the time between two, and the intervals in steps that are proposed.
GC_SHARE = 0.06
GC_STEPS = (50, 100, 200, 500, 1000, 2000)


def oversubscribed(view: View) -> Finding | None:
    """More threads than cores, measured to be slower."""
    threads, cores = view.threads, view.whole_cores
    if view.card or threads is None or cores is None or threads <= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None:
        return None
    if now < FASTER * then:
        # The baseline is the fastest of a few runs; compare the steps of the run as well.
        now = view.model.ns / view.micro_steps if view.micro_steps and not view.neighboured else now
        if now < FASTER_IN_RUN * then:
            return None
    cost = _saved(view, 1 - then / now)
    return finding(
        "oversubscribed",
        f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: oversubscribed",
        cost,
        [_by_threads(threads, now, cores, then)],
        [Change("use one thread per core", (f"run.threads={cores}",))],
        "certain",
        bound=view.undisturbed(threads=cores),
    )


def few_threads(view: View) -> Finding | None:
    """Fewer threads than cores, measured to be slower."""
    threads, cores = view.threads, view.whole_cores
    if view.card or threads is None or cores is None or threads >= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None or now < FASTER * then:
        return None
    use = view.snapshot.cores
    if use is not None and use.own + use.others > FULL * use.usable:
        return None  # the other cores are busy
    computing = view.cost("forward", "loss", "backward", "clip", "optimizer", "zero_grad")
    if not computing.clear:
        return None
    linear = 1 / max(1 - computing.share * (1 - threads / cores), threads / cores)
    measured = 1 / max(1 - computing.share * (1 - then / now), then / now)
    return finding(
        "few-threads",
        f"only {threads} thread{'s' if threads > 1 else ''} on {cores} cores",
        _saved(view, 1 - then / now),
        [_by_threads(threads, now, cores, then)],
        [Change("use one thread per core", (f"run.threads={cores}",))],
        "certain",
        bound=max(linear, measured),
    )


def neighbour_cores(view: View) -> Finding | None:
    """Other processes use the cores of the run."""
    use = view.snapshot.cores
    if use is None or use.samples < LEAST_SAMPLES or use.others < (OTHERS if use.neighbours else UNNAMED):
        return None
    if not use.neighbours and view.workers:
        return None  # new loader workers may be counted as other processes
    slowed, full = view.slowed, use.own + use.others >= FULL * use.usable
    if not full or (view.card and (slowed or 0) < SLOWED):
        return None
    wanted = min(view.threads or 1, use.usable) + view.workers
    if use.own >= 0.97 * min(wanted, use.usable) and (slowed or 0) < SLOWED:
        return None  # the run gets all the cores it can use
    share = min(use.others / use.usable, 0.9)
    # The scheduler gives each thread on a core the same share.
    competing = sum(ceil(cores) for _, _, cores in use.neighbours) or ceil(use.others)
    fair = WAITING * (1 + ceil(competing / use.usable))
    # Several threads wait for the slowest one at the end of every operator: the cost has no upper bound.
    together = not view.card and (view.threads or 1) > 1
    names = [f"{printable(name)} (pid {pid}, {cores:.1f} cores)" for pid, name, cores in use.neighbours[:3]]
    confidence: Confidence = "likely" if slowed is not None and slowed >= SLOWED else "possible"
    found = finding(
        "neighbour-cores",
        f"other processes use {use.others:.1f} of {use.usable:g} cores"
        + (f": {printable(use.neighbours[0][1])}" if use.neighbours else ""),
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"other processes use {use.others:.1f} cores, this run uses {use.own:.1f} of {use.usable:g} (mean of "
                f"{use.samples} samples)",
                SAMPLES,
            ),
            Evidence(", ".join(names), SAMPLES) if names else None,
            slower(view),
            Evidence(
                f"{view.threads} threads synchronise at every operator, so the cost has no upper bound",
                CONFIG,
            )
            if together
            else None,
        ],
        [
            Change("stop the other processes or move them" + (f": {names[0]}" if names else "")),
            _fewer_threads(view, use.usable - use.others),
        ],
        confidence,
        bound=max(fair, view.undisturbed() or 1.0),
    )
    return replace(found, ceiling=None) if together else found


def quota(view: View) -> Finding | None:
    """The cgroup throttles the run when its CPU quota is used up."""
    use = view.snapshot.cores
    if use is None or use.throttled is None or use.samples < LEAST_SAMPLES or use.throttled < FLOOR:
        return None
    share = min(use.throttled, 0.9)
    threads, cores = view.threads or 1, view.whole_cores or 1
    busy = threads + view.workers
    change = None
    if not view.card and busy > cores and threads > 1:
        change = Change(
            "use fewer threads, so that the run stays below the quota",
            (f"run.threads={max(cores - view.workers, 1)}",),
        )
    return finding(
        "quota",
        f"the CPU quota throttles the run {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"throttled {percent(share)} of the time (mean of {use.samples} samples)", "cgroup"),
            Evidence(f"{threads} threads and {view.workers} workers share {use.usable:g} cores", CONFIG),
        ],
        [change, Change(f"request more than {use.usable:g} cores for the job")],
        bound=view.undisturbed(),
    )


def collections(view: View) -> Finding | None:
    """Python's garbage collector."""
    totals = view.snapshot.totals
    if totals.gc_ns is None or not totals.wall_ns or not totals.steps:
        return None
    share = totals.gc_ns / totals.wall_ns
    every = view.whole("run.gc_every_steps") or 0
    if share < FLOOR - 0.01 or not totals.gc_count:
        return None
    enough = max(totals.gc_max_ns / (GC_SHARE * totals.wall_ns / totals.steps), 10 * every)
    steps = next((steps for steps in GC_STEPS if steps >= enough), max(GC_STEPS[-1], 10 * every))
    return finding(
        "gc",
        f"garbage collection pauses take {percent(share)} of the time",
        Cost(totals.gc_ns / totals.steps, share, None, share),
        [
            Evidence(
                f"{totals.gc_count} collections took {span(totals.gc_ns)} of {span(totals.wall_ns)}; the longest took "
                f"{span(totals.gc_max_ns)}",
                "garbage collector",
            )
        ],
        [
            Change(f"collect garbage only every {steps} steps", (f"run.gc_every_steps={steps}",)),
            Change("keep fewer Python objects alive: use tensors or arrays instead of lists and dicts"),
        ],
        "certain",
        # The collector also evicts data from the CPU caches.
        bound=ceiling(1.4 * share),
    )


RULES = (oversubscribed, few_threads, neighbour_cores, quota, collections)


def _saved(view: View, part: float) -> Cost:
    """A part of the model's cost."""
    model = view.model
    return Cost(part * model.ns, part * model.share, model.error, part * model.wall)


def _by_threads(threads: int, now: float, cores: int, then: float) -> Evidence:
    text = f"a micro-batch takes {span(now)} with {threads} threads and {span(then)} with {cores} ({times(now / then)})"
    return Evidence(text, BASELINE)


def _fewer_threads(view: View, left: float) -> Change | None:
    """One thread per free core, unless that was measured to be slower than now."""
    count = max(round(left), 1)
    if view.card or view.threads is None or count >= view.threads:
        return None
    alone = view.thread_ns(count)
    if alone is not None and view.micro_steps and alone * view.micro_steps > view.model.ns:
        return None
    return Change("use fewer threads and leave a core to the other process", (f"run.threads={count}",))
