"""`ndd-console claims`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ndd_console.render.text import lines
from ndd_console.words.claims import claims_listed, claims_measured, duration_text, part_conditions
from ndd_console.words.trial import measurement
from ndd_engine.text import counted

from . import options
from .printing import ProgressLines, check_writable, say, show, stoppable, write

if TYPE_CHECKING:
    from ndd_engine.trial.claims import ClaimsState


@options.command(
    "0 measured, whatever the verdicts; 2 usage error",
    "claims --list",
    "claims N1 N2 --budget 30",
    "claims chartext --json -o claims.json",
    stops=True,
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@options.flag("--list", "only_list", help="List the claims and what each one needs; measure nothing.")
@options.budget_option("Maximum duration of one measurement; most claims take one or two.")
@options.pause_option
@options.output_option("Also write the result to this file.")
@options.json_option
@options.gathered
def claims(asked: options.Asked) -> int:
    """The notes (guides) come from real projects, one for each built-in workload.

    Most of their figures are estimates, and they contradict each other: torch.compile is 1.3 times faster in one and
    9.5 times slower in another.

    ID is a claim (N1) or a guide (eeg, antispoof, chartext, finetune, summarise) for all of its claims. The default is
    every claim. Prints each claim with the measured ratio, its 95 % CI and the verdict. If this machine cannot
    reproduce a guide's condition, the closest one is measured, and the output says so.
    """
    from ndd_engine.hardware.detect import detect
    from ndd_engine.trial.claims import chosen, measurements, run_claims
    from ndd_engine.trial.outcome import Base
    from ndd_engine.trial.trial import held, to_pause
    from ndd_engine.trial.tuning import place_of

    wanted, budget = chosen(asked.ids), asked.budget
    check_writable(asked.output)
    machine = detect(use_torch=False)
    place = place_of(machine)
    if asked.only_list:
        entries = [
            {
                "id": claim.id, "guide": claim.guide, "claim": claim.text, "how": part_conditions(claim, place),
                "seconds_at_most": measurements(claim, place) * budget,
            }
            for claim in wanted
        ]  # fmt: skip
        listed = {"budget_s": budget, "claims": entries}
        show(listed if asked.as_json else claims_listed(wanted, place, budget))
        return 0
    paused = to_pause(Base("the claims"), asked.root, asked.pause)
    say(f"{counted(len(wanted), 'claim')}: {', '.join(claim.id for claim in wanted)}")
    say(duration_text(wanted, place, budget))
    with stoppable("the claims") as stop, held(paused, say, stop):
        results = run_claims(wanted, budget, ClaimsProgress(say).look, stop, machine=machine)
    body = {"budget_s": budget, "claims": [result.to_dict() for result in results]}
    blocks = list(claims_measured(results))
    show(body if asked.as_json else blocks)
    if asked.output is not None:
        text = json.dumps(body, indent=2, allow_nan=False) if asked.as_json else "\n".join(lines(blocks))
        write(asked.output, text + "\n")
    return stop.exit_status


class ClaimsProgress(ProgressLines):
    """Progress of the claims in lines: the claim that is being measured, and its verdict."""

    def look(self, state: ClaimsState) -> None:
        from ndd_engine.trial.claims import headline

        self.results([f"{result.claim.id}: {headline(result)}" for result in state.rows])
        if state.claim is not None and state.claim.id != self._key:
            self._key = state.claim.id
            self.news(f"{state.claim.id} ({len(state.rows) + 1} of {state.count}): {state.claim.text} …")
        elif state.progress is not None or state.stage:
            self.update(f"  {measurement(state.progress) if state.progress is not None else state.stage}")
