"""The model: its own time, and its losses, gradients and weights that are not finite.

Its time is spent in Python between operators, in small micro-batches, loops, compilation or deterministic mode.
"""

from __future__ import annotations

from pathlib import PurePath

from ndd_engine.errors import shortened
from ndd_engine.record.events import NotFiniteEvent
from ndd_engine.record.figures import bad_loss_text
from ndd_engine.record.snapshot import NotFinite
from ndd_engine.text import counted, duration, number, percent, printable, span, times

from .finding import Finding
from .gpu_rules import larger_batches
from .view import (
    BASELINE,
    CLOCK,
    CONFIG,
    FLOOR,
    MODEL,
    SLOWED,
    CodePlace,
    Cost,
    FindingDraft,
    View,
    place,
    rounded_up,
    taken,
)

# Minimum time between operators: fraction of the capture, and nanoseconds per operator.
GAPS = 0.1
GAP_NS = 50_000.0
# Forward time relative to the expectation from backward: from ABOVE on a function may be the cause, from BEYOND on
# it is.
ABOVE = 1.5
BEYOND = 4.0
# Minimum part of forward and loss in one function.
LINE = 0.3
# Minimum fixed overhead of a micro-batch, as a part of its time.
FIXED = 0.15
# A stepwise decoder is reported if operators are at most this small (FLOPs, on average) and at least this many.
SMALL_OPERATION = 1e6
MANY_OPERATIONS = 500
# Maximum part of the model's time that projecting once can save, and its weight in backward relative to forward.
LOOP_MOST = 0.75
LOOP_BACKWARD = 1.3
# Assumed maximum speedup by torch.compile.
COMPILED_GAIN = 1.3


def user_code(view: View) -> Finding | None:
    """Python or other host code in the forward pass or the loss of the user's own workload."""
    host = view.cost("forward", "loss")
    if ":" not in str(view.get("workload.name")) or not host.clear:
        return None
    seen, between = view.where("forward", "loss"), _between(view)
    if between is not None:
        # A profiler capture gives the exact answer.
        share, each_ns = between
        known = seen is not None and seen.own
        if share - view.collecting < GAPS or each_ns < (GAP_NS / 5 if known else GAP_NS):
            return None
        if view.disturbed and not known:
            return None  # in the few steps of a capture, other programs make gaps as well
        text = f"gaps between operators take {percent(share)} of the time, {span(each_ns)} per operator"
    else:
        expected = _expected_ns(view)
        if expected is None or seen is None or not seen.own or not _explains(seen, host.ns, expected):
            return None
        if (view.slowed or 0.0) >= SLOWED:
            return None  # the same code was faster before training: something else slows it down
        share = seen.most * host.share
        text = f"forward and loss take {span(host.ns)}; {span(expected)} expected from the speed of backward"
    # Collections are part of the phases and of the gaps.
    share = max(share - view.collecting, 0.0)
    if share < FLOOR:
        return None
    line = seen.line if seen is not None else None
    title = f"host code between operators takes {percent(share)} of each step" + (f": {line}" if line else "")
    draft = FindingDraft("user-code", title, view.part(share), "likely" if between else "possible")
    draft.saw(text, "profiler capture" if between else "counted operations")
    draft.add(seen.seen if seen is not None else None)
    draft.change(
        "move constant work out of the step, or replace Python loops with tensor operations", where=line
    )
    return draft.done()


def small_micro(view: View) -> Finding | None:
    """Micro-batches with a high fixed overhead, several per step."""
    baseline = view.baseline
    accumulation, micro = view.whole("batch.accumulation"), view.whole("batch.micro")
    if baseline is None or accumulation is None or micro is None or accumulation < 2:
        return None
    other, other_ns = baseline.other_micro, baseline.other_ns
    if other is None or other_ns is None or other == baseline.micro:
        return None
    each = (other_ns - baseline.micro_ns) / (other - baseline.micro)
    fixed = min(max(1 - each * baseline.micro / baseline.micro_ns, 0.0), 1.0)
    factor = _factor(view, accumulation, micro)
    repeated = view.cost("data_wait", "to_device", *MODEL)
    share = repeated.share * (fixed * (1 - 1 / factor))
    if fixed < FIXED or factor < 2 or share < FLOOR:
        return None
    title = f"{accumulation} micro-batches of {micro} items: fixed overhead takes {percent(fixed)} of each"
    draft = FindingDraft(
        "small-micro", title, Cost(share * view.step_ns, share, repeated.error, share), "certain"
    )
    first = f"a micro-batch of {baseline.micro} takes {span(baseline.micro_ns)}"
    draft.saw(f"{first}, of {other}: {span(other_ns)}", BASELINE)
    draft.saw(f"batch.micro is {micro}, batch.accumulation is {accumulation}", CONFIG)
    draft.add(larger_batches(micro, accumulation, factor))
    return draft.done()


