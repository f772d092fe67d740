"""What all events share: a dataclass written as one line of JSON, and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

VERSION = 1

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """What all events share: reading and writing."""

    type: ClassVar[str]

    def to_json(self, t: float) -> str:
        """One line without its newline. NaN and infinities become null: JSON has neither."""
        body: Json = {"v": VERSION, "type": self.type, "t": round(t, 4)}
        for item in fields(self):
            body[item.name] = getattr(self, item.name)
        try:
            return json.dumps(body, separators=(",", ":"), allow_nan=False)
        except ValueError:
            return json.dumps(finite(body), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, body: Json) -> Self:
        """Rebuild from a parsed line; unknown fields are dropped. Raises TypeError when a required one is absent."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in body.items() if key in known})


def finite(value: Any) -> Any:
    """The value with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
