"""Traces at two batches, rebuilt for a third; those that do not line up are told."""

from __future__ import annotations

import pytest

from ndd_engine.predict.allocator import MIB, Rules
from ndd_engine.predict.memory import Memory
from ndd_engine.predict.trace import Trace, fit


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
    card = Memory(family, "card", 5 * MIB, "here", Rules())
    assert host.peak(100) == 5 * MIB + family.trace(100).peak(64)
    assert card.peak(100) == 5 * MIB + 2 * MIB
    assert card.peak(1000) > card.peak(100)
    for memory in (host, card):
        again = Memory.from_dict(json.loads(json.dumps(memory.to_dict())))
        assert again == memory
        assert again.peak(100) == memory.peak(100)
