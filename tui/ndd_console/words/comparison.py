"""A comparison of runs in words: what differs, and how speed, phases, memory and losses changed."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence

from ndd_engine.text import MISSING, factor, number, plural, rate, size
from ndd_engine.trial.compare import (
    NOT_SET,
    Comparison,
    Difference,
    Recorded,
    SeveralCompared,
    phase_names,
)

from .blocks import Block, Diff, NamedValues, Table, clip, ns
from .model_work import changed_modules

# The runs, in their order.
LETTERS = string.ascii_uppercase
_VERDICTS = {"faster": "B is faster", "slower": "B is slower", "same": "no significant difference"}
_UNLIKE = "no verdict: the runs train different workloads or models"
_DISTURBED = "no verdict: other processes used the cores of one run"
_INCONCLUSIVE = "inconclusive; compare longer runs, or measure the change with ndd-console try"
_SHORT = {"faster": "faster", "slower": "slower", "same": "no difference", "not comparable": "other model"}
_TIMES = "Times are per optimizer step, by the host clock; those of phases are means."
_BLOCK = 5  # runs in one table of phases
_LABEL = 40
_ONLY = 2  # settings of one run alone that are named
_DIFF = 100  # lines of a diff that are shown


def unlike_text(comparison: Comparison) -> str:
    """Why the figures may be misleading, in one line; "" if they are not."""
    return f"not directly comparable: {'; '.join(comparison.unlike)}" if comparison.unlike else ""


def unlike_texts(comparison: SeveralCompared) -> Iterator[str]:
    """Which runs are not directly comparable with A, and why."""
    for letter, candidate in zip(LETTERS[1:], comparison.candidates, strict=False):
        which = f"A and {letter}" if len(comparison.candidates) > 1 else "the runs"
        if text := unlike_text(candidate):
            yield f"{which} are {text}"


def checked_texts(outcomes: Sequence[str | None], share: float) -> Iterator[str]:
    """Whether each run is slower than A by more than a share. outcomes: of `Comparison.slower_than`."""
    by = f"slower than A by more than {share * 100:.3g} %"
    for letter, outcome in zip(LETTERS[1:], outcomes, strict=False):
        words = {"slower": f"{letter} is {by}", "not slower": f"{letter} is not {by}"}
        yield words.get(outcome or "", f"inconclusive whether {letter} is {by}")


def two_compared(comparison: Comparison) -> Iterator[Block]:
    sides = ("A", _identity(comparison.a)), ("B", _identity(comparison.b))
    yield NamedValues((*sides, *_differences(comparison), *_speed(comparison)))
    if comparison.diff:
        yield Diff(comparison.diff[:_DIFF], len(comparison.diff[_DIFF:]))
    yield Table("", ("", "A", "B", "B / A"), tuple(_figures(comparison)), frozenset({1, 2, 3}), _TIMES)
    modules = changed_modules(comparison.a.snapshot.kernels, comparison.b.snapshot.kernels)
    if modules is not None and modules.rows:
        yield modules


def _identity(side: Recorded) -> str:
    run = side.run
    return (
        f"{side.name}: {run.workload}, {number(run.parameters or None)} parameters, {side.snapshot.status} at step "
        f"{number(side.snapshot.step)}, on {', '.join(filter(None, (run.device_name, run.precision)))}"
    )


def _differences(comparison: Comparison, label: str = "changed") -> Iterator[tuple[str, str]]:
    """What differs, one line each; what only one run sets is one line for each run."""
    found = comparison.differences
    lines = [f"{_key(one)}: {one.a} -> {one.b}" for one in found if NOT_SET not in (one.a, one.b)]
    for side, only in (
        (comparison.a, [(one, one.a) for one in found if one.b == NOT_SET]),
        (comparison.b, [(one, one.b) for one in found if one.a == NOT_SET]),
    ):
        if only:
            more = f" and {len(only) - _ONLY} more" if len(only) > _ONLY else ""
            settings = ", ".join(f"{_key(one)} {value}" for one, value in only[:_ONLY])
            lines.append(f"only {side.name} sets {settings}{more}")
    if not found and not comparison.diff:
        lines = ["nothing: configuration, versions, machine and data are the same"]
    elif not found:
        lines = ["the source of the script"]
    for index, line in enumerate(lines):
        yield "" if index else label, line


def _key(difference: Difference) -> str:
    key, kind = difference.key, difference.kind
    return key if kind in ("config", key) else f"{kind} {key}"


def _speed(comparison: Comparison) -> Iterator[tuple[str, str]]:
    speed, unit = comparison.speed, plural(comparison.a.run.item)
    if comparison.verdict == "not comparable":
        interval = _UNLIKE
    elif speed.low is None or speed.high is None:
        interval = "too few measuring intervals for a confidence interval"
    else:
        verdict = _DISTURBED if comparison.disturbed else _VERDICTS.get(comparison.verdict, _INCONCLUSIVE)
        interval = f"95 % CI {_ratio(speed.low)} to {_ratio(speed.high)}: {verdict}"
    yield "speed", f"B/A {_ratio(speed.ratio)}x, {interval}"
    yield "", f"A {rate(comparison.a.rate.value, unit)}, B {rate(comparison.b.rate.value, unit)}"
    used = f"A {_used(comparison.a)}; B {_used(comparison.b)}"
    yield "", f"measuring intervals used: {used}; evaluations and checkpoints excluded"


def _used(side: Recorded) -> str:
    counts = ((side.warm_up, "warm-up"), (side.profiled, "profiled"))
    excluded = ", ".join(f"{count:,} {kind}" for count, kind in counts if count)
    return f"{side.used}" + (f" (excluded: {excluded})" if excluded else "")


def _figures(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    a, b = comparison.a, comparison.b
    yield _row("all phases", ns, _mean_ns(a), _mean_ns(b))
    for name in phase_names((a, b)):
        indent = "    " if "/" in name else "  "
        yield _row(indent + name, ns, a.phases.get(name), b.phases.get(name))
    if a.exchange_ns is not None or b.exchange_ns is not None:
        yield _row("all ranks: exchange", ns, a.exchange_ns, b.exchange_ns)
        yield _row("all ranks: skew", ns, a.skew_ns, b.skew_ns)
    yield _row("step, median", ns, a.step_p50_ns, b.step_p50_ns)
    yield _row("step, 95th percentile", ns, a.step_p95_ns, b.step_p95_ns)
    peak = "peak GPU memory" if a.run.device != "cpu" else "peak resident memory"
    yield _row(peak, size, a.peak_bytes, b.peak_bytes)
    unit = plural(a.run.item)
    for point in comparison.losses:
        yield _row(f"loss at {number(point.items)} {unit}", _value, *point.losses)
    last = [next(reversed(side.snapshot.evaluations), None) for side in (a, b)]
    for word, sides in (("best", [a.snapshot.best, b.snapshot.best]), ("last", last)):
        before, after = (side.metrics if side else {} for side in sides)
        for name in dict.fromkeys((*before, *after)):
            yield _row(f"{word} {name}", _value, before.get(name), after.get(name))


def _mean_ns(side: Recorded) -> float | None:
    """The sum of the phases, which cover the whole step."""
    parts = [value for name, value in side.phases.items() if "/" not in name]
    return sum(parts) if parts else None


def _row(
    label: str, form: Callable[[float | None], str], a: float | None, b: float | None
) -> tuple[str, ...]:
    over = _ratio(b / a) if a and b is not None else MISSING
    return clip(label, _LABEL), form(a), form(b), over


def _ratio(ratio: float) -> str:
    """Three digits after the point, since small differences count here; else as other ratios: "25.3", "0.00012"."""
    return f"{ratio:.3f}" if 0.1 <= ratio < 10 else factor(ratio)


def _value(value: float | None) -> str:
    return number(value, 4)


def several_compared(comparison: SeveralCompared) -> Iterator[Block]:
    sides = list(zip(LETTERS, comparison.sides, strict=False))
    yield NamedValues(tuple((letter, _identity(side)) for letter, side in sides))
    candidates = zip(LETTERS[1:], comparison.candidates, strict=False)
    changed = [row for letter, candidate in candidates for row in _differences(candidate, letter)]
    yield NamedValues(tuple(changed), "Changed, compared with A")
    columns = ("", "speed / A", "95 % CI", "", "median step", "peak memory")
    yield Table("", columns, tuple(_speeds(comparison)), frozenset({1, 2, 4, 5}))
    yield from _scores(comparison)
    names = phase_names(comparison.sides)
    for begin in range(0, len(sides), _BLOCK):
        block = sides[begin : begin + _BLOCK]
        labels = (clip(("  " if "/" in name else "") + name, 24) for name in names)
        rows = tuple(
            (label, *(ns(side.phases.get(name)) for _, side in block))
            for name, label in zip(names, labels, strict=True)
        )
        head = ("time per step", *(letter for letter, _ in block))
        note = _TIMES if begin + _BLOCK >= len(sides) else ""
        yield Table("", head, rows, frozenset(range(1, len(head))), note)


def _speeds(comparison: SeveralCompared) -> Iterator[tuple[str, ...]]:
    baseline = comparison.baseline
    yield "A", "1.000x", "", "baseline", ns(baseline.step_p50_ns), size(baseline.peak_bytes)
    for letter, candidate in zip(LETTERS[1:], comparison.candidates, strict=False):
        speed = candidate.speed
        interval = MISSING
        if speed.low is not None and speed.high is not None and candidate.verdict != "not comparable":
            interval = f"{_ratio(speed.low)} to {_ratio(speed.high)}"
        verdict = _SHORT.get(candidate.verdict, "inconclusive")
        figures = ns(candidate.b.step_p50_ns), size(candidate.b.peak_bytes)
        yield letter, f"{_ratio(speed.ratio)}x", interval, verdict, *figures


def _scores(comparison: SeveralCompared) -> Iterator[Block]:
    """Losses and best evaluations, one row for each run."""
    best = [side.snapshot.best.metrics if side.snapshot.best else {} for side in comparison.sides]
    names = list(dict.fromkeys(name for metrics in best for name in metrics))[:2]
    if not comparison.losses and not names:
        return
    losses = (f"loss {point.share * 100:.0f} %" for point in comparison.losses)
    columns = ("", *losses, *(clip(f"best {name}", 16) for name in names))
    rows = tuple(
        (
            letter,
            *(_value(point.losses[index]) for point in comparison.losses),
            *(_value(best[index].get(name)) for name in names),
        )
        for index, (letter, _) in enumerate(zip(LETTERS, comparison.sides, strict=False))
    )
    note = ""
    if comparison.losses:
        unit = plural(comparison.baseline.run.item)
        note = f"Losses after these shares of {number(comparison.losses[-1].items)} {unit}."
    yield Table("", columns, rows, frozenset(range(1, len(columns))), note)
