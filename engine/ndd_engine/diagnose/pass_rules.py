"""Passes over the data: what happens where one begins, and whether it gives each item once."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ndd_engine.text import counted, number, percent, printable, span
from ndd_watch.phases import FIRST_BATCH

from .data_facts import no_workers, ready, small_batches
from .finding import Evidence, Finding
from .view import CLOCK, CONFIG, FLOOR, Cost, Draft, View, place

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
    draft = Draft("iterator-restart", title, begins[0], "certain")
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
    draft = Draft("worker-restart", title, cost)
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
    draft = Draft("short-epochs", title, Cost(stepping, share, None, cost.wall * share / cost.share))
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
        draft = Draft("repeated-items", title, None, "certain")
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
        draft = Draft("repeated-items", title, None, "certain")
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
    draft = Draft("repeated-items", title, None, "certain")
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


RULES = (repeated,)
