"""Data loading: why steps wait for data or loader workers slow the model down. At most one finding per run."""

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
# Minimum part of the data wait spent on first batches of later epochs. The first batch of the run is not counted.
FIRST_PART = 0.35
# An item that uses the CPU for less than this part of its time waits for storage.
COMPUTES = 0.4
# Minimum part of the data wait that an explanation must cover.
EXPLAINS = 0.3
# Making batches in this process must take at most this part of the wait for workers.
CHEAPER = 0.6
USUAL_WORKERS = 8


def waiting(view: View) -> Finding | None:
    """The first rule below that explains the data wait."""
    return next((found for rule in WAITS if (found := rule(view)) is not None), None)


def worker_restart(view: View) -> Finding | None:
    """Every epoch starts new worker processes."""
    totals = view.snapshot.totals
    first, waited = totals.phases.get(FIRST_BATCH, 0), totals.phases.get("data_wait", 0)
    stepping = totals.wall_ns - totals.phases.get("evaluate", 0) - totals.phases.get("checkpoint", 0)
    if not view.workers or view.get("loader.persistent") is not False or stepping <= 0 or not totals.steps:
        return None
    share = first / stepping
    if share < FLOOR or first < FIRST_PART * waited:
        return None
    # The first batch of the run waited for new workers as well.
    cost = Cost(waited / totals.steps, waited / stepping, None, waited / totals.wall_ns)
    changes = [Change("keep workers between epochs", ("loader.persistent=true",))]
    if view.snapshot.loader is not None and ready(view.snapshot.loader):
        changes.append(
            Change("load in the training process: the data is already in memory", no_workers(view))
        )
    return finding(
        "worker-restart",
        f"input-bound: restarting the workers every epoch takes {percent(share)} of the time",
        cost,
        [
            Evidence(
                f"waiting for the first batch of later epochs took {span(first)} of {span(stepping)}", CLOCK
            ),
            Evidence(f"loader.workers is {view.workers}, loader.persistent is false", CONFIG),
        ],
        changes,
        bound=view.wait.ceiling,
    )


def in_memory_workers(view: View) -> Finding | None:
    """Loader workers for in-memory data, where one gather makes a batch."""
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
        f"{percent(wait.share)} of each step is spent waiting for"
        if wait.clear
        else "the model shares its cores with"
    )
    return finding(
        "in-memory-workers",
        f"input-bound: {lost} loader workers although the data is in memory",
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(f"making a micro-batch in the training process takes {span(here)}", BASELINE),
            slower(view),
            workers_are(view),
        ],
        [
            Change(
                "load in the training process: copying a batch between processes costs more than making it",
                sets,
            ),
            on_device(view),
        ],
        "certain" if wait.clear else "likely",
        bound=crowded_bound(view),
    )


def item_collate(view: View) -> Finding | None:
    """Batches made item by item although one gather works."""
    loader, wait = view.snapshot.loader, view.wait
    if loader is None or view.workers or not ready(loader) or view.get("loader.fetch") != "item":
        return None
    here, gather = items_ns(loader), loader.gather_ns
    if not wait.clear or here is None or loader.item_ns is None:
        return None
    if gather is not None and gather > CHEAPER * here and not view.neighboured:
        return None
    instead = "" if gather is None else f", in one gather operation {span(gather)}"
    return finding(
        "item-collate",
        f"input-bound: making batches item by item takes {percent(wait.share)} of each step",
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(f"making a micro-batch item by item takes {span(here)}{instead}", BASELINE),
        ],
        [Change("make each batch in one gather operation", ("loader.fetch=auto",)), on_device(view)],
        "certain",
        bound=crowded_bound(view),
    )


def slow_storage(view: View) -> Finding | None:
    """Items wait for a disk or the network."""
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
        text = f"load with {count} workers: they wait for storage in parallel"
        changes.insert(0, Change(text, (f"loader.workers={count}", *off_device(view))))
    else:
        changes.append(Change("store the data on a local disk in few large files"))
    return finding(
        "slow-storage",
        f"input-bound: {percent(wait.share)} of each step is spent waiting for slow storage",
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(
                f"loading an item takes {span(loader.item_ns)}, of which {span(loader.item_cpu_ns)} is CPU time",
                BASELINE,
            ),
            workers_are(view),
        ],
        changes,
        bound=crowded_bound(view),
    )


