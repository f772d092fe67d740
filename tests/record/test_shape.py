"""Checks by declared types: what is accepted, and what a record must not contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Required, TypedDict

import pytest

from ndd_engine.record.events import EVENT_TYPES
from ndd_engine.record.shape import DEPTH, LARGEST, LARGEST_INT, Time, check_of


class Row(TypedDict, total=False):
    name: Required[str]
    count: int | None


@dataclass
class Thing:
    kind: ClassVar[str] = "thing"
    name: str
    rows: list[Row]
    note: str = ""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, 5, LARGEST_INT], [-1, LARGEST_INT + 1, 10**400, 1.0, True, "1", None]),
        (float, [0, -1.5, 1e38, 7], [1e101, -1e101, 10**400, float("nan"), float("inf"), True, "1"]),
        (Time, [0.0, 1.8e9], [-1.0, 1e15, 10**400, None]),
        (str, ["", "x"], [None, 1, ["x"]]),
        (bool, [True, False], [0, 1, "true", None]),
        (int | None, [None, 3], [-3, "3"]),
        (Literal["a", "b"], ["a"], ["c", 1, None, ["a"]]),
        (list[int], [[], [1, 2]], [{}, [1, "2"], (1, 2)]),
        (tuple[str, float], [["a", 1]], [["a"], ["a", "b"], ["a", 1, 2], "ab"]),
        (dict[str, int | None], [{}, {"a": None}], [{"a": "b"}, []]),
        (
            Row,
            [{"name": "a"}, {"name": "a", "count": 3, "more": [1]}],
            [{}, {"name": 1}, {"name": "a", "count": -1}],
        ),
        (Row, [], [{"name": "a", "more": 10**400}, {"name": "a", "more": nested(100)}]),
        (
            Thing,
            [{"name": "a", "rows": [{"name": "b"}], "v": 10**400}],
            [{"name": "a"}, {"name": "a", "rows": [{}]}],
        ),
        (Annotated[dict[str, Any], Row], [{"name": "a"}], [{}]),
        (
            Any,
            [None, "x", -5, {"a": [1.5]}, nested(DEPTH)],
            [nested(DEPTH + 1), 10**400, {"a": float("inf")}],
        ),
    ],
)
def test_a_value_has_the_declared_type_or_not(hint: Any, good: list[Any], bad: list[Any]) -> None:
    check = check_of(hint)
    assert [value for value in good if not check(value)] == []
    assert [value for value in bad if check(value)] == []


def test_every_event_can_be_checked() -> None:
    for kind in EVENT_TYPES.values():
        hint: Any = kind
        assert not check_of(hint)(None)
    with pytest.raises(TypeError, match="cannot check"):
        check_of(set[int])


def test_products_of_the_largest_numbers_are_finite() -> None:
    assert float("inf") > LARGEST * LARGEST * LARGEST
