"""The user's own code: its functions, and settings and modes that are not in effect.

Functions are those of a step, an evaluation or a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.record.events import FunctionsEvent
from ndd_engine.record.figures import obeyed
from ndd_engine.text import counted, percent, printable, span
from ndd_watch.called import logs

from . import data_facts, data_rules
from .finding import MOST_OF, Finding
from .view import (
    BETWEEN,
    CLOCK,
    COMPUTING,
    CONFIG,
    FLOOR,
    MODEL,
    PROFILER,
    FindingDraft,
    LibraryCall,
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
    draft = FindingDraft("no-effect", title, None, "certain")
    for setting in failed:
        text = f"{setting.name}: requested {setting.requested}, applied {setting.applied}"
        draft.saw(printable(text + (f" ({setting.verified})" if setting.verified else "")), "verified")
    return draft.done()


EFFECT_RULES = (no_effect,)

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
    draft = FindingDraft("anomaly", "anomaly detection of autograd is on", cost, "certain")
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
    draft = FindingDraft("oversubscribed", title, part)
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
    draft = FindingDraft("sync", f"{where} waits for the GPU in every step", view.part(share), "possible")
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


# Phases of our own runs besides the model and the loader, for which other rules name the function.
AROUND = ("to_device", "clip", "optimizer", "zero_grad", "log", "other")
# Parts of an evaluation below this are not named, and how many are.
LEAST_INSIDE, MOST_INSIDE = 0.1, 3
# Functions that wait for something else: the fault is not in them, but in what they wait for.
WAITING = frozenset({
    "get", "recv", "recv_bytes", "acquire", "wait", "select", "poll", "sleep", "join", "result", "accept", "next",
    "__next__", "synchronize", "urlopen", "request",
})  # fmt: skip
# Least part of a step that is told although nothing shows what takes it.
UNNAMED = 0.2
# Least part of the time of a function that its own code and known calls take: the rest may be another phase within it.
LEAST_SEEN = 0.5
# Of a generator of the user: they take what it reads, which is waiting for data, and what its function does.
_READS = frozenset({"next", "__next__"})
# What a loss is made of: each step needs it.
_OF_LOSS = frozenset({"log_prob", "entropy", "kl_divergence", "rsample"})
# Of an evaluation: they may take what a generator of the user does, as in sum(loss(batch) for batch in loader).
_DRIVES = _READS | {"sum", "min", "max", "list", "tuple", "set", "all", "any"}
# What else a Trainer of transformers does with the outputs of all batches of an evaluation.
_ACCUMULATES = frozenset({
    "nested_concat", "torch_pad_and_concatenate", "numpy_pad_and_concatenate", "nested_numpify", "nested_detach",
    "EvalLoopContainer.add", "EvalLoopContainer.to_cpu_and_numpy",
})  # fmt: skip
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "vstack", "hstack", "append"})
# Libraries and functions of torch that run beside the model -> what helps; "" where nothing does.
_BESIDE = {
    "GradScaler": "use bfloat16, which needs no gradient scaler, or none where the model is not trained in float16",
    "AveragedModel": "update the average of the parameters every few steps only",
    "LRScheduler": "step the scheduler once per epoch, if its schedule allows that",
    "clip_grad": "pass foreach=True to the clipping function",
}
# Libraries of environments, and what is in the names of classes that are some.
_ENVIRONMENTS = frozenset(
    {"gym", "gymnasium", "pettingzoo", "dm_control", "dm_env", "stable_baselines3", "envpool"}
)
_WORLDS = ("env", "game", "world", "simulat", "grid", "maze", "cartpole", "bandit", "market", "arena")
ENVIRONMENT = (
    "step several environments at once, in processes of their own (gymnasium.vector.AsyncVectorEnv), or make a step "
    "cheaper: the training needs each of them"
)
# Python's profiler sees no operator of tensors, so that its time is that of the function.
FORWARD = (
    "capture a few steps (key k) to see which line takes it: a loop of Python over items, or an operation on a large "
    "tensor, such as a product with a dense matrix of mostly zeros"
)
# A rollout of reinforcement learning needs the newest weights: it cannot run while the steps train.
RARE = (
    "see what the script does between groups of steps: do it for many items at once, as with several environments in a "
    "rollout, or more rarely, as with samples and logs"
)
# Of a function whose time is part of `other` although it makes the batches.
AHEAD = "make batches ahead of the steps that train on them: in a DataLoader with workers, or in a thread"
RARELY = "do it every few steps only, if the training does not need it in each"
_LOG_LESS = {
    "lightning": "call self.log every few steps only, as with if batch_idx % 50 == 0; "
    "enable_progress_bar=False or a larger refresh_rate for the progress bar",
    "transformers": "log every n steps: TrainingArguments(logging_steps=50, disable_tqdm=True)",
    "tqdm": "update the progress bar every few steps only: mininterval, miniters",
    "print": "print every few steps only",
    "": "log every few steps only, as means over these",
}
_LOG_LESS["pytorch_lightning"] = _LOG_LESS["lightning"]


def slow_function(view: View) -> Finding | None:
    """A function of the user that takes much of a step by itself, outside torch and what it logs."""
    found = _function_of_script(view) if view.is_script else _function_around(view)
    if found is None or found.share < 2 * FLOOR:
        return None
    inner = next(
        (call for call in view.calls if data_rules.called_by(call, found) and call.library != "torch"), None
    )
    if inner is not None and inner.ns < MOST_OF * found.ns:
        inner = None
    does, waits = "takes", inner is not None and last_name(inner) in WAITING
    if inner is not None:
        does = f"{'waits in' if waits else 'calls'} {inner.what}, which takes"
    draft = FindingDraft(
        "slow-function", f"{found.subject} {does} {percent(found.share)} of each step", view.part(found.share)
    )
    own = (
        "besides functions of torch, operators such as @ included"
        if found.phase == "forward"
        else "outside torch"
    )
    draft.saw(f"{counted(found.calls, 'call')} in one step take {span(found.ns)} {own}", PROFILER)
    if inner is not None:
        draft.saw(
            f"{counted(inner.calls, 'call')} of {inner.what} take {span(inner.ns)} ({inner.where})", PROFILER
        )
    draft.saw(f"a step takes {span(view.step_ns)}", CLOCK)
    if _environment(found.name) or (inner is not None and _environment(inner.function, inner.library)):
        text = ENVIRONMENT
    elif waits:
        text = "prepare what it waits for ahead of time, in another thread or process"
    elif _makes_batches(view, found):
        text = AHEAD
    elif inner is not None and inner.library:
        text = (
            f"call {inner.what} less often: once for all items, or before training, or keep what it returns"
        )
    elif found.phase == "forward":
        text = FORWARD
    else:
        text = "do its work once before training, cache its results, or use tensor operations instead of Python loops"
    draft.change(text, where=inner.where if inner is not None else found.where)
    return draft.done()


def _makes_batches(view: View, slow: SlowFunction) -> bool:
    """Whether a function, or the one that calls it, is known to make the batches, and was not timed as that."""
    names = {name.rpartition(".")[2] for name in (slow.name, slow.caller)}
    told = (timed.mark.data for timed in view.snapshot.marks)
    return slow.phase == "other" and any(
        data.get("timed") is False and data.get("function") in names for data in told
    )


def _environment(function: str, library: str = "") -> bool:
    """Whether a function is a step of an environment of reinforcement learning, without which nothing is trained."""
    owner, _, last = function.partition(" ")[0].rpartition(".")
    if last not in ("step", "reset"):
        return False
    known = library.partition(".")[0] in _ENVIRONMENTS
    return known or any(word in owner.lower() for word in _WORLDS)


def last_name(call: LibraryCall) -> str:
    """The name of the called function without its class or module."""
    return call.function.partition(" ")[0].rpartition(".")[2]


def _without_logging(view: View, *phases: str) -> SlowFunction | None:
    """The slowest function without what it calls to log, and without those that do nothing else."""
    found = []
    for item in view.functions:
        if logs(item.name, "") or (phases and item.phase and item.phase not in phases):
            continue
        logged = sum(
            call.ns
            for call in view.calls
            if call.logs and call.library != "torch" and data_rules.called_by(call, item)
        )
        ns = max(item.ns - logged, 0.0)
        found.append(replace(item, ns=ns, share=ns / view.step_ns))
    return max(found, key=lambda item: item.ns, default=None)


def _function_of_script(view: View) -> SlowFunction | None:
    found = _without_logging(view)
    if found is None or (data_rules.made_by(view, found) and view.wait.share >= 2 * FLOOR):
        return None  # `data_wait` names it
    share = min(found.share, view.exposed(found.phase))
    if found.phase in view.phases:  # of a usual step
        share = min(share, view.cost(found.phase).share)
    return replace(found, share=share, ns=min(found.ns, share * view.step_ns))


def _function_around(view: View) -> SlowFunction | None:
    """In a run of our own with the user's own code: besides the model and the loader, such as a callback."""
    found = _without_logging(view, *AROUND)
    if found is None or ":" not in str(view.get("workload.name")):
        return None
    return replace(found, share=min(found.share, view.exposed(found.phase)))


