"""`ndd-console wizard`: trade-offs for this card, predicted, verified and written down."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ndd_console.process.terminal import interactive
from ndd_console.view.rows import cells
from ndd_engine.errors import EXIT_MACHINE, NddError, UsageError
from ndd_engine.record.rundir import runs_root
from ndd_engine.text import MISSING, duration, number, printable, size
from ndd_engine.wizard.answers import BUDGET_S, GOALS

from .measuring import check_writable, stoppable
from .options import Finite, configuration

if TYPE_CHECKING:
    from ndd_engine.wizard.answers import Answers
    from ndd_engine.wizard.proposals import Proposal
    from ndd_engine.wizard.session import ProposalSet

_EVERY_S = 5.0
_HEADINGS = ("", "size", "sequence", "precision", "micro", "x", "memory", "step", "per second", "in all", "")
MIB = 1 << 20
# Rows of the table, unless all of them are asked for.
SHOWN = 12


@click.command()
@configuration
@click.option(
    "--goal", type=click.Choice(tuple(GOALS)), default="throughput", show_default=True,
    help="Most items a second; fits beside others; the same result again; shortest time to --items.",
)  # fmt: skip
@click.option("--items", type=int, metavar="N", help="Items of the goal time; also what total times are for.")
@click.option(
    "--effective", type=int, metavar="N", help="Items of an optimizer step to hold (default: as configured)."
)
@click.option("--free-batch", is_flag=True, help="Let the items of an optimizer step be whatever is best.")
@click.option(
    "--shortest", type=int, metavar="N", help="Shortest acceptable sequence (default: as configured)."
)
@click.option(
    "--size", "sizes", multiple=True, metavar="NAME", help="An acceptable size of the model; may be repeated."
)
@click.option("--leave", type=Finite(min=0), metavar="MB", help="Memory to leave free (default: 8 % of it).")
@click.option(
    "--card", metavar="NAME", help="Propose for a card that is not here, from its published figures."
)
@click.option("--headless", is_flag=True, help="Without a screen: the answers are the options.")
@click.option("--no-verify", is_flag=True, help="Leave out the measurements of the best proposals.")
@click.option(
    "--budget", type=Finite(min=1), default=BUDGET_S, show_default=True, metavar="SECONDS",
    help="Of the verification.",
)  # fmt: skip
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path),
    help="Write the TOML to this file, the table to stdout (default: the TOML to stdout).",
)
@click.option("--force", is_flag=True, help="Write over a file that exists; its comments stay.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def wizard(
    ctx: click.Context,
    config: Path | None,
    workload: str | None,
    sets: tuple[str, ...],
    goal: str,
    items: int | None,
    effective: int | None,
    free_batch: bool,
    shortest: int | None,
    sizes: tuple[str, ...],
    leave: float | None,
    card: str | None,
    headless: bool,
    no_verify: bool,
    budget: float,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Propose batch, sequence, size and precision for this machine, measure the best, and write a commented TOML.

    The configuration to begin with is CONFIG or the workload's defaults. Nothing that is running is touched.
    """
    from ndd_engine.config import read
    from ndd_engine.wizard.answers import Answers, longest_sequence

    if free_batch and effective is not None:
        raise UsageError("--effective and --free-batch exclude each other")
    check_writable(output)
    if output is not None and output.exists():
        if not force:
            raise UsageError(
                f"-o {printable(str(output))}: exists; --force changes it and keeps its comments"
            )
        read(output)  # what cannot be read cannot be changed either
    answers = Answers(
        config=config, workload=workload, sets=sets, card=card, goal=goal, items=items,  # type: ignore[arg-type]
        effective=effective, hold_effective=not free_batch, shortest=shortest, sizes=sizes,
        leave_bytes=None if leave is None else int(leave * MIB),
    )  # fmt: skip
    draft = answers.draft()
    answers.checked(longest_sequence(draft), draft.sizes)
    root = runs_root(ctx.obj["runs"])
    if headless or as_json or not interactive():
        return _headless(answers, no_verify, budget, output, as_json, root)
    from ndd_console.jobs.wizard import show

    to_train, status = show(answers, output, budget, ctx.obj["ascii"], root)
    if to_train:
        # Afresh: a run begins before any thread exists.
        options = ["--runs", str(ctx.obj["runs"])] if ctx.obj["runs"] else []
        options += ["--ascii"] if ctx.obj["ascii"] else []
        os.execv(sys.executable, [sys.executable, "-m", "ndd_console", *options, "train", to_train])
    return status


def _headless(
    answers: Answers, no_verify: bool, budget: float, output: Path | None, as_json: bool, root: Path
) -> int:
    from ndd_console.jobs.wizard import beside, live_runs
    from ndd_engine.wizard.planner import WizardStoppedError
    from ndd_engine.wizard.session import best_measured, propose, to_verify, written, written_into
    from ndd_engine.wizard.verify import verify
    from ndd_engine.wizard.writing import save

    progress = WizardProgress(lambda line: click.echo(line, err=True))
    for note in beside(live_runs(root)):
        click.echo(printable(note), err=True)
    with stoppable("the wizard") as stop:
        try:
            proposed = propose(answers, progress.tell, stop)
        except WizardStoppedError:
            return stop.exit_status  # before anything was known
        chosen = to_verify(proposed, answers)
        verified: Sequence[Proposal] = []
        if chosen and not no_verify and answers.card is None and not stop.is_set():
            verified = verify(proposed.situation, answers, chosen, budget, progress.tell, stop)
            proposed = proposed.verified(verified)
    best = best_measured(verified, answers) or next(
        (one for one in verified or chosen if not one.failed), None
    )
    text = "" if best is None else written(answers, proposed.situation, best)
    if as_json:
        click.echo(json.dumps(document(proposed, answers, best), indent=2, allow_nan=False))
    else:
        for line in describe(proposed, answers, best):
            # Where the TOML goes to stdout, nothing else does.
            click.echo(line, err=output is None and best is not None)
    if best is None:
        return stop.exit_status or EXIT_MACHINE
    if output is not None and stop.is_set():
        click.echo(f"stopped: {printable(str(output))} was not written", err=True)
    elif output is not None:
        try:
            if output.exists():
                text = written_into(answers, proposed.situation, best, output)
            save(output, text)
        except NddError:
            if not as_json:
                click.echo(f"\n{text}", nl=False)  # what took minutes is not lost
            raise
        name = printable(str(output))
        click.echo(f"wrote {name}; train it with: ndd-console train {name}", err=True)
    elif not as_json:
        click.echo(text, nl=False)
    return stop.exit_status


