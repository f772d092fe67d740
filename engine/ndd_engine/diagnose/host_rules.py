"""CPU and what surrounds the model: threads, other processes, garbage collection, optimizer, logging, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from ndd_engine.record.figures import others_text
from ndd_engine.record.snapshot import LEAST_SAMPLES
from ndd_engine.text import counted, number, percent, printable, span, times

from .code_rules import explain_aside, last_name, most_of_aside
from .data_facts import slower
from .finding import Change, Evidence, Finding
from .needless_rules import explains_optimizer
from .view import (
    BASELINE,
    CLOCK,
    COMPUTING,
    CONFIG,
    FLOOR,
    PROFILER,
    SAMPLES,
    SLOWED,
    Cost,
    FindingDraft,
    View,
    place,
    taken,
)

# Minimum speedup of another thread count before it is proposed.
FASTER = 1.1
# The same for one thread alone: the baseline is short, and other processes may have used a core during it.
FASTER_ALONE = 1.3
# The same for times from the run itself, which are noisier.
FASTER_IN_RUN = 1.35
# Part of what other processes use, from which on it helps to stop one of them.
LARGE = 0.3
# From this share of collections or sleep in the time on, the rest of it bounds the cost of other processes.
COLLECTS = 0.5
# Calls in which a thread needs no core, and waits for nothing that needs one.
SLEEPS = frozenset({"sleep", "urlopen", "request"})
# Maximum share of one collection in the time between two, and the intervals in steps that are proposed.
GC_SHARE = 0.06
GC_STEPS = (50, 100, 200, 500, 1000, 2000)


def one_thread(view: View) -> Finding | None:
    """One thread per core, measured to be slower than one alone."""
    threads, cores = view.threads, view.whole_cores
    if view.gpu or threads is None or threads != cores or threads < 2:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(1)
    if now is None or then is None or now < FASTER_ALONE * then:
        return None
    title = f"{threads} threads are slower than one"
    return _other_count(view, "many-threads", title, now, then, 1)


def oversubscribed(view: View) -> Finding | None:
    """More threads than cores, measured to be slower."""
    threads, cores = view.threads, view.whole_cores
    if view.gpu or threads is None or cores is None or threads <= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None:
        return None
    if now < FASTER * then:
        # The baseline is the fastest of a few runs; compare the steps of the run as well.
        now = view.model.ns / view.micro_steps if view.micro_steps and not view.neighboured else now
        if now < FASTER_IN_RUN * then:
            return None
    title = f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: oversubscribed"
    return _one_per_core(view, "oversubscribed", title, now, then)


def few_threads(view: View) -> Finding | None:
    """Fewer threads than cores, measured to be slower."""
    threads, cores = view.threads, view.whole_cores
    if view.gpu or threads is None or cores is None or threads >= cores:
        return None
    now, then = view.thread_ns(threads), view.thread_ns(cores)
    if now is None or then is None or now < FASTER * then:
        return None
    use = view.snapshot.cores
    if use is not None and use.full:
        return None  # the other cores are busy
    computing = view.cost(*COMPUTING)
    if not computing.clear:
        return None
    title = f"only {threads} thread{'s' if threads > 1 else ''} on {cores} cores"
    return _one_per_core(view, "few-threads", title, now, then, threads / cores)


def neighbour_cores(view: View) -> Finding | None:
    """Other processes use the cores of the run."""
    use = view.snapshot.cores
    if use is None or not use.shared:
        return None
    if not use.neighbours and view.workers:
        return None  # new loader workers may be counted as other processes
    slowed = (view.slowed or 0.0) >= SLOWED
    if not use.full or (view.gpu and not slowed):
        return None
    # While Python collects garbage, one thread computes; while it sleeps, only workers do.
    steps_want, collecting = min(view.threads or 1, use.usable) + view.workers, view.collecting
    asleep = _asleep(view)
    wanted = collecting + (1 - collecting) * steps_want - asleep * min(view.threads or 1, use.usable)
    if not use.lacks(wanted) and not slowed:
        return None  # the run gets all the cores it can use
    # As measured; else the part of the cores that the run wants and does not get. Others take no more than they use.
    together = not view.gpu and (view.threads or 1) > 1 and max(collecting, asleep) < COLLECTS
    bound = min(use.others / max(min(wanted, use.usable), 1.0), 0.9)
    lacking = bound if together else 1 - use.by_run / max(min(wanted, use.usable), use.by_run)
    if collecting >= COLLECTS:
        # At most all of the time besides, and what collecting lacks of its one core.
        gets = (use.by_run - (1 - collecting) * min(steps_want, use.usable)) / collecting
        lacking = 1 - collecting * min(max(gets, 0.0), 1.0)
        bound = min(bound, lacking)
    slowdown = view.slowdown()
    share = min(lacking if slowdown is None else slowdown + view.wait.share * bool(view.workers), bound)
    share = min(share, 1 - asleep)
    draft = FindingDraft(
        "neighbour-cores", others_text(use), view.of_wall(share), "likely" if slowed else "possible"
    )
    others, own = (
        f"other processes use {use.others:.1f} cores",
        f"this run uses {use.by_run:.1f} of {use.usable:g}",
    )
    draft.saw(f"{others}, {own} (mean of {use.samples} samples)", SAMPLES)
    names = {
        pid: f"{printable(name)} (pid {pid}, {cores:.1f} cores)" for pid, name, cores in use.neighbours[:3]
    }
    own_names = [text for pid, text in names.items() if pid in use.stoppable]
    # To stop a process that uses little of what the others use would not help.
    large = [
        names[pid] for pid, _, cores in use.neighbours[:3]
        if pid in use.stoppable and cores >= LARGE * use.others
    ]  # fmt: skip
    rest = [text for pid, text in names.items() if pid not in use.stoppable]
    if own_names:
        draft.saw(f"your own: {', '.join(name.removeprefix('your ') for name in own_names)}", SAMPLES)
    if rest:
        draft.saw(f"not identified as your own: {', '.join(rest)}", SAMPLES)
    draft.add(slower(view))
    if asleep >= FLOOR:
        draft.saw(f"the training sleeps or waits for the network {percent(asleep)} of the time", PROFILER)
    # Several threads wait for the slowest one at the end of every operator: the cost has no upper bound.
    if together:
        text = f"{view.threads} threads synchronise at every operator, so the cost has no upper bound"
        draft.saw(text, CONFIG)
        draft.unbounded()
    if large:
        first = large[0]
        of_run = first.startswith("your run ")
        draft.change(f"pause, stop or move {first}" if of_run else f"stop or move your own process {first}")
    draft.add(_fewer_threads(view, use.usable - use.others))
    if not large:
        draft.change("run on other cores or another machine, or wait until the other processes have ended")
    return draft.done()


def _asleep(view: View) -> float:
    """Share of the time (0..1) in which the thread that trains sleeps: no other process delays it then."""
    asleep = sum(call.share for call in view.calls if last_name(call) in SLEEPS)
    return min(view.in_steps * asleep, 1.0)


def quota(view: View) -> Finding | None:
    """The cgroup throttles the run when its CPU quota is used up."""
    use = view.snapshot.cores
    if use is None or use.throttled is None or use.samples < LEAST_SAMPLES or use.throttled < FLOOR:
        return None
    share = percent(min(use.throttled, 0.9))
    threads, cores = view.threads or 1, view.whole_cores or 1
    title = f"the CPU quota throttles the run {share} of the time"
    draft = FindingDraft("quota", title, view.of_wall(min(use.throttled, 0.9)))
    draft.saw(f"throttled {share} of the time (mean of {use.samples} samples)", "cgroup")
    draft.saw(f"{threads} threads and {view.workers} workers share {use.usable:g} cores", CONFIG)
    if not view.gpu and threads + view.workers > cores and threads > 1:
        fewer = f"run.threads={max(cores - view.workers, 1)}"
        draft.change("use fewer threads, so that the run stays below the quota", fewer)
    draft.change(f"request more than {use.usable:g} cores for the job")
    if (slowdown := view.slowdown()) is not None and (slow := slower(view)) is not None:
        title = f"the CPU quota costs up to {{share}} of each step: it throttles the run {share} of the time"
        draft.widen(slowdown, title, slow.text, slow.source)
    return draft.done()


def collections(view: View) -> Finding | None:
    """Python's garbage collector."""
    totals = view.snapshot.totals
    if totals.gc_ns is None or not totals.wall_ns or not totals.steps:
        return None
    share = view.collecting
    every = view.whole("run.gc_every_steps") or 0
    if share < FLOOR - 0.01 or not totals.gc_count:
        return None
    enough = max(totals.gc_max_ns / (GC_SHARE * totals.wall_ns / totals.steps), 10 * every)
    steps = next((steps for steps in GC_STEPS if steps >= enough), max(GC_STEPS[-1], 10 * every))
    cost = Cost(totals.gc_ns / totals.steps, share, None, share)
    draft = FindingDraft(
        "gc", f"garbage collection pauses take {percent(share)} of the time", cost, "certain"
    )
    taken = f"{totals.gc_count:,} collections took {span(totals.gc_ns)} of {span(totals.wall_ns)}"
    draft.saw(f"{taken}; the longest took {span(totals.gc_max_ns)}", "garbage collector")
    if view.collects:  # a setting cannot change what the code asks for
        file, line, name, _, calls, ns = max(view.collects, key=lambda wait: wait[5])
        where = place(file, line, name)
        draft.saw(f"{where} calls gc.collect() {counted(calls, 'time')} in a step: {span(ns)}", PROFILER)
        draft.change("remove the call of gc.collect(), or make it every few hundred steps only", where=where)
        return draft.done()
    draft.change(f"collect garbage only every {steps:,} steps", f"run.gc_every_steps={steps}")
    draft.change("keep fewer Python objects alive: use tensors or arrays instead of lists and dicts")
    return draft.done()


