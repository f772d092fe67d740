"""What ends a run or keeps it from going on: no progress, processes that died, and more and more open files."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from ndd_engine.record.events import DeathEvent
from ndd_engine.record.figures import death_text
from ndd_engine.record.process_events import NO_HANGS
from ndd_engine.record.snapshot import Curve
from ndd_engine.text import percent

from .finding import Finding
from .view import Draft, View

PROCESSES = "state of the processes"
# Growth of open files: at least so many, on so many points, with this part of the differences upwards; and after how
# many of their distances without another one it counts as ended.
GROWN, LEAST_POINTS, RISING, ENDED = 48, 4, 0.8, 3.0
# From this part of the limit on it is reached: others are opened in the same moment.
REACHED = 0.97
CRASHES = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")
KEPT = {
    "shared memory": "tensors that loader workers sent are kept, and each holds descriptors",
    "socket": "network connections stay open",
    "pipe": "pipes stay open, as of processes or loaders that are made and not ended",
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
    draft = Draft("hang", stall.text, None, "likely" if stall.kind == "waits" else "certain")
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
    draft = Draft("died", death_text(deaths[0]), None, "certain")
    for death in deaths:
        draft.saw(death_text(death), PROCESSES)
    draft.change(_remedy(deaths[0]))
    return draft.done()


def _remedy(death: DeathEvent) -> str:
    if not death.how:
        return "the kernel's log (dmesg) tells whether memory ran out; with num_workers=0 an error shows where it is"
    if death.how == "SIGKILL":
        if death.oom_kills == 0:
            return "somebody, a job scheduler or a limit of memory outside of this control group has killed it (dmesg)"
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
    if told is None or not points:
        return None
    full = told.limit is not None and told.open >= REACHED * told.limit
    slope = growth(points, snapshot.step, full)
    if slope is None:
        return None
    kind = max(told.kinds, key=told.kinds.__getitem__) if told.kinds else ""
    rate = f"{slope:.2g} a step" if slope >= 1 else f"1 in {1 / slope:.2g} steps"
    of_limit = f" of {told.limit:,}" if told.limit is not None else ""
    title = f"open files grow by {rate}: {told.open:,}{of_limit}{' (the limit)' if full else ''} at step {told.step:,}"
    what = told.path if kind == "file" else KEPT.get(kind, "")
    draft = Draft("open-files", f"{title}; {what}" if what else title, None, "certain")
    draft.saw(
        f"{points[0][1]:,.0f} descriptors at step {points[0][0]:,}, {told.open:,} at step {told.step:,}",
        PROCESSES,
    )
    if told.limit is not None and not full:
        draft.saw(
            f"the limit is reached in about {(told.limit - told.open) / slope:,.0f} steps", "extrapolated"
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
