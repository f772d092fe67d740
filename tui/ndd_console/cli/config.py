"""`ndd-console config`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ndd_engine.config.loading import DEFAULT_WORKLOAD, OWN_ALLOWED
from ndd_engine.config.messages import meant
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.errors import UsageError
from ndd_engine.text import printable

from .options import command, json_option, workload_option
from .printing import show

if TYPE_CHECKING:
    from ndd_engine.config.reference import Key

_WIDEST = 100


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
@click.argument("key", required=False, shell_complete=_key_names)
@workload_option
@json_option
def config(key: str | None, workload: str | None, as_json: bool) -> None:
    """List the keys of a configuration: type, allowed values, default and effect.

    KEY is a key (batch.micro), a section (batch) or the last part of keys (micro); without it, every key is listed. The
    keys of [workload] and the defaults are those of the workload.
    """
    from ndd_engine.config.reference import keys

    workload = workload or DEFAULT_WORKLOAD
    if workload not in WORKLOADS and ":" not in workload:
        hint = meant(workload, WORKLOADS)
        raise UsageError(
            f"--workload: there is no workload {workload!r}{f'; {hint}' if hint else ''}; "
            f"allowed: {', '.join((*WORKLOADS, OWN_ALLOWED))}"
        )
    every = keys(workload)
    listed = every if key is None else _matching(every, key)
    if as_json:
        show({"workload": workload, "keys": [one.to_dict() for one in listed]})
    elif key is not None and len(listed) == 1:
        show(_in_full(listed[0], workload))
    else:
        show(_listed(listed))


def _matching(every: list[Key], wanted: str) -> list[Key]:
    """The keys with this name, of this section or with this last part. Raises UsageError."""
    wanted = wanted.strip(".[]")
    for matching in (
        [one for one in every if one.name == wanted],
        [one for one in every if one.name.startswith(f"{wanted}.")],
        [one for one in every if one.name.rpartition(".")[2] == wanted],
    ):
        if matching:
            return matching
    names = [one.name for one in every]
    sections = list(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = meant(wanted, [*names, *sections]) or meant(wanted, [name.rpartition(".")[2] for name in names])
    raise UsageError(
        f"there is no key or section {printable(wanted)!r}{f'; {hint}' if hint else ''}; "
        f"sections: {', '.join(sections)}"
    )


def _listed(keys: list[Key]) -> Iterator[str]:
    """Each key with its default and its allowed values, and its effect below."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    section = ""
    for one in keys:
        if one.name.partition(".")[0] != section:
            if section:
                yield ""
            section = one.name.partition(".")[0]
            yield f"[{section}]"
        yield from _wrapped(f"{one.name} = {one.default_text}  ({one.allowed})", width, "", "        ")
        yield from _wrapped(one.effect, width, "    ", "    ")


def _in_full(one: Key, workload: str) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    section, _, name = one.name.partition(".")
    value = one.choices[-1] if one.choices else "VALUE"
    rows = (
        ("key", one.name),
        ("effect", one.effect),
        ("type", one.type),
        ("allowed", one.allowed + (", or none to remove it" if one.unset else "")),
        ("default", f"{one.default_text} (workload {workload})"),
        ("in a file", f"[{section}] {name} = …"),
        ("in a shell", f"--set {one.name}={value}"),
    )
    for label, text in rows:
        yield from _wrapped(text, width, label.ljust(12), " " * 12)


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