def stepwise(view: View) -> Finding | None:
    """A decoder with projections inside its loop, of a factory that can do without."""
    baseline, work, model = view.snapshot.baseline, view.snapshot.work, view.model
    if "stepwise" not in view.alternatives:
        return None
    if baseline is None or baseline.operations is None or work is None or work.flops_per_step is None:
        return None
    operations = baseline.operations * max(work.accumulation, 1)
    small = work.flops_per_step / max(operations, 1)
    if baseline.operations < MANY_OPERATIONS or small > SMALL_OPERATION or not model.clear:
        return None
    forward = view.cost("forward")
    loop = view.cost("forward/attention", "forward/pointer")
    # Gradients take about the same part of backward. At most the decoder's recurrence goes with the loop.
    whole = view.cost("forward/decoder", "forward/attention", "forward/pointer")
    share = model.share * max(_of_model(whole, forward), _of_model(loop, forward))
    if share < 2 * FLOOR:
        return None
    title = "the decoder repeats projections in its loop that could be computed once"
    draft = FindingDraft("stepwise", title, Cost(share * view.step_ns, share, model.error, share))
    text = f"a micro-batch runs {baseline.operations:,} operators of {small:,.0f} FLOPs on average"
    draft.saw(text, "counted operations")
    if loop.ns and forward.ns:
        draft.saw(f"attention and pointer take {percent(loop.ns / forward.ns)} of forward", CLOCK)
    return draft.done()


def _of_model(loop: Cost, forward: Cost) -> float:
    """Part of forward and backward that projecting once can save, from the loop's part of forward."""
    return min(LOOP_BACKWARD * loop.ns / forward.ns, LOOP_MOST) if forward.ns and loop.ns else LOOP_MOST


# In the first steps of a run, fewer recompilations are usual.
FEW_STEPS, AGAIN = 20, 3


def recompile(view: View) -> Finding | None:
    """Repeated recompilation by torch.compile."""
    totals = view.snapshot.totals
    marks = [item.mark for item in view.snapshot.marks if item.mark.kind == "recompile"]
    limit = next((mark for mark in reversed(marks) if mark.data.get("limit")), None)
    if not totals.recompiles or not totals.wall_ns or not marks:
        return None
    if totals.steps < FEW_STEPS and totals.recompiles < AGAIN:
        return None  # a shape that varies is compiled for once more
    share = min(totals.recompile_ns / totals.wall_ns, 1.0)
    if share < FLOOR and limit is None:
        return None
    last = next((mark for mark in reversed(marks) if mark.data.get("reason")), marks[-1])
    reason = printable(last.data.get("reason") or "")
    assumed = reason.partition(" ==")[0] if " ==" in reason else ""
    name = f" because of {assumed}" if assumed.isidentifier() else ""
    title, part = f"recompilation{name} takes {percent(share)} of the time", view.of_wall(share)
    if limit is not None:
        title = (
            f"{counted(totals.recompiles, 'recompilation')}{name}: runs uncompiled since step {limit.step:,}"
        )
        part = view.part(min(share + view.model.share, 1.0))
    draft = FindingDraft("recompile", title, part, "certain")
    where = None
    if "file" in last.data and "function" in last.data:
        where = place(last.data["file"], last.data.get("line", 0), last.data["function"])
    compiled = f"{counted(totals.recompiles, 'recompilation')} in {counted(totals.steps, 'step')}"
    spent = f"took {span(totals.recompile_ns)} of {span(totals.wall_ns)}"
    draft.saw(f"{compiled}{f' of {where}' if where else ''} {spent}", "compiler")
    if reason:
        draft.saw(f"the last one because this no longer held: {reason}", "compiler")
    if limit is not None:
        draft.saw("the limit of recompilations is reached: torch compiles it no more", "compiler")
        draft.add(taken(view.model, "the model, of which that is a part, takes"))
        draft.unbounded()
    if view.is_script:
        text = "pass what changes as a tensor, or compile with dynamic=True (torch._dynamo.mark_dynamic for a size)"
        draft.change(text, where=where)
    elif view.get("speed.compile_dynamic") is None and view.get("speed.compile") != "off":
        draft.change("compile for dynamic shapes from the start", "speed.compile_dynamic=true")
    if view.get("speed.compile") not in (None, "off"):
        draft.change("disable torch.compile", "speed.compile=off")
    return draft.done()


