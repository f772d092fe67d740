"""Memory: growth and who holds it, loader workers, evaluations, and little that is left."""

from __future__ import annotations

import re
from pathlib import PurePath
from statistics import median
from typing import NamedTuple

from ndd_engine.record.events import Holder, HoldersEvent
from ndd_engine.record.figures import obeyed
from ndd_engine.record.snapshot import Curve, Snapshot
from ndd_engine.text import counted, duration, number, percent, printable, size
from ndd_watch.holders import OF_GPU, OF_HOST

from .finding import Confidence, Finding
from .gpu_rules import smaller_batches
from .pace_rules import condensed, line_through
from .view import MODEL, FindingDraft, View

Trend = tuple[tuple[int, float], ...]

# Minimum points of the memory curve, and the number of points it is reduced to.
LEAST_POINTS = 7
GROUPS = 12
COMPILING_POINTS = 40
# Minimum growth: a fraction of the memory in use or this many bytes, and a multiple of the noise.
GROWN = 0.05
GROWN_BYTES = 50 << 20
TIMES_NOISE = 4.0
# Fraction of point pairs that must rise, and how steep the end must be relative to the whole: a curve that levels
# off is not a leak.
RISING = 0.9
STEADY = 0.5
# Memory is released where it falls to this part of its rise, and rises are alike up to this factor.
RELEASED = 0.5
ALIKE = 2.0
# Less growth is enough where a look has found what holds at least this part of it, and to ask for a look: this, or half
# a MiB from so many bytes a step on.
SMALL_BYTES, HELD = 2 << 20, 0.3
LEAST_BYTES, LEAST_SLOPE = 1 << 19, 4 << 10
# From this part of the growth on, free bytes of the heap explain it.
FREED = 0.7
# The second look comes after so many steps and seconds. Looks that named nothing are repeated when the run is so many
# times as long.
APART_STEPS, APART_S, LATER = 20, 4.0, 4
# Workers copy what they share with the process that forked them: their private memory must rise by this part of it and
# this many bytes, and what they share must fall by this part of the rise.
COPIED, COPIED_BYTES, FELL = 0.08, 32 << 20, 0.5
# Least part of that rise after the first sample of a worker.
STARTING = 0.1
# An evaluation takes much memory from this part of that of training on, or of what is free.
MUCH = 0.2
MUCH_BYTES = 100 << 20
# Memory is in pieces from this part of what is reserved on, and this many bytes, beyond the most that was in use.
PIECES, PIECES_BYTES = 0.2, 256 << 20
# Memory is almost full when less than this part of it is free.
NEARLY = 0.04
_RAN_OUT = re.compile(rf"out of memory|\bMemoryError\b|{OF_GPU}|{OF_HOST}", re.IGNORECASE)


class Growth(NamedTuple):
    """slope: bytes per step, between low and high with a confidence of 95 %. noise, last: bytes.

    first: step and bytes at the begin of the curve. released: steps after which it falls again; 0 if it does not.
    """

    slope: float
    noise: float
    last: float
    low: float = 0.0
    high: float = 0.0
    first: tuple[int, float] = (0, 0.0)
    released: int = 0


