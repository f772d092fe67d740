"""Claims of guides in words: how they are measured on this machine, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ndd_engine.text import counted, duration

from .blocks import Block, NamedValues, Text

if TYPE_CHECKING:
    from ndd_engine.trial.claims import Claim, ClaimResult
    from ndd_watch.changes import Conditions


def claims_listed(wanted: Sequence[Claim], place: Conditions, budget_s: float) -> Iterator[Block]:
    """Each claim with the condition under which it is measured, then how long that takes."""
    rows: list[tuple[str, str]] = []
    for claim in wanted:
        rows.append((claim.id, f"{claim.guide}: {claim.text}"))
        rows += (("", text) for text in part_conditions(claim, place))
    yield NamedValues(tuple(rows))
    yield Text(duration_text(wanted, place, budget_s))


def part_conditions(claim: Claim, place: Conditions) -> list[str]:
    """The condition under which each part is measured on this machine, without repetitions."""
    texts = []
    for part in claim.parts:
        variant, missing = part.choose(place)
        name = f"{part.name}: " if part.name else ""
        if variant is None:
            texts.append(f"{name}not measurable on this machine: {missing}")
        elif variant.where:
            needs = f"; the condition of the {claim.guide} guide {missing}" if missing else ""
            texts.append(f"{name}on this machine: {variant.where}{needs}")
        else:
            texts.append(f"{name}same condition as in the {claim.guide} guide")
    return list(dict.fromkeys(texts))


def duration_text(wanted: Sequence[Claim], place: Conditions, budget_s: float) -> str:
    """How many measurements there are, and how long they take at most."""
    from ndd_engine.trial.claims import measurements

    count = sum(measurements(claim, place) for claim in wanted)
    return f"{counted(count, 'measurement')} of up to {duration(budget_s)} each: {duration(count * budget_s)} at most"


def claims_measured(results: Sequence[ClaimResult]) -> Iterator[Block]:
    """Each claim with its verdict and its measurements, then the number of claims per verdict."""
    from ndd_engine.trial.claims import conditions, headline

    if not results:
        return
    yield Text(f"measured on {results[0].device}")
    rows: list[tuple[str, str]] = []
    for result in results:
        verdict, colon, rest = headline(result).partition(":")
        rows.append((result.claim.id, f"{verdict.upper()}{colon}{rest}"))
        rows.append(("", f"{result.claim.guide}: {result.claim.text}"))
        rows += (("", line) for line in conditions(result))
    yield NamedValues(tuple(rows))
    verdicts = [result.verdict for result in results]
    yield Text(", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts)))
