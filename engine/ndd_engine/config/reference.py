"""Every key of the configuration with its type, allowed values, default and effect, from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ndd_profiles

from .loading import DEFAULT_WORKLOAD
from .schema import Config
from .workload_sections import SECTIONS, WORKLOADS, Section, kind


@dataclass(frozen=True)
class Key:
    """One key.

    name: dotted, such as "batch.micro". type: "integer", "number", "text", "true or false", "choice", "list" or
    "table". allowed: the values, in words. choices: all of them as they are written on a command line, () if there is
    no list of them. default: of the workload, None if it is not set; required: there is none. unset: whether "none"
    removes the value. effect: what it does.
    """

    name: str
    type: str
    allowed: str
    choices: tuple[str, ...]
    default: Any
    required: bool
    unset: bool
    effect: str

    @property
    def default_text(self) -> str:
        """The default as TOML writes it."""
        return (
            "required" if self.required else "not set" if self.default is None else json.dumps(self.default)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "key": self.name, "type": self.type, "allowed": self.allowed, "choices": list(self.choices),
            "default": self.default, "required": self.required, "effect": self.effect,
        }  # fmt: skip


def keys(workload: str = DEFAULT_WORKLOAD) -> list[Key]:
    """All keys, in the order of the reference. workload: whose [workload] section and defaults, a name or a factory."""
    profile = ndd_profiles.read("workloads", workload) if workload in WORKLOADS else {}
    defaults = profile.get("defaults", {})
    found = []
    for section, field in Config.model_fields.items():
        model: object = field.annotation
        if section == "workload":
            model = SECTIONS[kind({"name": workload}) or workload]
        assert isinstance(model, type) and issubclass(model, Section)
        for key in section_keys(section, model):
            name = key.name.partition(".")[2]
            if name == "name" and section == "workload":
                key = replace(
                    key, type="text", allowed=", ".join((*WORKLOADS, "or package.module:factory")),
                    choices=tuple(WORKLOADS), default=workload, required=False,
                )  # fmt: skip
            elif name == "size" and section == "workload" and (sizes := profile.get("sizes")):
                choices = (*sizes, *(("auto",) if profile.get("auto") else ()))
                key = replace(key, type="choice", allowed=", ".join(choices), choices=choices)
            if name in defaults.get(section, {}):
                key = replace(key, default=defaults[section][name], required=False)
            found.append(key)
    return found


def section_keys(section: str, model: type[Section]) -> Iterator[Key]:
    """The keys of one section, with the defaults of the schema."""
    schema = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        own = schema[name]
        if isinstance(default, tuple):
            default = list(default)
        yield Key(
            name=f"{section}.{name}",
            type=type_of(own),
            allowed=allowed(own),
            choices=choices_of(own),
            default=default,
            required=field.is_required(),
            unset=any(part.get("type") == "null" for part in own.get("anyOf", ())),
            effect=field.description or {"name": "the workload"}.get(name, ""),
        )


def type_of(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema of one key, in words."""
    parts = [part for part in schema.get("anyOf", (schema,)) if part.get("type") != "null"]
    words = {"boolean": "true or false", "array": "list", "object": "table", "string": "text"}
    names = [
        "choice"
        if "enum" in part or "const" in part
        else words.get(part.get("type", ""), part.get("type", "any"))
        for part in parts
    ]
    return " or ".join(dict.fromkeys(names))


def choices_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of a key as they are written on a command line; () if there is no list of them."""
    found: list[str] = []
    for part in schema.get("anyOf", (schema,)):
        if part.get("type") == "null":
            continue
        values = [part["const"]] if "const" in part else part.get("enum")
        if part.get("type") == "boolean":
            values = [True, False]
        if values is None:
            return ()
        found += [value if isinstance(value, str) else json.dumps(value) for value in values]
    return tuple(found)


def allowed(schema: Mapping[str, Any], mark: str = "") -> str:
    """The values that a JSON schema of one key allows, in words. mark: put around each literal value."""
    if "anyOf" in schema:
        return " or ".join(allowed(item, mark) for item in schema["anyOf"] if item.get("type") != "null")
    if "const" in schema:
        return f"{mark}{json.dumps(schema['const'])}{mark}"
    if "enum" in schema:
        return ", ".join(f"{mark}{json.dumps(value)}{mark}" for value in schema["enum"])
    match schema.get("type"):
        case "boolean":
            return f"{mark}true{mark}, {mark}false{mark}"
        case "integer":
            return "integer" + _range(schema)
        case "number":
            return "number" + _range(schema)
        case "array":
            low, high = schema.get("minItems"), schema.get("maxItems")
            count = f" of {low}" if low is not None and low == high else ""
            return f"list{count}, each " + allowed(schema["items"], mark)
        case "object":
            return "table"
        case "string":
            return f"text matching {mark}{schema['pattern']}{mark}" if "pattern" in schema else "text"
    return "any"


def _range(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "multipleOf": "multiple of",
    }
    limits = [f"{sign} {schema[key]:,}" for key, sign in words.items() if key in schema]
    return f" {' and '.join(limits)}" if limits else ""
