"""Opens a screen of the console with recorded data: `python -m tests.ui.serve NAME`, or `make serve SCREEN=NAME`.

Nothing trains: the figures are those of the snapshot tests, and all keys work. Without a name it lists the screens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, TuningApp, WizardApp
from ndd_engine.config.messages import meant
from ndd_engine.diagnose import Finding
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.trial.request import Progress
from ndd_engine.trial.tuning import TuningState
from ndd_engine.wizard.proposals import Proposal

from .fake_ranks import planted_snapshot
from .fake_sources import Clock, FakeHome, FakeJob, FakeSource, FakeTrials
from .fake_tuning import DONE, MEASURING, FixedTuning
from .fake_wizard import FakeWizard
from .fakes import (
    FINDING,
    HEALTHY,
    MEASURED,
    SECOND,
    T0,
    empty_snapshot,
    ended,
    found,
    run_event,
    sample,
    snapshot,
    trial_event,
)

ScreenApp = ConsoleApp | TuningApp | WizardApp


class Shown(NamedTuple):
    """A screen: its app, and the keys that lead to it."""

    text: str
    app: Callable[[], ScreenApp]
    keys: Sequence[str] = ()


@dataclass
class FixedTrials(FakeTrials):
    """Trials that are at once as far as `job`."""

    job: FakeJob = field(default_factory=FakeJob)

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> FakeJob:
        super().start(sets, cause, budget_s)
        return self.job


class QuickWizard(FakeWizard):
    """A wizard whose measurements end at once."""

    def probe(self) -> None:
        super().probe()
        self.go_on()

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        super().verify(chosen)
        self.go_on()


def run(value: Snapshot, *findings: Finding, tries: FakeTrials | None = None) -> Callable[[], ScreenApp]:
    return lambda: ConsoleApp(
        FakeSource(value, tries=tries), None, refresh_hz=1.0, clock=Clock(T0 + 12), rules=found(*findings)
    )


def diagnosed(job: FakeJob | None = None) -> Callable[[], ScreenApp]:
    return run(snapshot(**MEASURED), FINDING, SECOND, tries=FixedTrials(job=job or FakeJob()))


def tuning(state: TuningState) -> Callable[[], ScreenApp]:
    return lambda: TuningApp(FixedTuning(state))


PREPARING = empty_snapshot(
    run=run_event(), sample=sample(), started_t=T0, preparing_t=T0, stage="compiling the model"
)
UNDER_WAY = FakeJob(progress=Progress("measuring the candidate", 18.0, 60.0, 3, 1.4, 1.2, 1.61))
SCREENS = {
    "live": Shown("a run with findings", diagnosed()),
    "live-healthy": Shown("a run without a bottleneck", run(snapshot(), HEALTHY)),
    "live-cpu": Shown("a run on the CPU", run(snapshot(False))),
    "live-preparing": Shown("a run before its first step", run(PREPARING)),
    "live-failed": Shown("a run that failed", run(ended("failed", "CUDA out of memory at step 4,218"))),
    "ranks-2": Shown("two ranks as bars", run(planted_snapshot(2))),
    "ranks-64": Shown("64 ranks as a heat map", run(planted_snapshot(64))),
    "ranks": Shown("the page of ranks", run(planted_snapshot(8)), "r"),
    "diagnosis": Shown("all findings", diagnosed(), "d"),
    "settings": Shown("settings and whether they are in effect", diagnosed(), "i"),
    "log": Shown("the output of the run", diagnosed(), "l"),
    "help": Shown("the help page", diagnosed(), ["question_mark"]),
    "question": Shown("the question on quitting", diagnosed(), "q"),
    "trial": Shown("choosing a change", diagnosed(), "t"),
    "trial-measuring": Shown("a trial under way", diagnosed(UNDER_WAY), ["t", "enter"]),
    "trial-done": Shown(
        "the result of a trial", diagnosed(FakeJob(result=trial_event(), done=True)), ["t", "enter"]
    ),
    "tuning": Shown("tuning under way", tuning(MEASURING)),
    "tuning-done": Shown("the result of tuning", tuning(DONE)),
    "home": Shown("runs, configurations and workloads", lambda: ConsoleApp(None, FakeHome())),
    "wizard": Shown("the wizard, page by page", lambda: WizardApp(QuickWizard())),
}


async def press(pilot: Pilot[Any], keys: Sequence[str]) -> None:
    """Press the keys, each when the screen has drawn."""
    for key in keys:
        await pilot.pause()
        await asyncio.sleep(0.1)
        await pilot.press(key)


def main(arguments: Sequence[str]) -> int:
    """Open the named screen, or list all. Returns the exit status."""
    if not arguments:
        width = max(map(len, SCREENS))
        sys.stdout.writelines(f"{name:{width}}  {shown.text}\n" for name, shown in SCREENS.items())
        return 0
    name = arguments[0]
    shown = SCREENS.get(name)
    if shown is None or len(arguments) > 1:
        hint = meant(name, list(SCREENS)) or f"screens: {', '.join(SCREENS)}"
        sys.stderr.write(f"there is no screen {' '.join(arguments)!r}; {hint}\n")
        return 2
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stderr.write(f"the screen {name} needs a terminal\n")
        return 2
    shown.app().run(auto_pilot=lambda pilot: press(pilot, shown.keys))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
