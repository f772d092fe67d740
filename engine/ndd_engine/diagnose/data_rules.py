"""Data: why steps wait for it or loader workers slow the model down, and passes over it.

At most one finding of a run is about loading. Of a pass over the data, the rules know what happens where it begins,
and whether it gives each item once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from math import ceil
from typing import Any

from ndd_engine.record.events import LoaderEvent
from ndd_engine.text import counted, number, percent, printable, span
from ndd_watch.changes import MOST_WORKERS
from ndd_watch.mapped import FIRST_BATCH

from . import worker_facts
from .data_facts import (
    as_made_ns,
    batch_ns,
    computes,
    crowded,
    crowding,
    explains,
    free,
    has_loader,
    items_ns,
    keep,
    keeps_up,
    made_ns,
    more_workers,
    no_workers,
    off_device,
    on_device,
    others_wait,
    ready,
    slowed_by_workers,
    slower,
    small_batches,
    storage_ns,
    tries,
    why_not_cached,
    workers_are,
)
from .finding import MOST_OF, Change, Evidence, Finding
from .view import (
    BASELINE,
    CLOCK,
    CONFIG,
    FLOOR,
    PROFILER,
    SAMPLES,
    Cost,
    FindingDraft,
    LibraryCall,
    SlowFunction,
    View,
    place,
    taken,
)

# Minimum part of the data wait spent on first batches of later epochs. The first batch of the run is not counted.
FIRST_PART = 0.35
# Fewest iterators that gave one batch, and their least part of the steps.
FEWEST_WASTED, WASTED = 10, 0.5
# Epochs of more steps than this are not short, whatever their start costs.
SHORT = 200
# Fewest comparisons of batches that are different from each other.
COMPARED = 2
CONTENT = "checksums of batches"
ONCE = "make the iterator once before the loop, or write `for batch in loader`"


AT_BEGINS = ("iterator-restart", "worker-restart", "short-epochs")


def at_pass_begins(view: View) -> Finding | None:
    """What the start of passes costs."""
    return iterator_restart(view) or worker_restart(view) or short_epochs(view)


def _begins(view: View) -> tuple[Cost, float, str] | None:
    """(cost of waiting for data, share of the first batches in the time, that share as evidence); None if it is small.

    The first batches of later passes only: the first one of the run may wait for anything.
    """
    totals = view.snapshot.totals
    first, waited = totals.phases.get(FIRST_BATCH, 0), totals.phases.get("data_wait", 0)
    stepping = totals.wall_ns - totals.phases.get("evaluate", 0) - totals.phases.get("checkpoint", 0)
    if stepping <= 0 or not totals.steps or first < FIRST_PART * waited or first < FLOOR * stepping:
        return None
    if view.gpu:  # the other waits count as far as the device sees them
        waited = min(waited, first + round(view.wait.ns * totals.steps))
    # The first batch of the run waited for the same.
    cost = Cost(waited / totals.steps, waited / stepping, None, waited / totals.wall_ns)
    share = first / stepping
    took = f"{span(first)} of {span(stepping)} ({percent(share)})"
    text = f"ending epochs and waiting for the first batch of the next one took {took}"
    if totals.passes:
        text += f": {counted(totals.passes, 'epoch')} of about {counted(_steps(view), 'step')}"
    return cost, share, text


def _steps(view: View) -> int:
    """Steps of a pass."""
    totals = view.snapshot.totals
    return max(round(totals.steps / (totals.passes or 1)), 1)


def iterator_restart(view: View) -> Finding | None:
    """A new iterator of the loader for each batch."""
    wasted, begins = _wasted(view), _begins(view)
    if wasted is None or begins is None:
        return None
    share = percent(begins[0].share)
    title = f"input-bound: waiting for data takes {share} of the time; an iterator of the loader is made for each batch"
    draft = FindingDraft("iterator-restart", title, begins[0], "certain")
    draft.add(wasted)
    if view.workers:
        draft.saw(f"each iterator starts {counted(view.workers, 'worker')} and loads batches ahead", CONFIG)
    draft.change(ONCE, where=view.script_place("wasted"))
    return draft.done()


def _wasted(view: View) -> Evidence | None:
    """Evidence of iterators that give one batch each; None if there are few of them."""
    totals, where = view.snapshot.totals, view.script_place("wasted")
    if where is None or totals.passes < max(FEWEST_WASTED, WASTED * totals.steps):
        return None
    return Evidence(
        f"{number(totals.passes)} iterators in {number(totals.steps)} steps, made at {where}", CLOCK
    )


def worker_restart(view: View) -> Finding | None:
    """Every epoch starts new worker processes."""
    begins, loader = _begins(view), view.snapshot.loader
    if begins is None or not view.workers or view.get("loader.persistent") is not False:
        return None
    cost, _, text = begins
    title = (
        f"input-bound: waiting for data takes {percent(cost.share)} of the time; workers restart every epoch"
    )
    draft = FindingDraft("worker-restart", title, cost)
    draft.saw(text, CLOCK)
    draft.saw(f"loader.workers is {view.workers}, loader.persistent is false", CONFIG)
    draft.change("keep workers between epochs", "loader.persistent=true", where=view.loader_place)
    if loader is not None and ready(loader):
        text = "load in the training process: the data is already in memory"
        draft.change(text, *no_workers(view))
    return draft.done()


def short_epochs(view: View) -> Finding | None:
    """Epochs so short that their starts take a large part of the time, without new workers."""
    begins, totals = _begins(view), view.snapshot.totals
    if begins is None or totals.passes < FEWEST_WASTED or _steps(view) > SHORT:
        return None
    cost, share, text = begins
    steps = counted(_steps(view), "step")
    title = f"input-bound: the start of an epoch takes {percent(share)} of the time; an epoch has {steps}"
    stepping = cost.ns * share / cost.share
    draft = FindingDraft("short-epochs", title, Cost(stepping, share, None, cost.wall * share / cost.share))
    draft.saw(text, CLOCK)
    if slow := view.slowest_function("data_wait"):
        draft.add(slow.taken)
    if view.workers and small_batches(view):
        draft.change("load in the training process", *no_workers(view), where=view.loader_place)
    draft.change(
        "make epochs longer: a dataset or a sampler that goes over the items several times",
        where=view.loader_place,
    )
    return draft.done()


def repeated(view: View) -> Finding | None:
    """Each step gets the same batch, or each loader worker, or each rank, gives all of the data."""
    wasted = _wasted(view)
    if wasted is not None and view.by_item and view.script.get("sampler") == "SequentialSampler":
        title = "each step trains on the first batch of the data: an iterator of the loader is made for each batch"
        draft = FindingDraft("repeated-items", title, None, "certain")
        draft.add(wasted)
        draft.saw("the loader does not shuffle", CONFIG)
        draft.change(ONCE, where=view.script_place("wasted"))
        return draft.done()
    loops = view.script.get("reads")
    where = place(*loops) if isinstance(loops, list) and len(loops) == 3 else view.loader_place
    name = printable(view.dataset) or "the dataset"
    if ranks := view.script.get("same_ranks"):
        title = (
            f"each item is trained on {len(ranks):,} times per epoch: {len(ranks)} ranks read the same data"
        )
        draft = FindingDraft("repeated-items", title, None, "certain")
        listed = ", ".join(map(str, ranks))
        draft.saw(f"ranks {listed} read the same batches one after the other", CONTENT)
        if view.by_item:
            text = "give each rank its own items: torch.utils.data.distributed.DistributedSampler"
            draft.change(text, where=view.loader_place)
        else:
            text = f"have {name} return only the items of its rank: torch.distributed.get_rank()"
            draft.change(text, where=where)
        return draft.done()
    compared = same_batches(view.script.get("batches"), view.workers)
    if not compared:
        return None
    title = (
        f"each item is trained on {view.workers} times per epoch: {name} is not divided among its "
        f"{view.workers} workers"
    )
    draft = FindingDraft("repeated-items", title, None, "certain")
    draft.saw(f"all workers gave the same batches, {compared} of {compared} that were compared", CONTENT)
    draft.saw(f"loader.workers is {view.workers}, and each worker has a copy of {name}", CONFIG)
    text = f"have {name} return only the items of its worker: torch.utils.data.get_worker_info()"
    draft.change(text, where=where)
    return draft.done()


def same_batches(found: Any, workers: int) -> int:
    """How many times all workers gave the same batch; 0 if they ever differed, or where that says nothing.

    found: [number in the pass, worker, checksum] of some batches of a pass. Each worker makes one of every `workers`
    batches. Data that is constant repeats nothing.
    """
    if not isinstance(found, list) or workers < 2 or any(worker < 0 for _, worker, _ in found):
        return 0
    sums = []
    for _, turn in groupby(found, key=lambda one: one[0] // workers):
        batches = list(turn)
        if len({worker for _, worker, _ in batches}) < workers:
            continue
        if len({checksum for *_, checksum in batches}) > 1:
            return 0
        sums.append(batches[0][2])
    return len(sums) if len(sums) >= COMPARED and len(set(sums)) == len(sums) else 0


PASS_RULES = (repeated,)


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
    found, loader = at_pass_begins(view), view.snapshot.loader
    if found is None and worker_facts.crowded_out(view):
        return None
    if found is None and loader is not None:
        found = next((found for rule in WAITS if (found := rule(view, loader)) is not None), None)
    if found is None:
        found = workers_of_script(view)
    if found is None:
        found = data_wait(view)
        return found if found is None or not view.workers else _with_workers(view, found)
    return _with_function(view, found)


def _with_workers(view: View, found: Finding) -> Finding:
    """A finding with what is known from inside the workers, and its changes by what is predicted of them.

    What is predicted says nothing of the start of passes.
    """
    begins = found.cause in AT_BEGINS
    more, need = worker_facts.evidence(view), None if begins else worker_facts.needed(view)
    function = worker_facts.slowest(view)
    title = found.title
    if function is not None:
        more.insert(0, worker_facts.function_evidence(function))
        if function[4] >= worker_facts.MOSTLY and " in " not in title:
            title += f", mostly for {worker_facts.where(function)} in the workers"
    evidence = (*found.evidence, *more, *([need] if need is not None else ()))
    ordered = worker_facts.beside_first if begins else worker_facts.ranked
    changes = ordered(view, found.changes)
    return replace(found, title=title, evidence=evidence, changes=changes)


def _with_function(view: View, found: Finding) -> Finding:
    """A finding with the function that makes the batches."""
    if view.workers:
        function, found = worker_facts.slowest(view), _with_workers(view, found)
        if function is None:
            return found
        work = Change("do less work per item", where=worker_facts.where(function))
        return replace(found, changes=(*found.changes, work))
    slow = view.slowest_function("data_wait")
    if slow is None or not made_by(view, slow):
        return found
    change = Change("do less work per item", where=slow.where)
    return replace(found, evidence=(*found.evidence, slow.taken), changes=(*found.changes, change))


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
    draft = FindingDraft("in-memory-workers", title, wait, "certain" if wait.clear else "likely")
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
    draft = FindingDraft("item-collate", title, wait, "certain")
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
    draft = FindingDraft("slow-storage", title, wait)
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
    if not view.workers or ready(loader) or not wait.clear or view.disturbed:
        return None
    # Workers cost the wait and the slowdown of the model.
    slowed = view.model.ns * (1 - 1 / (view.slowed or 1.0)) if slowed_by_workers(view) else 0.0
    if not here or not 0 < here * view.micro_steps < CHEAPER * (wait.ns + slowed):
        return None
    if wait.ns + slowed - here * view.micro_steps < FLOOR * view.step_ns:
        return None  # without workers, the step makes the batch itself: little would be gained
    crowd = f" on {cores} cores" if cores is not None and view.workers > cores else ""
    lost = "worker{} costs more than it saves" if view.workers == 1 else "workers{} cost more than they save"
    waited = f"({percent(wait.share)} of each step is spent waiting)"
    title = f"input-bound: {view.workers} loader {lost.format(crowd)} {waited}"
    draft = FindingDraft("many-workers", title, wait)
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
    draft = FindingDraft("on-the-fly", f"input-bound: items are encoded on the fly; {waited}", wait)
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
    draft = FindingDraft("few-workers", title, wait)
    draft.add(taken(wait, "waiting for data takes"))
    why = "change every epoch" if loader.epochs_differ else "cannot be cached"
    if loader.stream:
        why = "come from a stream, which cannot be cached"
    draft.saw(f"making a micro-batch takes {span(here)} of CPU time; items {why}", BASELINE)
    draft.add(workers_are(view), free(view), change)
    others_wait(view, draft, f"input-bound: waiting for {what} costs up to {{share}} of each step")
    return draft.done()


def workers_of_script(view: View) -> Finding | None:
    """Steps wait for more workers than there are cores, and they compute."""
    cores, use = view.whole_cores, view.snapshot.cores
    if not view.is_script or cores is None or view.workers <= cores or not view.wait.clear:
        return None
    if use is None or view.neighboured or view.disturbed:
        return None  # the cores are busy, whatever the number of workers
    if use.by_run < BUSY * use.usable:
        return None  # they wait for storage: more of them wait in parallel
    share = percent(view.wait.share)
    draft = FindingDraft(
        "many-workers", f"input-bound: {share} of each step is spent waiting for the loader", view.wait
    )
    draft.add(taken(view.wait, "waiting for data takes"))
    draft.saw(f"{view.workers} loader workers and the model share {cores} cores", CONFIG)
    draft.saw(f"they use {min(use.by_run, use.usable):.1f} of {use.usable:g} cores", SAMPLES)
    draft.change("load in the training process", "loader.workers=0", where=view.loader_place)
    if cores > 1:
        draft.change(f"load with {counted(cores - 1, 'worker')}", f"loader.workers={cores - 1}")
    others_wait(view, draft, "input-bound: waiting for the loader costs up to {share} of each step")
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
    library = None if slow is None else of_library(view, slow)
    waits_for = "the loader" if not view.is_script or view.get("loader.workers") is not None else "data"
    title = f"input-bound: {percent(wait.share)} of each step is spent waiting for {waits_for}"
    if library is not None:
        title += f", most of it in {library.what} ({library.where})"
    draft = FindingDraft("data-wait", title, wait)
    draft.add(taken(wait, "waiting for data takes"), workers_are(view))
    if slow is not None:
        draft.add(slow.taken)
        if library is not None:
            draft.saw(
                f"{library.library} takes {span(library.ns)} of it, called from {library.where}", PROFILER
            )
    elif line:
        draft.saw(f"most stack samples are at {line}", "stack samples")
    elif view.workers and worker_facts.inside(view) is None:
        draft.saw("functions in loader workers are not known yet", CONFIG)
    if (view.by_item or not view.is_script) and (why := why_not_cached(view)):
        draft.saw(why, CONFIG)
    draft.add(*tries(view))
    if view.trace is None and not has_loader(view):
        draft.saw("the batches come from no DataLoader, so no setting of one can be tried", CONFIG)
    stream = loader.stream if loader is not None else view.script.get("by_item") is False
    method = "__iter__" if stream else "__getitem__"
    text = f"do less work per batch in the dataset's {method} and in the collate function"
    if view.is_script and view.get("loader.fetch") == "item":
        text = "index whole batches of the tensors, with a sampler of batches and batch_size=None"
    if waits_for == "data":
        text = (
            "do less work in the function that makes the batches, or make them in a DataLoader with workers"
        )
    if slow is None and line is not None and _of_loop(view, line) and waits_for != "data":
        line = view.reads_place
    if (function := worker_facts.slowest(view)) is not None:
        line = worker_facts.where(function)
    draft.change(text, where=line if library is None else library.where)
    crowding(view, draft, "waiting for the loader")
    return draft.done()


def _of_loop(view: View, line: str) -> bool:
    """Whether samples in other phases show the same function: there it only waits, as with next()."""
    frames = view.snapshot.stacks.frames if view.snapshot.stacks is not None else []
    at = int(line.rpartition(" in ")[0].rpartition(":")[2])
    return any(
        place(file, at, function) == line
        for phase, file, _, function, _, own in frames
        if own and str(phase).partition("/")[0] != "data_wait"
    )


def called_by(call: LibraryCall, function: SlowFunction) -> bool:
    """Whether a function of the user's own makes a call."""
    return (call.file, call.name) == (function.file, function.name)


def of_library(view: View, slow: SlowFunction) -> LibraryCall | None:
    """The longest call of the library that takes most of a function, with the time of all of them; None without one."""
    spent: dict[str, float] = {}
    calls = [call for call in view.calls if called_by(call, slow) and call.library not in ("", "torch")]
    for call in calls:
        spent[call.library] = spent.get(call.library, 0.0) + call.ns
    name = max(spent, key=spent.__getitem__, default="")
    if not name or spent[name] < MOST_OF * slow.ns:
        return None
    first = next(call for call in calls if call.library == name)  # the longest one comes first
    return replace(first, ns=min(spent[name], slow.ns))


# In this order: the first one that applies is reported.
WAITS: tuple[Callable[[View, LoaderEvent], Finding | None], ...] = (
    in_memory_workers, item_collate, slow_storage, many_workers, on_the_fly, few_workers,
)  # fmt: skip
RULES = (waiting,)