def leak(view: View) -> Finding | None:
    """Memory that grows steadily and does not level off."""
    snapshot = view.snapshot
    if not _judged(snapshot):
        return None
    held = snapshot.holders.holders[0] if snapshot.holders is not None and snapshot.holders.holders else None
    found = _growing(view, held)
    if found is None:
        return None
    where, growth = found
    slope, on_gpu = growth.slope, where == "GPU memory"
    # Small pieces that are kept leave gaps between them, so that resident memory can grow by much more than they take.
    heap = None if on_gpu else _little(snapshot.heap_trend)
    if not _holds(snapshot, held, slope) and (heap is None or not _holds(snapshot, held, heap.slope)):
        held = None
    if held is not None and held.limit and _fits(snapshot, held):
        return None
    kept = snapshot.totals.kept_steps
    free, when, leave = _free(snapshot, on_gpu), "", ""
    whole = _steady(snapshot.resident_trend, SMALL_BYTES, SMALL_BYTES) if where == "the heap" else None
    if free is not None and not growth.released:
        steps = free / max(slope, whole.slope if whole is not None else 0.0)
        when = f"memory is full in about {steps:,.0f} steps"
        if view.step_ns:
            when += f", {duration(steps * view.step_ns * 1e-9)}"
        total = snapshot.run.total_steps if snapshot.run is not None else 0
        if total and not snapshot.final and total - snapshot.step < steps / 2:
            leave = f"this run ends in {total - snapshot.step:,} steps, before memory is full"
    confidence: Confidence = "certain" if snapshot.epoch or held is not None else "likely"
    title = f"{'memory' if where == 'the heap' else where} grows by {size(slope)} per step"
    if growth.released:
        title += f" until it is released, after about {growth.released:,} steps"
    if held is not None:
        title += f", held by {_named(held)}"
    elif kept:
        title += f", held by the autograd graphs of {kept:,} steps"
    draft = FindingDraft("leak", title, None, confidence, leave)
    source = (
        "allocator" if on_gpu else "the C library's heap" if where == "the heap" else "memory of the process"
    )
    between = f", {size(growth.low)} to {size(growth.high)}" if 0 < growth.low < growth.high else ""
    text = (
        f"{size(growth.last)} in use, growing by {size(slope)} per step (noise {size(growth.noise)}{between})"
    )
    draft.saw(text, source)
    if whole is not None and HELD * whole.slope > slope:
        draft.saw(f"the process grows by {size(whole.slope)} per step: the rest are gaps in its heap", source)
    if growth.first[0]:
        draft.saw(f"it was {size(growth.first[1])} at step {growth.first[0]:,}", source)
    if held is not None:
        assert snapshot.holders is not None
        _tell(draft, snapshot.holders, held)
    elif snapshot.looked is not None and snapshot.looked.tensors:
        shapes = ", ".join(
            f"{counted(count, 'tensor')} of {printable(shape)} ({size(taken)})"
            for shape, count, taken in snapshot.looked.tensors[:3]
        )
        draft.saw(f"live tensors that take most: {shapes}", "a look at the process")
    if kept:
        draft.saw(f"autograd graphs of {kept:,} steps were kept at a time", "autograd")
    if growth.released:
        draft.saw(f"it grows by {size(slope * growth.released)} before it is released", source)
    if when:
        draft.saw(f"{when} ({size(free)} free)", "extrapolated")
    line = None if held is None or held.at is None else printable(f"{PurePath(held.at[0]).name}:{held.at[1]}")
    draft.change(_cure(held), where=line or view.script_line("keeps") or view.line(*MODEL, "other", "log"))
    return draft.done()


def freed_memory(view: View) -> Finding | None:
    """Memory of the process that grows, although most of that was freed: the C library keeps it."""
    snapshot = view.snapshot
    growth = _steady(snapshot.resident_trend, GROWN_BYTES) if _judged(snapshot) else None
    if growth is None or not _freed(snapshot, growth.slope) or leak(view) is not None:
        return None
    title = f"memory grows by {size(growth.slope)} per step, and most of that is free: the C library keeps it"
    draft = FindingDraft("fragmentation", title, None, "possible")
    draft.saw(
        f"{size(growth.last)} resident; {size(snapshot.heap_free_trend[-1][1])} of the heap are free and "
        f"{size(snapshot.heap_trend[-1][1])} in use",
        "the C library's heap",
    )
    draft.change(
        "if batches become larger and larger, leave it: it ends with the largest one. Else small pieces that are kept "
        "lie between freed tensors: set MALLOC_MMAP_THRESHOLD_=65536 before starting the run, which returns these"
    )
    return draft.done()


