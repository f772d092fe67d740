"""The processes of a run: what ends them or keeps them from going on, and its ranks.

A run makes no progress, processes die, or more and more files are open. Of several ranks, the rules name stragglers,
exposed communication, and ranks whose speeds vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from ndd_engine.record.event import EXCHANGE, NO_HANGS, SKEW, Ranks
from ndd_engine.record.events import DeathEvent
from ndd_engine.record.figures import death_text
from ndd_engine.record.snapshot import Curve
from ndd_engine.text import number, percent, printable, span

from .finding import MOST_OF, Finding
from .view import MODEL, RANK_CLOCKS, Cost, FindingDraft, View, taken

PROCESSES = "state of the processes"
# Growth of open files: at least so many, on so many points, with this part of the differences upwards; and after how
# many of their distances without another one it counts as ended.
GROWN, LEAST_POINTS, RISING, ENDED = 48, 4, 0.8, 3.0
# From this part of the limit on it is reached: others are opened in the same moment.
REACHED = 0.97
CRASHES = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")
LEFT_OPEN = {
    "shared memory": "tensors that loader workers sent are kept, and each holds descriptors",
    "socket": "network connections stay open",
    "pipe": "pipes stay open, for example those of processes or loaders that are never shut down",
}
# Kind -> what to change.
CLOSE = {
    "shared memory": (
        "copy what is kept (.clone()), or call torch.multiprocessing.set_sharing_strategy('file_system'); "
        "ulimit -n raises the limit"
    ),
    "socket": "close connections, or use one for all steps",
    "pipe": "end processes and loaders that are made in the loop, or make them once",
    "file": "close files (with open(...)), or open them once",
}  # fmt: skip


def hang(view: View) -> Finding | None:
    """No process makes progress, and none computes."""
    stall = view.snapshot.stall
    if stall is None or stall.kind in NO_HANGS:
        return None
    draft = FindingDraft("hang", stall.text, None, "likely" if stall.kind == "waits" else "certain")
    for line in stall.processes:
        draft.saw(line, PROCESSES)
    if stall.advice:
        draft.change(stall.advice, where=stall.where or None)
    return draft.done()


def died(view: View) -> Finding | None:
    """A process that the training process has started was killed, or ended with an error."""
    deaths = view.snapshot.deaths
    if not deaths:
        return None
    draft = FindingDraft("died", death_text(deaths[0]), None, "certain")
    for death in deaths:
        draft.saw(death_text(death), PROCESSES)
    draft.change(_remedy(deaths[0]))
    return draft.done()


def _remedy(death: DeathEvent) -> str:
    if not death.how:
        return "the kernel's log (dmesg) tells whether memory ran out; with num_workers=0 an error shows where it is"
    if death.how == "SIGKILL":
        if death.oom_kills == 0:
            return (
                "a user, a job scheduler or a memory limit outside this control group killed it (see dmesg)"
            )
        return "memory most likely ran out: use fewer workers, smaller batches or less prefetching"
    if death.how == "SIGBUS":
        return "/dev/shm is most likely full: enlarge it (docker run --shm-size), or use fewer workers"
    if death.how in CRASHES:
        workers = " and num_workers=0 show" if death.name.startswith("loader worker") else " shows"
        return f"native code has crashed: python -X faulthandler{workers} where"
    text = "look for os._exit, sys.exit and errors in what it calls"
    return f"{text}; with num_workers=0 they show" if death.name.startswith("loader worker") else text


def open_files(view: View) -> Finding | None:
    """Open descriptors that grow with the steps."""
    snapshot = view.snapshot
    told, points = snapshot.descriptors, snapshot.descriptor_trend
    if snapshot.final and len(points) > 1 and points[-1][1] < points[-2][1]:
        points = points[:-1]  # a process that ends closes its files
    if told is None or not points:
        return None
    at, number_open = points[-1][0], round(points[-1][1])
    full = told.limit is not None and number_open >= REACHED * told.limit
    slope = growth(points, snapshot.step, full)
    if slope is None:
        return None
    kind = max(told.kinds, key=told.kinds.__getitem__) if told.kinds else ""
    rate = f"{number(slope, 2)} a step" if slope >= 1 else f"1 in {number(1 / slope, 2)} steps"
    of_limit = f" of {told.limit:,}" if told.limit is not None else ""
    title = (
        f"open files grow by {rate}: {number_open:,}{of_limit}{' (the limit)' if full else ''} at step {at:,}"
    )
    what = told.path if kind == "file" else LEFT_OPEN.get(kind, "")
    draft = FindingDraft("open-files", f"{title}; {what}" if what else title, None, "certain")
    draft.saw(
        f"{points[0][1]:,.0f} descriptors at step {points[0][0]:,}, {number_open:,} at step {at:,}",
        PROCESSES,
    )
    if told.limit is not None and not full:
        draft.saw(
            f"the limit is reached in about {(told.limit - number_open) / slope:,.0f} steps", "extrapolated"
        )
    if kind:
        share = told.kinds[kind] / sum(told.kinds.values())
        draft.saw(f"{percent(share)} of the newest are of the kind {kind}", "descriptors")
    draft.change(CLOSE.get(kind, CLOSE["file"]), where=told.where or None)
    return draft.done()


def growth(points: Curve, step: int, full: bool = False) -> float | None:
    """Descriptors that are added by a step; None if they do not grow, or do so no more. full: the limit is reached."""
    first, last = points[0], points[-1]
    if len(points) > LEAST_POINTS:  # without the start of the loader workers
        first = points[1]
    rose = last[1] - first[1]
    if rose < GROWN or last[0] <= first[0] or len(points) < (2 if full else LEAST_POINTS):
        return None
    pairs = list(pairwise(points))
    if sum(after[1] > before[1] for before, after in pairs) < RISING * len(pairs):
        return None
    usual = median(after[0] - before[0] for before, after in pairs)
    if not full and step - last[0] > ENDED * max(usual, (last[0] - first[0]) / len(pairs)):
        return None
    return rose / (last[0] - first[0])


RULES = (hang, died, open_files)

# A rank that computes less than this part of its own time waits for a processor.
SERVED = 0.9
# The factor by which buckets and accumulated micro-batches are increased.
MORE = 4
TWICE = 2
COMPUTING = (*MODEL, "clip", "optimizer", "zero_grad")


def straggler(view: View) -> Finding | None:
    """One rank, or those of one host, that the others wait for in every step."""
    ranks = view.snapshot.ranks
    late = ranks.late if ranks is not None else None
    if ranks is None or late is None or late["ceiling"] <= 1:
        return None
    phase = printable(late["phase"])
    who, several = subject(late)
    verb = "hold" if several and not late.get("same_host") else "holds"
    title = f"{who} {verb} up the others: +{milliseconds(late['late_ns'])} a step in {phase}"
    draft = FindingDraft("straggler", title, view.part(1 - 1 / late["ceiling"]))
    rank = f"rank {late['rank']}"
    host = f" on {printable(late['host'])}" if late.get("host") and ranks.newest.hosts > 1 else ""
    where = printable(late["where"]) if late.get("where") else None
    if where is not None:
        draft.saw(
            f"{rank}{host} is mostly at {where} in {phase}",
            "profiled step or stack samples" if view.is_script else "profiled step",
        )
    draft.saw(
        f"{rank}{host} works {milliseconds(late['late_ns'])} a step longer than the median rank "
        f"(+{milliseconds(late['phase_ns'])} in {phase}), since step {late.get('since_step', 0):,}",
        RANK_CLOCKS,
    )
    draft.saw(f"the ranks wait {span(ranks.skew_ns)} of each step for slower ones", RANK_CLOCKS)
    lacking = _lacking(ranks, late)
    if lacking is not None:
        draft.saw(f"{rank} is on a CPU core for {percent(lacking)} of its working time", RANK_CLOCKS)
    _changes(view, draft, late, where, lacking)
    return draft.done()


def subject(late: Mapping[str, Any]) -> tuple[str, bool]:
    """The straggler: "rank 5", "rank 5 and 2 others", or "host node3 (8 ranks)"; and whether that is several."""
    count = int(late.get("count", 1))
    if count > 1 and late.get("same_host"):
        return f"host {printable(late['host'])} ({count:,} ranks)", True
    if count > 1:
        return f"rank {late['rank']} and {count - 1} other{'s' if count > 2 else ''}", True
    return f"rank {late['rank']}", False


def milliseconds(ns: float) -> str:
    """ "7.9 ms"; two digits below 1 ms."""
    return f"{ns * 1e-6:.1f} ms" if ns >= 1e6 else f"{ns * 1e-6:.2f} ms"


def _lacking(ranks: Ranks, late: Mapping[str, Any]) -> float | None:
    """Processor time as a share of the straggler's own time, if it computes and gets too little."""
    newest = ranks.newest
    row = newest.rows_us.get(str(late["rank"]))
    if row is None or "cpu" not in newest.row_names or late["phase"] not in COMPUTING:
        return None
    figures = dict(zip(newest.row_names, row, strict=False))
    cpu, own = newest.columns_us.get("cpu"), newest.columns_us.get("own")
    if cpu is None or own is None:
        return None
    usual = cpu[1] / max(own[1], 1.0)
    share = figures.get("cpu", 0.0) / max(figures.get("own", 0.0), 1.0)
    return share if share < SERVED * min(usual, 1.0) else None


