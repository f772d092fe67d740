"""The registry of rules, and `diagnose`, which applies them and sorts the findings."""

from __future__ import annotations

from collections.abc import Callable

from ndd_engine.record.snapshot import Snapshot

from . import formats, gpu, hazards, healthy, loader, model, processor, ranks, script, step
from .finding import Finding
from .view import View, ceiling
from .worth import leave, proved, tried

Rule = Callable[[View], Finding | None]

# Findings with a lower ceiling are dropped.
LEAST = 1.04
# Rules that apply to short runs as well.
ALWAYS: tuple[Rule, ...] = (*hazards.RULES, model.compile_cost)
RULES: tuple[Rule, ...] = (
    *loader.RULES,
    *processor.RULES,
    *(GPU_RULES := (*gpu.RULES, *formats.RULES)),
    *ranks.RULES,
    *model.RULES,
    *script.RULES,
    *step.RULES,
)


def diagnose(snapshot: Snapshot, *, few_steps: bool = False) -> tuple[Finding, ...]:
    """All findings of a run, the most important first; never empty.

    few_steps: judge any number of steps, such as those of a trace.

    Order: hazards, a model that is compiled no more, bottlenecks, bottlenecks whose change was tried and not faster,
    findings that cost no time. Bottlenecks are sorted by the measured speedup of their change; if there is none, by
    ceiling or share of the time.
    """
    view = View(snapshot)
    found = [item for rule in ALWAYS if (item := rule(view)) is not None]
    short = None if few_steps else healthy.too_short(view)
    if short is not None:
        found.append(short)
    else:
        asked = (rule(view) for rule in RULES if view.gpu or rule not in GPU_RULES)
        found += [item for item in asked if item is not None and (item.ceiling or LEAST) >= LEAST]
    if not found:
        found.append(healthy.healthy(view))
    found.sort(key=lambda item: _rank(view, item))
    return tuple(leave(view, item) for item in found)


def _rank(view: View, item: Finding) -> tuple[int, float]:
    if item.cause in ("leak", "near-limit"):
        return 0, 0.0
    if item.cause == "recompile" and item.ceiling is None:  # what was to run compiled runs without
        return 1, float("-inf")
    if item.ceiling is not None or item.share is not None:
        bound = proved(view, item) or item.ceiling or ceiling(item.share or 0.0)
        return (1 if tried(view, item) is None else 2), -bound
    return (3 if item.cause == "too-short" else 4), 0.0