def fragmentation(view: View) -> Finding | None:
    """Reserved GPU memory that grows although no more is in use: pieces of it fit no new tensor."""
    snapshot, memory = view.snapshot, view.snapshot.memory
    if memory is None or not view.gpu or not _judged(snapshot):
        return None
    growth = _steady(snapshot.gap_trend, 0)
    if growth is None or growth.last < max(PIECES * memory.reserved_bytes, PIECES_BYTES):
        return None
    if _steady(snapshot.memory_trend, 0) is not None:
        return None  # what is in use grows as well
    title = (
        f"GPU memory is in pieces: {size(growth.slope)} more are reserved per step, and no more are in use"
    )
    draft = FindingDraft("fragmentation", title, None, "likely")
    reserved, used = size(memory.reserved_bytes), size(memory.peak_allocated_bytes)
    draft.saw(f"{reserved} are reserved, and at most {used} were in use at a time", "allocator")
    between = f" ({size(growth.low)} to {size(growth.high)})" if 0 < growth.low < growth.high else ""
    then = f"the difference was {size(growth.first[1])} at step {growth.first[0]:,}"
    draft.saw(
        f"{then}, is {size(growth.last)} now, and grows by {size(growth.slope)} per step{between}",
        "allocator",
    )
    free = _free(snapshot, True)
    if free is not None:
        steps = f"{free / growth.slope:,.0f} steps"
        draft.saw(
            f"memory is full in about {steps}; the allocator then frees its cache, and retries",
            "extrapolated",
        )
    draft.change(
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before starting the run: pieces can then grow"
    )
    draft.change("let batches have few different shapes: pad them to a few lengths, or sort items by length")
    return draft.done()


def wants_look(snapshot: Snapshot) -> bool:
    """Whether a look at what the process keeps would tell what holds growing memory. Two looks are compared."""
    looked = snapshot.looked
    if snapshot.final or not snapshot.step_ns or not _judged(snapshot):
        return False
    if looked is not None and not looked.steps:
        apart = max(APART_STEPS, APART_S * 1e9 / snapshot.step_ns)
        return snapshot.step >= looked.step + apart
    if looked is not None and (looked.holders or snapshot.step < LATER * looked.step):
        return False
    trends = (snapshot.memory_trend, snapshot.resident_trend, snapshot.heap_trend)
    return any(_little(trend) is not None for trend in trends)


def _judged(snapshot: Snapshot) -> bool:
    if snapshot.totals.steps < LEAST_POINTS:
        return False
    # Compiled code takes memory as well.
    return not snapshot.totals.recompiles or len(snapshot.resident_trend) >= COMPILING_POINTS


def _growing(view: View, held: Holder | None) -> tuple[str, Growth] | None:
    """What grows, and how. held: what a look has found."""
    snapshot, kept = view.snapshot, view.snapshot.totals.kept_steps
    places = [("memory", snapshot.memory_trend, snapshot.heap_trend, GROWN_BYTES)]
    if view.gpu:
        places = [
            ("GPU memory", snapshot.memory_trend, snapshot.memory_trend, 0),
            ("host memory", snapshot.resident_trend, snapshot.heap_trend, GROWN_BYTES),
        ]
    for name, trend, releasing, least in places:
        growth = _steady(trend, least)
        if growth is not None and (name == "GPU memory" or not _freed(snapshot, growth.slope)):
            return name, growth
        if growth is not None and (growth := _steady(releasing, least)) is not None:
            return "the heap", growth
        if held is not None:
            for one in (trend, releasing):
                growth = _little(one)
                if growth is not None and _holds(snapshot, held, growth.slope):
                    return (name if one is trend else "the heap"), growth
        between, steps = growth_between_releases(releasing, GROWN_BYTES)
        if between is not None:
            return name, Growth(*between, released=steps)
        if kept and (of_graphs := growth_of_graphs(trend, kept)) is not None:
            return name, Growth(*of_graphs, released=kept)
    return None


def _little(trend: Trend) -> Growth | None:
    """Growth that counts where a look has found its holder."""
    found = _steady(trend, LEAST_BYTES, LEAST_BYTES)
    return found if found and found.slope >= LEAST_SLOPE else _steady(trend, SMALL_BYTES, SMALL_BYTES)


