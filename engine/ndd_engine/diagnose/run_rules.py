"""Settings that are not in effect, and functions of the user's own code."""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.text import counted, percent, printable, span

from . import data_rules
from .finding import Finding
from .view import (
    BETWEEN,
    CLOCK,
    COMPUTING,
    CONFIG,
    FLOOR,
    MODEL,
    PROFILER,
    Draft,
    SlowFunction,
    View,
    place,
    taken,
)


def no_effect(view: View) -> Finding | None:
    """Requested settings that are not in effect."""
    failed = [setting for setting in view.snapshot.settings if setting.in_effect is False]
    if not failed:
        return None
    names = ", ".join(printable(setting.name) for setting in failed)
    title = f"setting{'' if len(failed) == 1 else 's'} not in effect: {names}"
    draft = Draft("no-effect", title, None, "certain")
    for setting in failed:
        text = f"{setting.name}: requested {setting.requested}, applied {setting.applied}"
        draft.saw(printable(text + (f" ({setting.verified})" if setting.verified else "")), "verified")
    return draft.done()


RULES = (no_effect,)

# Phases of our own runs besides the model and the loader, for which other rules name the function.
AROUND = ("to_device", "clip", "optimizer", "zero_grad", "log", "other")
# Reads of a tensor that are no call of a method by name.
WAITS = {
    "float": "float(tensor)", "int": "int(tensor)", "bool": "bool(tensor), which if and while call,",
    "format": 'f"{tensor}"', "to": '.to("cpu")',
}  # fmt: skip
# Minimum part of a wait for data that a function must take to be its cause.
MOST_OF = 0.5


def slow_function(view: View) -> Finding | None:
    """A function of the user that takes much of a step by itself, outside torch."""
    found = _function_of_script(view) if view.is_script else _function_around(view)
    if found is None or found.share < 2 * FLOOR:
        return None
    title = f"{found.subject} takes {percent(found.share)} of each step"
    draft = Draft("slow-function", title, view.part(found.share))
    draft.saw(f"{counted(found.calls, 'call')} in one step take {span(found.ns)} outside torch", PROFILER)
    draft.saw(f"a step takes {span(view.step_ns)}", CLOCK)
    draft.change(
        "do its work once before training, cache its results, or use tensor operations instead of Python loops",
        where=found.where,
    )
    return draft.done()


def _function_of_script(view: View) -> SlowFunction | None:
    found = view.slowest_function()
    if found is None or (data_rules.made_by(view, found) and view.wait.share >= 2 * FLOOR):
        return None  # `data_wait` names it
    return replace(found, share=min(found.share, view.exposed(found.phase)))


def _function_around(view: View) -> SlowFunction | None:
    """In a run of our own with the user's own code: besides the model and the loader, such as a callback."""
    found = view.slowest_function(*AROUND)
    if found is None or ":" not in str(view.get("workload.name")):
        return None
    return replace(found, share=min(found.share, view.exposed(found.phase)))


def aside(view: View) -> Finding | None:
    """Checkpoints or evaluations of the script, whose number and interval are its own."""
    if not view.is_script:
        return None
    totals = view.snapshot.totals
    if not totals.wall_ns:
        return None
    name = max(("checkpoint", "evaluate"), key=lambda phase: totals.phases.get(phase, 0))
    spent = totals.phases.get(name, 0)
    share = spent / totals.wall_ns
    if share < 2 * FLOOR:
        return None
    what = "saving checkpoints" if name == "checkpoint" else "evaluating"
    cause = "checkpoint" if name == "checkpoint" else "evaluation"
    draft = Draft(cause, f"{what} takes {percent(share)} of the time", view.part(share))
    draft.saw(f"{span(spent)} of {span(totals.wall_ns)}", CLOCK)
    draft.change("save less often" if name == "checkpoint" else "evaluate less often, or on fewer batches")
    return draft.done()


