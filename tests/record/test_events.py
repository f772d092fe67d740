"""Events as lines: what is written reads back, and a reader survives lines it does not know."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from record_help import end, event_sequences, mark, run_event, through_json, window

from ndd_engine.record.events import EVENT_TYPES, Event, FoldEvent, SampleEvent, StageEvent, parse


def test_a_line_carries_version_type_time_and_units() -> None:
    body = json.loads(window(3, loss=0.5).to_json(1700000000.123456))
    assert (body["v"], body["type"], body["t"]) == (1, "window", 1700000000.1235)
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
        assert type(item[1]) is type(event)
        # The same line again: a tuple may have become a list, but nothing that JSON can tell apart.
        assert item[1].to_json(12.5) == event.to_json(12.5)


def test_a_later_version_with_more_fields_still_reads() -> None:
    body = json.loads(mark("note", 3, "hello").to_json(1.0))
    body.update(v=2, colour="red", nested={"a": [1]})
    assert parse(json.dumps(body)) == (1.0, mark("note", 3, "hello"))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b'{"v":1,"type":"mark","t":1.0,"kind":"no',
        b'{"v":1,"type":"mark","t":1.0}',  # required fields are missing
        b'{"v":1,"type":"hologram","t":1.0}',
        b'{"v":1,"t":1.0}',
        b'{"v":1,"type":["mark"],"t":1.0}',
        b'{"v":1,"type":"stage","t":"noon","name":"a","text":"b"}',
        b'{"v":1,"type":"stage","name":"a","text":"b"}',
        b"[1, 2]",
        b'"mark"',
        b"17",
        b"null",
        b"\xff\xfe\x00",
        b"\x00" * 300,
    ],
)
def test_torn_foreign_and_unknown_lines_are_skipped(line: bytes) -> None:
    assert parse(line) is None


def test_a_line_cut_anywhere_is_skipped_or_whole() -> None:
    line = run_event().to_json(1.0).encode()
    assert [cut for cut in range(len(line)) if parse(line[:cut]) is not None] == []
    assert parse(line) == (1.0, run_event())


def test_each_type_has_its_own_name() -> None:
    assert set(EVENT_TYPES) == {
        "run", "stage", "window", "rank", "ranks", "sample", "memory", "setting", "work", "loader", "baseline",
        "kernels", "stacks", "functions", "finding", "trial", "scalars", "texts", "mark", "fold", "end",
    }  # fmt: skip
    for event in (StageEvent("a", "b"), FoldEvent({"x": 1}), end()):
        assert through_json(event) == event
