"""The two configurations of a trial."""

from __future__ import annotations

from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.train.preflight import preflight

from .outcome import differences
from .request import TrialRequest


def drafts(request: TrialRequest) -> tuple[Draft, Draft]:
    """(baseline, candidate). Raises UsageError if the request cannot be tried, ConfigError for mistakes in either."""
    if not request.sets:
        raise UsageError(
            "no settings to try: add --set KEY=VALUE (the length of the run applies to both sides of a trial)"
        )
    if not request.budget_s > 0:
        raise UsageError(f"--budget {request.budget_s:g}: allowed: more than 0 seconds")
    of = request.base
    base = read(of.config, of.sets, of.workload)
    change = read(of.config, (*of.sets, *request.sets), of.workload)
    configs = [preflight(draft, use_torch=False) for draft in (base, change)]
    if base.size == change.size and configs[0] == configs[1]:
        raise UsageError(f"{', '.join(request.sets)}: already set in {of.name}; there is nothing to compare")
    return base, change


def check(request: TrialRequest) -> dict[str, tuple[object, object]]:
    """The keys that differ, with both values. Raises UsageError if the request cannot be tried."""
    base, change = drafts(request)
    return differences(base.resolve(), change.resolve())