def compile_cost(view: View) -> Finding | None:
    """A run too short for compilation to break even."""
    seconds = view.snapshot.totals.compile_ns * 1e-9
    left = 0.0 if view.snapshot.final else view.snapshot.left.seconds
    if not seconds or left is None or (view.is_script and view.snapshot.totals.recompiles):
        return None
    whole = view.snapshot.elapsed_s + left
    if (
        view.is_script
    ):  # it compiles within its first steps, or before them: its time is known from the first backward on
        whole = max(whole - seconds, view.snapshot.totals.steps * view.step_ns * 1e-9)
    if whole <= 0 or seconds < (COMPILED_GAIN - 1) * whole:
        return None
    title = f"compilation took {duration(seconds)}, training takes only {duration(whole)}"
    draft = FindingDraft("compile-cost", title, view.of_wall(seconds / (seconds + whole)))
    draft.saw(f"it breaks even only if compiled steps are {times(1 + seconds / whole)} as fast", CLOCK)
    sets = () if view.is_script else ("speed.compile=off",)
    if sets:
        draft.saw(f"speed.compile is {view.get('speed.compile')}", CONFIG)
    if view.step_ns > 0:
        steps = rounded_up(seconds * 1e9 / (view.step_ns * (COMPILED_GAIN - 1)))
        draft.change(f"disable torch.compile for runs of fewer than about {steps:,} steps", *sets)
    else:
        draft.change("disable torch.compile for short runs", *sets)
    return draft.done()


def deterministic(view: View) -> Finding | None:
    """Deterministic algorithms, if a trial has shown that they cost time."""
    change = "speed.deterministic=false"
    shown = [trial for trial in view.snapshot.trials if trial.sets == [change] and trial.verdict == "faster"]
    if view.get("speed.deterministic") is not True or not shown or (shown[-1].ratio or 0.0) <= 1:
        return None
    trial, share = shown[-1], 1 - 1 / (shown[-1].ratio or 1.0)
    title = f"deterministic algorithms take {percent(share)} of each step"
    draft = FindingDraft("deterministic", title, view.part(share), "certain")
    draft.saw(trial.text, "trial")
    draft.change("allow nondeterministic algorithms (results differ by rounding)", change)
    return draft.done()


# compile_cost is not in here: it applies to short runs as well.
RULES = (user_code, small_micro, stepwise, deterministic)


def _between(view: View) -> tuple[float, float] | None:
    """(fraction of a profiler capture in gaps between operators, nanoseconds per operator); None without a capture."""
    capture = view.snapshot.kernels
    gaps = capture.idle_ns.get("launch gaps") if capture is not None else None
    if capture is None or gaps is None or not capture.wall_ns or not capture.launches:
        return None
    return gaps / capture.wall_ns, gaps / capture.launches


def _expected_ns(view: View) -> float | None:
    """Expected time of forward and loss at the FLOP rate of backward; None if some FLOPs are not counted."""
    work, backward = view.snapshot.work, view.cost("backward")
    if work is None or not work.flops_forward or work.flops_per_step is None or work.uncounted or view.gpu:
        return None
    rest = work.flops_per_step - work.flops_forward
    return backward.ns * work.flops_forward / rest if rest > 0 and backward.ns else None


def _explains(seen: CodePlace, host_ns: float, expected_ns: float) -> bool:
    """Whether a function, other than the model itself, explains why forward and loss take longer than expected."""
    excess = host_ns - expected_ns
    if host_ns >= BEYOND * expected_ns:
        return seen.share >= LINE
    if host_ns < ABOVE * expected_ns:
        return False
    rest = (1 - seen.share) * host_ns
    return rest >= expected_ns / 2 and seen.most * host_ns >= excess / 2


