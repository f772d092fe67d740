"""`ndd-console compare`."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from ndd_console.view.rows import foreign, shorten
from ndd_console.view.throughput import plural
from ndd_console.words.figures import ns
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.log import damage_text
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.text import MISSING, number, printable, rate, size
from ndd_engine.trial.compare import Comparison, SeveralCompared, compare_several, phase_names
from ndd_engine.trial.recorded import Recorded

from .completion import run_names
from .options import command, json_option
from .printing import say, show, table

# The runs, in their order.
LETTERS = string.ascii_uppercase
_VERDICTS = {"faster": "B is faster", "slower": "B is slower", "same": "no significant difference"}
_UNLIKE = "no verdict: the runs train different workloads or models"
_DISTURBED = "no verdict: other processes used the cores of one run"
_INCONCLUSIVE = "inconclusive; compare longer runs"


@command(
    "0 compared, 1 a run is slower than --fail-if-slower allows, 2 usage error or models that differ",
    "compare baseline candidate",
    "compare baseline candidate --fail-if-slower 5%",
    "compare baseline lr-2 lr-4 lr-8",
)
@click.argument("a", shell_complete=run_names)
@click.argument("b", shell_complete=run_names)
@click.argument("more", nargs=-1, metavar="[C]...", shell_complete=run_names)
@click.option(
    "--fail-if-slower",
    "limit",
    metavar="SHARE",
    help="Exit with status 1 if a run is slower than A by more than SHARE (5% or 0.05) with 95 % confidence.",
)
@json_option
@click.pass_context
def compare(
    ctx: click.Context, a: str, b: str, more: tuple[str, ...], limit: str | None, as_json: bool
) -> int:
    """Compare run B, and any further ones, with run A: what differs, and how speed, phases, memory and losses changed.

    Each is the name of a run or the path of its folder. The 95 % CI of a speedup covers variation within the two runs,
    not variation between repeated runs.
    """
    share = None if limit is None else share_of(limit)
    if len(more) > len(LETTERS) - 2:
        raise UsageError(f"{len(more) + 2} runs: at most {len(LETTERS)} are compared at a time")
    root = runs_root(ctx.obj["runs"])
    found = compare_several([find_run(root, name) for name in (a, b, *more)])
    checks = [None if share is None else each.slower_than(share) for each in found.candidates]
    for side in found.sides:
        if side.damaged:
            say(f"warning: run {side.name}: {damage_text(side.damaged)}")
    for letter, each in zip(
        LETTERS[1:], found.candidates, strict=False
    ):  # before the figures, which may be misleading
        which = f"A and {letter}" if more else "the runs"
        for text in each.unlike:
            say(f"warning: {which} are not directly comparable: {text}")
    if more:
        result = found.to_dict()
        for body, outcome in zip(result["candidates"], checks, strict=True):
            body["check"] = None if share is None else {"limit": share, "result": outcome}
        show(result if as_json else map(printable, describe_several(found)))
    else:
        only = found.candidates[0]
        check = None if share is None else {"limit": share, "result": checks[0]}
        show({**only.to_dict(), "check": check} if as_json else map(printable, describe(only)))
    if share is not None:
        by = f"slower than A by more than {share * 100:.3g} %"
        for letter, outcome in zip(LETTERS[1:], checks, strict=False):
            words = {"slower": f"{letter} is {by}", "not slower": f"{letter} is not {by}"}
            say(f"check: {words.get(outcome or '', f'inconclusive whether {letter} is {by}')}")
    return EXIT_FAILED if "slower" in checks else EXIT_DONE


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
    yield "times are per optimizer step, by the host clock; those of phases are means"


def _identity(side: Recorded) -> str:
    run = side.run
    return foreign(
        f"{side.name}: {run.workload}, {number(run.parameters or None)} parameters, {side.snapshot.status} at step "
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
        verdict = _DISTURBED if found.disturbed else _VERDICTS.get(found.verdict, _INCONCLUSIVE)
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
    yield _row("all phases", ns, _mean_ns(a), _mean_ns(b))
    for name in phase_names((a, b)):
        indent = "    " if "/" in name else "  "
        yield _row(indent + foreign(name), ns, a.phases.get(name), b.phases.get(name))
    if a.exchange_ns is not None or b.exchange_ns is not None:
        yield _row("all ranks: exchange", ns, a.exchange_ns, b.exchange_ns)
        yield _row("all ranks: skew", ns, a.skew_ns, b.skew_ns)
    yield _row("step, median", ns, a.step_p50_ns, b.step_p50_ns)
    yield _row("step, 95th percentile", ns, a.step_p95_ns, b.step_p95_ns)
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


def _mean_ns(side: Recorded) -> float | None:
    """The sum of the phases, which cover the whole step."""
    found = [value for name, value in side.phases.items() if "/" not in name]
    return sum(found) if found else None


def _row(
    label: str, form: Callable[[float | None], str], a: float | None, b: float | None
) -> tuple[str, ...]:
    over = f"{b / a:.3f}" if a and b is not None else MISSING
    return shorten(label, 40), form(a), form(b), over


def _value(value: float | None) -> str:
    return number(value, 4)


# Several candidates.

# Columns that every terminal has, and runs in one block of the table of phases.
_WIDTH = 80
_BLOCK = 5
_SHORT = {"faster": "faster", "slower": "slower", "same": "no difference", "not comparable": "other model"}


def describe_several(found: SeveralCompared) -> Iterator[str]:
    """The comparison of several runs with the first one as lines of at most 80 columns."""
    sides = found.sides
    for letter, side in zip(LETTERS, sides, strict=False):
        yield from _wrapped(letter, _identity(side))
    yield ""
    yield "changed, compared with A:"
    for letter, each in zip(LETTERS[1:], found.candidates, strict=False):
        for index, (_, text) in enumerate(_differences(each)):
            yield from _wrapped("" if index else letter, text)
    yield ""
    yield from _narrow(
        table(
            [("", "speed / A", "95 % CI", "", "median step", "peak memory"), *_speeds(found)],
            right={1, 2, 4, 5},
        )
    )
    if scores := _scores(found):
        yield ""
        yield from _narrow(table(scores, right=set(range(1, len(scores[0])))))
        if found.losses:
            unit = plural(foreign(found.baseline.run.item))
            yield f"losses after these shares of {number(found.losses[-1].items)} {unit}"
    names = phase_names(sides)
    for begin in range(0, len(sides), _BLOCK):
        block = list(zip(LETTERS, sides, strict=False))[begin : begin + _BLOCK]
        yield ""
        head = ("time per step", *(letter for letter, _ in block))
        phases = [_phase(name, [side for _, side in block]) for name in names]
        yield from _narrow(table([head, *phases], right=set(range(1, len(head)))))
    yield "times are per optimizer step, by the host clock; those of phases are means"


def _speeds(found: SeveralCompared) -> Iterator[tuple[str, ...]]:
    one = found.baseline
    yield "A", "1.000x", "", "baseline", ns(one.step_p50_ns), size(one.peak_bytes)
    for letter, each in zip(LETTERS[1:], found.candidates, strict=False):
        speed = each.speed
        known = speed.low is not None and speed.high is not None and each.verdict != "not comparable"
        interval = f"{speed.low:.3f} to {speed.high:.3f}" if known else MISSING
        verdict = _SHORT.get(each.verdict, "inconclusive")
        yield (
            letter,
            f"{speed.ratio:.3f}x",
            interval,
            verdict,
            ns(each.b.step_p50_ns),
            size(each.b.peak_bytes),
        )


def _scores(found: SeveralCompared) -> list[tuple[str, ...]]:
    """Losses and best evaluations, one row for each run; [] without any."""
    best = [side.snapshot.best.metrics if side.snapshot.best else {} for side in found.sides]
    names = list(dict.fromkeys(name for metrics in best for name in metrics))[:2]
    if not found.losses and not names:
        return []
    head = (
        "",
        *(f"loss {point.share * 100:.0f} %" for point in found.losses),
        *(f"best {foreign(name)}" for name in names),
    )
    rows = [
        (
            letter,
            *(_value(point.losses[index]) for point in found.losses),
            *(_value(best[index].get(name)) for name in names),
        )
        for index, (letter, _) in enumerate(zip(LETTERS, found.sides, strict=False))
    ]
    return [tuple(shorten(text, 16) for text in head), *rows]


def _phase(name: str, sides: Sequence[Recorded]) -> tuple[str, ...]:
    indent = "  " if "/" in name else ""
    return shorten(indent + foreign(name), 24), *(ns(side.phases.get(name)) for side in sides)


def _wrapped(letter: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(printable(text), _WIDTH, initial_indent=f"{letter:3}", subsequent_indent="     ")


def _narrow(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield shorten(line, _WIDTH)
