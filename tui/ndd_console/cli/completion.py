"""`ndd-console completion`, and what it completes: runs, workloads, and the keys and values of --set.

bash splits words at "=": `Bash` joins them again, and returns only what follows the last "=".
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from ndd_engine.config import DEFAULT_WORKLOAD, WORKLOADS
from ndd_engine.errors import NddError
from ndd_engine.record.rundir import all_runs, runs_root


def run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the runs in the folder given by --runs."""
    root = ctx.find_root()
    given: Path | None = root.meta.get("runs") or (root.params or {}).get("runs_folder")
    return [CompletionItem(run.name) for run in all_runs(runs_root(given)) if run.name.startswith(incomplete)]


def workload_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in WORKLOADS if name.startswith(incomplete)]


def sets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """KEY=VALUE: the sections, the keys of one, or the values of a key."""
    from ndd_engine.config import read

    workload = str(ctx.params.get("workload") or "")
    # click does not parse arguments before an option whose value is still missing.
    files = [word for word in os.environ.get("COMP_WORDS", "").split() if word.endswith(".toml")]
    if not workload and files:
        with contextlib.suppress(NddError):
            workload = read(Path(files[0]).expanduser()).workload
    if workload not in WORKLOADS and ":" not in workload:
        workload = DEFAULT_WORKLOAD
    key, equals, value = incomplete.partition("=")
    if not equals:
        return key_items(incomplete, workload)
    from ndd_engine.config.schema import keys

    known = next((known for known in keys(workload) if known.name == key), None)
    if known is None:
        return []
    values = (*known.choices, *(("none",) if known.unset else ()))
    if not values and known.default is not None:
        values = (known.default_text,)
    return [CompletionItem(f"{key}={text}", help=known.effect) for text in values if text.startswith(value)]


def key_items(incomplete: str, workload: str, end: str = "=") -> list[CompletionItem]:
    """Sections, keys of a section, or keys by their last part. end: of a key."""
    from ndd_engine.config.schema import keys

    every = keys(workload)
    sections = dict.fromkeys(key.name.partition(".")[0] for key in every)
    listed = [key for key in every if key.name.startswith(incomplete)]
    if "." not in incomplete:
        if items := [CompletionItem(f"{name}.") for name in sections if name.startswith(incomplete)]:
            return items
        listed = [key for key in every if key.name.rpartition(".")[2].startswith(incomplete)]
    return [CompletionItem(key.name + end, help=key.effect) for key in listed]


def joined(words: list[str]) -> tuple[list[str], str]:
    """(words of a bash command line as the program gets them, what bash takes for the start of the last one).

    bash splits "--set batch.micro=6" into "--set", "batch.micro", "=", "6".
    """
    words_before: list[str] = []
    prefix = ""
    glue = False
    for word in words:
        if word == "=" and words_before and words_before[-1].startswith("--") and "=" not in words_before[-1]:
            continue
        if word == "=" and words_before:
            words_before[-1] += "="
            prefix, glue = words_before[-1], True
        elif glue:
            words_before[-1] += word
            glue = False
        else:
            words_before.append(word)
            prefix = ""
    return words_before, prefix


class Bash(BashComplete):
    """Completes words that contain "=", and adds no space after "=" and "."."""

    source_template = BashComplete.source_template.replace(
        "            COMPREPLY+=($value)\n",
        "            COMPREPLY+=($value)\n            [[ $value == *[=.] ]] && compopt -o nospace\n",
    )
    _prefix = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words, self._prefix = joined([*args, incomplete])
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{str(item.value).removeprefix(self._prefix)}"


class Zsh(ZshComplete):
    """Adds no space after "=" and "."."""

    source_template = ZshComplete.source_template.replace(
        '        if [[ "$type" == "plain" ]]; then\n',
        '        if [[ "$type" == "plain" && "$key" == *[=.] ]]; then\n'
        "            compadd -U -S '' -- \"$key\"\n"
        '        elif [[ "$type" == "plain" ]]; then\n',
    )


add_completion_class(Bash)
add_completion_class(Zsh)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """It completes commands, options, files, runs, workloads, and the keys and values of --set.

    \b
    bash: ndd-console completion bash >> ~/.bashrc
    zsh:  ndd-console completion zsh >> ~/.zshrc
    fish: ndd-console completion fish > ~/.config/fish/completions/ndd-console.fish
    """
    kind: Any = get_completion_class(shell)
    click.echo(kind(ctx.find_root().command, {}, "ndd-console", "_NDD_CONSOLE_COMPLETE").source())