def _factor(view: View, accumulation: int, micro: int) -> int:
    """How many micro-batches to merge into one: the largest divisor of `accumulation` that fits in memory."""
    headroom, memory = view.snapshot.headroom, view.snapshot.memory
    most = float(accumulation)
    if view.gpu:
        if headroom.fits_micro is not None:
            most = headroom.fits_micro / micro
        elif memory is not None:
            most = 2.0
    return max(
        (count for count in range(1, accumulation + 1) if not accumulation % count and count <= most),
        default=1,
    )


LOOK = "closer look at a step"
# Skipped updates, and their share, that are more than a scaler skips to find the largest scale: one in 2,000.
MANY, SHARE = 20, 0.005
# Batches that were left out, and their share, that are worth a finding where one of them was not finite.
LEFT_OUT, LEFT_OUT_SHARE = 20, 0.01
# A loss that has grown so many times before it was not finite has diverged.
DIVERGED = 100.0
# Values of this magnitude have grown without a bound: their products overflow.
LARGE = 1e10
# Of a text of the user's own, such as the name of a module.
LONGEST = 60


def not_finite(view: View) -> Finding | None:
    """Updates or batches that are skipped, or losses that are not finite: since when, and what was so first."""
    known = view.snapshot.not_finite
    origin = known.origin
    skips = known.skipped >= MANY and known.skipped > SHARE * known.updates
    # A loop may leave out batches for other reasons, too.
    leaves_out = known.left_out >= LEFT_OUT and _left_out_share(known) > LEFT_OUT_SHARE
    if skips:
        title = skipped_text(known)
    elif known.loss is not None:
        title = f"the loss is {bad_loss_text(known)}"
    elif leaves_out and origin is not None and origin.what:
        title = left_out_text(known)
    else:
        return None
    cause = "" if origin is None else cause_text(origin)
    grown = _grown(known) if origin is None or origin.what in ("", "parameter") else None
    if grown is not None:
        cause = f"it had grown from {small(grown[0])} to {small(grown[1])} before"
    draft = FindingDraft("not-finite", f"{title}: {cause}" if cause else title, None, "certain")
    if known.loss is not None:
        value, first, before, last, _ = known.loss
        finite = (
            "no finite loss was seen before"
            if before is None
            else f"it was {small(last or 0.0)} at step {before:,}"
        )
        draft.saw(
            f"the loss was {value} at step {first:,}; {finite}", "losses that are read ten times a second"
        )
    if known.left_out:
        draft.saw(
            f"about {known.left_out:,.0f} batches went through the model and have no backward pass, beside "
            f"{known.updates:,} steps",
            "steps that are timed by phase",
        )
    if known.skipped:
        scale = view.snapshot.loss_scale
        draft.saw(f"{counted(known.skipped, 'update')} skipped by the gradient scaler", "gradient scaler")
        if known.scales is not None and scale is not None:
            first_scale, lowest = (small(one) for one in known.scales)
            text = f"its scale was {first_scale} at first, {lowest} at the lowest, and is {small(scale)}"
            draft.saw(text, "gradient scaler")
    if origin is not None:
        draft.saw(_seen(origin), LOOK)
    text, where = advice_text(origin, known.skipped > 0, grown is not None)
    draft.change(text, where=where)
    return draft.done()


def skipped_text(known: NotFinite) -> str:
    """ "23,180 of 23,680 updates skipped (98 %) since step 500"."""
    share = percent(known.skipped / max(known.updates, known.skipped))
    text = f"{known.skipped:,} of {known.updates:,} updates skipped ({share})"
    return text if known.begun is None else f"{text} since step {known.begun:,}"


def _left_out_share(known: NotFinite) -> float:
    return known.left_out / max(known.left_out + known.updates, 1.0)


def left_out_text(known: NotFinite) -> str:
    """ "about 12 % of the batches are left out since about step 400, without a backward pass"."""
    since = f" since about step {known.left_out_since:,}" if known.left_out_since else ""
    return (
        f"about {percent(_left_out_share(known))} of the batches are left out{since}, without a backward pass"
    )


