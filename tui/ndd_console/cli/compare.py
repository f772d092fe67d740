"""`ndd-console compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from ndd_console.report.model import ns
from ndd_console.view.rows import foreign, shorten
from ndd_console.view.throughput import plural
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.log import damage_text
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.text import MISSING, number, printable, rate, size
from ndd_engine.trial.compare import Comparison, phase_names
from ndd_engine.trial.compare import compare as compared
from ndd_engine.trial.recorded import Recorded

from .completion import run_names
from .options import command, json_option
from .printing import say, show, table

_VERDICTS = {"faster": "B is faster", "slower": "B is slower", "same": "no significant difference"}
_UNLIKE = "no verdict: the runs train different workloads or models"
_INCONCLUSIVE = "inconclusive; compare longer runs"


@command(
    "0 compared, 1 B is slower than --fail-if-slower allows, 2 usage error or models that differ",
    "compare baseline candidate",
    "compare baseline candidate --fail-if-slower 5%",
)
@click.argument("a", shell_complete=run_names)
@click.argument("b", shell_complete=run_names)
@click.option(
    "--fail-if-slower",
    "limit",
    metavar="SHARE",
    help="Exit with status 1 if B is slower than A by more than SHARE with 95 % confidence, e.g. 5% or 0.05.",
)
@json_option
@click.pass_context
def compare(ctx: click.Context, a: str, b: str, limit: str | None, as_json: bool) -> int:
    """Compare run B with run A: what differs, and how speed, phases, memory and losses changed.

    A and B are names of runs or paths of their folders. The 95 % CI of the speedup covers variation within the two
    runs, not variation between repeated runs.
    """
    share = None if limit is None else share_of(limit)
    root = runs_root(ctx.obj["runs"])
    found = compared(find_run(root, a), find_run(root, b))
    outcome = None if share is None else found.slower_than(share)
    for side in (found.a, found.b):
        if side.damaged:
            say(f"warning: run {side.name}: {damage_text(side.damaged)}")
    for text in found.unlike:  # before the figures, which may be misleading
        say(f"warning: the runs are not directly comparable: {text}")
    check = None if share is None else {"limit": share, "result": outcome}
    show({**found.to_dict(), "check": check} if as_json else map(printable, describe(found)))
    if share is not None:
        by = f"slower than A by more than {share * 100:.3g} %"
        words = {"slower": f"B is {by}", "not slower": f"B is not {by}"}
        say(f"check: {words.get(outcome or '', f'inconclusive whether B is {by}')}")
    return EXIT_FAILED if outcome == "slower" else EXIT_DONE


def share_of(text: str) -> float:
    """The share that "5%" or "0.05" stands for: 0.05. Raises UsageError."""
    number_text = text.strip().removesuffix("%").strip()
    try:
        value = float(number_text) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(
            f"--fail-if-slower {printable(text)}: not a share; allowed: 0 to below 100 %, as in 5% or 0.05"
        )
    return value


def describe(found: Comparison) -> Iterator[str]:
    """The comparison as lines."""
    sides = ("A", _identity(found.a)), ("B", _identity(found.b))
    yield from table([*sides, *_differences(found), *_speed(found)])
    yield ""
    yield from table(list(_figures(found)), right={1, 2, 3})
    yield "times are per optimizer step, measured by the host clock"


def _identity(side: Recorded) -> str:
    run = side.run
    return foreign(
        f"{side.name}: {run.workload}, {number(run.parameters)} parameters, {side.snapshot.status} at step "
        f"{number(side.snapshot.step)}, on {run.device_name}, {run.precision}"
    )


def _differences(found: Comparison) -> Iterator[tuple[str, str]]:
    if not found.differences:
        yield "changed", "nothing: configuration, versions, machine and data are the same"
    for index, item in enumerate(found.differences):
        what = item.key if item.kind in ("config", item.key) else f"{item.kind} {item.key}"
        yield "" if index else "changed", f"{foreign(what)}: {foreign(item.a)} -> {foreign(item.b)}"


def _speed(found: Comparison) -> Iterator[tuple[str, str]]:
    speed, unit = found.speed, plural(foreign(found.a.run.item))
    if found.verdict == "not comparable":
        interval = _UNLIKE
    elif speed.low is None or speed.high is None:
        interval = "too few measuring intervals for a confidence interval"
    else:
        verdict = _VERDICTS.get(found.verdict, _INCONCLUSIVE)
        interval = f"95 % CI {speed.low:.3f} to {speed.high:.3f}: {verdict}"
    yield "speed", f"B/A {speed.ratio:.3f}x, {interval}"
    yield "", f"A {rate(found.a.rate.value, unit)}, B {rate(found.b.rate.value, unit)}"
    yield (
        "",
        f"measuring intervals used: A {_used(found.a)}; B {_used(found.b)}; evaluations and checkpoints excluded",
    )


def _used(side: Recorded) -> str:
    counts = ((side.warm_up, "warm-up"), (side.profiled, "profiled"))
    excluded = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{side.used}" + (f" (excluded: {excluded})" if excluded else "")


def _figures(found: Comparison) -> Iterator[tuple[str, ...]]:
    a, b = found.a, found.b
    yield "", "A", "B", "B / A"
    yield _row("step, median", ns, a.step_p50_ns, b.step_p50_ns)
    yield _row("step, 95th percentile", ns, a.step_p95_ns, b.step_p95_ns)
    for name in phase_names(found):
        indent = "    " if "/" in name else "  "
        yield _row(indent + foreign(name), ns, a.phases.get(name), b.phases.get(name))
    peak = "peak GPU memory" if a.run.device != "cpu" else "peak resident memory"
    yield _row(peak, size, a.peak_bytes, b.peak_bytes)
    unit = plural(foreign(a.run.item))
    for point in found.losses:
        yield _row(f"loss at {number(point.items)} {unit}", _value, point.a, point.b)
    last = [next(reversed(side.snapshot.evaluations), None) for side in (a, b)]
    for word, sides in (("best", [a.snapshot.best, b.snapshot.best]), ("last", last)):
        one, other = (side.metrics if side else {} for side in sides)
        for name in dict.fromkeys((*one, *other)):
            yield _row(f"{word} {foreign(name)}", _value, one.get(name), other.get(name))


def _row(
    label: str, form: Callable[[float | None], str], a: float | None, b: float | None
) -> tuple[str, ...]:
    over = f"{b / a:.3f}" if a and b is not None else MISSING
    return shorten(label, 40), form(a), form(b), over


def _value(value: float | None) -> str:
    return number(value, 4)