def _logged(view: View) -> list[LibraryCall]:
    """What records values in a step, or draws a progress bar: calls of libraries, and functions of the user.

    Beside other programs, only what is called several times: a single call of a profiled step may have waited for a
    core.
    """
    found = [call for call in view.calls if call.logs]
    known = {(call.file, call.name) for call in found}
    own = (item for item in view.functions if logs(item.name, "") and (item.file, item.name) not in known)
    found += [
        LibraryCall(one.file, one.line, one.name, one.name, "", one.calls, one.ns, one.share, one.phase)
        for one in own
    ]
    found = [call for call in found if call.calls > 1 or not view.disturbed]
    return sorted(found, key=lambda call: -call.ns)


def logging_calls(view: View) -> Finding | None:
    """Values are logged, printed or shown in a progress bar at each step."""
    found = _logged(view)
    share = min(sum(min(call.share, view.exposed(call.phase)) for call in found), 1.0)
    if not found or not (view.is_script or ":" in str(view.get("workload.name"))):
        return None
    first = found[0]
    # One call in each step is what most trainings do.
    if share < (FLOOR if sum(call.calls for call in found) > 1 else 3 * FLOOR):
        return None
    often = f" is called {counted(first.calls, 'time')} in it" if first.calls > 1 else ""
    title = f"logging takes {percent(share)} of each step: {first.what}{often} ({first.where})"
    draft = FindingDraft("logging", title, view.part(share))
    for call in found[:MOST_INSIDE]:
        times = counted(call.calls, "time")
        draft.saw(f"{call.what} is called {times} in a step, from {call.where}: {span(call.ns)}", PROFILER)
    draft.saw(f"a step takes {span(view.step_ns)}", CLOCK)
    advice = _LOG_LESS.get(first.library or first.function, _LOG_LESS[""])
    draft.change(advice, where=first.where)
    return draft.done()