def cause_text(origin: NotFiniteEvent) -> str:
    """ "the input x is not finite (NaN in column 3 of 128)"."""
    name, part = _named(origin.name), _part(origin)
    module = f"{name or 'the model'}" + (f" ({_named(origin.kind)})" if origin.kind else "")
    where = f" at {_place(origin)}" if origin.file else ""
    grown = f", up to {small(origin.largest)}" if origin.largest >= LARGE else ""
    match origin.what:
        case "input":
            return f"the input {name or 'of the model'} is not finite ({part})"
        case "output":
            return f"the output of {module} is not finite ({part}), while its inputs are{grown}"
        case "before":
            return f"what is computed{where} is not finite ({part}), before {module}"
        case "function":
            return f"{name}{where} returns values that are not finite ({part}) from finite arguments{grown}"
        case "loss":
            return f"the loss{where} is not finite, while the outputs of the model are"
        case "gradient":
            return (
                f"the gradients of {origin.count:,} of {origin.of:,} parameters are not finite, such as {name} "
                f"({part}), while the loss is"
            )
        case "parameter":
            return f"{origin.count:,} of {origin.of:,} parameters are not finite, such as {name} ({part})"
    return ""


def _part(origin: NotFiniteEvent) -> str:
    """ "NaN in column 3 of 128", "infinite in 12 of 64 items"."""
    what = (
        "NaN" if origin.nan and not origin.infinite else "infinite" if not origin.nan else "NaN or infinite"
    )
    if origin.axis and origin.places <= len(origin.at):
        words = [f"{one:,}" for one in origin.at]
        joined = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        text = f"{what} in {origin.axis}{'s' * (len(words) > 1)} {joined} of {origin.size:,}"
        inside = origin.share * origin.size / max(origin.places, 1)
        return (
            text
            if inside >= 1 or origin.axis == "item"
            else f"{text}, in {percent(inside)} of the values there"
        )
    if origin.axis:
        return f"{what} in {origin.places:,} of {counted(origin.size, origin.axis)}"
    return f"{what} in {'all' if origin.share >= 1 else percent(origin.share) + ' of its'} values"


def _seen(origin: NotFiniteEvent) -> str:
    """The evidence of a closer look."""
    step = f"step {origin.step:,}"
    if not origin.what:
        return f"up to {step}, everything was finite in the steps that were looked at"
    text = f"{step}: {cause_text(origin)}"
    if origin.made is not None:
        file, line, function = origin.made
        text += f"; {_named(function)} returns it ({printable(PurePath(file).name)}:{line})"
    elif origin.file and origin.what in ("input", "output"):
        text += f" ({_place(origin)})"
    return text


def advice_text(
    origin: NotFiniteEvent | None, scaled: bool = False, diverged: bool = False
) -> tuple[str, str | None]:
    """(what to do, where)."""
    what = "" if origin is None else origin.what
    where = _place(origin) if origin is not None and origin.file else None
    if origin is not None and origin.made is not None:
        file, line, function = origin.made
        where = printable(f"{PurePath(file).name}:{line} in {function}")
    if what == "input":
        return "repair such values where the batch is made, or leave these items out", where
    diverged |= origin is not None and origin.largest >= LARGE
    if what in ("output", "before", "function", "loss") and not diverged:
        half = ", or of values beyond 65,504 in float16" if scaled else ""
        return (
            f"look there for a division by zero, the logarithm of zero, or an overflow of exp(){half}",
            where,
        )
    if scaled and what in ("", "gradient"):
        return (
            "use bfloat16, which needs no scaler, a lower learning rate, or clip gradients after scaler.unscale_()",
            where,
        )
    if what == "parameter" or diverged:
        return (
            "continue from a checkpoint before that step, with a lower learning rate or clipped gradients "
            "(torch.nn.utils.clip_grad_norm_)",
            where,
        )
    return (
        "train a few steps with torch.autograd.set_detect_anomaly(True), which names the operation",
        where,
    )


def _grown(known: NotFinite) -> tuple[float, float] | None:
    """(lowest, last finite loss), if the loss had diverged before it was not finite."""
    last, lowest = known.loss[3:] if known.loss is not None else (None, None)
    if last is None or lowest is None or last <= DIVERGED * max(abs(lowest), 1e-6):
        return None
    return lowest, last


def small(value: float) -> str:
    """A number of any size, in a few digits: "65,536", "2.31", "6e-05", "1.2e+09"."""
    return number(value, 3) if value == 0 or 1e-2 <= abs(value) < 1e6 else f"{value:.2g}"


def _place(origin: NotFiniteEvent) -> str:
    return printable(f"{PurePath(origin.file).name}:{origin.line}")


def _named(name: str) -> str:
    return shortened(printable(name), LONGEST)


FINITE_RULES = (not_finite,)
