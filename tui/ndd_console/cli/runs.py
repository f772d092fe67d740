"""`ndd-console runs` and `ndd-console runs delete`."""

from __future__ import annotations

import dataclasses
import sys

import click

from ndd_console.jobs.run_sources import RUN_COLUMNS, HomeFolder
from ndd_console.words.blocks import Table
from ndd_console.words.runs import deletion_table, deletion_total, no_runs_text
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, RunLockedError, UsageError
from ndd_engine.record.rundir import runs_root
from ndd_engine.text import printable

from .completion import run_names
from .options import Asked, Seconds, command, epilog, flag, gathered, json_option
from .printing import say, show


@click.group(
    epilog=epilog("0", ("runs", "--runs ~/experiments runs --json", "runs delete baseline")),
    invoke_without_command=True,
)
@json_option
@click.pass_context
def runs(ctx: click.Context, as_json: bool) -> None:
    """The newest run comes first. The last column marks those that are live."""
    if ctx.invoked_subcommand is not None:
        return
    root = runs_root(ctx.obj["runs"])
    home = HomeFolder(root)
    rows = home.runs()
    if as_json:
        show({"folder": str(root), "runs": [dataclasses.asdict(row) for row in rows]})
    elif rows:
        cells = tuple((*row.texts, "live" if row.live else "") for row in rows)
        show([Table("", (*RUN_COLUMNS, ""), cells)])
    else:
        say(no_runs_text(root))
    for name, damage in home.damaged.items():
        say(f"warning: run {name}: {damage}")


@command(
    "0 deleted or nothing to delete, 1 not deleted, 2 usage error",
    "runs delete baseline candidate",
    "runs delete 'sweep-*' --older-than 30d --dry-run",
    "runs delete --failed --yes",
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=run_names)
@click.option(
    "--older-than",
    "age",
    type=Seconds(bare=False, min=0),
    metavar="AGE",
    help="Only runs whose last event is older, e.g. 30d, 12h or 2w.",
)
@flag("--failed", help="Only runs that failed or whose process was killed.")
@flag("--yes", "-y", help="Do not ask.")
@flag("--dry-run", help="List what would be deleted.")
@gathered
def delete(asked: Asked) -> int:
    """Delete runs with their checkpoints.

    Those with these names or globs are deleted, or all that the options select. Only folders of runs directly in the
    runs folder are deleted. A run that is being written is never deleted.
    """
    from ndd_engine.run.deletion import candidates
    from ndd_engine.run.deletion import delete as deleted

    names, root = asked.names, asked.root
    if not names and asked.age is None and not asked.failed:
        raise UsageError("name the runs to delete, or select them with --older-than or --failed")
    matching = candidates(root, names, asked.age, asked.failed)
    live = [candidate.run.name for candidate in matching if candidate.live]
    if named := [name for name in live if name in names]:
        raise UsageError(f"run {', '.join(named)} is running; stop it first")
    for name in live:
        say(f"{name} is running: it stays")
    chosen = [candidate for candidate in matching if not candidate.live]
    if not chosen:
        say(f"there is nothing to delete in {root.absolute()}")
        return EXIT_DONE
    show([deletion_table(chosen)])
    total = deletion_total(chosen)
    if asked.dry_run:
        say(f"would delete {total} in {root.absolute()}")
        return EXIT_DONE
    if not asked.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {total} needs an answer: without a terminal, add --yes")
        if not click.confirm(printable(f"Delete {total} in {root.absolute()}?"), default=False, err=True):
            say("nothing was deleted")
            return EXIT_FAILED
    left = 0
    for run in (candidate.run for candidate in chosen):
        try:
            deleted(run)
        except RunLockedError:
            say(f"{run.name} was started meanwhile: it stays")
        except OSError as error:
            left += 1
            say(f"{run.name} cannot be deleted completely: {error.filename or run.path}: {error.strerror}")
    say(f"deleted {len(chosen) - left:,} of {total}" if left else f"deleted {total}")
    return EXIT_FAILED if left else EXIT_DONE


runs.add_command(delete)
