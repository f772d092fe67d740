"""`ndd-console completion`, and the functions that complete names of runs and workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from ndd_engine.config import WORKLOADS
from ndd_engine.record.rundir import all_runs, runs_root


def run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the runs in the folder given by --runs."""
    given: Path | None = (ctx.find_root().params or {}).get("runs_folder")
    return [CompletionItem(run.name) for run in all_runs(runs_root(given)) if run.name.startswith(incomplete)]


def workload_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the built-in workloads."""
    return [CompletionItem(name) for name in WORKLOADS if name.startswith(incomplete)]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL. It completes commands, options, files, runs and workloads.

    \b
    bash: ndd-console completion bash >> ~/.bashrc
    zsh:  ndd-console completion zsh >> ~/.zshrc
    fish: ndd-console completion fish > ~/.config/fish/completions/ndd-console.fish
    """
    kind: Any = get_completion_class(shell)
    click.echo(kind(ctx.find_root().command, {}, "ndd-console", "_NDD_CONSOLE_COMPLETE").source())