def _changes(
    view: View, draft: FindingDraft, late: Mapping[str, Any], where: str | None, lacking: float | None
) -> None:
    who = subject(late)[0]
    phase = late["phase"]
    if phase == "data_wait":
        draft.change(
            f"look at the data of {who}: its storage, its loader, the length of its items", where=where
        )
        if view.workers and not view.is_script:
            workers = view.workers * TWICE
            draft.change(f"use {workers} loader workers on every rank", f"loader.workers={workers}")
    elif phase == "to_device":
        draft.change(
            f"check how the GPU of {who} is connected (nvidia-smi topo -m), and pin its memory", where=where
        )
    elif phase in COMPUTING:
        if lacking is not None:
            draft.change(
                f"free the processor of {who}: other processes or too many threads use it", where=where
            )
        elif view.gpu:
            draft.change(
                f"compare clocks, power and temperature of the GPU of {who} with the others", where=where
            )
        else:
            draft.change(
                f"compare processor, clocks and other processes of {who} with the others", where=where
            )
        draft.change("give all ranks batches of equal cost, such as equal lengths")
    else:
        draft.change(f"move what only {who} does, such as logging or saving, out of the step", where=where)


def exchange(view: View) -> Finding | None:
    """Exposed communication of gradients and parameters."""
    ranks, cost = view.snapshot.ranks, view.cost(EXCHANGE)
    if ranks is None or not cost.clear:
        return None
    sharded = ranks.newest.strategy == "fsdp2"
    what = "gradients and parameters" if sharded else "gradients"
    if ranks.newest.launched is not None:
        return _exchange_elsewhere(cost)
    title = f"exchanging {what} takes {percent(cost.share)} of each step"
    draft = FindingDraft("exchange", title, cost)
    draft.add(taken(cost, "exposed communication takes", RANK_CLOCKS))
    if ranks.hidden_ns is not None:
        draft.saw(f"another {span(ranks.hidden_ns)} is hidden by computation", RANK_CLOCKS)
    if view.is_script:
        draft.change("exchange only in the last micro-batch of a step (no_sync), and accumulate more of them")
        if not sharded:
            draft.change("use larger buckets (bucket_cap_mb), or a communication hook that halves their size")
        return draft.done()
    if sharded:
        _sharded_changes(view, draft)
    else:
        _replicated_changes(view, draft)
    accumulation = view.whole("batch.accumulation")
    if accumulation:
        draft.change(
            f"accumulate {accumulation * TWICE} micro-batches per exchange (a larger effective batch changes the "
            "training; adjust the learning rate)"
        )
    return draft.done()


