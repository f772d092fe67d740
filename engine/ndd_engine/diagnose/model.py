"""The model's own time: Python between operators, small micro-batches, loops, compilation, deterministic mode."""

from __future__ import annotations

from ndd_engine.text import duration

from .finding import Change, Evidence, Finding
from .view import (
    BASELINE,
    CLOCK,
    CONFIG,
    FLOOR,
    MODEL,
    SLOWED,
    CodePlace,
    Cost,
    View,
    ceiling,
    finding,
    percent,
    span,
    times,
)

STACKS = "stack samples"
# Minimum time between operators: fraction of the capture, and nanoseconds per operator.
GAPS = 0.1
GAP_NS = 50_000.0
# Forward time relative to the expectation from backward: from ABOVE on a function may be the cause, from BEYOND on
# it is.
ABOVE = 1.5
BEYOND = 4.0
# Minimum part of the stack samples in one function.
LINE = 0.3
# Total cost of a function relative to the time in which it is sampled.
UNSEEN = 1.3
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
    collecting = _collecting(view)
    if between is not None:
        # A profiler capture gives the exact answer.
        gaps, each_ns = between
        known = seen is not None and seen.own
        if gaps - collecting < GAPS or each_ns < (GAP_NS / 5 if known else GAP_NS):
            return None
        share = gaps
        evidence = Evidence(
            f"gaps between operators take {percent(gaps)} of a profiler capture, {span(each_ns)} per operator",
            "profiler capture",
        )
    else:
        expected = _expected_ns(view)
        if expected is None or seen is None or not seen.own or not _explains(seen, host.ns, expected):
            return None
        if (view.slowed or 0.0) >= SLOWED:
            return None  # the same code was faster before training: something else slows it down
        share = seen.most * host.share
        evidence = Evidence(
            f"forward and loss take {span(host.ns)}; {span(expected)} expected from the speed of backward",
            "counted operations",
        )
    share = max(share - collecting, 0.0)
    if share < FLOOR:
        return None
    line = seen.line if seen is not None else None
    return finding(
        "user-code",
        f"host code between operators takes {percent(share)} of each step" + (f": {line}" if line else ""),
        Cost(share * view.step_ns, share, None, share),
        [
            evidence,
            Evidence(
                f"{percent(seen.share)} of {seen.looks} stack samples in forward and loss are in {seen.line}",
                STACKS,
            )
            if seen is not None
            else None,
        ],
        [
            Change(
                "move constant work out of the step, or replace Python loops with tensor operations", (), line
            )
        ],
        "likely" if between else "possible",
        bound=ceiling(min(UNSEEN * share, host.share)),
    )


def small_micro(view: View) -> Finding | None:
    """Micro-batches with a high fixed overhead, several per step."""
    baseline = view.baseline
    accumulation, micro = view.whole("batch.accumulation"), view.whole("batch.micro")
    if baseline is None or accumulation is None or micro is None or accumulation < 2:
        return None
    other, other_ns = baseline.other_micro, baseline.other_ns
    if other is None or other_ns is None or other == baseline.micro or baseline.micro_ns <= 0:
        return None
    each = (other_ns - baseline.micro_ns) / (other - baseline.micro)
    fixed = min(max(1 - each * baseline.micro / baseline.micro_ns, 0.0), 1.0)
    if fixed < FIXED:
        return None
    factor = _factor(view, accumulation, micro)
    repeated = view.cost("data_wait", "to_device", *MODEL)
    part = fixed * (1 - 1 / factor)
    share = repeated.share * part
    if factor < 2 or share < FLOOR:
        return None
    # The overhead is the difference of two short measurements: allow for their error.
    bound = ceiling(
        min(repeated.share, repeated.share * min(1.4 * fixed + 0.1, 1.0) * (1 - 1 / accumulation))
    )
    sets = (f"batch.micro={micro * factor}", f"batch.accumulation={accumulation // factor}")
    return finding(
        "small-micro",
        f"{accumulation} micro-batches of {micro} items: fixed overhead takes {percent(fixed)} of each",
        Cost(share * view.step_ns, share, repeated.error, share),
        [
            Evidence(
                f"a micro-batch of {baseline.micro} takes {span(baseline.micro_ns)}, of {other}: {span(other_ns)}",
                BASELINE,
            ),
            Evidence(f"batch.micro is {micro}, batch.accumulation is {accumulation}", CONFIG),
        ],
        [Change("use larger micro-batches with the same effective batch", sets)],
        "certain",
        bound=bound,
    )


def stepwise(view: View) -> Finding | None:
    """The summariser's decoder with projections inside its loop."""
    baseline, work = view.snapshot.baseline, view.snapshot.work
    if view.get("workload.name") != "summarise" or view.get("workload.decoder") != "stepwise":
        return None
    if baseline is None or baseline.operations is None or work is None or work.flops_per_step is None:
        return None
    operations = baseline.operations * max(work.accumulation, 1)
    small = work.flops_per_step / max(operations, 1)
    if baseline.operations < MANY_OPERATIONS or small > SMALL_OPERATION or not view.model.clear:
        return None
    forward = view.cost("forward")
    loop = view.cost("forward/attention", "forward/pointer")
    # Gradients take about the same part of backward. The recurrence stays in the loop.
    part = _of_model(loop, forward)
    share = view.model.share * part
    if share < 2 * FLOOR:
        return None
    whole = _of_model(view.cost("forward/decoder", "forward/attention", "forward/pointer"), forward)
    return finding(
        "stepwise",
        "the decoder repeats projections in its loop that could be computed once",
        Cost(share * view.step_ns, share, view.model.error, share),
        [
            Evidence(
                f"a micro-batch runs {baseline.operations:,} operators of {small:,.0f} FLOPs on average",
                "counted operations",
            ),
            Evidence("workload.decoder is stepwise", CONFIG),
            Evidence(f"attention and pointer take {percent(loop.ns / forward.ns)} of forward", CLOCK)
            if loop.ns and forward.ns
            else None,
        ],
        [
            Change(
                "compute the projections once for all steps (same loss and gradients)",
                ("workload.decoder=hoisted",),
            )
        ],
        bound=ceiling(view.model.share * max(whole, part)),
    )


