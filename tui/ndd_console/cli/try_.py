"""`ndd-console try`: a change measured against the present, in paired blocks on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ndd_console.view.interval import interval_text
from ndd_console.view.rows import foreign
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.text import MISSING, duration, number, printable, size
from ndd_engine.trial.request import Base, Progress, TrialRequest

from .completion import run_names, workload_names
from .measuring import stoppable
from .options import Finite

# Without a terminal: a line at least this many seconds after the last one while nothing else is new.
_EVERY_S = 10.0
_HEADINGS = ("", "step", "throughput", "before training", "peak memory")


@click.command("try")
@click.argument("what", metavar="[RUN|CONFIG]", required=False, shell_complete=run_names)
@click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="What to change, as in loader.workers=2; may be repeated."
)  # fmt: skip
@click.option(
    "--workload", metavar="NAME", help="Workload (default: chartext), or your own as module:factory.",
    shell_complete=workload_names,
)  # fmt: skip
@click.option(
    "--budget", type=Finite(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="At most so long, preparing included; less when it is clear before.",
)  # fmt: skip
@click.option("--pause", is_flag=True, help="Pause the other runs on the same device meanwhile.")
@click.option("--cause", metavar="CAUSE", help="The finding that the change comes from, for the record.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def try_(
    ctx: click.Context,
    what: str | None,
    sets: tuple[str, ...],
    workload: str | None,
    budget: float,
    pause: bool,
    cause: str | None,
    as_json: bool,
) -> int:
    """Measure a change against the present: gain, no gain, loss or undecided, with a 95 % interval.

    The present is RUN's configuration, CONFIG (a TOML file) or the default workload. Both are trained from the
    beginning in processes of their own, in turn. A live RUN is paused meanwhile, and the result is recorded in it.
    Ctrl-C stops early.
    """
    root = runs_root(ctx.obj["runs"])
    base = present(root, what, workload)
    request = TrialRequest(base, sets, budget, cause)
    from ndd_engine.trial.drafts import check
    from ndd_engine.trial.pausing import held, to_pause
    from ndd_engine.trial.store import record_trial
    from ndd_engine.trial.trial import run_trial

    check(request)  # mistakes are told before anything is paused
    progress = TrialProgress(sys.stderr)
    with stoppable("the trial") as stop, held(to_pause(base, root, pause), progress.say, stop):
        event = run_trial(request, progress.look, stop)
    progress.finish()
    if base.run is not None:
        try:
            record_trial(base.run, event)
        except UsageError as error:
            progress.say(f"not recorded: {error}")
    if as_json:
        click.echo(json.dumps(json.loads(event.to_json(time.time())), indent=2))
    else:
        for line in describe(event):
            click.echo(line)
    return stop.exit_status or (EXIT_FAILED if event.verdict == "failed" else EXIT_DONE)


def present(root: Path, what: str | None, workload: str | None) -> Base:
    """What is compared with: a file that exists, else a run. Raises UsageError."""
    if what is None:
        return Base(f"the workload {workload}" if workload else "the defaults", None, workload)
    path = Path(what)
    if path.is_file():
        return Base(what, path, workload)
    if path.suffix == ".toml":
        raise UsageError(f"{printable(what)}: there is no such file")
    if workload is not None:
        raise UsageError("a run has its workload: leave out --workload")
    found = find_run(root, what)
    if not found.config.exists():
        raise UsageError(f"run {found.name} has no config.toml: it ended before training began")
    return Base.of_run(found)


class TrialProgress:
    """How far a trial is: one line that changes on a terminal, else a line now and then."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._moving = bool(stream.isatty())
        self._shown = False
        self._stage = ""
        self._quads = 0
        self._next_s = 0.0

    def look(self, progress: Progress) -> None:
        """Called a few times a second."""
        text = line(progress)
        if self._moving:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            self._stream.write(f"\r\x1b[K{text[:width]}")
            self._stream.flush()
            self._shown = True
            return
        stage = progress.stage.partition(":")[0]
        new = stage != self._stage or progress.elapsed_s >= self._next_s
        if new or progress.quads > self._quads:
            self._stage, self._quads, self._next_s = stage, progress.quads, progress.elapsed_s + _EVERY_S
            click.echo(text, file=self._stream)

    def say(self, text: str) -> None:
        """A line of its own."""
        self.finish()
        click.echo(printable(text), file=self._stream)

    def finish(self) -> None:
        """Take the moving line away."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


def line(progress: Progress) -> str:
    """ "12 of at most 60 s   measuring   4 quads   1.41x (1.33 to 1.50)"."""
    parts = [f"{progress.elapsed_s:3.0f} of at most {progress.budget_s:.0f} s", printable(progress.stage)]
    if progress.quads:
        parts.append(f"{progress.quads} quad{'' if progress.quads == 1 else 's'}")
    if progress.ratio is not None:
        parts.append(interval_text(progress.ratio, progress.low, progress.high))
    return "   ".join(parts)


def describe(event: TrialEvent) -> Iterator[str]:
    """The two sides, how the losses compare, and the result in a sentence."""
    rows: list[Sequence[str]] = [_HEADINGS]
    for name, side in (("present", event.base), (" ".join(event.sets), event.change)):
        if side.get("prepare_s") is not None:
            rows.append((foreign(name), *_figures(side)))
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        for row in rows:
            first, *rest = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            yield "  ".join([row[0].ljust(len(first)), *rest]).rstrip()
        yield ""
    if event.loss_text:
        yield f"losses: {foreign(event.loss)}: {foreign(event.loss_text)}"
    for name in event.change.get("not_in_effect", []):
        yield f"not in effect: {foreign(name)}"
    yield foreign(event.text)


def _figures(side: dict[str, Any]) -> tuple[str, ...]:
    before = duration(side["prepare_s"])
    if side.get("compile_s") is not None:
        before += f" ({duration(side['compile_s'])} compiling)"
    rate = side.get("items_per_s")
    return (
        duration(side.get("step_s")),
        f"{number(rate)} items/s" if rate is not None else MISSING,
        before,
        size(side.get("peak_bytes")),
    )
