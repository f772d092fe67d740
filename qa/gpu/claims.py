"""Part "claims": `claims decisive|other`, the guides' claims, as many as the time allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain, zip_longest

from ndd_engine.hardware.detect import detect
from ndd_engine.trial.claims import Claim, ClaimsState, claims, conditions, measurements, run_claims
from ndd_engine.trial.tuning import place_of
from ndd_watch.changes import Conditions

from .figures import Task, one_line

# Seconds of one measurement, which include its set-up, and of what is around it.
LEAST_S, MOST_S, START_S = 20.0, 60.0, 3.0
# Until the first measurement: imports.
IMPORTS_S = 14.0
# Those that depend most on the GPU, each with one measurement, the most decisive first: TF32, mixed precision, loader
# and idle GPU, compiling, cuDNN, the optimizer, the size of the batch. These always run.
DECISIVE = ("C2", "A3", "N1", "F3", "C3", "A4", "C4", "C5", "S1", "C7", "S6", "N6")
QUICK = 2


def wanted(which: str, effort: str, place: Conditions) -> list[Claim]:
    """The claims of a part, in the order in which they are measured. which: "decisive" or "other"."""
    by_id = {claim.id: claim for claim in claims()}
    decisive = [by_id.pop(name) for name in DECISIVE]
    found = decisive if which == "decisive" else in_turn(tuple(by_id.values()))
    if effort == "smoke":
        return [claim for claim in found if measurements(claim, place)][:1]
    return found[:QUICK] if effort == "quick" and which == "decisive" else found


def measure(given: Task) -> None:
    """Measure the claims until the time is over."""
    machine = detect("cuda" if given.on_gpu else "cpu", use_torch=False)
    place = place_of(machine)
    chosen = wanted(given.args[0], given.effort, place)
    budget_s = budget(sum(measurements(claim, place) for claim in chosen), given.left_s)
    budget_s = given.of(budget_s, budget_s, LEAST_S)
    given.put("seconds per measurement", f"{budget_s:.0f} at most")
    stop = threading.Event()
    timer = threading.Timer(max(given.left_s - 3, 1), stop.set)
    timer.daemon = True
    timer.start()
    done: set[str] = set()

    def look(state: ClaimsState) -> None:
        """Record each claim as soon as it is measured."""
        for result in state.rows[len(done) :]:
            done.add(result.claim.id)
            text = one_line("; ".join(conditions(result)), 600)
            given.put(name_of(result.claim), "", "", result.verdict, text)

    run_claims(chosen, budget_s, stop=stop, machine=machine, tell=look)
    for claim in chosen:
        if claim.id not in done:
            given.skip(name_of(claim), "no time left")


def in_turn(every: Sequence[Claim]) -> list[Claim]:
    """The first claim of each guide, then the second of each, and so on."""
    guides: dict[str, list[Claim]] = {}
    for claim in every:
        guides.setdefault(claim.guide, []).append(claim)
    return [claim for claim in chain.from_iterable(zip_longest(*guides.values())) if claim is not None]


def budget(count: int, left_s: float) -> float:
    """Seconds per measurement, so that all of them fit into the time if that is possible."""
    return min(max(left_s / max(count, 1) - START_S, LEAST_S), MOST_S)


def name_of(claim: Claim) -> str:
    """Its id, guide and text."""
    return one_line(f"{claim.id} {claim.guide}: {claim.text}", 160)
