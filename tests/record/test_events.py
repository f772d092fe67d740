"""Events as lines: what is written reads back, and a reader survives lines it does not know."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from record_help import end, event_sequences, mark, run_event, through_json, window

from ndd_engine.record.event import DEPTH, LARGEST_INT
from ndd_engine.record.events import Event, SampleEvent, decode, parse


def test_a_line_carries_version_type_time_and_units() -> None:
    body = json.loads(window(3, loss=0.5).to_json(1700000000.123456))
    assert (body["v"], body["type"], body["t"]) == (2, "window", 1700000000.1235)
    assert (body["step"], body["loss"], body["wall_ns"]) == (3, 0.5, 100_000_000)
    assert "\n" not in mark("note", 1, "two\nlines").to_json(1.0)


def test_what_is_not_a_number_becomes_null_wherever_it_is() -> None:
    bad = window(
        1, loss=math.nan, lr=math.inf, last_loss=(1, -math.inf), phases={"forward": {"host_ns": math.nan}}
    )
    line = bad.to_json(1.0)
    body = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (body["loss"], body["lr"], body["last_loss"]) == (None, None, [1, None])
    assert body["phases"] == {"forward": {"host_ns": None}}
    nested = SampleEvent(None, {"list": [1.0, math.nan, {"deep": math.inf}], "fine": 2.0})
    assert through_json(nested) == SampleEvent(None, {"list": [1.0, None, {"deep": None}], "fine": 2.0})


@given(event_sequences())
def test_every_event_reads_back_as_it_was_written(events: list[Event]) -> None:
    for event in events:
        item = parse(event.to_json(12.5))
        assert item is not None
        assert item[0] == 12.5
        assert item[1] == event


def test_more_fields_than_known_are_no_damage_but_another_version_is() -> None:
    body = json.loads(mark("note", 3, "hello").to_json(1.0))
    body.update(colour="red", nested={"a": [1]})
    assert parse(json.dumps(body)) == (1.0, mark("note", 3, "hello"))
    for version in (1, 3, "2", None, 2**70):
        assert parse(json.dumps({**body, "v": version})) is None


def test_a_line_cut_anywhere_is_skipped_or_whole() -> None:
    line = run_event().to_json(1.0).encode()
    assert [cut for cut in range(len(line)) if parse(line[:cut]) is not None] == []
    assert parse(line) == (1.0, run_event())


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("event", "key", "good", "bad"),
    [
        (window(1), "step", [0, 5, LARGEST_INT], [-1, LARGEST_INT + 1, 10**400, 1.0, True, "1", None]),
        (window(1), "loss", [0, -1.5, 1e38, None], [1e101, -1e101, 10**400, True, "1", []]),
        (window(1), "t", [0.0, 1.8e9], [-1.0, 1e15, 10**400, None]),
        (window(1), "profiled", [True, False], [0, 1, "true", None]),
        (window(1), "last_loss", [[3, 0.5], [3, None], None], [[3], [3, "x"], [1, 2.0, 3], "ab", {}]),
        (window(1), "phases", [{}, {"log": {"host_ns": 1, "more": [1]}}], [[], {"log": {}}, {"log": {"host_ns": -1}}]),
        (end(), "status", ["done"], ["sleeping", 1, None, ["done"]]),
        (mark("note"), "text", ["", "x"], [None, 1, ["x"]]),
        (
            mark("note"),
            "data",
            [{"odd": [None, "x", -5, {"a": [1.5]}]}, {"odd": nested(DEPTH - 1)}],
            [{"odd": nested(DEPTH + 1)}, {"odd": 10**400}, {"holders": [-1]}, {"metrics": {"a": "b"}}],
        ),
        (run_event(), "config", [{}, {"batch": {"micro": None}}], [None, {"batch": {"micro": -1}}, {"run": 10**200}]),
    ],
)  # fmt: skip
def test_a_value_has_the_declared_type_or_the_error_names_its_field(
    event: Event, key: str, good: list[Any], bad: list[Any]
) -> None:
    body = json.loads(event.to_json(1.0))
    for value in good:
        assert parse(json.dumps({**body, key: value})) is not None
    for value in bad:
        with pytest.raises(ValueError, match=key if key != "t" else "Input"):
            decode(json.dumps({**body, key: value}))


def test_a_file_name_that_is_no_text_does_not_cost_the_event() -> None:
    found = parse(mark("note", 3, "caf\udce9 \x9b\U0001f600", file="\udcff").to_json(1.0))
    assert found == (1.0, mark("note", 3, "caf\\udce9 \x9b\U0001f600", file="\\udcff"))
    # Names of metrics are the keys of a table.
    found = parse(mark("evaluation", 3, "", metrics={"\udcff": 1.0}).to_json(1.0))
    assert found == (1.0, mark("evaluation", 3, "", metrics={"\\udcff": 1.0}))
    assert mark("note", 3, "é\x9b").to_json(1.0).isascii()