class WizardProgress:
    """Says what is being done, each thing once, and how far it is every few seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._last, self._next = "", 0.0

    def tell(self, text: str, share: float) -> None:
        """For `plan` and `verify`."""
        now = self._clock()
        if text == self._last or (
            now < self._next and text.partition(":")[0] == self._last.partition(":")[0]
        ):
            return
        self._last, self._next = text, now + _EVERY_S
        self._say(printable(f"{share:4.0%}  {text}"))


def describe(proposed: ProposalSet, answers: Answers, best: Proposal | None) -> Iterator[str]:
    """The table of trade-offs, and what was left out of it."""
    from ndd_console.jobs.wizard import lengths_line
    from ndd_engine.wizard.planner import model_name
    from ndd_engine.wizard.proposals import by_speed

    situation = proposed.situation
    opened = situation.opened
    where = situation.card.name if situation.card is not None else opened.device_name
    yield printable(f"{where}: {size(situation.free_bytes)} may be used")
    yield printable(f"{opened.data}; {opened.model}")
    yield from lengths_line(opened)
    for note in situation.notes:
        yield printable(note)
    for found in proposed.found:
        if found.why:
            yield printable(f"{model_name(found.model)}: {found.why}")
    rows = by_speed(proposed.best)[:SHOWN]
    measured = [one for one in proposed.rows if one.measured is not None]
    rows += [one for one in measured if all(one.key != other.key for other in rows)]
    tight = [one for one in proposed.rows if not one.fits]
    shown = [*rows, *sorted(tight, key=lambda one: one.missing_bytes)[:2]]
    if not shown:
        yield "nothing could be predicted"
        return
    grid = [_HEADINGS, *(_cells(one, best is not None and one.key == best.key) for one in shown)]
    widths = [max(cells(row[column]) for row in grid) for column in range(len(_HEADINGS))]
    yield ""
    for row in grid:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    if best is None and any(one.fits for one in proposed.rows):
        yield "none of those that were tried could be trained; nothing is written"
    elif best is None:
        least = min(tight, key=lambda one: one.missing_bytes)
        yield f"nothing fits: {size(least.missing_bytes)} are missing even for a micro-batch of {least.batch.micro}"
    yield "memory and time are predicted" + (", where nothing else is said" if measured else "")


def _cells(one: Proposal, best: bool) -> tuple[str, ...]:
    memory = MISSING if one.memory_bytes is None else size(one.memory_bytes)
    step = MISSING if one.step_s is None else duration(one.step_s)
    rate = MISSING if one.items_per_s is None else number(one.items_per_s)
    total = MISSING if one.total_s is None else duration(one.total_s)
    if one.lower_bound:
        step, rate, total = f"≥ {step}", f"≤ {rate}", f"≥ {total}"
    measured = one.measured
    words = []
    if one.missing_bytes:
        words.append(f"does not fit: {size(one.missing_bytes)} missing")
    if measured is not None:
        if measured.step_s is None:
            words.append(measured.verdict)
        else:
            spread = "" if measured.spread is None else f" (rounds differ by {measured.spread:.0%})"
            words.append(
                f"measured {size(measured.memory_bytes)}, {duration(measured.step_s)} a step{spread}"
            )
    if one.over_bytes:
        words.append(f"{size(one.over_bytes)} more than may be used")
    if one.doubt and one.memory_bytes is not None:
        words.append(f"memory is a guess, as {one.doubt}")
    if one.placement == "device":
        words.append("data on the card")
    if one.cost:
        words.append(one.cost)
    return (
        "*" if best else "",
        one.model.size or "",
        str(one.model.sequence),
        one.model.precision,
        str(one.batch.micro),
        str(one.batch.accumulation),
        memory,
        step,
        rate,
        total,
        printable("; ".join(words)),
    )


def document(proposed: ProposalSet, answers: Answers, best: Proposal | None) -> dict[str, Any]:
    """All of it, for programs."""
    from ndd_engine.wizard.planner import model_name

    situation = proposed.situation
    return {
        "device": situation.opened.device,
        "card": None if situation.card is None else situation.card.name,
        "verified": any(one.measured is not None for one in proposed.rows),
        "free_bytes": situation.free_bytes,
        "goal": answers.goal,
        "data": situation.opened.data,
        "train_items": situation.opened.train_items,
        "proposals": [one.to_dict() for one in proposed.rows],
        "pareto": [list(one.sets()) for one in proposed.best],
        "chosen": None if best is None else best.to_dict(),
        "failed": [
            {"model": model_name(found.model), "why": found.why} for found in proposed.found if found.why
        ],
    }
