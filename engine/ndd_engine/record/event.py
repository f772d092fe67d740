"""The base class of events: a dataclass that is written as one line of JSON and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self

from .shape import check_of

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
        """The event from a parsed line; unknown fields are ignored.

        Raises ValueError if a required field is missing, or if a value does not have the declared type.
        """
        kind: Any = cls
        if not check_of(kind)(body):
            raise ValueError(f"not a {cls.type} event")
        return cls.of_checked(body)

    @classmethod
    def of_checked(cls, body: Json) -> Self:
        """As `from_dict`, for a body that was checked before."""
        kind: Any = cls
        names = _names(kind)
        return cls(**{key: value for key, value in body.items() if key in names})


@cache
def _names(kind: type[Event]) -> frozenset[str]:
    return frozenset(item.name for item in fields(kind))


def finite(value: Any) -> Any:
    """The value with all NaN and infinities replaced by None."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
