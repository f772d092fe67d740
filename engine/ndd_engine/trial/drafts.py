"""The two configurations that a request for a trial comes to."""

from __future__ import annotations

from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.train.preflight import preflight

from .outcome import differences
from .request import TrialRequest


def drafts(request: TrialRequest) -> tuple[Draft, Draft]:
    """The present and the change. Raises UsageError for what cannot be tried, ConfigError for mistakes in either."""
    if not request.sets:
        raise UsageError("nothing is changed: say what to try with --set KEY=VALUE")
    if not request.budget_s > 0:
        raise UsageError(f"the budget of a trial is {request.budget_s:g} s; allowed: more than 0")
    of = request.base
    base = read(of.config, of.sets, of.workload)
    change = read(of.config, (*of.sets, *request.sets), of.workload)
    configs = [preflight(draft, use_torch=False) for draft in (base, change)]
    if base.size == change.size and configs[0] == configs[1]:
        raise UsageError(
            f"{', '.join(request.sets)}: this is what {of.name} has already; there is nothing to compare"
        )
    return base, change


def check(request: TrialRequest) -> dict[str, tuple[object, object]]:
    """The keys that the change changes, with both values. Raises UsageError for what cannot be tried."""
    base, change = drafts(request)
    return differences(base.resolve(), change.resolve())