def _freed(snapshot: Snapshot, slope: float) -> bool:
    """Whether most of a growth of the process is free in its heap. slope: bytes per step."""
    trend = snapshot.heap_free_trend
    line = line_through(condensed(trend[len(trend) // 3 :], GROUPS))
    return line is not None and line.slope >= FREED * slope


def _steady(trend: Trend, least: float, most: float = GROWN_BYTES) -> Growth | None:
    """The growth of a curve with its interval; see `steady_growth`. A last point that has fallen is no evidence yet.

    So is one that was taken while the process ended.
    """
    found = steady_growth(trend, least, most)
    if found is None and len(trend) > 1 and trend[-1][1] < trend[-2][1]:
        trend = trend[:-1]
        found = steady_growth(trend, least, most)
    if found is None:
        return None
    later = trend[len(trend) // 3 :]
    line = line_through(condensed(later, GROUPS))
    assert line is not None  # `steady_growth` has found one
    return Growth(*found, line.low, line.high, later[0])


def _holds(snapshot: Snapshot, held: Holder | None, slope: float) -> bool:
    """Whether what a look has found holds a noticeable part of the growth.

    The graphs of what it holds are not weighed: they belong to it where graphs were kept from one look to the next.
    """
    looked = snapshot.holders
    if held is None or looked is None:
        return False
    graphs = held.graphs and snapshot.totals.kept_steps >= looked.steps
    return graphs or held.bytes / looked.steps >= HELD * slope


def _fits(snapshot: Snapshot, held: Holder) -> bool:
    """Whether a container that ends growing does so before memory is full."""
    assert held.limit is not None
    free = _free(snapshot, False)
    left = max(held.limit - held.length, 0) * held.bytes / max(held.grown, 1)
    return free is None or left < free / 2


def _free(snapshot: Snapshot, on_gpu: bool) -> float | None:
    if snapshot.headroom.kind == ("gpu" if on_gpu else "host"):
        return snapshot.headroom.free_bytes
    host = snapshot.host or {}
    return None if on_gpu else host.get("memory_available_bytes")


# What a user has to look for, by the name of an attribute of a library.
_LIBRARY = {
    "_forward_hooks": "forward hooks", "_forward_pre_hooks": "forward hooks", "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward hooks", "_post_accumulate_grad_hooks": "hooks",
    "figs": "open figures of matplotlib",
}  # fmt: skip


def _named(held: Holder) -> str:
    """ "list `history` in train.py"."""
    name, owner, kind = f"`{held.name}`", f"`{held.owner}`", held.type
    if held.name in _LIBRARY:
        text = _LIBRARY[held.name] + ("" if held.name == "figs" else f" of {held.owner}")
    elif held.kind == "cache":
        text = f"the cache of {owner}"
    elif held.kind in ("attribute", "class"):
        text = f"{kind} `{held.owner}.{held.name}`"
    elif held.kind == "default":
        text = f"{kind} {name}, the default of an argument of {owner}"
    elif held.kind in ("local", "closure"):
        text = f"{kind} {name} in {'function ' if held.kind == 'closure' else ''}{owner}"
    elif held.kind == "global":
        text = f"{kind} {name} in {PurePath(held.file).name}" if held.file else f"{kind} {name}"
    else:
        text = f"a {kind} of {held.holds}" if held.holds else f"a {kind}"
    return printable(text)


def _tell(draft: FindingDraft, looked: HoldersEvent, held: Holder) -> None:
    """Evidence of what holds growing memory. looked: the look that has found it."""
    unit = "batch" if looked.inside else "step"
    each, grows = held.grown / looked.steps, held.bytes / max(held.grown, 1)
    what = "is as long as" if held.type == "tensor" else "has"
    text = f"it {what} {counted(held.length, 'element')}, {number(each)} more each {unit}, of about {size(grows)} each"
    if held.holds and held.type != "tensor":
        text += f"; the newest is a {printable(held.holds)}"
    if held.graphs:
        text += ", with its autograd graph"
    draft.saw(
        text,
        f"two looks at the process, {counted(looked.steps, unit)} apart; the second took {looked.ns / 1e6:.0f} ms",
    )
    if held.file and held.line and held.kind != "cache":
        draft.saw(printable(f"{held.owner} begins at {PurePath(held.file).name}:{held.line}"), "source")


def _cure(held: Holder | None) -> str:
    if held is None:
        return "detach tensors that are kept between steps (loss.item() instead of loss, output.detach())"
    if held.name == "figs":
        return "close each figure after it is saved: plt.close(figure)"
    if held.name in _LIBRARY:
        return "register hooks once, before the loop, or call remove() on their handles"
    if held.kind == "cache":
        return "bound the cache: lru_cache(maxsize=...)"
    if held.graphs:
        return (
            "keep numbers (loss.item()) or detached tensors (output.detach()), and only as many as are needed"
        )
    if held.type == "tensor":
        return "keep only what is needed: it becomes longer at each step"
    return "keep only what is needed: a deque(maxlen=...), numbers instead of tensors, or clear it after use"


def growth_of_graphs(trend: Trend, kept: int) -> tuple[float, float, float] | None:
    """As `steady_growth`, of a curve that stays level after its first rise, since freed memory is used again.

    kept: the most steps whose graphs existed at a time. None if the curve rose by too little.
    """
    values = [value for _, value in trend[1:]]
    if len(trend) < LEAST_POINTS:
        return None
    rise = max(values) - values[0]
    if rise < max(GROWN * max(values), GROWN_BYTES):
        return None
    return rise / kept, 0.0, values[-1]


def worker_memory(view: View) -> Finding | None:
    """Private memory of loader workers that grows: by copies of what the dataset keeps, or by what they keep."""
    snapshot = view.snapshot
    private, shared = snapshot.workers_trend, snapshot.workers_shared_trend
    first, last = _longest_rise(private)
    if last <= first:
        return None
    steps, rise = private[last][0] - private[first][0], private[last][1] - private[first][1]
    common = shared[first][1]
    if steps <= 0:
        return None
    copies = common - shared[last][1] >= FELL * rise
    if copies and rise < max(COPIED * common, COPIED_BYTES):
        return None
    if copies and private[last][1] - private[first + 1][1] < STARTING * rise:
        return None  # a worker that starts takes its memory at once
    # Copies end by themselves; what workers keep has to grow until they end.
    if not copies and (
        steady_growth(_whole(private, first, last), GROWN_BYTES) is None or _caches(view, rise / steps)
    ):
        return None
    workers = counted(int(view.workers or (snapshot.host or {}).get("workers") or 1), "loader worker")
    title = f"private memory of {workers} grows: {size(rise)} more in {steps:,} steps"
    if copies:
        title += ", copies of the dataset's Python objects"
    draft = FindingDraft("worker-memory", title, None, "certain" if copies else "likely")
    per = f"{size(rise / steps)} per step"
    line = (
        line_through(condensed(private[first : last + 1], GROUPS)) if last - first >= LEAST_POINTS else None
    )
    if line is not None and 0 < line.low < line.high:
        per += f", {size(line.low)} to {size(line.high)}"
    items = snapshot.run.items_per_step if snapshot.run is not None else 0
    if items:
        per += f", {size(rise / steps / items)} per item read"
    went = ", ".join(f"{size(private[at][1])} at step {private[at][0]:,}" for at in (first, last))
    draft.saw(f"private memory of all of them: {went} ({per})", "/proc/PID/smaps_rollup")
    free = _free(snapshot, False)
    if copies:
        fell = f"{size(common)} to {size(shared[last][1])}"
        draft.saw(
            f"memory that they share with the training process fell from {fell}: they copy it",
            "/proc/PID/smaps_rollup",
        )
        draft.saw(f"at most {size(shared[last][1])} more will be copied", "the rest of what is shared")
        if free is not None and shared[last][1] > free:
            draft.saw(f"only {size(free)} are free", "host counters")
        keeps = _objects(view)
        what = f"the dataset keeps Python objects ({keeps})" if keeps else "the dataset keeps Python objects"
        draft.saw(
            f"{what}; reading one changes its reference count, so Linux copies its page", "copy-on-write"
        )
        draft.change(
            "keep the data in numpy arrays or tensors instead of lists and dictionaries, or in a file that is mapped",
            where=view.loader_place,
        )
    else:
        if free is not None:
            draft.saw(
                f"memory is full in about {free / rise * steps:,.0f} steps ({size(free)} free)",
                "extrapolated",
            )
        draft.change(
            "do not keep items in the dataset for longer than they are needed", where=view.loader_place
        )
    return draft.done()


def _whole(trend: Curve, first: int, last: int) -> Curve:
    """A rise between these places, with what follows it until the workers are new ones."""
    least = trend[last][1] - RELEASED * (trend[last][1] - trend[first][1])
    after = next((place for place in range(last, len(trend)) if trend[place][1] < least), len(trend))
    return trend[first:after]


def _caches(view: View, slope: float) -> bool:
    """Whether a dataset that keeps its items has all of them before memory is full. slope: bytes per step."""
    snapshot, items, free = view.snapshot, view.items, _free(view.snapshot, False)
    each = snapshot.run.items_per_step if snapshot.run is not None else 0
    if snapshot.totals.passes or not items or not each or not view.by_item:
        return False
    return free is None or (items / each - snapshot.step) * slope < free / 2


def _objects(view: View) -> str:
    """ "list `lines` of 2,000,000 dict" of the script's dataset; "" if that is not known."""
    script = view.config.get("script")
    found = script.get("objects") if isinstance(script, dict) else None
    if not isinstance(found, (list, tuple)) or len(found) != 4:
        return ""
    name, kind, length, holds = found
    return printable(f"{kind} `{view.dataset}.{name}` of {int(length):,} {holds}")


def _longest_rise(trend: Trend) -> tuple[int, int]:
    """The places of the curve between which it rises by most, without falling to half of the rise in between."""
    best = (0, 0)
    low = high = 0
    for place, (_, value) in enumerate(trend):
        if value < trend[low][1] or value < trend[high][1] - RELEASED * (trend[high][1] - trend[low][1]) - 1:
            low = high = place  # new workers
        elif value > trend[high][1]:
            high = place
        if trend[high][1] - trend[low][1] > trend[best[1]][1] - trend[best[0]][1]:
            best = (low, high)
    return best


def evaluation_memory(view: View) -> Finding | None:
    """An evaluation that takes much more memory than training."""
    snapshot = view.snapshot
    draft = _aside_memory(view, "evaluate", "evaluation-memory", "evaluating", "an evaluation")
    if draft is None:
        return None
    held, looked = _collected(snapshot), snapshot.collected
    recorded = held is None and looked is not None and looked.gradients
    if recorded:
        draft.titled(", with autograd on")
        draft.saw(
            "within it, torch.is_grad_enabled() is true: each loss and output has its graph",
            "a look at the process",
        )
    if held is not None:
        assert looked is not None
        draft.titled(f", held by {_named(held)}")
        grown = (looked.grown_bytes or 0) / looked.steps
        draft.saw(
            f"memory in use grew by {size(grown)} with each batch of the evaluation", "memory of the process"
        )
        _tell(draft, looked, held)
    line = None if held is None or held.at is None else printable(f"{PurePath(held.at[0]).name}:{held.at[1]}")
    if recorded or (held is not None and held.graphs):
        text = "evaluate under torch.no_grad(): what is kept has its autograd graph, with the activations of its batch"
    elif "evaluate" in obeyed(snapshot.run):  # Hugging Face's Trainer
        text = (
            "Trainer keeps the logits of all batches: reduce them in preprocess_logits_for_metrics, or set "
            "eval_accumulation_steps to move them off the GPU"
        )
    else:
        text = "compute the metric batch by batch instead of keeping all outputs, under torch.no_grad()"
    draft.change(text, where=line or view.line("evaluate"))
    return draft.done()


def _collected(snapshot: Snapshot) -> Holder | None:
    """What holds a noticeable part of the memory that grows within an evaluation; None if that is not known."""
    looked = snapshot.collected
    if looked is None or not looked.holders or not looked.grown_bytes:
        return None
    held = looked.holders[0]
    # The bytes of a graph are not counted.
    return held if held.graphs or held.bytes >= HELD * looked.grown_bytes else None


def checkpoint_memory(view: View) -> Finding | None:
    """A checkpoint that takes much more memory than training."""
    draft = _aside_memory(view, "checkpoint", "checkpoint-memory", "saving a checkpoint", "a checkpoint")
    if draft is None:
        return None
    draft.change(
        "save the state_dict as it is: a copy (deepcopy, .cpu(), a full one on each rank) is in memory beside it",
        where=view.line("checkpoint"),
    )
    return draft.done()


def _aside_memory(view: View, phase: str, cause: str, doing: str, one: str) -> FindingDraft | None:
    """What takes much more memory than training; None if this phase does not."""
    snapshot = view.snapshot
    rise, base = snapshot.aside_bytes.get(phase, (0.0, 0.0))
    if rise < max(MUCH * base, MUCH_BYTES):
        return None
    draft = FindingDraft(
        cause, f"{doing} takes up to {size(rise)} more memory than training", None, "certain"
    )
    source = "allocator" if view.gpu else "memory of the process"
    draft.saw(f"at most {size(base)} in training, {size(base + rise)} in {one}", source)
    free = _free(snapshot, view.gpu)
    if free is not None:
        draft.saw(f"{size(free)} are free now", "allocator" if view.gpu else "host counters")
    return draft


def near_limit(view: View) -> Finding | None:
    """So little free memory that a larger batch, an evaluation or another process can end the run."""
    snapshot = view.snapshot
    headroom, memory = snapshot.headroom, snapshot.memory
    if headroom.free_bytes is None or not headroom.total_bytes or not snapshot.totals.steps or snapshot.final:
        return None
    free, on_gpu = headroom.free_bytes, headroom.kind == "gpu"
    if on_gpu:
        if memory is None:
            return None
        # Memory that the allocator has cached can be reused.
        free += max(memory.reserved_bytes - memory.peak_allocated_bytes, 0)
    share = free / headroom.total_bytes
    if share > NEARLY:
        return None
    title = f"{'GPU' if on_gpu else 'host'} memory is almost full: {size(free)} of {size(headroom.total_bytes)} free"
    draft = FindingDraft("near-limit", title, None, "certain")
    used = f"this run uses {size(headroom.used_bytes)}, other processes {size(headroom.others_bytes)}"
    draft.saw(f"{percent(share)} free; {used}", "allocator" if on_gpu else "host counters")
    draft.add(smaller_batches(view))
    if not on_gpu and view.get("loader.cache"):
        draft.change("do not cache encoded items", "loader.cache=false")
    elif not on_gpu and view.workers > 1:
        fewer = f"loader.workers={view.workers // 2}"
        draft.change("use fewer loader workers: each has its own memory", fewer)
    return draft.done()


def out_of_memory(view: View) -> Finding | None:
    """The run has ended because an allocation failed: what needs less memory, the cheapest first."""
    snapshot, end, memory = view.snapshot, view.snapshot.end, view.snapshot.memory
    if end is None or end.status != "failed" or not _RAN_OUT.search(end.reason):
        return None
    where = "GPU memory" if view.gpu else "memory"
    draft = FindingDraft(
        "out-of-memory", f"{where} ran out after {counted(snapshot.step, 'step')}", None, "certain"
    )
    draft.saw(printable(end.reason), "the end of the run")
    if memory is not None and view.gpu:
        draft.saw(f"at most {size(memory.peak_allocated_bytes)} were in use before", "allocator")
        if memory.growth_bytes:
            whole = memory.allocated_bytes + memory.growth_bytes
            half = f"{size(whole - memory.growth_bytes / 2)} in place of {size(whole)}"
            draft.saw(f"a step with half of the batch needs about {half}, predicted", "allocator")
    if view.is_script:
        draft.change("use smaller batches, and update the parameters after several of them")
    elif (smaller := smaller_batches(view)) is not None:
        draft.add(smaller)
    else:
        draft.change("the micro-batch is already 1: reduce batch.sequence, or use a smaller model")
    if " in optimizer" in end.reason and view.get("optimizer.implementation") in ("auto", "foreach"):
        draft.change("update one parameter after the other", "optimizer.implementation=loop")
    if view.gpu and (view.get("precision.amp") == "off" or (view.is_script and view.precision == "fp32")):
        draft.change("use mixed precision, which rounds differently", "precision.amp=bf16")
    if view.get("memory.budget") is None and not view.get("speed.cuda_graph"):
        text = "compute activations again in backward, which takes up to a third more time"
        if view.is_script and not snapshot.step:  # a trial needs steps that this batch lets finish
            draft.change(f"{text}: call the blocks of the model by torch.utils.checkpoint.checkpoint")
        else:
            draft.change(text, "memory.budget=auto")
    return draft.done()


RULES = (
    leak,
    freed_memory,
    fragmentation,
    worker_memory,
    evaluation_memory,
    checkpoint_memory,
    near_limit,
    out_of_memory,
)


def steady_growth(
    trend: Trend, least_bytes: float = 0, most_bytes: float = GROWN_BYTES
) -> tuple[float, float, float] | None:
    """(bytes per step, noise in bytes, newest value) of the last two thirds of a curve that grows until its end.

    None if there are too few points, or the growth is within the noise, below least_bytes, or below a part of the
    memory in use and most_bytes, levels off or is not steady. Resident memory of a process grows for a while at the
    start; allocated GPU memory does not.
    """
    later = trend[len(trend) // 3 :]
    if len(trend) < LEAST_POINTS or later[-1][0] <= later[0][0]:
        return None
    points = condensed(later, GROUPS)
    line = line_through(points)
    if line is None or line.slope <= 0:
        return None
    slope, noise = line.slope, line.noise
    used, growth = points[-1][1], slope * (points[-1][0] - points[0][0])
    if growth < max(min(GROWN * used, most_bytes), least_bytes) or growth < TIMES_NOISE * noise:
        return None
    if line.rising < RISING:
        return None
    end = points[-max(len(points) // 3, 2) :]
    end_slope = (end[-1][1] - end[0][1]) / (end[-1][0] - end[0][0])
    if end_slope < STEADY * slope:
        return None
    return slope, noise, later[-1][1]


def growth_between_releases(
    trend: Trend, least_bytes: float
) -> tuple[tuple[float, float, float] | None, int]:
    """((as `steady_growth`), steps from one release to the next) of a curve that grows and falls, again and again.

    Something is kept for an epoch, for example. (None, 0) unless at least two rises are steady and alike.
    """
    rises: list[list[tuple[int, float]]] = [[]]
    low = high = 0.0
    for point in trend:
        if not rises[-1]:
            low = high = point[1]
        elif high - low > least_bytes and point[1] < low + RELEASED * (high - low):
            rises.append([])
            low = high = point[1]
        rises[-1].append(point)
        high = max(high, point[1])
    found = [(rise, growth) for rise in rises if (growth := steady_growth(tuple(rise), least_bytes))]
    if len(found) < 2 or len(rises) > 2 * len(found):
        return None, 0
    slopes = sorted(growth[0] for _, growth in found)
    if slopes[-1] > ALIKE * slopes[0]:
        return None, 0
    lengths = [rise[-1][0] - rise[0][0] for rise, _ in found]
    last = found[-1][1]
    return (median(slopes), last[1], last[2]), round(max(lengths))
