"""`ndd-console config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ndd_console.words.settings import key_in_full, keys_listed
from ndd_engine.config import DEFAULT_WORKLOAD, read
from ndd_engine.config.loading import meant
from ndd_engine.errors import UsageError

from .options import command, json_option, workload_option
from .printing import show

if TYPE_CHECKING:
    from ndd_engine.config.schema import ConfigKey


def _key_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from .completion import key_items

    return key_items(incomplete, ctx.params.get("workload") or DEFAULT_WORKLOAD, end="")


@command(
    "0, 2 there is no such key or workload",
    "config",
    "config batch",
    "config speed.compile",
    "config --workload finetune workload --json",
)
@click.argument("name", metavar="[KEY]", required=False, shell_complete=_key_names)
@workload_option
@json_option
def config(name: str | None, workload: str | None, as_json: bool) -> None:
    """KEY is a key (batch.micro), a section (batch) or the last part of keys (micro); without it, every key is listed.

    The keys of [workload] and the defaults are those of the workload.
    """
    from ndd_engine.config.schema import keys

    workload = workload or DEFAULT_WORKLOAD
    read(None, (), workload)  # says what is allowed
    every = keys(workload)
    listed = every if name is None else _matching(every, name)
    if as_json:
        show({"workload": workload, "keys": [key.to_dict() for key in listed]})
    elif name is not None and len(listed) == 1:
        show([key_in_full(listed[0], workload)])
    else:
        show(keys_listed(listed))


def _matching(every: list[ConfigKey], wanted: str) -> list[ConfigKey]:
    """The keys with this name, of this section or with this last part. Raises UsageError."""
    wanted = wanted.strip(".[]")
    for matching in (
        [key for key in every if key.name == wanted],
        [key for key in every if key.name.startswith(f"{wanted}.")],
        [key for key in every if key.name.rpartition(".")[2] == wanted],
    ):
        if matching:
            return matching
    names = [key.name for key in every]
    sections = list(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = meant(wanted, [*names, *sections]) or meant(wanted, [name.rpartition(".")[2] for name in names])
    raise UsageError(
        f"there is no key or section {wanted!r}{f'; {hint}' if hint else ''}; sections: {', '.join(sections)}"
    )
