"""`ndd-console compare`: what changed between two recorded runs, and what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from ndd_console.view.rows import cells, foreign, shorten
from ndd_console.view.throughput import plural
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.record.snapshot import Evaluation
from ndd_engine.text import MISSING, duration, number, printable, rate, size
from ndd_engine.trial.compare import Comparison, phase_names
from ndd_engine.trial.compare import compare as compared
from ndd_engine.trial.recorded import Recorded

from .completion import run_names

_LABEL = 10
_COLUMN = 14
_VERDICTS = {
    "faster": "B is faster",
    "slower": "B is slower",
    "same": "no difference that matters",
    "undecided": "undecided: longer runs would tell",
}


@click.command()
@click.argument("a", shell_complete=run_names)
@click.argument("b", shell_complete=run_names)
@click.option(
    "--fail-if-slower",
    "limit",
    metavar="SHARE",
    help="Exit with status 1 when B is slower than A by more than this, beyond doubt: 5% or 0.05.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def compare(ctx: click.Context, a: str, b: str, limit: str | None, as_json: bool) -> int:
    """Compare run B with run A (names in the runs folder, or paths): what was changed, and what it did.

    The interval covers how the speed varied within the two runs, not what differs from start to start.
    """
    share = None if limit is None else share_of(limit)
    root = runs_root(ctx.obj["runs"])
    found = compared(find_run(root, a), find_run(root, b))
    outcome = None if share is None else found.slower_than(share)
    if as_json:
        check = None if share is None else {"limit": share, "result": outcome}
        click.echo(json.dumps({**found.to_dict(), "check": check}, indent=2, allow_nan=False))
    else:
        for line in describe(found):
            click.echo(line)
    for text in found.unlike:
        click.echo(f"warning: not a comparison of like with like: {printable(text)}", err=True)
    if share is not None:
        by = f"slower than A by more than {share * 100:.3g} %"
        said = {"slower": f"B is {by}", "not slower": f"B is not {by}"}
        click.echo(f"check: {said.get(outcome or '', f'undecided whether B is {by}')}", err=True)
    return EXIT_FAILED if outcome == "slower" else EXIT_DONE


def share_of(text: str) -> float:
    """ "5%" or "0.05" as 0.05. Raises UsageError."""
    number_text = text.strip().removesuffix("%").strip()
    try:
        value = float(number_text) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(
            f"--fail-if-slower {printable(text)}: is not a share; allowed: 0 to below 100 %, as in 5% or 0.05"
        )
    return value


def describe(found: Comparison) -> Iterator[str]:
    """The comparison as lines."""
    for letter, side in (("A", found.a), ("B", found.b)):
        yield _line(letter, _identity(side))
    yield from _differences(found)
    yield from _speed(found)
    yield from _table(found)


def _identity(side: Recorded) -> str:
    run = side.run
    return foreign(
        f"{side.name}: {run.workload}, {number(run.parameters)} parameters, {side.snapshot.status} at step "
        f"{number(side.snapshot.step)}, on {run.device_name}, {run.precision}"
    )


def _differences(found: Comparison) -> Iterator[str]:
    if not found.differences:
        yield _line(
            "changed", "nothing that was recorded: configuration, versions, machine and data are the same"
        )
    for index, item in enumerate(found.differences):
        what = item.key if item.kind in ("config", item.key) else f"{item.kind} {item.key}"
        yield _line(
            "changed" if index == 0 else "", f"{foreign(what)}: {foreign(item.a)} -> {foreign(item.b)}"
        )


def _speed(found: Comparison) -> Iterator[str]:
    speed, unit = found.speed, plural(foreign(found.a.run.item))
    if speed.low is None or speed.high is None:
        told = "too few windows for an interval"
    else:
        told = f"{speed.low:.3f} to {speed.high:.3f} with 95 % confidence: {_VERDICTS[found.verdict]}"
    yield _line("speed", f"{speed.ratio:.3f}x, {told}")
    yield _line(
        "", f"A {rate(found.a.rate.value, unit)}, B {rate(found.b.rate.value, unit)}; without evaluations"
    )
    yield _line("", f"and checkpoints; windows used: A {_used(found.a)}; B {_used(found.b)}")


def _used(side: Recorded) -> str:
    left_out = [
        f"{count} {what}"
        for count, what in ((side.warm_up, "of warm-up"), (side.profiled, "profiled"))
        if count
    ]
    return f"{side.used}" + (f" (left out: {', '.join(left_out)})" if left_out else "")


def _table(found: Comparison) -> Iterator[str]:
    a, b = found.a, found.b
    yield ""
    yield _row("", "A", "B", "B / A")
    yield _times("step, middle", a.step_p50_ns, b.step_p50_ns)
    yield _times("step, 95 %", a.step_p95_ns, b.step_p95_ns)
    for name in phase_names(found):
        indent = "    " if "/" in name else "  "
        yield _times(indent + foreign(name), a.phases.get(name), b.phases.get(name))
    peak = "memory, peak" if a.run.device != "cpu" else "resident, peak"
    yield _row(peak, size(a.peak_bytes), size(b.peak_bytes), _over(a.peak_bytes, b.peak_bytes))
    unit = plural(foreign(a.run.item))
    for point in found.losses:
        yield _row(
            f"loss at {number(point.items)} {unit}",
            number(point.a, 4),
            number(point.b, 4),
            _over(point.a, point.b),
        )
    for word, one, other in (
        ("best", a.snapshot.best, b.snapshot.best),
        ("last", _last(a), _last(b)),
    ):
        yield from _evaluation(word, one, other)
    yield "times are per optimizer step, by the host clock"


def _evaluation(word: str, a: Evaluation | None, b: Evaluation | None) -> Iterator[str]:
    left, right = (a.metrics if a else {}), (b.metrics if b else {})
    for name in dict.fromkeys((*left, *right)):
        one, other = left.get(name), right.get(name)
        yield _row(f"{word} {foreign(name)}", number(one, 4), number(other, 4), _over(one, other))


def _last(side: Recorded) -> Evaluation | None:
    return side.snapshot.evaluations[-1] if side.snapshot.evaluations else None


def _times(label: str, a: float | None, b: float | None) -> str:
    return _row(label, *(duration(None if value is None else value * 1e-9) for value in (a, b)), _over(a, b))


def _over(a: Any, b: Any) -> str:
    return f"{b / a:.3f}" if a and b is not None else MISSING


def _row(label: str, *values: str) -> str:
    label = shorten(label, 30)
    return label + " " * (30 - cells(label)) + "".join(f"{value:>{_COLUMN}}" for value in values)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"
