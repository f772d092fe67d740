"""`ndd-console train`."""

from __future__ import annotations

from functools import partial

import click

from ndd_console.process.terminal import interactive
from ndd_engine.api.sources import configured_run
from ndd_engine.config import read
from ndd_engine.errors import EXIT_DONE, UsageError
from ndd_engine.text import counted
from ndd_engine.train.parallel.rank_place import RankPlace, place
from ndd_engine.train.request import RunRequest, preflight

from .completion import run_names
from .options import Asked, command, configuration, count, flag, gathered, name_option
from .printing import say

# Section of the configuration -> its keys that have an option of their own.
_GIVEN = {"run": ("max_steps", "name"), "log": ("kernels_every", "trace"), "parallel": ("ranks", "restarts")}


@command(
    "0 done or stopped, 1 training failed, 2 usage or configuration error, 3 insufficient memory or hardware",
    "train --max-steps 200",
    "train run.toml --set optimizer.lr=3e-4 --run baseline",
    "train --workload my_workload:factory",
    "train --resume baseline",
    "train run.toml --run baseline --resume-or-start",
    "train run.toml --ranks 2",
    stops=True,
)
@configuration
@count("--max-steps", type=click.IntRange(min=1), help="Stop after N optimizer steps.")
@name_option("the workload and a number")
@click.option(
    "--resume", metavar="RUN", help="Resume a run from its latest checkpoint.", shell_complete=run_names
)
@flag(
    "--resume-or-start",
    help="With --run, for jobs that are requeued: start the run, or resume it if it exists; exit 0 if it has finished.",
)
@count("--from-step", type=click.IntRange(min=0), help="With --resume: resume from the checkpoint of step N.")
@count(
    "--kernels-every", type=click.IntRange(min=0),
    help="Capture a few steps with the profiler every N optimizer steps, to measure idle time exactly.",
)  # fmt: skip
@click.option(
    "--trace", metavar="FILE", help="Export each profiler capture to FILE as a Chrome trace; .gz compresses it."
)  # fmt: skip
@count("--ranks", type=click.IntRange(min=1), help="Train one model with N processes (ranks).")
@count(
    "--restarts", type=click.IntRange(min=0),
    help="Restart all ranks from the last checkpoint at most N times after one of them fails.",
)  # fmt: skip
@flag("--headless", help="No screen: log to standard error, print a summary at the end.")
@flag("--json", "as_json", help="Headless, with the events as JSON lines on standard output.")
@gathered
def train(asked: Asked) -> int:
    """CONFIG (a TOML file) describes the model and its training; without it, the default workload is trained.

    Shows the live screen in a terminal and runs headless otherwise. Ctrl-C and SIGTERM save a checkpoint and stop; a
    second Ctrl-C stops at once. The run continues if the terminal is closed. The exit status is that of the run, even
    if its output cannot be written. With --ranks, torchrun's launcher starts the processes; started by torchrun itself,
    each process is one rank.
    """
    here = place()
    request_of = partial(_request, asked, here)
    from ndd_console.sessions.headless import rank_command, ranks_headless, run_headless, run_rank

    if here is not None:
        run_rank(request_of, here, asked.as_json)
    request = request_of()
    if request is None:
        return EXIT_DONE
    # Report mistakes before the screen opens and before a process is started.
    several = preflight(request.draft, use_torch=False).parallel.ranks > 1
    screen = interactive() and not (asked.headless or asked.as_json)
    if not screen and several:
        return ranks_headless(request, rank_command(), asked.as_json)
    if not screen:
        return run_headless(request, asked.as_json)
    from ndd_console.sessions.training import run_console

    return run_console(request, asked.ascii, rank_command())


def _request(asked: Asked, here: RankPlace | None) -> RunRequest | None:
    """The run to train; None if it has finished. here: the rank that this process is. Raises UsageError."""
    overrides = {
        section: {key: value for key in keys if (value := getattr(asked, key)) is not None}
        for section, keys in _GIVEN.items()
    }
    if here is not None:
        overrides["parallel"].setdefault("ranks", here.size)
    if asked.resume_or_start and (asked.resume is not None or asked.from_step is not None):
        raise UsageError("--resume-or-start excludes --resume and --from-step")
    if asked.from_step is not None and asked.resume is None:
        raise UsageError("--from-step needs --resume")
    given = (asked.config, asked.workload, asked.name)
    if asked.resume is not None and any(each is not None for each in given):
        raise UsageError(
            "--resume uses the configuration of its run: omit CONFIG, --workload and --run (--set still works)"
        )
    resumed = None if asked.resume is None else configured_run(asked.root, asked.resume)
    config = asked.config if resumed is None else resumed.config
    draft = read(config, asked.sets, asked.workload, overrides)
    if here is not None and (ranks := draft.resolve().parallel.ranks) != here.size:
        raise UsageError(f"parallel.ranks is {ranks}, but the launcher started {counted(here.size, 'rank')}")
    request = RunRequest(draft, asked.root, resumed, asked.from_step)
    if asked.resume_or_start:
        from ndd_engine.api.training_api import resume_or_start

        decision = resume_or_start(request)
        if here is None or here.first:
            say(decision.text)
        return decision.request
    if resumed is not None and asked.sets:
        from ndd_engine.api.training_api import changes_text

        if (text := changes_text(resumed, draft)) and (here is None or here.first):
            say(f"run {resumed.name} resumes with a changed configuration: {text}")
    return request
