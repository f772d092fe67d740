"""`ndd-console wizard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from ndd_console.process.terminal import Leash, capabilities, interactive, restart, supervised
from ndd_console.render.text import lines
from ndd_console.words.wizard import proposal_blocks
from ndd_engine.errors import EXIT_FAILED, EXIT_MACHINE, NddError, UsageError
from ndd_engine.files import replaces, write_text
from ndd_engine.hardware.named_gpus import GIVEN
from ndd_engine.text import printable
from ndd_engine.wizard.proposals import BUDGET_S, GOALS, Answers, longest_sequence

from . import options
from .printing import ProgressLines, check_writable, say, show, stoppable, terminal_width

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal
    from ndd_engine.wizard.session import Choice, ProposalSet


@options.command(
    "0 done, 1 no recommendation because the measurements disagree, 2 usage or configuration error, "
    "3 insufficient memory or hardware",
    "wizard",
    "wizard run.toml --goal low-memory --headless -o run2.toml",
    'wizard --workload finetune --gpu "RTX 4070" --headless',
    stops=True,
)
@options.configuration
@click.option(
    "--goal", type=click.Choice(tuple(GOALS)), default="throughput", show_default=True,
    help="Highest throughput, low memory use, reproducible results, or shortest time for --items.",
)  # fmt: skip
@options.count("--items", help="Items to train on, for the total time (default: as configured).")
@options.count("--effective-batch", help="Effective batch to keep.")
@click.option(
    "--keep",
    metavar="LIST",
    default="",
    help="What stays as configured: any of batch, sequence, size, with commas between them.",
)
@options.count("--min-sequence", help="Propose shorter sequences down to this one.")
@options.count(
    "--ranks", help="Ranks to propose, each on its own GPU (default: one for each GPU of this machine)."
)
@click.option("--size", "sizes", multiple=True, metavar="NAME", help="Propose this model size; repeatable.")
@click.option(
    "--reserve-memory",
    type=options.FiniteNumber(min=0),
    metavar="MiB",
    help="Memory to keep free (default: 8 % of the free memory).",
)
@click.option(
    "--budget-memory",
    metavar="SIZE",
    help="Most memory that a rank may use, such as 8GB (default: what is free, less the reserve).",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help=f"Propose for a GPU that is not in this machine, by its profile or by figures such as {GIVEN}.",
)
@options.flag("--headless", help="No screen: take the answers from the options.")
@options.flag("--no-verify", help="Do not measure the best proposals.")
@options.budget_option("Maximum duration of the measurements.", BUDGET_S)
@options.output_option(
    "Write the TOML to FILE and the table to standard output (default: the TOML to standard output)."
)
@options.flag("--force", help="Change an existing file; its comments are preserved.")
@options.json_option
@options.gathered
def wizard(asked: options.Asked) -> int:
    """Starts from CONFIG (a TOML file) or the workload's defaults; the TOML that it writes has comments.

    Predicts memory and time of many combinations, then measures the best ones. Live runs are not paused. Ctrl-C stops
    early and prints the results so far.
    """
    from ndd_engine.config import read

    output = asked.output
    check_writable(output)
    if output is not None and replaces(output):
        if not asked.force:
            raise UsageError(
                f"-o {printable(str(output))} exists; use --force to change it (comments are preserved)"
            )
        read(output)  # fail early if it is not valid
    names = [field.name for field in fields(Answers) if hasattr(asked, field.name)]
    given = {name: getattr(asked, name) for name in names}
    reserve_bytes = None if asked.reserve_memory is None else int(asked.reserve_memory * (1 << 20))
    given["keep"] = tuple(filter(None, (name.strip() for name in asked.keep.split(","))))
    answers = Answers(**given, reserve_bytes=reserve_bytes)
    draft = answers.draft()
    answers.checked(longest_sequence(draft), draft.sizes)
    if asked.headless or asked.as_json or not interactive():
        return _headless(answers, asked)
    from ndd_console.app import WizardApp
    from ndd_console.jobs.wizard import WizardJob, live_run_notes
    from ndd_console.sessions.hosting import hosted

    def shown(leash: Leash) -> int:
        job = WizardJob(answers, output or answers.config, asked.budget, live_run_notes(asked.root))
        app = WizardApp(job, capabilities(asked.ascii), can_train=answers.gpu is None)
        status = hosted(app, job, leash)
        if app.to_train:
            # A new process, because a run must start before any thread exists.
            restart(asked.root, (app.to_train, *["--ascii"] * asked.ascii))
        return status

    return supervised(shown)


def _headless(answers: Answers, asked: options.Asked) -> int:
    from ndd_console.jobs.wizard import live_run_notes
    from ndd_engine.wizard.planner import WizardStoppedError
    from ndd_engine.wizard.session import (
        choose,
        comparison,
        propose,
        to_verify,
        verify,
        written,
        written_into,
    )

    output, as_json, progress = asked.output, asked.as_json, WizardProgress(say, interval_s=5.0)
    for note in live_run_notes(asked.root):
        say(note)
    with stoppable("the wizard") as stop:
        try:
            proposed = propose(answers, progress.look, stop)
        except WizardStoppedError:
            return stop.exit_status  # no proposals yet
        chosen = to_verify(proposed, answers)
        verified: Sequence[Proposal] = []
        if chosen and not asked.no_verify and answers.gpu is None and not stop.is_set():
            verified = verify(proposed.situation, answers, chosen, asked.budget, progress.look, stop)
            proposed = proposed.verified(verified)
    choice = choose(verified, answers) if verified else None
    # Without measurements, the best one by prediction; None if none fits.
    best = choice.best if choice is not None else next(iter(proposed.ranked(answers)), None)
    text = "" if best is None else written(answers, proposed.situation, best, comparison(best, verified))
    if as_json:
        show(document(proposed, answers, best, choice))
    else:
        # If the TOML goes to stdout, nothing else does.
        for line in lines(proposal_blocks(proposed, answers, best, choice), terminal_width()):
            say(line) if output is None and best is not None else show([line])
    if best is None:
        ran = any(proposal.measured is not None and proposal.measured.step_s for proposal in verified)
        return stop.exit_status or (EXIT_FAILED if ran else EXIT_MACHINE)
    if output is not None and stop.is_set():
        say(f"stopped; {output} was not written")
    elif output is not None:
        try:
            if replaces(output):
                text = written_into(answers, proposed.situation, best, output)
            write_text(output, text, "-o ")
        except NddError:
            if not as_json:
                click.echo(f"\n{text}", nl=False)  # do not lose minutes of work
            raise
        say(f"wrote {output}; train with: ndd-console train {output}")
    elif not as_json:
        click.echo(text, nl=False)
    return stop.exit_status


class WizardProgress(ProgressLines):
    """Prints each new stage, and progress within it every few seconds."""

    def look(self, text: str, share: float) -> None:
        self.stage(text.partition(":")[0], f"{share:4.0%}  {text}")


def document(
    proposed: ProposalSet, answers: Answers, best: Proposal | None, choice: Choice | None
) -> dict[str, Any]:
    from ndd_engine.wizard.planner import model_name
    from ndd_engine.wizard.ranking import handful

    situation = proposed.situation
    recommendation: dict[str, Any] | None = None
    if choice is not None:
        recommendation = {"text": choice.text, "recommended": choice.best is not None}
        if choice.found is not None:
            recommendation |= {name: getattr(choice.found, name) for name in ("ratio", "low", "high")}
    return {
        "device": situation.opened.device,
        "gpu": None if situation.gpu is None else situation.gpu.name,
        "verified": any(proposal.measured is not None for proposal in proposed.rows),
        "free_bytes": situation.free_bytes,
        "goal": answers.goal,
        "data": situation.opened.data,
        "train_items": situation.opened.train_items,
        "threads": situation.opened.threads or None,
        "s_by_threads": {str(count): seconds for count, seconds in situation.opened.by_threads},
        "proposals": [proposal.to_dict() for proposal in proposed.rows],
        "table": [list(proposal.sets()) for proposal in handful(proposed.rows, answers)],
        "pareto": [list(proposal.sets()) for proposal in proposed.best],
        "recommendation": recommendation,
        "chosen": None if best is None else best.to_dict(),
        "failed": [
            {"model": model_name(probed.model), "why": probed.why} for probed in proposed.found if probed.why
        ],
    }
