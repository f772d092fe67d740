"""The tables of the suite: all cases, true vs. reported causes, and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.common import Table

from .outcome import FELT, Measured, Outcome

# Cores used by processes that were not planted, above which a case counts as disturbed.
DISTURBED = 0.2
# Target share of planted faults whose true cause comes first.
NAMED = 0.95


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """All three tables."""
    return [case_table(outcomes), confusion(outcomes), targets(outcomes)]


def case_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per case."""
    table = Table(
        "planted faults: is the true cause reported, and does its fix gain?",
        (
            "true cause", "severity", "workload", "reported first", "ceiling", "fix", "95 % CI", "trial",
            "without the fault", "95 % CI", "correct",
        ),
    )  # fmt: skip
    for outcome in outcomes:
        if outcome.error:
            table.add(*_subject(outcome), "failed")
            table.note(f"{outcome.case.name}: {outcome.error}")
            continue
        ceiling = "" if outcome.ceiling is None else f"{outcome.ceiling:.2f}x"
        table.add(
            *_subject(outcome), outcome.named, ceiling,
            *_measured(outcome.tried), outcome.tried.verdict if outcome.tried else "", *_measured(outcome.cured),
            "yes" if outcome.right else "NO",
        )  # fmt: skip
        for measured in (outcome.tried, outcome.cured):
            if measured is not None and measured.ratio is None:
                table.note(
                    f"{outcome.case.name}: {' '.join(measured.sets)}: {measured.verdict}: {measured.text}"
                )
        if outcome.exceeded:
            table.note(f"{outcome.case.name}: the gain exceeds the ceiling")
        for cause in outcome.charges:
            table.note(f"{outcome.case.name}: false positive: {cause}")
        if outcome.owes_a_cure and not outcome.cures:
            table.note(
                f"{outcome.case.name}: costs over {FELT - 1:.0%}, and the proposed fix has no measured gain: "
                f"{' '.join(outcome.fix) or 'no setting'}"
            )
    disturbed = [outcome.case.name for outcome in outcomes if outcome.foreign > DISTURBED]
    if disturbed:
        table.note(
            f"other processes used over {DISTURBED} cores in {len(disturbed)} cases; repeat them on a quiet machine: "
            f"{', '.join(disturbed)}"
        )
    return table


def confusion(outcomes: Sequence[Outcome]) -> Table:
    """True causes in rows, reported ones in columns by their numbers."""
    pairs = Counter((outcome.case.truth, outcome.named) for outcome in outcomes if not outcome.error)
    causes = sorted({cause for pair in pairs for cause in pair})
    numbers = {cause: str(index) for index, cause in enumerate(causes, start=1)}
    table = Table("true causes (rows) vs. causes reported first (columns)", ("", *numbers.values()))
    for truth in causes:
        cells = [str(pairs[truth, named]) if pairs[truth, named] else "." for named in causes]
        table.add(f"{numbers[truth]} {truth}", *cells)
    return table


def targets(outcomes: Sequence[Outcome]) -> Table:
    """The targets, and whether they are reached."""
    table = Table("targets", ("", "found", "total", "target", ""))
    faults = [outcome for outcome in outcomes if outcome.planted]
    clean = [outcome for outcome in outcomes if not outcome.planted]
    owing = [outcome for outcome in faults if outcome.owes_a_cure]
    tried = [outcome for outcome in outcomes if outcome.tried or outcome.cured]

    def add(what: str, found: int, of: int, least: float | None = None) -> None:
        """least: the share that has to be found; None: none may be."""
        target = "0" if least is None else "all" if least == 1 else f"≥ {least:.0%}"
        reached = found == 0 if least is None else found >= least * of
        verdict = ("reached" if reached else "NOT REACHED") if of else "not measured"
        table.add(what, str(found), str(of), target, verdict)

    add("true cause first", sum(outcome.right for outcome in faults), len(faults), NAMED)
    accused = sum(bool(outcome.charges) for outcome in clean)
    add("false positives without a planted fault", accused, len(clean))
    cured = sum(outcome.cures for outcome in owing)
    add("fix gains (interval above 1), fault costs > 10 %", cured, len(owing), 1)
    add("gain beyond the ceiling", sum(outcome.exceeded for outcome in tried), len(tried))
    add("failed cases", sum(bool(outcome.error) for outcome in outcomes), len(outcomes))
    table.note(
        "a planted fault with a measured cost under 5 % may be reported as healthy; without a planted fault, a cause "
        "is correct if its fix gains in a trial"
    )
    return table


def _subject(outcome: Outcome) -> tuple[str, str, str]:
    case = outcome.case
    what = case.truth if outcome.planted else f"none ({case.kind}: {case.fault})"
    return what, case.severity, case.workload


def _measured(measured: Measured | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    if measured.ratio is None:
        return measured.verdict, ""
    interval = "" if measured.low is None else f"{measured.low:.2f} … {measured.high:.2f}"
    return f"{measured.ratio:.2f}x", interval