RULES = (one_thread, oversubscribed, few_threads, neighbour_cores, quota, collections)


def _one_per_core(view: View, cause: str, title: str, now: float, then: float, least: float = 1.0) -> Finding:
    """Finding that one thread per core is faster. least: part of the computing time that may remain at best."""
    return _other_count(view, cause, title, now, then, view.whole_cores or 1, least)


def _other_count(
    view: View, cause: str, title: str, now: float, then: float, count: int, least: float = 1.0
) -> Finding:
    """Finding that `count` threads are faster. now, then: nanoseconds of a micro-batch. least: see above."""
    computing, part = view.cost(*COMPUTING), 1 - min(then / now, least)
    draft = FindingDraft(cause, title, view.part(part * computing.share), "certain")
    threads = f"{view.threads} thread{'' if view.threads == 1 else 's'}"
    text = f"a micro-batch takes {span(now)} with {threads} and {span(then)} with {count}"
    draft.saw(f"{text} ({times(now / then)})", BASELINE)
    each = "use one thread" if count == 1 and count != view.whole_cores else "use one thread per core"
    draft.change(each, f"run.threads={count}")
    return draft.done()


def _fewer_threads(view: View, left: float) -> Change | None:
    """One thread per free core, unless that was measured to be slower than now."""
    count = max(round(left), 1)
    if view.gpu or view.threads is None or count >= view.threads:
        return None
    alone = view.thread_ns(count)
    if alone is not None and view.micro_steps and alone * view.micro_steps > view.model.ns:
        return None
    return Change("use fewer threads and leave a core to the other process", (f"run.threads={count}",))


