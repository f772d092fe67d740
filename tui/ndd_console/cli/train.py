"""`ndd-console train`: from the command line to a run, with the screen or without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ndd_console.process.terminal import interactive
from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.rundir import RunDir, find_run, runs_root
from ndd_engine.train.preflight import preflight
from ndd_engine.train.run import RunRequest

from .completion import run_names
from .options import configuration


@click.command()
@configuration
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Stop after N optimizer steps.")
@click.option("--run", "name", metavar="NAME", help="Name of the run (default: the workload and a number).")
@click.option(
    "--resume", metavar="RUN", help="Go on with a run from its newest checkpoint.", shell_complete=run_names
)
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --resume: from the checkpoint of step N.",
)
@click.option(
    "--kernels-every",
    type=click.IntRange(min=0),
    metavar="N",
    help="Record a few steps with the profiler every N optimizer steps: exactly when nothing is computed.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Write what the profiler records to FILE, as a Chrome trace; compressed when it ends in .gz.",
)
@click.option("--headless", is_flag=True, help="No screen: lines to standard error, a summary at the end.")
@click.option(
    "--json", "as_json", is_flag=True, help="With --headless: the events as lines of JSON on standard output."
)
@click.pass_context
def train(
    ctx: click.Context,
    config: Path | None,
    workload: str | None,
    sets: tuple[str, ...],
    max_steps: int | None,
    name: str | None,
    resume: str | None,
    from_step: int | None,
    kernels_every: int | None,
    trace: str | None,
    headless: bool,
    as_json: bool,
) -> int:
    """Train as CONFIG (a TOML file) says, or the default workload. Without a terminal this is headless by itself.

    Ctrl-C and SIGTERM stop after a checkpoint, a second Ctrl-C stops at once. A lost terminal does not stop the run.
    """
    root = runs_root(ctx.obj["runs"])
    overrides: dict[str, Any] = {"run": {}}
    if max_steps is not None:
        overrides["run"]["max_steps"] = max_steps
    if name is not None:
        overrides["run"]["name"] = name
    if kernels_every is not None:
        overrides["log"] = {"kernels_every": kernels_every}
    if trace is not None:
        overrides.setdefault("log", {})["trace"] = trace
    resumed: RunDir | None = None
    if resume is not None:
        if config is not None or workload is not None or name is not None:
            raise UsageError(
                "--resume takes the configuration of its run: leave out CONFIG, --workload and --run "
                "(--set may change values)"
            )
        resumed = find_run(root, resume)
        config = resumed.config
        if not config.exists():
            raise UsageError(
                f"run {resumed.name} has no config.toml: it ended before training began; start it anew"
            )
    elif from_step is not None:
        raise UsageError("--from-step needs --resume")
    draft: Draft = read(config, sets, workload, overrides)
    request = RunRequest(draft, root, resumed, from_step)
    if headless or as_json or not interactive():
        from ndd_console.jobs.headless import run_headless

        return run_headless(request, as_json)
    # Mistakes are told before the screen opens and before a process is made for it.
    preflight(draft, use_torch=False)
    from ndd_console.jobs.training import run_console

    return run_console(request, ctx.obj["ascii"])
