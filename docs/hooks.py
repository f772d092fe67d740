"""Writes the generated parts of the documentation, and hooks for MkDocs.

The text between `<!-- generated: NAME -->` and `<!-- end -->` is what `GENERATORS[NAME]` returns. It is committed, so
that the pages are complete as plain Markdown. `python docs/hooks.py --write` updates it (`make docs` does so); without
`--write` it lists the outdated pages.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_type_hints

import ndd_profiles
from ndd_console.view.glossary import GLOSSARY
from ndd_console.view.keys import APP_KEYS, LIVE_KEYS, TABLES, Key
from ndd_engine.config.schema import Config, allowed, section_keys
from ndd_engine.config.workload_sections import OWN, SECTIONS, Section
from ndd_engine.diagnose import CAUSES
from ndd_engine.record.event import VERSION
from ndd_engine.record.events import EVENT_TYPES, PHASES, Event
from ndd_watch.changes import OF_SCRIPTS, TABLE
from ndd_watch.switches import Loader

ROOT = Path(__file__).parents[1]
# Meanings of fields that no docstring explains: {event or "any": {field: text}}.
MEANINGS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("fields.toml").read_text("utf-8")
)
START = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
BLOCK = re.compile(START.pattern + r"(?:(?!<!-- generated: ).)*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
# The heading of a cause on the diagnosis page, with the generated title below it.
CAUSE = re.compile(r"^### ([a-z0-9-]+)$(?:\n\nShown as: \*.*\*\.$)?", re.MULTILINE)
# Suffix of a field's name -> its unit.
UNITS = {
    "_ns": "ns",
    "_s": "s",
    "_bytes": "bytes",
    "_tflops": "TFLOP/s",
    "_gb_s": "GB/s",
    "_hz": "Hz",
    "_mhz": "MHz",
    "_percent": "%",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the screenshots, which are stored outside the docs folder."""
    from mkdocs.structure.files import File

    for image in sorted([*(ROOT / "screenshots").glob("*.png"), ROOT / "screenshots/tour.svg"]):
        files.append(File.generated(config, f"screenshots/{image.name}", abs_src_path=str(image)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads something from the network. Raises ValueError."""
    if found := re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', output):
        raise ValueError(f"{page.file.src_uri} loads from the network: {found[0]}")
    return output


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each page, its text, and its text as generated now. Raises ValueError, as `filled` does."""
    for path in (ROOT / "README.md", *sorted(Path(__file__).parent.glob("*.md"))):
        text = path.read_text("utf-8")
        yield path, text, filled(with_titles(text) if path.name == "diagnosis.md" else text)


def filled(markdown: str) -> str:
    """The page with every block generated anew. Raises ValueError for a block without its end."""
    starts, blocks = START.findall(markdown), [match[1] for match in BLOCK.finditer(markdown)]
    if starts != blocks:
        raise ValueError(f"no <!-- end --> after one of the generated blocks {starts}")
    return BLOCK.sub(
        lambda match: f"<!-- generated: {match[1]} -->\n\n{GENERATORS[match[1]]()}\n\n<!-- end -->", markdown
    )


def with_titles(markdown: str) -> str:
    """The diagnosis page with the title of each cause on the screens. Raises ValueError if a cause is missing."""
    listed = CAUSE.findall(markdown)
    if sorted(listed) != sorted(CAUSES):
        missing, unknown = set(CAUSES) - set(listed), set(listed) - set(CAUSES)
        raise ValueError(f"diagnosis.md: missing {sorted(missing)}, unknown {sorted(unknown)}")
    return CAUSE.sub(lambda match: f"### {match[1]}\n\nShown as: *{CAUSES[match[1]]}*.", markdown)


# Configuration.


def configuration() -> str:
    """Every section and key of the schema."""
    parts = []
    for name, field in Config.model_fields.items():
        if name == "workload":
            continue
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        parts.append(f"## [{name}]\n\n{_keys(name, field.annotation)}")
    return "\n\n".join(parts)


def workloads() -> str:
    """The `[workload]` section of each workload, with its sizes."""
    return "\n\n".join(_workload(name, section) for name, section in SECTIONS.items())


def presets() -> str:
    """What each preset sets."""
    rows = [
        (f"`{name}`", _settings(ndd_profiles.read("presets", name))) for name in ndd_profiles.names("presets")
    ]
    return _table(("preset", "sets"), rows)


def _workload(name: str, section: type[Section]) -> str:
    title = "Your own: `module:factory`" if name == OWN else f"`{name}`"
    parts = [
        f"### {title}",
        inspect.getdoc(section) or "",
        _keys("workload", section),
    ]
    if name != OWN:
        profile = ndd_profiles.read("workloads", name)
        if defaults := _settings(profile.get("defaults", {})):
            parts.append(f"Defaults of this workload: {defaults}.")
        rows = [(f"`{size}`", _settings(values)) for size, values in profile.get("sizes", {}).items()]
        parts.append(_table(("`workload.size`", "sets"), rows))
        tiers = profile.get("gpus", [])
        on_gpu = [(_at_least(tier["min_gb"]), _settings(dict(list(tier.items())[1:]))) for tier in tiers]
        if on_gpu:
            parts.append('With `workload.size = "auto"` on a GPU, the size `guide` and:')
            parts.append(_table(("memory of the GPU", "sets"), on_gpu))
    return "\n\n".join(parts)


def _at_least(gigabytes: float) -> str:
    return f"{gigabytes} GB or more" if gigabytes else "less"


def _keys(section: str, model: type[Section]) -> str:
    schema = model.model_json_schema()["properties"]
    rows = []
    for key in section_keys(section, model):
        default = "required" if key.required else _value(key.default)
        rows.append((f"`{key.name}`", allowed(schema[key.name.partition(".")[2]], "`"), default, key.effect))
    return _table(("key", "allowed", "default", "description"), rows)


def _settings(tables: Mapping[str, Any]) -> str:
    """`{"batch": {"micro": 16}}` as "`batch.micro = 16`"."""
    return ", ".join(
        f"`{section}.{key} = {json.dumps(value)}`"
        for section, table in tables.items()
        for key, value in table.items()
    )


def _value(value: Any) -> str:
    return "not set" if value is None else f"`{json.dumps(value)}`"


# Record format.


def record_format() -> str:
    """Every event with its fields."""
    parts = [f'The current version is `"v": {VERSION}`.']
    parts += [_event(name, kind) for name, kind in EVENT_TYPES.items()]
    return "\n\n".join(parts)


def phases() -> str:
    """The phases of a step, in their order."""
    return ", ".join(f"`{name}`" for name in PHASES)


def _event(name: str, kind: type[Event]) -> str:
    prose, meanings = explained(inspect.getdoc(kind) or "", [item.name for item in fields(kind)])
    meanings = {**MEANINGS["any"], **MEANINGS.get(name, {}), **meanings}
    hints = get_type_hints(kind)
    rows = []
    for item in fields(kind):
        required = item.default is MISSING and item.default_factory is MISSING
        meaning = meanings.get(item.name, "")
        presence = "" if required else "optional"
        rows.append((f"`{item.name}`", _type(hints[item.name]), unit(item.name), presence, meaning))
    return f"## {name}\n\n{prose}\n\n{_table(('field', 'type', 'unit', '', 'meaning'), rows)}"


def explained(docstring: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(the docstring without what it says of fields, {field: what it says of this field alone}).

    A docstring says "field: text. other, third: text of both."; a name may have a `*` in it. What it says of several
    fields explains none of them by itself: fields.toml has a text for each.
    """
    text = " ".join(docstring.split())
    found: list[tuple[int, int, list[str]]] = []
    for match in re.finditer(r"(?:(?<=[.;] )|^)([a-z0-9_*]+(?:, [a-z0-9_*]+)*): ", text):
        patterns = match[1].split(", ")
        if all(any(fnmatch(name, pattern) for name in names) for pattern in patterns):
            found.append((match.start(), match.end(), patterns))
    if not found:
        return text, {}
    ends = [start for start, _, _ in found[1:]] + [len(text)]
    meanings: dict[str, str] = {}
    for (_, begin, patterns), end in zip(found, ends, strict=True):
        matching = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
        if len(matching) == 1:
            meanings.setdefault(matching[0], text[begin:end].strip().rstrip(";."))
    return text[: found[0][0]].strip(), meanings


def unit(name: str) -> str:
    """The unit that a field's name says; empty for counts, text and tables."""
    longest = sorted(UNITS, key=len, reverse=True)
    return next((UNITS[suffix] for suffix in longest if name.endswith(suffix)), "")


def _type(hint: Any) -> str:
    if hint is type(None):
        return "null"
    args = getattr(hint, "__args__", ())
    if type(None) in args:
        return " or ".join(_type(part) for part in args)
    origin = getattr(hint, "__origin__", hint)
    if is_dataclass(origin):
        return "object"
    return {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}.get(
        origin, "array"
    )


# Claims.


def claims() -> str:
    """The claims of the tuning guides."""
    rows = [
        (claim["id"], f"`{claim['guide']}`", claim["text"])
        for claim in ndd_profiles.read("claims", "guides")["claim"]
    ]
    return _table(("claim", "guide", "text"), rows)


# Glossary.


def glossary() -> str:
    """The words on the screens."""
    parts = []
    for title, pairs in groups():
        table = _table(("term", "meaning"), [(f"**{term.strip()}**", text) for term, text in pairs])
        parts.append(f"## {title}\n\n{table}" if title else table)
    return "\n\n".join(parts)


def groups() -> Sequence[tuple[str, Sequence[tuple[str, str]]]]:
    """(title, [(term, definition), …]) of the words that the screens explain."""
    return tuple((title.capitalize(), pairs) for title, pairs in GLOSSARY)


# Keys.


def live_keys() -> str:
    """The keys of the live screen."""
    return _key_table((*LIVE_KEYS, *APP_KEYS))


def other_keys() -> str:
    """The keys of the other screens."""
    return "\n\n".join(
        f"### {name.capitalize()}\n\n{_key_table(keys)}" for name, keys in TABLES.items() if name != "live"
    )


def key_words() -> str:
    """The keys of the live screen in one sentence."""
    keys = (key for key in LIVE_KEYS if key.drop is not None)
    words = ", ".join(f"`{key.shown}` {key.word}" for key in keys)
    return textwrap.fill(f"Keys on the live screen: {words}.", 120, break_long_words=False)


def _key_table(keys: Sequence[Key]) -> str:
    return _table(("key", "what it does"), [(f"`{key.shown}`", key.help) for key in keys if key.help])


def changes() -> str:
    """What can be tried with a script, how it is made, what it may change in the training, and how that is checked."""
    rows = []
    for key, kind in OF_SCRIPTS.items():
        how = inspect.getdoc(Loader if issubclass(kind, Loader) else kind) or ""
        alters = TABLE[key].alters
        rows.append(
            (f"`{key}`", how.partition("\n")[0].rstrip("."), alters.what or "nothing", alters.checked)
        )
    return _table(("key", "how it is made", "may change", "how a trial checks that"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "workloads": workloads,
    "presets": presets,
    "record-format": record_format,
    "phases": phases,
    "changes": changes,
    "claims": claims,
    "glossary": glossary,
    "keys-live": live_keys,
    "keys-other": other_keys,
    "keys-words": key_words,
}


def main(arguments: Sequence[str]) -> int:
    """Update the outdated pages, or list them. Returns the exit status: 1 if a page is outdated."""
    outdated = [(path, new) for path, old, new in pages() if new != old]
    for path, new in outdated:
        sys.stdout.write(f"{path.name} {'updated' if '--write' in arguments else 'is outdated'}\n")
        if "--write" in arguments:
            path.write_text(new, "utf-8")
    return 1 if outdated and "--write" not in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