def _of_model(loop: Cost, forward: Cost) -> float:
    """Part of forward and backward that projecting once can save, from the loop's part of forward."""
    return min(LOOP_BACKWARD * loop.ns / forward.ns, LOOP_MOST) if forward.ns and loop.ns else LOOP_MOST


def recompile(view: View) -> Finding | None:
    """Repeated recompilation by torch.compile."""
    totals = view.snapshot.totals
    if not totals.recompiles or view.get("speed.compile") == "off" or not totals.steps:
        return None
    usual = sum(view.phases[name].p50_ns or 0 for name in MODEL if name in view.phases)
    spent = sum(totals.phases.get(name, 0) for name in MODEL)
    if not usual or not totals.wall_ns:
        return None
    share = min(max(spent - totals.steps * usual, 0) / totals.wall_ns, 1.0)
    if share < FLOOR:
        return None
    changes = []
    if view.get("speed.compile_dynamic") is None:
        changes.append(Change("compile for dynamic shapes from the start", ("speed.compile_dynamic=true",)))
    if view.get("workload.pad") == "longest":
        changes.append(Change("pad all batches to one shape", ("workload.pad=full",)))
    changes.append(Change("disable torch.compile", ("speed.compile=off",)))
    return finding(
        "recompile",
        f"recompilation takes {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"{totals.recompiles} recompilations in {totals.steps} steps", "compiler"),
            Evidence(
                f"forward and backward took {span(spent)}; {span(totals.steps * usual)} expected from their median",
                CLOCK,
            ),
        ],
        changes,
        bound=ceiling(sum(view.snapshot.totals.share(name) for name in MODEL)),
    )


def compile_cost(view: View) -> Finding | None:
    """A run too short for compilation to break even."""
    if view.get("speed.compile") in (None, "off"):
        return None
    marks = [item.mark for item in view.snapshot.marks if item.mark.kind == "compile"]
    seconds = marks[-1].data.get("seconds") if marks else None
    left = 0.0 if view.snapshot.final else view.snapshot.left.seconds
    if not isinstance(seconds, (int, float)) or left is None:
        return None
    whole = view.snapshot.elapsed_s + left
    if whole <= 0 or seconds < (COMPILED_GAIN - 1) * whole:
        return None
    share = seconds / (seconds + whole)
    return finding(
        "compile-cost",
        f"compilation took {duration(seconds)}, training takes only {duration(whole)}",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"it breaks even only if compiled steps are {times(1 + seconds / whole)} as fast", CLOCK
            ),
            Evidence(f"speed.compile is {view.get('speed.compile')}", CONFIG),
        ],
        [Change("disable torch.compile for short runs", ("speed.compile=off",))],
    )


def deterministic(view: View) -> Finding | None:
    """Deterministic algorithms, if a trial has shown that they cost time."""
    if view.get("speed.deterministic") is not True:
        return None
    change = "speed.deterministic=false"
    shown = [trial for trial in view.snapshot.trials if trial.sets == [change] and trial.verdict == "gain"]
    if not shown or not shown[-1].ratio or shown[-1].ratio <= 1:
        return None
    trial = shown[-1]
    share = 1 - 1 / shown[-1].ratio
    return finding(
        "deterministic",
        f"deterministic algorithms take {percent(share)} of each step",
        Cost(share * view.step_ns, share, None, share),
        [Evidence(trial.text, "trial")],
        [Change("allow nondeterministic algorithms (results differ by rounding)", (change,))],
        "certain",
        bound=trial.high,
    )


# compile_cost is not in here: it applies to short runs as well.
RULES = (user_code, small_micro, stepwise, recompile, deterministic)


def _between(view: View) -> tuple[float, float] | None:
    """(fraction of a profiler capture in gaps between operators, nanoseconds per operator); None without a capture."""
    capture = view.snapshot.kernels
    gaps = capture.idle_ns.get("launch gaps") if capture is not None else None
    if capture is None or gaps is None or not capture.wall_ns or not capture.launches:
        return None
    return gaps / capture.wall_ns, gaps / capture.launches


def _collecting(view: View) -> float:
    """Share of wall time in Python's garbage collector (part of the phases)."""
    totals = view.snapshot.totals
    return totals.gc_ns / totals.wall_ns if totals.gc_ns and totals.wall_ns else 0.0


def _expected_ns(view: View) -> float | None:
    """Expected time of forward and loss at the FLOP rate of backward; None if some FLOPs are not counted."""
    work, backward = view.snapshot.work, view.cost("backward")
    if work is None or not work.flops_forward or work.flops_per_step is None or work.uncounted or view.card:
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
    if view.card:
        if headroom.fits_micro is not None:
            most = headroom.fits_micro / micro
        elif memory is not None:
            most = 2.0
    return max(
        (count for count in range(1, accumulation + 1) if not accumulation % count and count <= most),
        default=1,
    )
