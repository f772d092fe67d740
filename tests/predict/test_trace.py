"""Traces at two batches, rebuilt for a third; those that do not line up are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.predict.allocator import MIB, Rules
from ndd_engine.predict.memory import Memory
from ndd_engine.predict.trace import DATA, DATA_END, TRIFLE, Trace, fit


def step(micro: int, extra: bool = False) -> Trace:
    """Weights, two activations of which the first outlives the second, and a temporary one of another slope."""
    sizes = {
        "weight": 4096,
        "first": 1000 * micro,
        "second": 3000 * micro,
        "sum": 8,
        "third": 50_000 + 100 * micro,
    }
    events, labels = [], []
    for name in ("weight", "first", "second", *(["extra"] if extra else []), "sum"):
        events.append((len(labels), sizes.get(name, 700 * micro)))
        labels.append(name)
    events += [(labels.index("second"), -1), (len(labels), sizes["third"])]
    labels.append("third")
    events += [(labels.index("first"), -1)]
    return Trace(tuple(events), tuple(labels), {"one": len(events)})


@pytest.mark.parametrize("micro", [1, 3, 16, 96, 1000])
def test_a_rebuilt_trace_is_the_one_that_would_be_recorded(micro: int) -> None:
    family = fit(step(2), step(4), (2, 4))
    assert family.aligned
    assert family.trace(micro).events == step(micro).ordered().events
    assert family.trace(micro).peak() == step(micro).peak()


def test_the_peak_moves_from_one_place_to_another() -> None:
    family = fit(step(2), step(4), (2, 4))
    # With few items the temporary one is the peak, with many the two activations.
    assert family.trace(1).peak() == 4096 + 1000 + 8 + 50_100
    assert family.trace(100).peak() == 4096 + 100_000 + 300_000 + 8


def test_ends_in_another_order_are_the_same() -> None:
    one = Trace(((0, 8), (1, 8), (1, -1), (0, -1), (2, 16)))
    other = Trace(((0, 8), (1, 8), (0, -1), (1, -1), (2, 16)))
    assert one.ordered() == other.ordered()


def test_marks_stay_where_they_are() -> None:
    trace = Trace(((0, 8), (1, 8), (1, -1), (0, -1), (2, 16)), marks={"one": 3})
    assert trace.ordered().until("one").events == ((0, 8), (1, 8), (1, -1))


def test_sequences_that_differ_are_told_and_guessed_high() -> None:
    family = fit(step(2), step(4, extra=True), (2, 4))
    assert not family.aligned
    assert family.loose == 1
    guess, truth = family.trace(40).peak(), step(40, extra=True).peak()
    assert guess == truth  # what has no partner grows with the batch, which here it does
    assert fit(step(2, extra=True), step(4), (2, 4)).aligned is False


def test_a_line_needs_two_batches() -> None:
    with pytest.raises(ValueError, match="2 and 2"):
        fit(step(2), step(2), (2, 2))


def test_memory_answers_for_host_and_card_and_survives_json() -> None:
    import json

    family = fit(step(2), step(4), (2, 4))
    host = Memory(family, "host", 5 * MIB, "here")
    card = Memory(family, "gpu", 5 * MIB, "here", Rules())
    assert host.peak(100) == 5 * MIB + family.trace(100).peak(64)
    assert card.peak(100) == 5 * MIB + 2 * MIB
    assert card.peak(1000) > card.peak(100)
    for memory in (host, card):
        again = Memory.from_dict(json.loads(json.dumps(memory.to_dict())))
        assert again == memory
        assert again.peak(100) == memory.peak(100)


def looped(items: int) -> Trace:
    """A batch made item by item, then an operator that loops over its items, and one that does not."""
    events: list[tuple[int, int]] = []
    labels: list[str] = []

    def request(label: str, size: int) -> int:
        events.append((len(labels), size))
        labels.append(label)
        return len(labels) - 1

    def end(*keys: int) -> None:
        events.extend((key, -1) for key in keys)

    weight = request("weight", 6400)
    marks = {f"{DATA}1": len(events)}
    kept = []
    for _ in range(items):
        raw = request("read", 12_800)
        kept.append(request("encode", 640))
        end(raw)
    batch = request("stack", 640 * items)
    end(*kept)
    marks[f"{DATA_END}1"] = len(events)
    out = request("attention", 1280 * items)
    for _ in range(items):
        one, two = request("attention", 64), request("attention", 3200)
        end(two, one)
    loss = request("loss", 64)
    marks["one"] = len(events)
    end(batch, out, loss, weight)
    return Trace(tuple(events), tuple(labels), marks)


@pytest.mark.parametrize("items", [8, 24, 96])
def test_loops_over_items_line_up_once_they_are_collapsed(items: int) -> None:
    family = fit(looped(4), looped(8), (4, 8))
    assert family.aligned
    real = looped(items).ordered()
    assert family.trace(items).peak(64) == real.peak(64) == real.collapsed().peak(64)
    assert family.trace(items).until("one").left() == real.until("one").left()


def test_collapsing_keeps_what_an_operator_leaves_behind() -> None:
    trace = looped(3).ordered()
    found = trace.collapsed()
    assert len(found.events) < len(trace.events)
    assert found.left() == trace.left() == 0
    assert set(found.marks) == {"one"}
    assert sum("(temporary)" in label for label in found.labels) == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=60))
def test_collapsing_never_lowers_a_peak_or_changes_what_stays(steps: list[tuple[int, int, bool]]) -> None:
    events: list[tuple[int, int]] = []
    labels: list[str] = []
    alive: list[int] = []
    for operator, granules, ends in steps:
        if ends and alive:
            events.append((alive.pop(operator % len(alive)), -1))
        else:
            alive.append(len(labels))
            events.append((len(labels), 64 * granules))
            labels.append(f"op{operator}")
    trace = Trace(tuple(events), tuple(labels))
    found = trace.collapsed()
    assert found.peak(64) >= trace.peak(64) - TRIFLE
    assert found.left() == trace.left()
