"""What the rules on data know of the loader, and the changes of it that they propose."""

from __future__ import annotations

from math import ceil

from ndd_engine.record.events import LoaderEvent
from ndd_engine.record.snapshot import OTHERS
from ndd_engine.text import counted, duration, number, printable, size, span
from ndd_watch.changes import MOST_WORKERS, PREFETCH

from .finding import Change, Evidence
from .view import BASELINE, CONFIG, RANK_CLOCKS, SAMPLES, SLOWED, FindingDraft, View

# Below this part of CPU time an item waits for storage even when other processes use the cores.
COMPUTES_CROWDED = 0.08
# Upper bounds for copying an item in Python on a slow machine: fixed, and per byte.
COPY_NS = 100_000.0
COPY_BYTE_NS = 2.0
# Workers that need less than this part of the time between two batches keep up.
KEEPS_UP = 0.5
# From this share of a step's CPU time on, loader workers slow the model down.
DISTURBS = 0.1
# A script whose items take longer than this to read, all once, is not asked to cache them.
LONGEST_READ_NS = 30e9
# What an item takes in memory beside its numbers: its container and its tensors.
ITEM_BYTES = 1024
# Workers make most batches in time where the median of the wait is below this part of its mean.
UNEVEN = 0.2
# The most batches of a worker ahead that are proposed.
MOST_AHEAD = 16
# Below this part of the cores in use, workers wait for something else.
IDLE = 0.5
# A worker that makes a batch of a script in less time than this spends most of it on sending it.
SENT_NS = 5e6
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
    if loader.encoded is not None or loader.epochs_differ or loader.stream or view.get("loader.cache"):
        return None
    if ready(loader) or view.get("loader.placement") == "device":
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


def tries(view: View) -> list[Change]:
    """What can be tried against a wait for data whose reason is not known; the first one helps most likely."""
    quick = view.workers > 0 and small_batches(view)
    cache, workers = untold_cache(view), None if quick else untold_workers(view)
    # Of a run of one's own, it is not known whether the items fit into memory.
    last = (cache, workers) if view.is_script else (workers, cache)
    found = (untold_gather(view), alone(view) if quick else None, *smoother(view), *last)
    return [change for change in found if change is not None] or last_tries(view)


def last_tries(view: View) -> list[Change]:
    """What only a trial can tell, where nothing speaks for it: loading in another process, or in this one."""
    if not has_loader(view):
        return []
    if view.workers:
        return [alone(view)]
    text = f"load with 1 worker{in_host_memory(view)}: it makes batches while the model computes, if a core is free"
    return [Change(text, ("loader.workers=1", *off_device(view)), view.loader_place)]


def has_loader(view: View) -> bool:
    """Whether the batches come from a loader whose settings can be tried."""
    return view.trace is None and view.whole("loader.workers") is not None


def untold_gather(view: View) -> Change | None:
    """Index the tensors of a script's TensorDataset in whole batches, or the data of a run of one's own."""
    if view.get("loader.fetch") != "item":
        return None
    loader = view.snapshot.loader
    if not view.is_script and loader is not None and loader.gather_ns is None:
        return None  # it cannot be indexed so
    text = "take whole batches of the tensors by one index, instead of single items that are stacked again"
    sets = ("loader.fetch=auto", *(no_workers(view) if view.workers else ()))
    return Change(text + here_too(view), sets, view.loader_place)


def alone(view: View) -> Change:
    """Load without workers."""
    text = "load in the training process: sending a batch from a worker may take longer than making it"
    if not cores_free(view):
        text = "load in the training process: on busy cores, workers and the model slow each other down"
    return Change(text, no_workers(view), view.loader_place)


def smoother(view: View) -> list[Change]:
    """Changes where workers make most batches in time, and some late."""
    wait = view.phases.get("data_wait")
    if not view.workers or wait is None or wait.p50_ns is None or wait.p50_ns > UNEVEN * view.wait.ns:
        return []
    return [change for change in (further_ahead(view), any_order(view)) if change is not None]