def _exchange_elsewhere(cost: Cost) -> Finding | None:
    """Only some of the ranks are observed: exchange cannot be told from waiting for the others."""
    title = f"exchange and waiting for ranks of other hosts take {percent(cost.share)} of each step"
    draft = FindingDraft("exchange", title, cost)
    draft.add(taken(cost, "all ranks of this host wait for", RANK_CLOCKS))
    draft.change("compare with the work of the ranks on the other hosts: start ndd-console run there as well")
    return draft.done()


def _sharded_changes(view: View, draft: FindingDraft) -> None:
    if view.get("parallel.reshard") is True:
        text = "keep parameters after forward instead of gathering them again (uses more memory)"
        draft.change(text, "parallel.reshard=false")
    if view.get("parallel.reduce_dtype") == "fp32":
        draft.change("reduce gradients in bf16 (rounds them)", "parallel.reduce_dtype=bf16")
    if view.get("parallel.param_dtype") == "fp32":
        draft.change("gather parameters in bf16 (layers compute in it)", "parallel.param_dtype=bf16")


def _replicated_changes(view: View, draft: FindingDraft) -> None:
    bucket = view.get("parallel.bucket_mb")
    if isinstance(bucket, (int, float)) and bucket > 0:
        larger = f"parallel.bucket_mb={bucket * MORE:g}"
        draft.change(f"use larger buckets of {bucket * MORE:g} MiB, for fewer exchanges", larger)
    if view.get("parallel.compress") == "off":
        half = "bf16" if view.gpu else "fp16"  # gloo does not compress to bf16
        draft.change(f"exchange gradients in {half} (rounds them)", f"parallel.compress={half}")


def skew(view: View) -> Finding | None:
    """Ranks that wait for each other, each time for a different one."""
    ranks, cost = view.snapshot.ranks, view.cost(SKEW)
    if ranks is None or ranks.late is not None or not cost.clear:
        return None
    if ranks.alternating_ns < MOST_OF * ranks.skew_ns:
        return None  # one rank is the slowest, but not a straggler
    title = f"ranks wait for each other for {percent(cost.share)} of each step, each time for a different one"
    draft = FindingDraft("skew", title, cost)
    draft.add(taken(cost, "waiting for slower ranks takes", RANK_CLOCKS))
    apart = {name: ns - ranks.phases[name] for name, (ns, _) in ranks.longest.items() if name in ranks.phases}
    phase = max(apart, key=apart.__getitem__, default="")
    if apart.get(phase, 0.0) < MOST_OF * ranks.skew_ns:
        phase = ""  # within a window all ranks take their turns
    if phase:
        draft.saw(
            f"the ranks differ most in {printable(phase)}: {span(ranks.phases[phase])} on average, "
            f"{span(ranks.longest[phase][0])} on the slowest",
            RANK_CLOCKS,
        )
    if phase == "data_wait":
        draft.change("load further ahead, so that a slow batch is ready in time")
    draft.change("give all ranks batches of equal cost in each step, such as by sorting items by length")
    draft.change("accumulate micro-batches: their times even out before the ranks meet")
    return draft.done()


RANK_RULES = (straggler, exchange, skew)
