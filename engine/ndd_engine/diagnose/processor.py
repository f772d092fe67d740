"""The processor: threads, neighbours, quotas and Python's garbage collection."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ndd_engine.text import printable

from .finding import Change, Confidence, Evidence, Finding
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

# Another count of threads has to be so many times as fast before it is proposed.
FASTER = 1.1
# In the run itself, where noise slows everything a little.
FASTER_IN_RUN = 1.35
# Cores that unnamed others use before they count, and samples that say so.
UNNAMED = 0.6
LEAST_SAMPLES = 3
# All cores are busy from this share on.
FULL = 0.9
# Threads that wait for each other lose more than the processor time that is taken from one of them.
WAITING = 1.6
# Of the time between two collections, what one may take at most; and the steps between two that are proposed.
GC_SHARE = 0.06
GC_STEPS = (50, 100, 200, 500, 1000, 2000)


def oversubscribed(view: View) -> Finding | None:
    """More threads than cores, and slower for it."""
    threads, cores = view.threads, view.whole_cores
    if view.card or threads is None or cores is None or threads <= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None:
        return None
    if now < FASTER * then:
        # By itself the fastest of a few runs may be lucky; the steps are all of them.
        now = view.model.ns / view.micro_steps if view.micro_steps and not view.neighboured else now
        if now < FASTER_IN_RUN * then:
            return None
    cost = _saved(view, 1 - then / now)
    return finding(
        "oversubscribed",
        f"{threads} threads on {cores} core{'s' if cores > 1 else ''}",
        cost,
        [_by_threads(threads, now, cores, then)],
        [Change("one thread for each core", (f"run.threads={cores}",))],
        "certain",
        bound=view.undisturbed(threads=cores),
    )


def few_threads(view: View) -> Finding | None:
    """Fewer threads than cores, and slower for it."""
    threads, cores = view.threads, view.whole_cores
    if view.card or threads is None or cores is None or threads >= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None or now < FASTER * then:
        return None
    use = view.snapshot.cores
    if use is not None and use.own + use.others > FULL * use.usable:
        return None  # somebody computes on the other cores already
    computing = view.cost("forward", "loss", "backward", "clip", "optimizer", "zero_grad")
    if not computing.clear:
        return None
    linear = 1 / max(1 - computing.share * (1 - threads / cores), threads / cores)
    measured = 1 / max(1 - computing.share * (1 - then / now), then / now)
    return finding(
        "few-threads",
        f"{threads} thread{'s' if threads > 1 else ''} on {cores} cores",
        _saved(view, 1 - then / now),
        [_by_threads(threads, now, cores, then)],
        [Change("one thread for each core", (f"run.threads={cores}",))],
        "certain",
        bound=max(linear, measured),
    )


def neighbour_cores(view: View) -> Finding | None:
    """Other processes compute on the cores that the run could use."""
    use = view.snapshot.cores
    if use is None or use.samples < LEAST_SAMPLES or use.others < (OTHERS if use.neighbours else UNNAMED):
        return None
    if not use.neighbours and view.workers:
        return None  # workers that were born a moment ago count as others
    slowed, full = view.slowed, use.own + use.others >= FULL * use.usable
    if not full or (view.card and (slowed or 0) < SLOWED):
        return None
    wanted = min(view.threads or 1, use.usable) + view.workers
    if use.own >= 0.97 * min(wanted, use.usable) and (slowed or 0) < SLOWED:
        return None  # it has what it can use
    share = min(use.others / use.usable, 0.9)
    # Fair shares: a core of one thread and k others gives each the same.
    competing = sum(ceil(cores) for _, _, cores in use.neighbours) or ceil(use.others)
    fair = WAITING * (1 + ceil(competing / use.usable))
    # Several threads wait for the slowest of them at the end of every operator, for as long as the system likes.
    together = not view.card and (view.threads or 1) > 1
    names = [f"{printable(name)} (pid {pid}, {cores:.1f} cores)" for pid, name, cores in use.neighbours[:3]]
    confidence: Confidence = "likely" if slowed is not None and slowed >= SLOWED else "possible"
    found = finding(
        "neighbour-cores",
        f"another process takes {use.others:.1f} of {use.usable:g} cores"
        + (f": {printable(use.neighbours[0][1])}" if use.neighbours else ""),
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"others use {use.others:.1f} cores, this run {use.own:.1f} of {use.usable:g}, over {use.samples} "
                "samples",
                SAMPLES,
            ),
            Evidence(", ".join(names), SAMPLES) if names else None,
            Evidence(f"forward and backward take {slowed:.2g} times as long as by themselves", BASELINE)
            if slowed is not None and slowed >= SLOWED
            else None,
            Evidence(
                f"{view.threads} threads wait for each other at every operator: there is no bound to what it costs",
                CONFIG,
            )
            if together
            else None,
        ],
        [
            Change("stop it, or let it run elsewhere" + (f": {names[0]}" if names else "")),
            _fewer_threads(view, use.usable - use.others),
        ],
        confidence,
        bound=max(fair, view.undisturbed() or 1.0),
    )
    return replace(found, ceiling=None) if together else found


def quota(view: View) -> Finding | None:
    """The control group stops the run when its share of the processor is used up."""
    use = view.snapshot.cores
    if use is None or use.throttled is None or use.samples < LEAST_SAMPLES or use.throttled < FLOOR:
        return None
    share = min(use.throttled, 0.9)
    threads, cores = view.threads or 1, view.whole_cores or 1
    busy = threads + view.workers
    change = None
    if not view.card and busy > cores and threads > 1:
        change = Change(
            "fewer threads, so that they are not stopped together",
            (f"run.threads={max(cores - view.workers, 1)}",),
        )
    return finding(
        "quota",
        f"the processor quota stops the run {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"held up {percent(share)} of the time, over {use.samples} samples", "control group"),
            Evidence(f"{threads} threads and {view.workers} workers share {use.usable:g} cores", CONFIG),
        ],
        [change, Change(f"ask for more than {use.usable:g} cores where the job is started")],
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
                f"{totals.gc_count} collections took {span(totals.gc_ns)} of {span(totals.wall_ns)}, the longest "
                f"{span(totals.gc_max_ns)}",
                "collector",
            )
        ],
        [
            Change(f"collect every {steps} steps only", (f"run.gc_every_steps={steps}",)),
            Change("keep fewer small Python objects alive: tensors or arrays instead of lists and dicts"),
        ],
        "certain",
        # What the collector pushes out of the caches has to be read again.
        bound=ceiling(1.4 * share),
    )


RULES = (oversubscribed, few_threads, neighbour_cores, quota, collections)


def _saved(view: View, part: float) -> Cost:
    """A part of what the model takes."""
    model = view.model
    return Cost(part * model.ns, part * model.share, model.error, part * model.wall)


def _by_threads(threads: int, now: float, cores: int, then: float) -> Evidence:
    text = f"a micro-batch takes {span(now)} with {threads} threads and {span(then)} with {cores} ({times(now / then)})"
    return Evidence(text, BASELINE)


def _fewer_threads(view: View, left: float) -> Change | None:
    """As many threads as cores are left, unless that is known to be slower than now."""
    count = max(round(left), 1)
    if view.card or view.threads is None or count >= view.threads:
        return None
    alone = view.thread_ns(count)
    if alone is not None and view.micro_steps and alone * view.micro_steps > view.model.ns:
        return None
    return Change("leave the neighbour its core", (f"run.threads={count}",))
