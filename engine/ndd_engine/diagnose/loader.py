"""The loader: why a step waits for its data, or loses its cores to loader processes. One cause for one wait."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from .finding import Change, Evidence, Finding
from .loader_facts import (
    COMPUTES_CROWDED,
    MOST_WORKERS,
    as_made_ns,
    batch_ns,
    computes,
    crowded,
    crowded_bound,
    explains,
    free,
    items_ns,
    keep,
    keeps_up,
    made_ns,
    more_workers,
    no_workers,
    off_device,
    on_device,
    ready,
    slowed_by_workers,
    slower,
    untold_workers,
    workers_are,
)
from .view import (
    BASELINE,
    CLOCK,
    CONFIG,
    FLOOR,
    Cost,
    View,
    finding,
    percent,
    span,
    taken,
)

FIRST_BATCH = "data_wait/first_batch"
# Of all waiting, the part that first batches must be before restarts are to blame. A run of two epochs spends
# as much on its very first batch, which is not counted among them.
FIRST_PART = 0.35
# An item that computes less than this part of its time waits for something.
COMPUTES = 0.4
# What an explanation must amount to of the wait that it explains.
EXPLAINS = 0.3
# Making batches here must take at most this part of the wait for workers, before the workers are to blame.
CHEAPER = 0.6
USUAL_WORKERS = 8


def waiting(view: View) -> Finding | None:
    """The first of the causes below that explains the wait."""
    return next((found for rule in WAITS if (found := rule(view)) is not None), None)


def worker_restart(view: View) -> Finding | None:
    """Each epoch begins with new worker processes."""
    totals = view.snapshot.totals
    first, waited = totals.phases.get(FIRST_BATCH, 0), totals.phases.get("data_wait", 0)
    stepping = totals.wall_ns - totals.phases.get("evaluate", 0) - totals.phases.get("checkpoint", 0)
    if not view.workers or view.get("loader.persistent") is not False or stepping <= 0 or not totals.steps:
        return None
    share = first / stepping
    if share < FLOOR or first < FIRST_PART * waited:
        return None
    # The very first batch was waited for in the same way.
    cost = Cost(waited / totals.steps, waited / stepping, None, waited / totals.wall_ns)
    changes = [Change("keep the workers between epochs", ("loader.persistent=true",))]
    if view.snapshot.loader is not None and ready(view.snapshot.loader):
        changes.append(Change("the data lies in memory: load without workers", no_workers(view)))
    return finding(
        "worker-restart",
        f"input-bound: workers are restarted each epoch, {percent(share)} of the time",
        cost,
        [
            Evidence(
                f"first batches of later epochs were waited for {span(first)} of {span(stepping)}", CLOCK
            ),
            Evidence(f"loader.workers is {view.workers} and loader.persistent false", CONFIG),
        ],
        changes,
        bound=view.wait.ceiling,
    )


def in_memory_workers(view: View) -> Finding | None:
    """Workers for data that one gather makes batches of."""
    loader, wait = view.snapshot.loader, view.wait
    if loader is None or not view.workers or not ready(loader) or not (wait.clear or slowed_by_workers(view)):
        return None
    here = batch_ns(loader)
    if here is None or (wait.clear and here * view.micro_steps > CHEAPER * wait.ns):
        return None
    sets = no_workers(view)
    if view.get("loader.fetch") == "item":
        sets += ("loader.fetch=auto",)
    lost = (
        f"{percent(wait.share)} of each step waits for" if wait.clear else "the model shares its cores with"
    )
    return finding(
        "in-memory-workers",
        f"input-bound: {lost} workers whose data lies in memory",
        wait,
        [
            taken(wait, "waiting for the loader takes"),
            Evidence(f"a micro-batch is made in this process in {span(here)}", BASELINE),
            slower(view),
            workers_are(view),
        ],
        [
            Change("load without workers: copying between processes costs more than the batch", sets),
            on_device(view),
        ],
        "certain" if wait.clear else "likely",
        bound=crowded_bound(view),
    )


def item_collate(view: View) -> Finding | None:
    """Item by item, where one gather would do."""
    loader, wait = view.snapshot.loader, view.wait
    if loader is None or view.workers or not ready(loader) or view.get("loader.fetch") != "item":
        return None
    here, gather = items_ns(loader), loader.gather_ns
    if not wait.clear or here is None or loader.item_ns is None:
        return None
    if gather is not None and gather > CHEAPER * here and not view.neighboured:
        return None
    instead = "" if gather is None else f", in one gather {span(gather)}"
    return finding(
        "item-collate",
        f"input-bound: {percent(wait.share)} of each step makes batches item by item",
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(f"a micro-batch item by item takes {span(here)}{instead}", BASELINE),
        ],
        [Change("make each batch in one gather", ("loader.fetch=auto",)), on_device(view)],
        "certain",
        bound=crowded_bound(view),
    )


def slow_storage(view: View) -> Finding | None:
    """Items wait for a disk or a network."""
    loader, wait = view.snapshot.loader, view.wait
    if (
        loader is None
        or ready(loader)
        or loader.item_ns is None
        or loader.item_cpu_ns is None
        or not wait.clear
    ):
        return None
    computes = COMPUTES_CROWDED if view.neighboured else COMPUTES
    if loader.item_cpu_ns > computes * loader.item_ns:
        return None
    waits = loader.micro * (loader.item_ns - loader.item_cpu_ns) * view.micro_steps
    if keeps_up(view) or (view.workers and waits / view.workers < EXPLAINS * wait.ns):
        return None
    needed = ceil(loader.micro * loader.item_ns * view.micro_steps / max(view.step_ns - wait.ns, 1.0)) + 1
    count = max(min(needed, USUAL_WORKERS), 2)
    if view.workers:
        count = min(max(count, 2 * view.workers), MOST_WORKERS)
    changes = [keep(view, loader)]
    if count > view.workers:
        text = f"load with {count} workers, which wait at the same time"
        changes.insert(0, Change(text, (f"loader.workers={count}", *off_device(view))))
    else:
        changes.append(Change("put the data on a local disk, in few large files"))
    return finding(
        "slow-storage",
        f"input-bound: {percent(wait.share)} of each step waits for slow storage",
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(
                f"an item takes {span(loader.item_ns)}, of which it computes {span(loader.item_cpu_ns)}",
                BASELINE,
            ),
            workers_are(view),
        ],
        changes,
        bound=crowded_bound(view),
    )


def many_workers(view: View) -> Finding | None:
    """Workers that cost more than they save: a batch is made here in less time than is waited for theirs.

    More workers than cores are no fault by themselves: where items take long to make, they keep the cores busy.
    """
    loader, cores = view.snapshot.loader, view.whole_cores
    if loader is None or not view.workers or ready(loader) or not view.wait.clear:
        return None
    here = made_ns(loader)
    # Beside the wait, they cost what they slow the model down.
    slowed = view.model.ns * (1 - 1 / (view.slowed or 1.0)) if slowed_by_workers(view) else 0.0
    if not here or not 0 < here * view.micro_steps < CHEAPER * (view.wait.ns + slowed):
        return None
    crowd = f" on {cores} cores" if cores is not None and view.workers > cores else ""
    each = "s" if view.workers == 1 else ""
    return finding(
        "many-workers",
        f"input-bound: {view.workers} worker{'' if each else 's'}{crowd} cost{each} more than "
        f"{'it saves' if each else 'they save'} ({percent(view.wait.share)} is waiting)",
        view.wait,
        [
            taken(view.wait, "waiting for data takes"),
            Evidence(f"a micro-batch is made in this process in {span(here)}", BASELINE),
            slower(view),
            workers_are(view),
        ],
        [Change("load without workers: here a batch takes less than the wait for one", no_workers(view))],
        bound=crowded_bound(view),
    )


def on_the_fly(view: View) -> Finding | None:
    """Items are encoded anew each time, and could be kept."""
    loader = view.snapshot.loader
    change = keep(view, loader) if loader is not None else None
    waits = view.wait.clear and not keeps_up(view)
    if loader is None or change is None or not (waits or crowded(view)):
        return None
    here = batch_ns(loader)
    if here is None or not explains(view, loader, EXPLAINS):
        return None
    return finding(
        "on-the-fly",
        f"input-bound: items are encoded on the fly, {percent(view.wait.share)} of each step waits for them",
        view.wait,
        [
            taken(view.wait, "waiting for data takes"),
            Evidence(f"making a micro-batch takes {span(here)} of processor time, every time", BASELINE),
            workers_are(view),
            slower(view),
        ],
        [change, more_workers(view, loader)],
        bound=crowded_bound(view),
    )


def few_workers(view: View) -> Finding | None:
    """Items take processor time, cannot be kept, and cores are free."""
    loader, wait = view.snapshot.loader, view.wait
    if loader is None or ready(loader) or not wait.clear or keeps_up(view) or not computes(view, loader):
        return None
    change = more_workers(view, loader)
    here = batch_ns(loader)
    if change is None or here is None or not explains(view, loader, EXPLAINS):
        return None
    why = "change every epoch" if loader.epochs_differ else "cannot be kept"
    return finding(
        "few-workers",
        f"input-bound: {percent(wait.share)} of each step waits for "
        + (
            f"{view.workers} loader worker{'s' if view.workers > 1 else ''}"
            if view.workers
            else "this process to load"
        ),
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(f"making a micro-batch takes {span(here)} of processor time; items {why}", BASELINE),
            workers_are(view),
            free(view),
        ],
        [change],
    )


def data_wait(view: View) -> Finding | None:
    """Waiting for data, for none of the reasons above: it takes more of it to be worth a word."""
    wait = view.wait
    if not wait.clear or wait.share < 2 * FLOOR or keeps_up(view):
        return None
    here = None if view.snapshot.loader is None else as_made_ns(view, view.snapshot.loader)
    if not view.workers and here is not None and here * view.micro_steps < EXPLAINS * wait.ns:
        return None  # made here in far less time: something else takes its processor time
    line = view.line("data_wait")
    change = Change(
        "make batches with less work in the dataset's __getitem__ and the collate function", (), line
    )
    return finding(
        "data-wait",
        f"input-bound: {percent(wait.share)} of each step waits for the loader",
        wait,
        [
            taken(wait, "waiting for data takes"),
            workers_are(view),
            Evidence(f"it is seen most at {line}", "stack samples") if line else None,
        ],
        [untold_workers(view), change],
        bound=crowded_bound(view),
    )


WAITS: tuple[Callable[[View], Finding | None], ...] = (
    worker_restart, in_memory_workers, item_collate, slow_storage, many_workers, on_the_fly, few_workers, data_wait,
)  # fmt: skip
RULES = (waiting,)