def own_saves(view: View) -> Finding | None:
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
    title = f"{what} takes {percent(share)} of the time{most_of_aside(view, name)}"
    draft = FindingDraft(cause, title, view.of_wall(share))
    draft.saw(f"{span(spent)} of {span(totals.wall_ns)}", CLOCK)
    explain_aside(view, name, draft)
    draft.change("save less often" if name == "checkpoint" else "evaluate less often, or on fewer batches")
    return draft.done()


def _rest(view: View, phase: str) -> list[LibraryCall]:
    """What is neither the model nor the data, longest first."""
    drives = (call for call in view.called_in(phase) if call.library or call.function not in _DRIVES)
    return [call for call in drives if call.phase not in (*MODEL, "data_wait")]


def _beside_model(view: View, phase: str) -> LibraryCall | None:
    """What takes most of a profiled evaluation or checkpoint, if that is neither the model nor the data."""
    rest = _rest(view, phase)
    return rest[0] if rest and rest[0].share >= 2 * LEAST_INSIDE else None


def most_of_aside(view: View, phase: str) -> str:
    """For a title: ", 79 % of it in torch.cat (train.py:12 in evaluate)"; "" if nothing takes much."""
    top = _beside_model(view, phase)
    if top is None:
        return ""
    return (
        f", {percent(top.share)} of it in {top.what} ({top.where})"
        if top.function
        else f", {percent(top.share)} of it in {top.where}"
    )


