"""The base class of events: a dataclass that is written as one line of JSON and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

VERSION = 1

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""

    type: ClassVar[str]

    def to_json(self, t: float) -> str:
        """The event as one line of JSON without newline. NaN and infinities become null."""
        body: Json = {"v": VERSION, "type": self.type, "t": round(t, 4)}
        for item in fields(self):
            body[item.name] = getattr(self, item.name)
        try:
            return json.dumps(body, separators=(",", ":"), allow_nan=False)
        except ValueError:
            return json.dumps(finite(body), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, body: Json) -> Self:
        """The event from a parsed line; unknown fields are ignored. Raises TypeError if a required one is missing."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in body.items() if key in known})


def finite(value: Any) -> Any:
    """The value with all NaN and infinities replaced by None."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