# Target share of the time for evaluations and for checkpoints.
AIM = 0.05
# Minimum share of an update that is already fused.
MUCH = 0.3
# Below these settings the run logs often.
SHORT_WINDOW_S = 0.1
FEW_STEPS = 5
FEWER_UPDATES = (
    "use a larger effective batch for fewer updates (changes the training; adjust the learning rate)"
)
LESS_HISTORY = "lower history_size: each iteration combines so many earlier gradients (changes the training)"
# Section of the configuration -> (cause, what is done).
ASIDES = {"evaluate": ("evaluation", "evaluate"), "checkpoint": ("checkpoint", "save checkpoints")}


def optimizer(view: View) -> Finding | None:
    """The parameter update, including zeroing the gradients."""
    cost = view.cost("optimizer", "zero_grad")
    if not cost.clear:
        return None
    applied = [item.applied for item in view.snapshot.settings if item.name == "optimizer.implementation"]
    used = (applied[0] if applied else "") or view.get("optimizer.implementation")
    edits = {}
    # PyTorch's fused SGD does not update sharded parameters.
    sharded = (view.whole("parallel.ranks") or 1) > 1 and view.get("parallel.strategy") == "fsdp2"
    if used in ("loop", "foreach") and not (sharded and view.get("optimizer.name") == "sgd"):
        text = "use the fused optimizer (one kernel for all parameters)"
        edits["optimizer.implementation=fused"] = text
    if view.get("optimizer.set_to_none") is False and view.cost("zero_grad").share >= FLOOR / 2:
        edits["optimizer.set_to_none=true"] = "set gradients to None instead of zero"
    if not edits and (cost.share < MUCH or view.crowded):
        return None  # its threads may wait for cores that others use
    if not edits and explains_optimizer(view):
        return None
    title = f"the optimizer (with zero_grad) takes {percent(cost.share)} of each step"
    draft = FindingDraft("optimizer", title, cost, "certain" if used in ("loop", "foreach") else "likely")
    draft.add(taken(cost, "the parameter update takes"))
    if isinstance(used, str):
        draft.saw(f"optimizer.implementation is {used}", CONFIG)
    draft.add(_parameters(view))
    if edits:
        draft.change(" and ".join(edits.values()), *edits)
    draft.change(LESS_HISTORY if view.get("optimizer.name") == "LBFGS" else FEWER_UPDATES)
    return draft.done()