def explain_aside(view: View, phase: str, draft: FindingDraft) -> None:
    """Add where the time of evaluations or checkpoints goes, by function, and what helps."""
    found = view.called_in(phase)
    one = "a profiled checkpoint" if phase == "checkpoint" else "a profiled evaluation"
    model = sum(call.share for call in found if call.phase in MODEL)
    data = sum(call.share for call in found if call.phase == "data_wait")
    rest = [call for call in _rest(view, phase) if call.share >= LEAST_INSIDE]
    parts = [
        (call.share, f"{call.what if call.function else call.where} {percent(call.share)}") for call in rest
    ]
    parts += [
        (share, f"{name} {percent(share)}")
        for name, share in (("the model", model), ("loading data", data))
        if share >= LEAST_INSIDE
    ]
    if not parts:
        return
    draft.saw(
        f"of {one}: {', '.join(text for _, text in sorted(parts, reverse=True)[:MOST_INSIDE])}",
        PROFILER_ASIDE,
    )
    top = _beside_model(view, phase)
    if top is not None:
        draft.change(_help_for(top, phase), where=top.where)
    elif data >= MOST_OF:
        draft.change("load the data of the evaluation ahead: num_workers of its DataLoader, or cached items")
    elif model >= MOST_OF:
        larger = "larger batches in the evaluation, which keeps no gradients, and "
        draft.change(f"use {larger if data_facts.has_loader(view) else ''}torch.inference_mode()")


# The source of evidence from a profiled evaluation or checkpoint.
PROFILER_ASIDE = "Python profiler"


def _help_for(call: LibraryCall, phase: str) -> str:
    if phase == "checkpoint":
        return "save only what a resumed run needs, or from another thread"
    name = call.function.partition(" ")[0]
    if call.library == "transformers" and name in _ACCUMULATES:
        return (
            "the Trainer keeps the outputs of all batches: return only what the metric needs, with "
            "preprocess_logits_for_metrics"
        )
    if call.logs:
        return "log once for the whole evaluation"
    if last_name(call) in _JOINS:
        return "keep sums, or what the metric needs, instead of all outputs; join them once, after the last batch"
    if last_name(call) in ("item", "tolist", "cpu", "numpy"):
        return "read values once, after the last batch"
    return "do this once for the whole evaluation, or with tensor operations"


# What torch.compile has compiled, and torch.autograd.grad.
_MODEL = ("_fn", "compile_wrapper", "grad")


def _of_model(call: LibraryCall) -> bool:
    """Whether it is the model, although no module is called there: a compiled function, or derivatives for a loss."""
    return call.phase == "other" and call.library == "torch" and call.function in _MODEL