def outside(view: View) -> Finding | None:
    """Time outside all phases that no function of the script takes by itself: torch, on small tensors or in a log."""
    cost = view.cost("other")
    slow = view.slowest_function()
    totals = view.snapshot.totals
    collecting = (totals.gc_ns or 0) / totals.wall_ns if totals.wall_ns else 0.0
    if not view.is_script or not cost.clear or cost.share - collecting < 2 * FLOOR:
        return None
    if slow is not None and slow.share >= 2 * FLOOR and slow.ns >= MOST_OF * cost.ns:
        return None  # `slow_function` names it
    if view.gpu and waited_ns(view) >= MOST_OF * view.phases["other"].host_ns:
        return None  # the host waits there: `waits_for_device` or a capture says what that costs
    found = view.where("other")
    line = found.line if found is not None and found.own else None
    title = f"code outside the model takes {percent(cost.share)} of each step"
    draft = Draft("user-code", title, cost)
    draft.add(taken(cost, "what is neither data, model nor optimizer takes"))
    if found is not None and line is not None:
        draft.add(found.seen)
    draft.change("do it every few steps only, or on all tensors at once instead of one by one", where=line)
    return draft.done()


def anomaly(view: View) -> Finding | None:
    """A debugging mode of autograd that was left on."""
    script = view.config.get("script")
    if not isinstance(script, dict) or not script.get("anomaly"):
        return None
    cost = view.cost(*MODEL)
    draft = Draft("anomaly", "anomaly detection of autograd is on", cost, "certain")
    draft.saw("torch.is_anomaly_enabled() is true", CONFIG)
    draft.saw(
        "every operator records a traceback, and every gradient is checked for NaN", "PyTorch documentation"
    )
    draft.unbounded()
    draft.change("remove torch.autograd.set_detect_anomaly(True), which is for debugging")
    return draft.done()


def oversubscribed(view: View) -> Finding | None:
    """More threads than cores. Without a measurement before training, a trial shows what it costs."""
    threads, cores = view.threads, view.whole_cores
    if not view.is_script or view.gpu or threads is None or cores is None or threads <= cores:
        return None
    computing = view.cost(*COMPUTING)
    if not computing.clear:
        return None
    part = view.part(computing.share * (1 - cores / threads))
    title = f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: oversubscribed"
    draft = Draft("oversubscribed", title, part)
    draft.saw(f"torch.get_num_threads() is {threads}", CONFIG)
    draft.add(taken(computing, "computing takes"))
    draft.unbounded()
    draft.change("use one thread per core", f"run.threads={cores}")
    return draft.done()


def waited_ns(view: View) -> float:
    """Nanoseconds of the profiled step in calls that wait for the GPU."""
    return sum(view.waits.values())


def _lost_in_waits(view: View, wall_ns: int) -> float:
    """Share of a step for which the GPU waits, at most, because the host has waited for it."""
    if not view.clocked:
        return min(waited_ns(view) / wall_ns, 1.0 if view.idle is None else view.idle)
    inside = {phase: ns / wall_ns for phase, ns in view.waits.items() if phase in MODEL}
    elsewhere = waited_ns(view) / wall_ns - sum(inside.values())
    # After such a wait, the GPU has nothing to do until the host launches something again.
    lost = min(elsewhere, view.cost(*BETWEEN).share)
    return min(lost + sum(min(share, view.exposed(phase)) for phase, share in inside.items()), 1.0)


def waits_for_device(view: View) -> Finding | None:
    """Calls that wait for the GPU in every step. Only where nothing else was measured: a capture shows idle time."""
    functions, kernels = view.snapshot.functions, view.snapshot.kernels
    if (
        not view.is_script
        or not view.gpu
        or functions is None
        or not view.device_waits
        or kernels is not None
    ):
        return None
    share = _lost_in_waits(view, max(functions.wall_ns, 1))
    if share < 2 * FLOOR:
        return None
    file, line, name, method, calls, _ = max(view.device_waits, key=lambda wait: wait[5])
    where = place(file, line, name)
    draft = Draft("sync", f"{where} waits for the GPU in every step", view.part(share), "possible")
    call = WAITS.get(method, f".{method}()")
    draft.saw(f"{call} is called {counted(calls, 'time')} in a step", PROFILER)
    draft.saw(f"such calls take {span(waited_ns(view))}; the GPU may compute meanwhile", PROFILER)
    if view.clocked:
        draft.add(taken(view.cost(*BETWEEN), "between the steps the GPU waits for"))
    elif view.idle is not None:
        draft.saw(f"the GPU is idle {percent(view.idle)} of the time", "NVML")
    draft.unbounded()
    draft.change(f"call {call} every few steps only, or once for several values", where=where)
    return draft.done()


SCRIPT_RULES = (slow_function, outside, anomaly, oversubscribed, waits_for_device, aside)
