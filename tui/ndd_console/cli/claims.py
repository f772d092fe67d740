"""`ndd-console claims`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndd_engine.record.rundir import runs_root
from ndd_engine.text import duration, printable

from .measuring import check_writable, stoppable, write
from .options import budget_option, command, flag, json_option, output_option, pause_option
from .printing import ProgressLines, measurement, say, show

if TYPE_CHECKING:
    from ndd_engine.trial.candidates import Place
    from ndd_engine.trial.claims import ClaimResult, ClaimsState
    from ndd_engine.trial.claims_table import Claim

_WIDTH = 100
_INDENT = " " * 5


@command(
    "0 measured, whatever the verdicts; 2 usage error",
    "claims --list",
    "claims N1 N2 --budget 30",
    "claims chartext --json -o claims.json",
    stops=True,
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@flag("--list", "only_list", help="List the claims and what each one needs; measure nothing.")
@budget_option("Maximum duration of one measurement; most claims take one or two.")
@pause_option
@output_option("Also write the result to this file.")
@json_option
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
    """Measure on this machine what five notes on training speed claim.

    The notes (guides) come from real projects, one for each built-in workload. Most of their figures are estimates, and
    they contradict each other: torch.compile is 1.3 times faster in one and 9.5 times slower in another.

    ID is a claim (N1) or a guide (eeg, antispoof, chartext, finetune, summarise) for all of its claims. The default is
    every claim. Prints each claim with the measured ratio, its 95 % CI and the verdict. If this machine cannot
    reproduce a guide's condition, the closest one is measured, and the output says so.
    """
    from ndd_engine.hardware.detect import detect
    from ndd_engine.trial.candidates import Place
    from ndd_engine.trial.claims import measurements, run_claims
    from ndd_engine.trial.claims_table import chosen
    from ndd_engine.trial.pausing import held, to_pause
    from ndd_engine.trial.request import Base

    wanted = chosen(ids)
    check_writable(output)
    machine = detect(use_torch=False)
    place = Place.of(machine)
    if only_list:
        entries = [
            {
                "id": claim.id, "guide": claim.guide, "claim": claim.text, "how": _conditions(claim, place),
                "seconds_at_most": measurements(claim, place) * budget,
            }
            for claim in wanted
        ]  # fmt: skip
        listed = {"budget_s": budget, "claims": entries}
        show(listed if as_json else _listed(wanted, place, budget))
        return 0
    paused = to_pause(Base("the claims"), runs_root(ctx.obj["runs"]), pause)
    say(f"{len(wanted)} claims: {', '.join(claim.id for claim in wanted)}")
    say(_total(wanted, place, budget))
    with stoppable("the claims") as stop, held(paused, say, stop):
        results = run_claims(wanted, budget, ClaimsProgress(say).look, stop, machine=machine)
    body = {"budget_s": budget, "claims": [result.to_dict() for result in results]}
    lines = list(describe(results))
    show(body if as_json else lines)
    if output is not None:
        text = json.dumps(body, indent=2, allow_nan=False) if as_json else "\n".join(map(printable, lines))
        write(output, text + "\n")
    return stop.exit_status


def _listed(wanted: Sequence[Claim], place: Place, budget_s: float) -> Iterator[str]:
    for claim in wanted:
        yield from _wrapped(f"{claim.id:<5}{claim.guide}: {claim.text}")
        for text in _conditions(claim, place):
            yield from _wrapped(f"{_INDENT}{text}")
    yield _total(wanted, place, budget_s)


def _conditions(claim: Claim, place: Place) -> list[str]:
    """The condition under which each part is measured on this machine, without repetitions."""
    conditions = []
    for part in claim.parts:
        variant, missing = part.choose(place)
        name = f"{part.name}: " if part.name else ""
        if variant is None:
            conditions.append(f"{name}not measurable on this machine: {missing}")
        elif variant.where:
            needs = f"; the condition of the {claim.guide} guide {missing}" if missing else ""
            conditions.append(f"{name}on this machine: {variant.where}{needs}")
        else:
            conditions.append(f"{name}same condition as in the {claim.guide} guide")
    return list(dict.fromkeys(conditions))


def _total(wanted: Sequence[Claim], place: Place, budget_s: float) -> str:
    from ndd_engine.trial.claims import measurements

    count = sum(measurements(claim, place) for claim in wanted)
    return f"{count} measurements of up to {duration(budget_s)} each: {duration(count * budget_s)} at most"


class ClaimsProgress(ProgressLines):
    """Progress of the claims in lines: the claim that is being measured, and its verdict."""

    _results = 0

    def look(self, state: ClaimsState) -> None:
        """Called a few times a second."""
        from ndd_engine.trial.claims import headline

        for result in state.results[self._results :]:
            self.news(f"{result.claim.id}: {headline(result)}")
        self._results = len(state.results)
        if state.claim is not None and state.claim.id != self._key:
            self._key = state.claim.id
            self.news(f"{state.claim.id} ({state.index + 1} of {state.count}): {state.claim.text} …")
        elif state.progress is not None or state.stage:
            self.update(f"  {measurement(state.progress) if state.progress is not None else state.stage}")


def describe(results: Sequence[ClaimResult]) -> Iterator[str]:
    """Each claim with its verdict and its measurements, then the number of claims per verdict."""
    from ndd_engine.trial.claims import conditions, headline

    if not results:
        return
    yield f"measured on {printable(results[0].device)}"
    for result in results:
        yield ""
        verdict, colon, rest = headline(result).partition(":")
        yield f"{result.claim.id:<5}{verdict.upper()}{colon}{rest}"
        yield from _wrapped(f"{_INDENT}{result.claim.guide}: {result.claim.text}")
        for line in conditions(result):
            yield from _wrapped(f"{_INDENT}{printable(line)}")
    verdicts = [result.verdict for result in results]
    yield ""
    yield ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))


def _wrapped(text: str) -> list[str]:
    """The text over lines of _WIDTH, the second and further ones indented."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=f"{_INDENT}  ", break_on_hyphens=False)
