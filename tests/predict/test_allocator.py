"""The simulated allocator: facts from the source of the real one, and invariants for random requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.predict.allocator import MIB, Allocator, Rules, SimulatedOutOfMemoryError


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (10 * MIB, 10 * MIB)]
)  # fmt: skip
def test_sizes_are_rounded_up_to_512_bytes(size: int, rounded: int) -> None:
    assert Rules().rounded(size) == rounded


def test_divisions_round_to_parts_of_a_power_of_two() -> None:
    rules = Rules(divisions=4)
    assert rules.rounded(1200) == 1536  # small sizes are rounded to 512 bytes
    assert rules.rounded(1 << 20) == 1 << 20
    assert rules.rounded((1 << 20) + 1) == (1 << 20) + (1 << 18)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB),
    ],
)  # fmt: skip
def test_segment_sizes_match_the_source(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(0, size)
    assert allocator.reserved == segment


def test_small_and_large_requests_do_not_share_a_segment() -> None:
    allocator = Allocator()
    allocator.allocate(0, 512)
    allocator.allocate(1, 2 * MIB)
    assert allocator.reserved == 22 * MIB


def test_large_blocks_are_split_if_the_remainder_exceeds_1_mib() -> None:
    split, whole = Allocator(), Allocator()
    split.allocate(0, 18 * MIB)
    assert split.reserved == 18 * MIB
    for allocator, size in ((split, 17 * MIB - 512), (whole, 17 * MIB)):
        allocator.replay([(1, 18 * MIB), (1, -1)])
        before = allocator.active
        allocator.allocate(2, size)
        allocator.active -= before
    assert split.active == 17 * MIB - 512
    assert whole.active == 18 * MIB  # a remainder of 1 MiB is not split off


def test_the_smallest_sufficient_block_is_used() -> None:
    allocator = Allocator()
    for key, size in enumerate((30 * MIB, 14 * MIB, 22 * MIB)):
        allocator.allocate(key, size)
    for key in range(3):
        allocator.free(key)
    allocator.allocate(9, 20 * MIB)
    assert allocator.reserved == 66 * MIB
    allocator.allocate(10, 29 * MIB)  # the largest block is still unsplit
    assert allocator.reserved == 66 * MIB


def test_a_full_gpu_releases_cached_segments_and_retries() -> None:
    allocator = Allocator(cap=64 * MIB)
    allocator.replay([(0, 30 * MIB), (0, -1), (1, 40 * MIB)])
    assert allocator.retries == 1
    assert allocator.reserved == 40 * MIB
    assert allocator.peak_reserved == 40 * MIB
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        allocator.allocate(2, 30 * MIB)
    assert caught.value.requested == 30 * MIB


def test_expandable_segments_grow_in_pages_and_leave_no_gaps() -> None:
    allocator = Allocator(Rules(expandable=True))
    allocator.allocate(0, 15 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(1, 15 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.replay([(0, -1), (1, -1)])
    allocator.allocate(2, 38 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocator.segments == 1


def test_the_environment_variable_is_parsed() -> None:
    text = "expandable_segments:True,max_split_size_mb:128, large_segment_size_mb:32,roundup_power2_divisions:[256:1]"
    rules = Rules.of_environment(text)
    assert rules == Rules(large_segment=32 * MIB, max_split=128 * MIB, expandable=True)
    assert Rules.of_environment("") == Rules()
    assert Rules.of_environment("max_split_size_mb:lots") == Rules()


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 80 * MIB))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Allocations and frees in a valid order; some allocations are never freed."""
    events: list[tuple[int, int]] = []
    live: list[int] = []
    for key in range(draw(st.integers(1, 40))):
        events.append((key, draw(SIZES)))
        live.append(key)
        while live and draw(st.booleans()):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), -1))
    return events


RULES = st.builds(
    Rules,
    max_split=st.sampled_from([Rules.max_split, 32 * MIB]),
    expandable=st.booleans(),
    divisions=st.sampled_from([0, 4]),
)


@given(requests(), RULES)
def test_invariants(events: list[tuple[int, int]], rules: Rules) -> None:
    allocator = Allocator(rules)
    for key, size in events:
        allocator.replay([(key, size)])
        assert allocator.reserved >= allocator.active >= allocator.requested >= 0
        assert allocator.peak_reserved >= allocator.reserved
    for key, _ in events:
        allocator.free(key)
    assert allocator.active == allocator.requested == 0
    # All blocks have merged into whole segments.
    free = sum(size for pool in allocator._free.values() for size, _, _ in pool)
    assert free == allocator.reserved
    blocks = sum(len(pool) for pool in allocator._free.values())
    assert blocks == allocator.segments


@given(requests(), RULES)
def test_a_cap_at_the_peak_or_above_changes_nothing(events: list[tuple[int, int]], rules: Rules) -> None:
    free = Allocator(rules).replay(events)
    same = Allocator(rules, cap=free.peak_reserved).replay(events)
    assert (same.peak_reserved, same.retries) == (free.peak_reserved, 0)
    assert Allocator(rules, cap=2 * free.peak_reserved).replay(events).peak_reserved == free.peak_reserved