def outside(view: View) -> Finding | None:
    """Time outside all phases that no function of the script takes by itself: torch on small tensors, a library."""
    cost = view.cost("other")
    slow = _without_logging(view)
    if not view.is_script or not cost.clear:
        return None
    if model := sum(call.share for call in view.calls if _of_model(call)):
        cost = view.part(max(cost.share - model, 0.0))
    # Where most steps need little of it, the profiled one does not tell what takes it.
    usual_ns = view.phases["other"].p50_ns
    rare = usual_ns is not None and usual_ns * view.stretched("other") < data_facts.UNEVEN * cost.ns
    totals = view.snapshot.totals
    if rare and totals.recompile_ns:  # `recompile` names that
        cost = view.part(max(cost.share - totals.recompile_ns / totals.wall_ns, 0.0))
    if cost.share - view.collecting < 2 * FLOOR:
        return None
    # Beside other programs, any phase takes long now and then.
    beside = view.neighboured or view.disturbed
    shown_ns = min(cost.ns, (usual_ns or cost.ns) * view.stretched("other")) if beside else cost.ns
    if slow is not None and slow.share >= 2 * FLOOR and slow.ns >= MOST_OF * shown_ns:
        return None  # `slow_function` names it
    if sum(call.ns for call in _logged(view)) >= MOST_OF * cost.ns:
        return None  # `logging_calls` does
    if view.gpu and waited_ns(view) >= MOST_OF * view.phases["other"].host_ns:
        return None  # the host waits there: `waits_for_device` or a capture says what that costs
    called = [
        call
        for call in view.calls
        if call.phase == "other" and not (call.logs or _of_model(call)) and last_name(call) not in _READS
    ]
    found = view.where("other")
    line = found.line if found is not None and found.own else None
    title = f"code outside the model takes {percent(cost.share)} of each step"
    waited = rare and beside
    if rare:
        called = [call for call in called if call.ns >= MOST_OF * cost.ns and not waited]
    named = bool(called) and called[0].share >= FLOOR
    environment = named and _environment(called[0].function, called[0].library)
    # A loss that no module computes, a few small tensors: nothing that could be done is known.
    unsure = line is None or waited
    if not named and unsure and cost.share < UNNAMED:
        return None
    whole = None if rare or (named and called[0].ns >= MOST_OF * cost.ns) else _contains(view)
    if whole is not None:
        title += f", most of it in {whole[1]}"
    elif named:
        title += f", {percent(called[0].share)} in {called[0].what} ({called[0].where})"
    draft = FindingDraft("user-code", title, cost)
    draft.add(taken(cost, "what is neither data, model nor optimizer takes"))
    if rare:
        draft.saw(
            f"most steps take {span(usual_ns or 0)} of it: it comes in bursts, before or after some steps",
            CLOCK,
        )
    for call in called[: MOST_INSIDE * named]:
        draft.saw(f"{call.what} takes {span(call.ns)} of a step, called at {call.where}", PROFILER)
    if found is not None and line is not None:
        draft.add(found.seen)
    known = next((text for name, text in _BESIDE.items() if named and name in called[0].function), None)
    if whole is not None:
        draft.change(ENVIRONMENT if _environment(whole[0]) else RARELY, where=whole[1])
    elif known is not None:
        draft.change(known, where=called[0].where)
    elif rare and not named:
        draft.change(RARE, where=line)
    elif named and (
        not _of_step(view, called[0]) or (called[0].calls == 1 and last_name(called[0]) in _OF_LOSS)
    ):
        pass  # nothing of it is the user's, or can be left out
    elif line is not None or (named and (called[0].library in ("", "torch") or environment)):
        if environment:
            text = ENVIRONMENT
        elif named and called[0].calls > 1:
            text = f"do it for all at once, instead of {counted(called[0].calls, 'time')} in a step"
        elif slow is not None and _makes_batches(view, slow):
            text = AHEAD
        else:
            text = RARELY
        draft.change(text, where=called[0].where if named else line)
    return draft.done()


def _of_step(view: View, call: LibraryCall) -> bool:
    """Whether a call is one of the user's loop or functions, rather than what a framework does within `fit`."""
    return not obeyed(view.snapshot.run) or any(item.name == call.name for item in view.functions)


def _contains(view: View) -> tuple[str, str] | None:
    """(name, place) of the user's innermost function with most of what the profiled step does outside all phases.

    A function that calls another phase as well, such as `training_step` the model, has that in its total.
    """
    found = view.snapshot.functions
    if found is None:
        return None
    whole = found.phases.get("other", 0)
    rows = [
        (total, file, line, name)
        for file, line, name, _, total, _, _, phase in found.functions
        # What an iterator takes is most likely waiting for data.
        if phase == "other"
        and MOST_OF * whole <= total <= whole
        and not name.endswith(("__iter__", "__next__"))
        and _seen_ns(found, name) >= LEAST_SEEN * total
    ]
    return (min(rows)[3], place(*min(rows)[1:])) if rows else None


def _seen_ns(found: FunctionsEvent, name: str) -> int:
    """What a profiled step has seen of a function outside all phases, besides what it logs.

    That is its own time, and that of what it calls. Its own has what libraries take, but for torch.
    """
    names, size = {name}, 0
    while len(names) > size:
        size = len(names)
        names |= {row[2] for row in found.functions if row[6] in names}
    own = sum(row[5] for row in found.functions if row[2] in names and row[7] == "other")
    calls = [call for call in found.calls if call[2] in names and call[7] == "other"]
    torch = sum(call[6] for call in calls if call[4] == "torch")
    return own + torch - sum(call[6] for call in calls if call[4] != "torch" and logs(call[3], call[4]))


RULES = (slow_function, logging_calls, outside, own_saves)
