"""`ndd-console claims`: what the guides claim, measured here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndd_console.view.interval import interval_text
from ndd_console.view.rows import wrap
from ndd_engine.record.rundir import runs_root
from ndd_engine.text import duration, printable

from .measuring import check_writable, stoppable, write
from .options import Finite

if TYPE_CHECKING:
    from ndd_engine.trial.candidates import Place
    from ndd_engine.trial.claims import ClaimResult, ClaimsState
    from ndd_engine.trial.claims_table import Claim

_EVERY_S = 10.0
_WIDTH = 100
_INDENT = " " * 5


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--list", "only_list", is_flag=True, help="Only list the claims and what they need.")
@click.option(
    "--budget", type=Finite(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="At most so long for one measurement; a claim takes one or two.",
)  # fmt: skip
@click.option("--pause", is_flag=True, help="Pause the runs on the same device meanwhile.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the result to this file as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def claims(
    ctx: click.Context,
    ids: tuple[str, ...],
    only_list: bool,
    budget: float,
    pause: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure the guides' claims on this machine: the ratio with its interval, and whether the claim holds.

    ID: a claim (N1), or all of a guide (eeg, antispoof, chartext, finetune, summarise); without one all of them. Where
    the guide's own condition cannot be had here, the nearest one that can is measured, and said.
    """
    from ndd_engine.hardware.detect import detect
    from ndd_engine.trial.candidates import Place
    from ndd_engine.trial.claims import run_claims
    from ndd_engine.trial.claims_table import chosen
    from ndd_engine.trial.pausing import held, to_pause
    from ndd_engine.trial.request import Base

    wanted = chosen(ids)
    check_writable(output)
    machine = detect(use_torch=False)
    place = Place.of(machine)
    if only_list:
        _print(
            json.dumps(_list_dict(wanted, place, budget), indent=2)
            if as_json
            else _listed(wanted, place, budget)
        )
        return 0

    def say(line: str) -> None:
        click.echo(line, err=True)

    beside = to_pause(Base("the claims"), runs_root(ctx.obj["runs"]), pause)
    for line in _announced(wanted, place, budget):
        say(line)
    with stoppable("the claims") as stop, held(beside, say, stop):
        results = run_claims(wanted, budget, ClaimsProgress(say).look, stop, machine=machine)
    body = {"budget_s": budget, "claims": [result.to_dict() for result in results]}
    text = json.dumps(body, indent=2, allow_nan=False) if as_json else "\n".join(describe(results))
    if output is not None:
        write(output, text + "\n")
    _print(text)
    return stop.exit_status


def _print(text: str) -> None:
    if text:
        click.echo(text)


def _listed(wanted: Sequence[Claim], place: Place, budget_s: float) -> str:
    lines = []
    for claim in wanted:
        lines += _wrapped(f"{claim.id:<5}{claim.guide}: {claim.text}")
        for text in dict.fromkeys(_how(claim, place)):
            lines += _wrapped(f"{_INDENT}{text}")
    return "\n".join([*lines, _total(wanted, place, budget_s)])


def _how(claim: Claim, place: Place) -> Iterator[str]:
    """What is measured of each part, and with what."""
    for part in claim.parts:
        variant, missing = part.choose(place)
        name = f"{part.name}: " if part.name else ""
        if variant is None:
            yield f"{name}not measurable here: {missing}"
        elif variant.where:
            yield f"{name}here: {variant.where}" + (f"; the guide's condition {missing}" if missing else "")
        else:
            yield f"{name}as the guide has it"


def _announced(wanted: Sequence[Claim], place: Place, budget_s: float) -> Iterator[str]:
    yield f"{len(wanted)} claims: {', '.join(claim.id for claim in wanted)}"
    yield _total(wanted, place, budget_s)


def _total(wanted: Sequence[Claim], place: Place, budget_s: float) -> str:
    from ndd_engine.trial.claims import measurements

    count = sum(measurements(claim, place) for claim in wanted)
    return f"{count} measurements of at most {duration(budget_s)}: up to {duration(count * budget_s)}"


def _list_dict(wanted: Sequence[Claim], place: Place, budget_s: float) -> dict[str, object]:
    from ndd_engine.trial.claims import measurements

    entries = [
        {
            "id": claim.id, "guide": claim.guide, "claim": claim.text, "how": list(dict.fromkeys(_how(claim, place))),
            "seconds_at_most": measurements(claim, place) * budget_s,
        }
        for claim in wanted
    ]  # fmt: skip
    return {"budget_s": budget_s, "claims": entries}


class ClaimsProgress:
    """Says which claim is being measured, how far it is, and what came of it."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._told = 0
        self._claim = ""
        self._next = 0.0

    def look(self, state: ClaimsState) -> None:
        """Tell what changed since the last look."""
        for result in state.results[self._told :]:
            self._say(f"{result.claim.id}: {result.verdict}")
        self._told = len(state.results)
        now = self._clock()
        if state.claim is not None and state.claim.id != self._claim:
            self._claim, self._next = state.claim.id, now + _EVERY_S
            self._say(f"{state.claim.id} ({state.index + 1} of {state.count}): {state.claim.text} …")
        elif now >= self._next and (state.progress is not None or state.stage):
            self._next = now + _EVERY_S
            progress = state.progress
            if progress is None:
                self._say(f"  {state.stage}")
                return
            so_far = interval_text(progress.ratio, progress.low, progress.high)
            self._say(
                f"  {printable(progress.stage)}, {progress.elapsed_s:.0f} of at most {progress.budget_s:.0f} s"
                + (f", so far {so_far}" if so_far else "")
            )


def describe(results: Sequence[ClaimResult]) -> Iterator[str]:
    """Each claim with its verdict and what was measured, then how many there are of each verdict."""
    from ndd_engine.trial.claims import conditions

    if results:
        yield f"measured on {printable(results[0].device)}"
    for result in results:
        yield ""
        yield f"{result.claim.id:<5}{result.verdict.upper()}"
        yield from _wrapped(f"{_INDENT}{result.claim.guide}: {result.claim.text}")
        for line in conditions(result):
            yield from _wrapped(f"{_INDENT}{printable(line)}")
    if results:
        verdicts = [result.verdict for result in results]
        yield ""
        yield ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))


def _wrapped(text: str) -> list[str]:
    """Within _WIDTH, further lines indented."""
    first, *rest = wrap(text, _WIDTH) or [""]
    lead = text[: len(text) - len(text.lstrip())]
    first = lead + first.lstrip()
    more = " ".join(rest)
    return (
        [first, *(f"{_INDENT}  {line}" for line in wrap(more, _WIDTH - len(_INDENT) - 2))]
        if more
        else [first]
    )