def clip(view: View) -> Finding | None:
    """Clipping the gradient's norm."""
    cost, limit, norm = view.cost("clip"), view.get("clip.max_norm"), view.snapshot.grad_norm
    limited = isinstance(limit, (int, float)) and limit > 0
    # Disabling it changes the training: require a larger share.
    if not cost.clear or cost.share < 2 * FLOOR or not (limited or view.is_script):
        return None
    if view.is_script and norm is None and view.snapshot.loss_scale is not None:
        return None  # the time is that of a gradient scaler's `unscale_`
    draft = FindingDraft("clip", f"gradient clipping takes {percent(cost.share)} of each step", cost)
    draft.add(taken(cost, "clipping takes"))
    if norm:
        told = f", the limit is {limit:g}" if limited else ""
        draft.saw(f"the latest gradient norm is {number(norm)}{told}", "record")
    draft.add(_parameters(view))
    text = "disable clipping (changes the training at steps whose norm is above the limit)"
    draft.change(text, *(["clip.max_norm=0.0"] if limited else []))
    return draft.done()


def logging(view: View) -> Finding | None:
    """Recording or reading the loss at almost every step."""
    # On a GPU, host time costs nothing while it computes, and reading losses is synchronisation: see gpu.sync.
    cost = view.device_cost("other") if view.gpu else view.cost("log", "other")
    # Setting -> (whether it is costly, its usual value).
    often: dict[str, tuple[Callable[[float], bool], str]] = {
        "log.window_s": (lambda seconds: seconds < SHORT_WINDOW_S, "1.0"),
        "log.every_steps": (lambda steps: steps < FEW_STEPS, "10"),
    }
    values = {key: value for key in often if isinstance(value := view.get(key), (int, float))}
    costly = {key: value for key, value in values.items() if often[key][0](value)}
    if not cost.clear or not costly:
        return None
    draft = FindingDraft("logging", f"logging takes {percent(cost.share)} of each step", cost)
    draft.add(taken(cost, "reading losses and writing the record takes"))
    draft.saw(", ".join(f"{key} is {value:g}" for key, value in costly.items()), CONFIG)
    draft.change("log less often", *(f"{key}={often[key][1]}" for key in costly))
    # The recorder's thread shares the interpreter lock with the training thread.
    if (slowdown := view.slowdown()) is not None and (slow := slower(view)) is not None and not view.gpu:
        title = "logging costs up to {share} of each step"
        draft.widen(cost.share + slowdown, title, slow.text, slow.source)
    return draft.done()


