"""Starts processes for their first losses: with a change, without it, and with the edit that makes it.

The edit of a script is tried before it is shown: an edited scratch copy trains, as the change did that was measured.

Its losses have to be those of the script with the change made from outside, and the change has to be in effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildError, Tick
from ndd_engine.text import printable
from ndd_engine.trial.outcome import compare_losses, same_steps
from ndd_engine.trial.trial_request import LOSSES, SideFacts, not_in_effect

from .edits import Edit

# Seconds until the first step, besides those that it took in the trial.
FIRST_S = 60.0
# Starts a process with an edited file and what has to be in effect, or with a change that is made from outside.
Started = Callable[[Mapping[Path, str], Mapping[str, Any], Mapping[str, Any]], Any]


def digest(edit: Edit) -> str:
    """Identifies the text of an edited file; "" without one."""
    return "" if edit.path is None else hashlib.sha256(edit.after.encode()).hexdigest()


def refusal(edit: Edit, changes: Mapping[str, Any], start: Started, prepare_s: float, tick: Tick) -> str:
    """Why an edit is not shown; "" if it trained and did what was measured. changes: those that the edit makes."""
    if edit.path is None:
        return ""

    def trained(*how: Mapping[Any, Any]) -> SideFacts:
        return first_steps(start(*how), prepare_s, tick)

    try:
        edited = trained({edit.path: edit.after}, changes, {})
        if missing := not_in_effect(edited.settings):
            return f"with it, {'; '.join(missing)}"
        measured = trained({}, {}, changes)
        if _differ(edited, measured) and not _differ(measured, trained({}, {}, changes)):
            return "with it, the first losses are others than those of the change that was measured"
    except ChildError as error:
        return f"a scratch copy with it does not train: {printable(str(error))}"
    return ""


def first_steps(started: Any, prepare_s: float, tick: Tick) -> SideFacts:
    """What is known of a process after its first steps. Raises ChildError."""
    with started as process:
        process.prepare(FIRST_S + 2 * prepare_s, tick)
        process.train(LOSSES, FIRST_S, tick, lead=0)
        process.learn(tick)
        facts: SideFacts = process.facts
        return facts


def _differ(one: SideFacts, other: SideFacts) -> bool:
    losses = same_steps(one, other)
    return (
        compare_losses(losses[0], losses[1], (), (one.items_per_step, other.items_per_step))[0] == "differs"
    )