def further_ahead(view: View) -> Change | None:
    """Load more batches ahead; None if there are many already."""
    ahead = view.whole("loader.prefetch") or PREFETCH
    if ahead >= MOST_AHEAD:
        return None
    text = "load further ahead, for batches that come late"
    return Change(text, (f"loader.prefetch={min(4 * ahead, MOST_AHEAD)}",), view.loader_place)


def any_order(view: View) -> Change | None:
    """Take batches as they come; None if they are, or where their order is fixed."""
    stream = view.snapshot.loader is not None and view.snapshot.loader.stream
    if view.workers < 2 or view.get("loader.in_order") is False or stream:
        return None
    text = "use batches as soon as they are ready, in an order that differs from run to run"
    return Change(text, ("loader.in_order=false",), view.loader_place)


def untold_workers(view: View) -> Change | None:
    """Try workers, or more of them; only if the cost of a batch is unknown."""
    cores, use = view.whole_cores, view.snapshot.cores
    if view.snapshot.loader is not None or cores is None or not cores_free(view):
        return None
    if view.is_script and view.get("loader.workers") is None:
        return None  # it has no loader
    # A stream may not ask which worker reads it: several would each read all of it.
    count = min(cores - 1, 4 if view.by_item or not view.is_script else 1)
    if view.workers:
        idle = use is not None and use.by_run + use.others < IDLE * use.usable
        count = min(2 * view.workers, MOST_WORKERS if idle else cores)
    if count <= view.workers:
        return None
    text = f"load with {counted(count, 'worker')}{in_host_memory(view)}"
    return Change(text, (f"loader.workers={count}", *off_device(view)), view.loader_place)


def untold_cache(view: View) -> Change | None:
    """Try to read each item once; None if it is known that they cannot be kept, or take long to read."""
    if not view.is_script:
        return _cache_of_own(view)
    if not view.by_item or why_not_cached(view):
        return None
    totals = view.snapshot.totals
    # Without a second pass over the data, all of the wait was for items that are read for the first time.
    waited = totals.phases.get("data_wait", 0)
    if view.items is None and waited > LONGEST_READ_NS and not totals.passes:
        return None
    needed = cache_bytes(view)
    kept = "keep it, if all fit into memory" if needed is None else f"keep it: about {size(needed)} in all"
    return Change(
        f"read each item once and {kept}; a trial refuses it where items change{here_too(view)}",
        ("loader.cache=true", *(no_workers(view) if view.workers else ())),
        view.loader_place,
    )


def _cache_of_own(view: View) -> Change | None:
    """The same of a run of one's own."""
    if view.snapshot.loader is not None:
        return keep(view, view.snapshot.loader)
    if not has_loader(view) or view.get("loader.cache") or view.get("loader.placement") == "device":
        return None
    text = "encode each item once and cache it, if all fit into memory; a trial refuses it where items change"
    return Change(text + here_too(view), ("loader.cache=true", *(no_workers(view) if view.workers else ())))


def cache_bytes(view: View) -> float | None:
    """Bytes of all items of a script's dataset in memory; None if they are unknown."""
    items, batch, each = view.items, view.script.get("batch_bytes"), _items_of_batch(view)
    if items is None or not isinstance(batch, int) or not each:
        return None
    return items * (batch / each + ITEM_BYTES)


def why_not_cached(view: View) -> str:
    """Why the items are not to be cached; "" if nothing is known against it."""
    if not view.is_script:
        return _why_not_kept(view)
    if place := view.script_place("random"):
        return f"items are random ({place}): a cache would give the same ones in each epoch"
    if name := view.script.get("augments"):
        return f"items are random ({printable(str(name))}): a cache would give the same ones in each epoch"
    needed, free = cache_bytes(view), (view.snapshot.host or {}).get("memory_available_bytes")
    if needed is not None and free is not None and needed > KEEPING * free:
        return f"all {number(view.items or 0)} items would take about {size(needed)}, of {size(free)} of free memory"
    each, items = _items_of_batch(view), view.items
    if items is None or not each:
        return ""
    # Where steps wait for data, workers make it all the time.
    made_ns = (view.step_ns * view.workers if view.workers else view.wait.ns) / max(view.micro_steps, 1.0)
    reading = items * made_ns / each
    if reading <= LONGEST_READ_NS:
        return ""
    return f"reading all {number(items)} items once would take about {duration(reading * 1e-9)}"