def evaluation(view: View) -> Finding | None:
    """Evaluations between the steps."""
    left, done = view.snapshot.left, view.snapshot.totals.evaluations
    return _beside_steps(
        view, "evaluate", done, left.evaluations, left.evaluation_s, _shorter_evaluations(view)
    )


def checkpoint(view: View) -> Finding | None:
    """Checkpoints between the steps."""
    left, done = view.snapshot.left, view.snapshot.totals.checkpoints
    return _beside_steps(view, "checkpoint", done, left.checkpoints, left.checkpoint_s)


STEP_RULES = (optimizer, clip, logging, evaluation, checkpoint)


def _beside_steps(
    view: View, section: str, done: int, to_come: int, each_s: float | None, more: Sequence[Change] = ()
) -> Finding | None:
    """Cost of evaluations or checkpoints. done, to_come: counts; each_s: mean seconds of one; more: other changes."""
    totals, periods = view.snapshot.totals, _periods(view, section)
    if not done or not each_s or not periods or not totals.wall_ns or done + to_come < 2:
        return None
    period_s, measured = min(periods.values()), totals.share(section)
    expected = each_s / (each_s + period_s)
    share = max(expected, measured)
    if share < FLOOR or expected < FLOOR / 2:
        return None
    cause, verb = ASIDES[section]
    title = f"{cause}s take {percent(share)} of the time{most_of_aside(view, section)}"
    draft = FindingDraft(cause, title, view.of_wall(share), "certain")
    draft.saw(f"each takes {span(each_s * 1e9)}, after every {span(period_s * 1e9)} of training", CLOCK)
    draft.saw(f"{done} {cause}s took {percent(measured)} of the time so far", CLOCK)
    explain_aside(view, section, draft)
    sets, aim_s = [], each_s * (1 - AIM) / AIM
    for key, seconds in periods.items():
        if seconds < aim_s:
            value = view.get(f"{section}.{key}") * ceil(aim_s / seconds)
            sets.append(
                f"{section}.{key}={value:.1f}" if key == "every_minutes" else f"{section}.{key}={value}"
            )
    draft.change(f"{verb} less often, to take less than {percent(AIM)} of the time", *sets)
    draft.add(*more)
    return draft.done()


def _periods(view: View, section: str) -> dict[str, float]:
    """Seconds of training between two of them, by setting."""
    step_s, run = view.step_ns * 1e-9, view.snapshot.run
    found: dict[str, float] = {}
    if every := view.whole(f"{section}.every_steps"):
        found["every_steps"] = every * step_s
    if (every := view.whole(f"{section}.every_epochs")) and run is not None and run.steps_per_epoch > 0:
        found["every_epochs"] = every * run.steps_per_epoch * step_s
    minutes = view.get(f"{section}.every_minutes")
    if isinstance(minutes, (int, float)) and minutes > 0:
        found["every_minutes"] = minutes * 60.0
    return {key: seconds for key, seconds in found.items() if seconds > 0}


def _shorter_evaluations(view: View) -> list[Change]:
    """Changes that make an evaluation shorter."""
    changes = []
    marks = reversed(view.snapshot.marks)
    batches = next((item.mark.data.get("batches") for item in marks if item.mark.kind == "evaluation"), None)
    periods, each_s = _periods(view, "evaluate"), view.snapshot.left.evaluation_s
    if isinstance(batches, int) and batches > 1 and periods and each_s:
        count = max(int(batches * AIM * min(periods.values()) / each_s), 1)
        if count < batches:
            text = f"evaluate on {count:,} of {batches:,} batches"
            changes.append(Change(text, (f"evaluate.batches={count}",)))
    return changes


def _parameters(view: View) -> Evidence | None:
    run = view.snapshot.run
    return (
        Evidence(f"the model has {run.parameters:,} parameters", "model")
        if run is not None and run.parameters
        else None
    )
