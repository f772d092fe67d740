"""Settings that are not in effect, and modes and waits of observed scripts."""

from __future__ import annotations

from ndd_engine.text import counted, percent, printable, span

from .finding import Finding
from .view import (
    BETWEEN,
    COMPUTING,
    CONFIG,
    FLOOR,
    MODEL,
    PROFILER,
    Draft,
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

# Reads of a tensor that are no call of a method by name.
WAITS = {
    "float": "float(tensor)", "int": "int(tensor)", "bool": "bool(tensor), which if and while call,",
    "format": 'f"{tensor}"', "repr": "print(tensor)", "in": "x in tensor", "to": '.to("cpu")',
}  # fmt: skip


def anomaly(view: View) -> Finding | None:
    """A debugging mode of autograd that was left on."""
    functions = view.snapshot.functions
    if not (view.script.get("anomaly") or (functions is not None and functions.anomaly)):
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


SCRIPT_RULES = (anomaly, oversubscribed, waits_for_device)