def many_workers(view: View) -> Finding | None:
    """Workers that cost more than they save: making a batch in-process takes less time than waiting for one.

    More workers than cores are not a fault in themselves: with expensive items they keep the cores busy.
    """
    loader, cores = view.snapshot.loader, view.whole_cores
    if loader is None or not view.workers or ready(loader) or not view.wait.clear:
        return None
    here = made_ns(loader)
    # Workers cost the wait and the slowdown of the model.
    slowed = view.model.ns * (1 - 1 / (view.slowed or 1.0)) if slowed_by_workers(view) else 0.0
    if not here or not 0 < here * view.micro_steps < CHEAPER * (view.wait.ns + slowed):
        return None
    crowd = f" on {cores} cores" if cores is not None and view.workers > cores else ""
    each = "s" if view.workers == 1 else ""
    return finding(
        "many-workers",
        f"input-bound: {view.workers} loader worker{'' if each else 's'}{crowd} cost{each} more than "
        f"{'it saves' if each else 'they save'} ({percent(view.wait.share)} of each step is spent waiting)",
        view.wait,
        [
            taken(view.wait, "waiting for data takes"),
            Evidence(f"making a micro-batch in the training process takes {span(here)}", BASELINE),
            slower(view),
            workers_are(view),
        ],
        [
            Change(
                "load in the training process: making a batch takes less time than waiting for one",
                no_workers(view),
            )
        ],
        bound=crowded_bound(view),
    )


def on_the_fly(view: View) -> Finding | None:
    """Items are encoded again for every batch and could be cached."""
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
        f"input-bound: items are encoded on the fly; {percent(view.wait.share)} of each step is spent waiting for them",
        view.wait,
        [
            taken(view.wait, "waiting for data takes"),
            Evidence(f"making a micro-batch takes {span(here)} of CPU time, again for every batch", BASELINE),
            workers_are(view),
            slower(view),
        ],
        [change, more_workers(view, loader)],
        bound=crowded_bound(view),
    )


def few_workers(view: View) -> Finding | None:
    """Items take CPU time and cannot be cached, and cores are free."""
    loader, wait = view.snapshot.loader, view.wait
    if loader is None or ready(loader) or not wait.clear or keeps_up(view) or not computes(view, loader):
        return None
    change = more_workers(view, loader)
    here = batch_ns(loader)
    if change is None or here is None or not explains(view, loader, EXPLAINS):
        return None
    why = "change every epoch" if loader.epochs_differ else "cannot be cached"
    return finding(
        "few-workers",
        f"input-bound: {percent(wait.share)} of each step is spent waiting for "
        + (
            f"{view.workers} loader worker{'s' if view.workers > 1 else ''}"
            if view.workers
            else "loading in the training process"
        ),
        wait,
        [
            taken(wait, "waiting for data takes"),
            Evidence(f"making a micro-batch takes {span(here)} of CPU time; items {why}", BASELINE),
            workers_are(view),
            free(view),
        ],
        [change],
    )


def data_wait(view: View) -> Finding | None:
    """Data wait without one of the causes above; needs a larger share."""
    wait = view.wait
    if not wait.clear or wait.share < 2 * FLOOR or keeps_up(view):
        return None
    here = None if view.snapshot.loader is None else as_made_ns(view, view.snapshot.loader)
    if not view.workers and here is not None and here * view.micro_steps < EXPLAINS * wait.ns:
        return None  # batches are made far faster: the wait has another reason, such as busy cores
    line = view.line("data_wait")
    change = Change(
        "do less work per batch in the dataset's __getitem__ and in the collate function", (), line
    )
    return finding(
        "data-wait",
        f"input-bound: {percent(wait.share)} of each step is spent waiting for the loader",
        wait,
        [
            taken(wait, "waiting for data takes"),
            workers_are(view),
            Evidence(f"most stack samples are at {line}", "stack samples") if line else None,
        ],
        [untold_workers(view), change],
        bound=crowded_bound(view),
    )


WAITS: tuple[Callable[[View], Finding | None], ...] = (
    worker_restart, in_memory_workers, item_collate, slow_storage, many_workers, on_the_fly, few_workers, data_wait,
)  # fmt: skip
RULES = (waiting,)
