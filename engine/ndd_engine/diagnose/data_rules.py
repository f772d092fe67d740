"""Data loading: why steps wait for data or loader workers slow the model down. At most one finding per run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from ndd_engine.record.events import LoaderEvent
from ndd_engine.record.snapshot import OTHERS
from ndd_engine.text import counted, duration, percent, size, span
from ndd_watch.phases import FIRST_BATCH

from .finding import Change, Evidence, Finding
from .view import (
    BASELINE,
    CLOCK,
    CONFIG,
    FLOOR,
    SAMPLES,
    SLOWED,
    Cost,
    Draft,
    SlowFunction,
    View,
    taken,
)

# Below this part of CPU time an item waits for storage even when other processes use the cores.
COMPUTES_CROWDED = 0.08
# Upper bounds for copying an item in Python on a slow machine: fixed, and per byte.
COPY_NS = 100_000.0
COPY_BYTE_NS = 2.0
# Workers that need less than this part of the time between two batches keep up.
KEEPS_UP = 0.5
# From this share of a step's CPU time on, loader workers slow the model down.
DISTURBS = 0.1
MOST_WORKERS = 16
# A script whose items take longer than this to read, all once, is not asked to cache them.
LONGEST_READ_NS = 30e9
# Maximum part of the free memory for cached items, including copies made while encoding.
KEEPING = 0.4


# Changes.


def no_workers(view: View) -> tuple[str, ...]:
    """Edits to load in the training process."""
    sets: tuple[str, ...] = ("loader.workers=0",)
    if view.get("loader.persistent"):
        sets += ("loader.persistent=false",)
    if view.get("loader.prefetch") is not None:
        sets += ("loader.prefetch=none",)
    return sets


def on_device(view: View) -> Change | None:
    """Keep the data in GPU memory; None without a GPU or if it may not fit."""
    loader, free = view.snapshot.loader, view.snapshot.headroom.free_bytes
    needed = data_bytes(loader)
    if not view.gpu or loader is None or loader.epochs_differ or needed is None or free is None:
        return None
    if needed > KEEPING * free:
        return None
    sets = ("loader.placement=device", *(no_workers(view) if view.workers else ()))
    return Change(f"keep all data ({size(needed)}) in GPU memory{here_too(view)}", sets)


def here_too(view: View) -> str:
    """What `no_workers` adds to the text of a change."""
    return ", and load in the training process" if view.workers else ""


def keep(view: View, loader: LoaderEvent) -> Change | None:
    """Cache encoded items; None if they cannot be cached or may not fit in memory."""
    if loader.encoded is not None or loader.epochs_differ or view.get("loader.cache"):
        return None
    if ready(loader) or view.get("loader.placement") == "device" or view.get("workload.augment"):
        return None
    needed, free = data_bytes(loader), (view.snapshot.host or {}).get("memory_available_bytes")
    # Items exist twice while they are stacked.
    if needed is not None and free is not None and 2 * needed > KEEPING * free:
        return None
    text = "encode each item once and cache it"
    if loader.item_ns is not None:
        text += f" (about {duration(loader.items * loader.item_ns * 1e-9)} before training)"
    text += here_too(view)
    return Change(text, ("loader.cache=true", *(no_workers(view) if view.workers else ())))


def data_bytes(loader: LoaderEvent | None) -> float | None:
    """Bytes of all items in the form they have in a batch."""
    if loader is None or loader.batch_bytes is None or not loader.micro:
        return None
    return loader.batch_bytes / loader.micro * loader.items


def more_workers(view: View, loader: LoaderEvent) -> Change | None:
    """As many workers as needed to remove the wait; None if no cores are free."""
    cores, here = view.whole_cores, batch_ns(loader)
    if cores is None or here is None or view.workers >= min(cores, MOST_WORKERS) or not cores_free(view):
        return None
    needed = ceil(here * view.micro_steps / max(view.step_ns - view.wait.ns, 1.0))
    count = min(max(needed, view.workers + 1), cores, MOST_WORKERS)
    text = f"load with {counted(count, 'worker')}{in_host_memory(view)}"
    if loader.stream and count > 1:
        text += ", each of which has to read its own part of the stream (torch.utils.data.get_worker_info)"
    return Change(text, (f"loader.workers={count}", *off_device(view)))


def untold_workers(view: View) -> Change | None:
    """Try workers on free cores; only if the cost of a batch is unknown."""
    cores = view.whole_cores
    if view.snapshot.loader is not None or cores is None or view.workers or cores < 2 or not cores_free(view):
        return None
    if view.is_script and view.get("loader.workers") is None:
        return None  # it has no loader
    count = min(cores - 1, 4)
    text = f"load with {count} worker{'s' if count > 1 else ''}{in_host_memory(view)}"
    return Change(text, (f"loader.workers={count}", *off_device(view)), view.loader_place)


def untold_cache(view: View) -> Change | None:
    """Try to read each item of a script once; None if it is known that it cannot, or that reading all takes long."""
    totals = view.snapshot.totals
    waited = totals.phases.get("data_wait", 0)
    # Without a second pass over the data, all of the wait was for items that are read for the first time.
    if not view.by_item or (waited > LONGEST_READ_NS and not totals.phases.get(FIRST_BATCH)):
        return None
    text = "read each item once and keep it, if all fit into memory; a trial refuses it where items change"
    return Change(
        text + here_too(view),
        ("loader.cache=true", *(no_workers(view) if view.workers else ())),
        view.loader_place,
    )


def in_host_memory(view: View) -> str:
    """What `off_device` adds to the text of a change."""
    return ", with the data in host memory" if off_device(view) else ""


def off_device(view: View) -> tuple[str, ...]:
    return ("loader.placement=host",) if view.get("loader.placement") == "device" else ()


# Facts.


def ready(loader: LoaderEvent) -> bool:
    """Whether items are in memory in their final form, so that an item is a copy and one gather makes a batch.

    False for a dataset that computes the batches it returns.
    """
    each = loader.item_cpu_ns if loader.item_cpu_ns is not None else loader.item_ns
    if not loader.in_memory or each is None:
        return loader.in_memory
    size_of = loader.batch_bytes / loader.micro if loader.batch_bytes and loader.micro else 0.0
    return each <= COPY_NS + COPY_BYTE_NS * size_of


def items_ns(loader: LoaderEvent) -> float | None:
    """CPU time of a micro-batch made item by item in one process."""
    each = loader.item_cpu_ns if loader.item_cpu_ns is not None else loader.item_ns
    return None if each is None else loader.micro * each + (loader.collate_ns or 0.0)


def made_ns(loader: LoaderEvent) -> float | None:
    """Wall time of a micro-batch made in one process by the fastest method."""
    return min((ns for ns in (_by_item_ns(loader), loader.gather_ns) if ns is not None), default=None)


def as_made_ns(view: View, loader: LoaderEvent) -> float | None:
    """Wall time of a micro-batch made in one process by the method that the run uses."""
    gathers = loader.gather_ns is not None and view.get("loader.fetch") != "item"
    return loader.gather_ns if gathers else _by_item_ns(loader)


def _by_item_ns(loader: LoaderEvent) -> float | None:
    return None if loader.item_ns is None else loader.micro * loader.item_ns + (loader.collate_ns or 0.0)


def batch_ns(loader: LoaderEvent) -> float | None:
    """CPU time of a micro-batch made in one process by the fastest method."""
    known = [ns for ns in (items_ns(loader), loader.gather_ns) if ns is not None]
    return min(known, default=None)


def explains(view: View, loader: LoaderEvent, part: float) -> bool:
    """Whether making batches item by item takes at least `part` of the wait (wall time).

    Without workers the wait consists of making the batch.
    """
    if loader.item_ns is None or not view.workers:
        return loader.item_ns is not None
    made = _by_item_ns(loader) or 0.0
    return made * view.micro_steps / view.workers >= part * view.wait.ns


def keeps_up(view: View) -> bool:
    """Whether workers make batches far faster than the run uses them.

    The remaining wait is the transfer between processes, which more workers or faster items do not shorten.
    """
    loader = view.snapshot.loader
    if loader is None or not view.workers or loader.item_ns is None:
        return False
    computing = loader.item_cpu_ns if loader.item_cpu_ns is not None else loader.item_ns
    at_once = min(view.workers, view.whole_cores or view.workers)
    each = max(loader.item_ns - computing, 0.0) / view.workers + computing / at_once
    made = loader.micro * each + (loader.collate_ns or 0.0) / at_once
    return made * view.micro_steps < KEEPS_UP * (view.step_ns - view.wait.ns)


def storage_ns(view: View, loader: LoaderEvent) -> float | None:
    """Time in which making an item waits for storage or network; None if it may have waited for a core as well."""
    item_ns, cpu_ns = loader.item_ns, loader.item_cpu_ns
    if item_ns is None or cpu_ns is None:
        return None
    waits = max(item_ns - cpu_ns, 0.0)
    if loader.item_delay_ns is not None:
        return max(waits - loader.item_delay_ns, 0.0)
    cores = view.snapshot.cores
    busy = cores is not None and cores.others >= OTHERS and cores.full
    crowded = (view.neighboured or busy) and cpu_ns > COMPUTES_CROWDED * item_ns
    return None if crowded else waits


def computes(loader: LoaderEvent) -> bool:
    """Whether items are known to take CPU time."""
    item_ns, cpu_ns = loader.item_ns, loader.item_cpu_ns
    return item_ns is not None and cpu_ns is not None and cpu_ns > COMPUTES_CROWDED * item_ns


def crowded(view: View) -> bool:
    """Whether loader workers compete with the model for cores: they compute, and the model is slower."""
    loader, cores, slowed = view.snapshot.loader, view.snapshot.cores, view.slowed
    if view.gpu or not view.workers or loader is None or cores is None or slowed is None:
        return False
    here = batch_ns(loader)
    if here is None or here * view.micro_steps < DISTURBS * view.step_ns:
        return False
    return slowed >= SLOWED and not view.neighboured and cores.own > 0.8 * cores.usable


def slowed_by_workers(view: View) -> bool:
    """Whether the model is slower than before training although no other processes use the cores."""
    varies = view.get("workload.pad") == "longest"  # the batch of the baseline differs from the others
    if view.gpu or view.snapshot.cores is None or view.neighboured or varies:
        return False
    return (view.slowed or 0.0) >= SLOWED


def crowding(view: View, draft: Draft, what: str) -> None:
    """Add the competition for cores and caches to the cost of a wait. what: "waiting for X", in the new title.

    Loading in the training process slows the model down as well: it evicts the caches between steps.
    """
    if view.gpu:
        return
    title = f"input-bound: {what} costs up to {{share}} of each step"
    if view.baseline is not None:
        slowdown, slow = view.slowdown(), slower(view)
        # With batches of different lengths the model may be slower for another reason: it is a bound.
        if slowdown is not None and slow is not None:
            draft.widen(view.wait.share + slowdown, title, slow.text, slow.source)
        return
    here = batch_ns(view.snapshot.loader) if view.snapshot.loader is not None else None
    if not view.workers or here is None or not view.step_ns:
        return
    share = min(view.wait.share + here * view.micro_steps / view.step_ns, 0.9)
    why = f"making a micro-batch takes {span(here)} of CPU time, on the same cores as the model"
    draft.widen(share, title, why, BASELINE)


def cores_free(view: View) -> bool:
    """Whether there is CPU time left for workers; True if unknown."""
    cores = view.snapshot.cores
    return cores is None or not cores.full


def workers_are(view: View) -> Evidence | None:
    """None if the configuration is unknown, as in a trace."""
    if view.whole("loader.workers") is None:
        return None
    return Evidence(f"loader.workers is {view.workers}", CONFIG)


def slower(view: View) -> Evidence | None:
    """Evidence that the model is slower than before training; None if it is not."""
    if view.slowed is None or view.slowed < SLOWED:
        return None
    return Evidence(f"forward and backward take {view.slowed:.2g} times as long as before training", BASELINE)


def free(view: View) -> Evidence | None:
    cores = view.snapshot.cores
    if cores is None:
        return None
    return Evidence(f"the run uses {cores.own:.1f} of {cores.usable:g} cores", SAMPLES)


# Minimum part of the data wait spent on first batches of later epochs. The first batch of the run is not counted.
FIRST_PART = 0.35
# An item that uses the CPU for less than this part of its time waits for storage.
COMPUTES = 0.4
# Minimum part of the data wait that an explanation must cover.
EXPLAINS = 0.3
# Making batches in this process must take at most this part of the wait for workers.
CHEAPER = 0.6
USUAL_WORKERS = 8
# A function that takes longer than this part of the wait does something else.
LONGEST = 1.3
# Workers that compute use at least this part of the cores.
BUSY = 0.5


def waiting(view: View) -> Finding | None:
    """The first rule that explains the data wait."""
    found, loader = worker_restart(view), view.snapshot.loader
    if found is None and loader is not None:
        found = next((found for rule in WAITS if (found := rule(view, loader)) is not None), None)
    if found is None:
        return workers_of_script(view) or data_wait(view)
    return _with_function(view, found)


def _with_function(view: View, found: Finding) -> Finding:
    """A finding with the function that makes the batches, if batches are made in this process."""
    slow = view.slowest_function("data_wait")
    if view.workers or slow is None or not made_by(view, slow):
        return found
    change = Change("do less work per item", where=slow.where)
    return replace(found, evidence=(*found.evidence, slow.taken), changes=(*found.changes, change))


def worker_restart(view: View) -> Finding | None:
    """Every epoch starts new worker processes."""
    totals, loader = view.snapshot.totals, view.snapshot.loader
    first, waited = totals.phases.get(FIRST_BATCH, 0), totals.phases.get("data_wait", 0)
    stepping = totals.wall_ns - totals.phases.get("evaluate", 0) - totals.phases.get("checkpoint", 0)
    if not view.workers or view.get("loader.persistent") is not False or stepping <= 0 or not totals.steps:
        return None
    share = first / stepping
    if share < FLOOR or first < FIRST_PART * waited:
        return None
    if view.gpu:  # the other waits count as far as the device sees them
        waited = min(waited, first + round(view.wait.ns * totals.steps))
    # The first batch of the run waited for new workers as well.
    cost = Cost(waited / totals.steps, waited / stepping, None, waited / totals.wall_ns)
    title = (
        f"input-bound: waiting for data takes {percent(cost.share)} of the time; workers restart every epoch"
    )
    draft = Draft("worker-restart", title, cost)
    first_text = f"waiting for the first batch of later epochs took {span(first)} of {span(stepping)}"
    draft.saw(f"{first_text} ({percent(share)})", CLOCK)
    draft.saw(f"loader.workers is {view.workers}, loader.persistent is false", CONFIG)
    draft.change("keep workers between epochs", "loader.persistent=true")
    if loader is not None and ready(loader):
        text = "load in the training process: the data is already in memory"
        draft.change(text, *no_workers(view))
    return draft.done()


def in_memory_workers(view: View, loader: LoaderEvent) -> Finding | None:
    """Loader workers for in-memory data, where one gather makes a batch."""
    wait, here = view.wait, batch_ns(loader)
    if not view.workers or not ready(loader) or not (wait.clear or slowed_by_workers(view)):
        return None
    if here is None or (wait.clear and here * view.micro_steps > CHEAPER * wait.ns):
        return None
    lost = f"input-bound: {percent(wait.share)} of each step is spent waiting for"
    if not wait.clear:
        lost = "the model shares its cores with"
    title = f"{lost} loader workers although the data is in memory"
    draft = Draft("in-memory-workers", title, wait, "certain" if wait.clear else "likely")
    draft.add(taken(wait, "waiting for data takes"))
    draft.saw(f"making a micro-batch in the training process takes {span(here)}", BASELINE)
    draft.add(slower(view), workers_are(view))
    gather = ("loader.fetch=auto",) if view.get("loader.fetch") == "item" else ()
    text = "load in the training process: copying a batch between processes costs more than making it"
    draft.change(text, *no_workers(view), *gather)
    draft.add(on_device(view))
    crowding(view, draft, "loading data in memory with workers")
    return draft.done()


def item_collate(view: View, loader: LoaderEvent) -> Finding | None:
    """Batches made item by item although one gather works."""
    wait, here, gather = view.wait, items_ns(loader), loader.gather_ns
    if view.workers or not ready(loader) or view.get("loader.fetch") != "item":
        return None
    if not wait.clear or here is None or loader.item_ns is None:
        return None
    if gather is not None and gather > CHEAPER * here and not view.neighboured:
        return None
    title = f"input-bound: making batches item by item takes {percent(wait.share)} of each step"
    draft = Draft("item-collate", title, wait, "certain")
    draft.add(taken(wait, "waiting for data takes"))
    instead = "" if gather is None else f", in one gather operation {span(gather)}"
    draft.saw(f"making a micro-batch item by item takes {span(here)}{instead}", BASELINE)
    draft.change("make each batch in one gather operation", "loader.fetch=auto")
    draft.add(on_device(view))
    crowding(view, draft, "making batches item by item")
    return draft.done()


def slow_storage(view: View, loader: LoaderEvent) -> Finding | None:
    """Items wait for a disk or the network."""
    wait, item_ns, cpu_ns = view.wait, loader.item_ns, loader.item_cpu_ns
    if ready(loader) or item_ns is None or cpu_ns is None or not wait.clear:
        return None
    stored_ns = storage_ns(view, loader)
    if stored_ns is None or stored_ns < (1 - COMPUTES) * item_ns:
        return None
    waits = loader.micro * stored_ns * view.micro_steps
    if keeps_up(view) or (view.workers and waits / view.workers < EXPLAINS * wait.ns):
        return None
    needed = ceil(loader.micro * item_ns * view.micro_steps / max(view.step_ns - wait.ns, 1.0)) + 1
    count = max(min(needed, USUAL_WORKERS), 2)
    if view.workers:
        count = min(max(count, 2 * view.workers), MOST_WORKERS)
    title = f"input-bound: {percent(wait.share)} of each step is spent waiting for slow storage"
    draft = Draft("slow-storage", title, wait)
    draft.add(taken(wait, "waiting for data takes"))
    text = f"loading an item takes {span(item_ns)}: {span(cpu_ns)} of CPU time, {span(stored_ns)} waiting for storage"
    draft.saw(text, BASELINE)
    draft.add(workers_are(view))
    if count > view.workers:
        text = f"load with {count} workers: they wait for storage in parallel"
        draft.change(text, f"loader.workers={count}", *off_device(view))
    draft.add(keep(view, loader))
    if count <= view.workers:
        draft.change("store the data on a local disk in few large files")
    crowding(view, draft, "waiting for slow storage")
    return draft.done()


def many_workers(view: View, loader: LoaderEvent) -> Finding | None:
    """Workers that cost more than they save: making a batch in-process takes less time than waiting for one.

    More workers than cores are not a fault in themselves: with expensive items they keep the cores busy.
    """
    wait, cores, here = view.wait, view.whole_cores, made_ns(loader)
    if not view.workers or ready(loader) or not wait.clear:
        return None
    # Workers cost the wait and the slowdown of the model.
    slowed = view.model.ns * (1 - 1 / (view.slowed or 1.0)) if slowed_by_workers(view) else 0.0
    if not here or not 0 < here * view.micro_steps < CHEAPER * (wait.ns + slowed):
        return None
    crowd = f" on {cores} cores" if cores is not None and view.workers > cores else ""
    lost = "worker{} costs more than it saves" if view.workers == 1 else "workers{} cost more than they save"
    waited = f"({percent(wait.share)} of each step is spent waiting)"
    title = f"input-bound: {view.workers} loader {lost.format(crowd)} {waited}"
    draft = Draft("many-workers", title, wait)
    draft.add(taken(wait, "waiting for data takes"))
    draft.saw(f"making a micro-batch in the training process takes {span(here)}", BASELINE)
    draft.add(slower(view), workers_are(view))
    text = "load in the training process: making a batch takes less time than waiting for one"
    draft.change(text, *no_workers(view))
    crowding(view, draft, f"loading with {view.workers} worker{'' if view.workers == 1 else 's'}")
    return draft.done()


def on_the_fly(view: View, loader: LoaderEvent) -> Finding | None:
    """Items are encoded again for every batch and could be cached."""
    change, wait, here = keep(view, loader), view.wait, batch_ns(loader)
    waits = wait.clear and not keeps_up(view)
    if change is None or not (waits or crowded(view)):
        return None
    if here is None or not explains(view, loader, EXPLAINS):
        return None
    waited = f"{percent(wait.share)} of each step is spent waiting for them"
    draft = Draft("on-the-fly", f"input-bound: items are encoded on the fly; {waited}", wait)
    draft.add(taken(wait, "waiting for data takes"))
    draft.saw(f"making a micro-batch takes {span(here)} of CPU time, again for every batch", BASELINE)
    draft.add(workers_are(view), slower(view), change, more_workers(view, loader))
    crowding(view, draft, "encoding items on the fly")
    return draft.done()


def few_workers(view: View, loader: LoaderEvent) -> Finding | None:
    """Items take CPU time and cannot be cached, and cores are free."""
    wait, here, change = view.wait, batch_ns(loader), more_workers(view, loader)
    if ready(loader) or not wait.clear or keeps_up(view) or not computes(loader):
        return None
    if change is None or here is None or not explains(view, loader, EXPLAINS):
        return None
    what = f"{view.workers} loader worker{'s' if view.workers > 1 else ''}"
    if not view.workers:
        what = "loading in the training process"
    title = f"input-bound: {percent(wait.share)} of each step is spent waiting for {what}"
    draft = Draft("few-workers", title, wait)
    draft.add(taken(wait, "waiting for data takes"))
    why = "change every epoch" if loader.epochs_differ else "cannot be cached"
    if loader.stream:
        why = "come from a stream, which cannot be cached"
    draft.saw(f"making a micro-batch takes {span(here)} of CPU time; items {why}", BASELINE)
    draft.add(workers_are(view), free(view), change)
    return draft.done()


def workers_of_script(view: View) -> Finding | None:
    """Steps wait for more workers than there are cores, and they compute."""
    cores, use = view.whole_cores, view.snapshot.cores
    if not view.is_script or cores is None or view.workers <= cores or not view.wait.clear:
        return None
    # Workers that end and start again are counted as other processes.
    if use is None or view.neighboured or use.own + use.others < BUSY * use.usable:
        return None  # they wait for storage: more of them wait in parallel
    share = percent(view.wait.share)
    draft = Draft(
        "many-workers", f"input-bound: {share} of each step is spent waiting for the loader", view.wait
    )
    draft.add(taken(view.wait, "waiting for data takes"))
    draft.saw(f"{view.workers} loader workers and the model share {cores} cores", CONFIG)
    draft.saw(f"{min(use.own + use.others, use.usable):.1f} of {use.usable:g} cores are busy", SAMPLES)
    draft.change("load in the training process", "loader.workers=0", where=view.loader_place)
    if cores > 1:
        draft.change(f"load with {counted(cores - 1, 'worker')}", f"loader.workers={cores - 1}")
    return draft.done()


def made_by(view: View, slow: SlowFunction) -> bool:
    """Whether a function may be what makes the batches: it explains the wait, and takes no longer."""
    return view.wait.clear and EXPLAINS * view.wait.ns <= slow.ns <= LONGEST * view.wait.ns


def data_wait(view: View) -> Finding | None:
    """Data wait without one of the causes above; needs a larger share."""
    wait, loader = view.wait, view.snapshot.loader
    if not wait.clear or wait.share < 2 * FLOOR or keeps_up(view):
        return None
    here = None if loader is None else as_made_ns(view, loader)
    if not view.workers and here is not None and here * view.micro_steps < EXPLAINS * wait.ns:
        return None  # batches are made far faster: the wait has another reason, such as busy cores
    slow = view.slowest_function("data_wait")
    if slow is not None and not made_by(view, slow):
        slow = None
    line = slow.where if slow is not None else view.line("data_wait")
    waits_for = "the loader" if not view.is_script or view.get("loader.workers") is not None else "data"
    title = f"input-bound: {percent(wait.share)} of each step is spent waiting for {waits_for}"
    draft = Draft("data-wait", title, wait)
    draft.add(taken(wait, "waiting for data takes"), workers_are(view))
    if slow is not None:
        draft.add(slow.taken)
    elif line:
        draft.saw(f"most stack samples are at {line}", "stack samples")
    elif view.workers:
        draft.saw("functions in loader workers are not profiled", CONFIG)
    draft.add(untold_cache(view), untold_workers(view))
    method = "__iter__" if loader is not None and loader.stream else "__getitem__"
    text = f"do less work per batch in the dataset's {method} and in the collate function"
    if view.is_script and view.dataset == "TensorDataset":
        text = (
            "a TensorDataset gives single items, which are stacked again: index whole batches of the tensors, with a "
            "sampler of batches and batch_size=None"
        )
    if waits_for == "data":
        text = (
            "do less work in the function that makes the batches, or make them in a DataLoader with workers"
        )
    draft.change(text, where=line)
    crowding(view, draft, "waiting for the loader")
    return draft.done()


# In this order: the first one that applies is reported.
WAITS: tuple[Callable[[View, LoaderEvent], Finding | None], ...] = (
    in_memory_workers, item_collate, slow_storage, many_workers, on_the_fly, few_workers,
)  # fmt: skip
RULES = (waiting,)
