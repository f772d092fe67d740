"""`ndd-console compare`."""

from __future__ import annotations

import click

from ndd_console.words.comparison import LETTERS, checked_texts, several_compared, two_compared, unlike_texts
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.file import damage_text
from ndd_engine.record.rundir import find_run
from ndd_engine.text import printable
from ndd_engine.trial.compare import compare_several

from .completion import run_names
from .options import Asked, command, gathered, json_option
from .printing import say, show


@command(
    "0 compared, 1 a run is slower than --fail-if-slower allows, 2 usage error or models that differ",
    "compare baseline candidate",
    "compare baseline candidate --fail-if-slower 5%",
    "compare baseline lr-2 lr-4 lr-8",
)
@click.argument("a", shell_complete=run_names)
@click.argument("b", shell_complete=run_names)
@click.argument("more", nargs=-1, metavar="[C]...", shell_complete=run_names)
@click.option(
    "--fail-if-slower",
    "limit",
    metavar="SHARE",
    help="Exit with status 1 if a run is slower than A by more than SHARE (5% or 0.05) with 95 % confidence.",
)
@json_option
@gathered
def compare(asked: Asked) -> int:
    """Run B, and any further ones, are compared with run A. Each is the name of a run or the path of its folder.

    Shows how speed, phases, memory and losses changed. The 95 % CI of a speedup covers variation within the two runs
    and the usual difference between repeated runs on this machine.
    """
    share = None if asked.limit is None else share_of(asked.limit)
    names = (asked.a, asked.b, *asked.more)
    if len(names) > len(LETTERS):
        raise UsageError(f"{len(names)} runs: at most {len(LETTERS)} are compared at a time")
    comparison = compare_several([find_run(asked.root, name) for name in names])
    checks = [None if share is None else candidate.slower_than(share) for candidate in comparison.candidates]
    for side in comparison.sides:
        if side.damaged:
            say(f"warning: run {side.name}: {damage_text(side.damaged)}")
    # Before the figures, which may be misleading.
    for text in unlike_texts(comparison):
        say(f"warning: {text}")
    if asked.more:
        result = comparison.to_dict()
        for body, outcome in zip(result["candidates"], checks, strict=True):
            body["check"] = None if share is None else {"limit": share, "result": outcome}
        show(result if asked.as_json else several_compared(comparison))
    else:
        only = comparison.candidates[0]
        check = None if share is None else {"limit": share, "result": checks[0]}
        show({**only.to_dict(), "check": check} if asked.as_json else two_compared(only))
    if share is not None:
        for text in checked_texts(checks, share):
            say(f"check: {text}")
    return EXIT_FAILED if "slower" in checks else EXIT_DONE


def share_of(text: str) -> float:
    """The share that "5%" or "0.05" stands for: 0.05. Raises UsageError."""
    number_text = text.strip().removesuffix("%").strip()
    try:
        value = float(number_text) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        allowed = "allowed: 0 to below 100 %, as in 5% or 0.05"
        raise UsageError(f"--fail-if-slower {printable(text)}: not a share; {allowed}")
    return value
