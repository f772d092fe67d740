"""Screens of the console with recorded data: `python -m tests.ui.serve NAME`, or `make serve SCREEN=NAME`.

Nothing trains: the figures are those of the snapshot tests, and all keys work. Without a name it lists the screens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, ScreenApp, TuningApp, WizardApp
from ndd_console.jobs.folder import StartRow
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.pages import LoadedPage
from ndd_console.view.style import PLAIN, Look
from ndd_console.words.finding import Rules
from ndd_engine.config.loading import meant
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.event import MeasuredChange
from ndd_engine.record.events import TextsEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.trial.outcome import Progress
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
    MODEL_WORK,
    SECOND,
    T0,
    empty_snapshot,
    ended,
    found,
    run_event,
    sample,
    snapshot,
    trial_event,
    workers_event,
)

Make = Callable[[Look], ScreenApp]


class Scene(NamedTuple):
    """A screen: its app, and the keys that lead to it."""

    text: str
    app: Make
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


def run(
    value: Snapshot, *findings: Finding, tries: FakeTrials | None = None, rules: Rules | None = None
) -> Make:
    return lambda look: ConsoleApp(
        FakeSource(value, tries=tries), None, look=look, refresh_hz=1.0, clock=Clock(T0 + 12),
        rules=rules or found(*findings),
    )  # fmt: skip


def diagnosed(job: FakeJob | None = None) -> Make:
    """A run with findings, whose changes can be tried."""
    before = trial_event("no gain", sets=["loader.workers=1"], ratio=1.0, low=0.98, high=1.02)
    value = snapshot(**MEASURED, trials=(before,))
    return run(value, FINDING, SECOND, tries=FixedTrials(job=job or FakeJob()))


def ranks(world: int) -> Make:
    """A run with so many ranks, which are simulated when it is opened: that takes a second."""
    return lambda look: run(planted_snapshot(world), rules=diagnose)(look)


def home(look: Look) -> ConsoleApp:
    """The home screen. Its runs, entries and files open as runs that are recorded here."""
    clock = Clock(T0 + 12)

    def begin(what: StartRow | str) -> FakeSource:
        return FakeSource(name=what if isinstance(what, str) else what.name, owned=not isinstance(what, str))

    return ConsoleApp(
        None, FakeHome(), look=look, start=begin, attach=begin, start_file=begin, clock=clock,
        rules=found(FINDING), wizard=lambda *_: QuickWizard(),  # type: ignore[arg-type,return-value]
    )  # fmt: skip


def tuning(state: TuningState) -> Make:
    return lambda look: TuningApp(FixedTuning(state), look)


def wizard(kind: type[FakeWizard]) -> Make:
    return lambda look: WizardApp(kind(), look)


_MEASURED = MeasuredChange("faster", 1.42, 1.35, 1.49)
TRIED = replace(FINDING, changes=(replace(FINDING.changes[0], measured=_MEASURED), *FINDING.changes[1:]))
PREPARING = empty_snapshot(
    run=run_event(), sample=sample(), started_t=T0, preparing_t=T0, stage="compiling the model"
)
FAILED = ended(
    "failed", "CUDA out of memory at step 4,218: tried 512 MiB, 210 MiB free. Lower batch.micro from 128 to 96, or use "
    "batch.accumulation 3; console.log has the whole message",
)  # fmt: skip
SCALARS = (
    ("accuracy", tuple((step, 1 - 0.9 * 0.7 ** (step / 500)) for step in range(0, 4_200, 60))),
    ("grad/norm", tuple((step, 1.2 + 0.3 * (step % 7) / 7) for step in range(0, 4_200, 60))),
)
SAMPLES = TextsEvent(4_200, ["ROMEO:\nWhat light is this?", "JULIET:\nThe lamp, and it is late."])
UNDER_WAY = FakeJob(progress=Progress("measuring the candidate", 18.0, 60.0, 3, 1.4, 1.2, 1.61))
SCREENS = {
    "live": Scene("a run", run(snapshot())),
    "live-finding": Scene("a run with findings", diagnosed()),
    "live-measured": Scene("a finding whose change was tried", run(snapshot(), TRIED, SECOND)),
    "live-healthy": Scene("a run without a bottleneck", run(snapshot(), HEALTHY)),
    "live-cpu": Scene("a run on the CPU", run(snapshot(False))),
    "live-preparing": Scene("a run before its first step", run(PREPARING)),
    "live-failed": Scene("a run that failed", run(FAILED)),
    "live-2-ranks": Scene("two ranks as bars", ranks(2)),
    "live-8-ranks": Scene("eight ranks as bars", ranks(8)),
    "live-64-ranks": Scene("64 ranks as a heat map", ranks(64)),
    "live-1024-ranks": Scene("1,024 ranks as a heat map", ranks(1024)),
    "ranks-2": Scene("the page of two ranks", ranks(2), "r"),
    "ranks-1024": Scene("the page of 1,024 ranks", ranks(1024), "r"),
    "workers": Scene("the page of loader workers", run(snapshot(workers=workers_event())), "o"),
    "diagnosis": Scene("all findings", diagnosed(), "d"),
    "diagnosis-end": Scene("the end of that page", diagnosed(), ["d", "end"]),
    "diagnosis-model": Scene(
        "the parts of the model in a capture",
        run(snapshot(**{**MEASURED, "kernels": MODEL_WORK})),
        ["d", *["pagedown"] * 2],
    ),
    "settings": Scene("settings and whether they are in effect", run(snapshot()), "i"),
    "log": Scene("the output of the run", run(snapshot()), "l"),
    "log-search": Scene("what to find in it", run(snapshot()), ["l", "slash"]),
    "values": Scene(
        "values that the code logs, and its samples", run(snapshot(scalars=SCALARS, texts=SAMPLES)), "v"
    ),
    "help": Scene("the help page", run(snapshot()), ["question_mark"]),
    "palette": Scene("the command palette", run(snapshot()), ["ctrl+p"]),
    "question": Scene("the question on quitting", run(snapshot()), "q"),
    "trial": Scene("choosing a change", diagnosed(), "t"),
    "trial-mistake": Scene("a change with a mistake", diagnosed(), ["t", "tab", *"batch.mikro=8", "enter"]),
    "trial-measuring": Scene("a trial under way", diagnosed(UNDER_WAY), ["t", "enter"]),
    "trial-done": Scene(
        "the result of a trial, written",
        diagnosed(FakeJob(result=trial_event(), done=True)),
        ["t", "enter", "w"],
    ),
    "tuning": Scene("tuning under way", tuning(MEASURING)),
    "tuning-done": Scene("the result of tuning", tuning(DONE)),
    "home": Scene("runs, configurations and workloads", home),
    "start": Scene("what an entry of it would train", home, ["enter"]),
    "comparison": Scene("two runs compared", home, ["end", "c", "up", "c"]),
    "wizard": Scene("the wizard, page by page", wizard(QuickWizard)),
    "wizard-workload": Scene("its workloads", wizard(QuickWizard), ["enter"]),
    "wizard-goal": Scene("its goals and limits", wizard(QuickWizard), ["enter"] * 2),
    "wizard-probing": Scene("probing", wizard(FakeWizard), ["enter"] * 3),
    "wizard-table": Scene("the trade-offs with their plot", wizard(QuickWizard), ["enter"] * 3),
    "wizard-long-table": Scene("the trade-offs without", wizard(QuickWizard), [*["enter"] * 3, "p"]),
    "wizard-measured": Scene("predictions and measurements", wizard(QuickWizard), [*["enter"] * 3, "v"]),
    "wizard-file": Scene("the file", wizard(QuickWizard), [*["enter"] * 3, "v", "enter"]),
}


async def press(pilot: Pilot[Any], keys: Sequence[str]) -> None:
    """Press the keys, each when the screen shows what its source knows."""
    await settled(pilot)
    for key in keys:
        await pilot.press(key)
        await settled(pilot)


async def settled(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    screen = pilot.app.screen
    while isinstance(screen, HomeScreen) and (screen.machine is None or screen.runs is None):
        await asyncio.sleep(0.02)
    while isinstance(screen, LoadedPage) and screen.loaded is None:
        await asyncio.sleep(0.02)
    getattr(screen, "look_again", lambda: None)()
    await pilot.pause()


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
    shown.app(PLAIN).run(auto_pilot=lambda pilot: press(pilot, shown.keys))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