def _why_not_kept(view: View) -> str:
    """The same of a run of one's own."""
    loader, free = view.snapshot.loader, (view.snapshot.host or {}).get("memory_available_bytes")
    if loader is None or loader.encoded is not None or ready(loader):
        return ""
    if loader.stream:
        return "items come from a stream, which cannot be cached"
    if loader.epochs_differ:
        return "items change, as by random augmentation: a cache would give the same ones in each epoch"
    needed = data_bytes(loader)
    if needed is not None and free is not None and 2 * needed > KEEPING * free:
        items = f"all {number(loader.items)} items would take about {size(2 * needed)} while they are cached"
        return f"{items}, of {size(free)} of free memory"
    return ""


def _items_of_batch(view: View) -> float:
    """Items of a micro-batch of one rank; 0 if that is unknown."""
    run, ranks = view.snapshot.run, view.whole("parallel.ranks") or 1
    return run.items_per_step / max(view.micro_steps, 1.0) / ranks if run is not None else 0.0


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
    return slowed >= SLOWED and not view.neighboured and cores.by_run > 0.8 * cores.usable


def slowed_by_workers(view: View) -> bool:
    """Whether the model is slower than before training although no other processes use the cores."""
    varies = "recompile" in view.alternatives  # the batch of the baseline differs from the others
    if view.gpu or view.snapshot.cores is None or view.neighboured or varies:
        return False
    return (view.slowed or 0.0) >= SLOWED


def crowding(view: View, draft: FindingDraft, what: str) -> None:
    """Add the competition for cores and caches to the cost of a wait. what: "waiting for X", in the new title.

    Loading in the training process slows the model down as well: it evicts the caches between steps. Of several ranks,
    each waits for those that still wait for data.
    """
    title = f"input-bound: {what} costs up to {{share}} of each step"
    share = view.wait.share + others_wait(view, draft, title)
    if view.gpu:
        return
    if view.baseline is not None:
        slowdown, slow = view.slowdown(), slower(view)
        # With batches of different lengths the model may be slower for another reason: it is a bound.
        if slowdown is not None and slow is not None:
            draft.widen(share + slowdown, title, slow.text, slow.source)
        return
    here = batch_ns(view.snapshot.loader) if view.snapshot.loader is not None else None
    if not view.workers or here is None or not view.step_ns:
        return
    share = min(share + here * view.micro_steps / view.step_ns, 0.9)
    why = f"making a micro-batch takes {span(here)} of CPU time, on the same cores as the model"
    draft.widen(share, title, why, BASELINE)


def others_wait(view: View, draft: FindingDraft, title: str) -> float:
    """Add what ranks wait for those that still wait for data; its share of a step. title: with "{share}"."""
    ranks = view.snapshot.ranks
    if ranks is None or not ranks.step_ns or ranks.skew_ns <= 0:
        return 0.0
    share = ranks.skew_ns / ranks.step_ns
    why = f"the ranks wait {span(ranks.skew_ns)} of each step for slower ones, which may wait for data"
    draft.widen(view.wait.share + share, title, why, RANK_CLOCKS)
    return share


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
    return Evidence(
        f"forward and backward take {number(view.slowed, 2)} times as long as before training", BASELINE
    )


def free(view: View) -> Evidence | None:
    cores = view.snapshot.cores
    if cores is None:
        return None
    return Evidence(f"the run uses {cores.by_run:.1f} of {cores.usable:g} cores", SAMPLES)


def small_batches(view: View) -> bool:
    """Whether the workers of a script make batches so fast that sending them is what takes time."""
    micro = max(view.micro_steps, 1.0)
    return view.is_script and 0 < view.step_ns / micro * view.workers <= SENT_NS
