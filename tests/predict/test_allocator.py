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


def expandable(cap: int | None = None) -> Allocator:
    return Allocator(Rules(expandable=True), cap)


def test_expandable_segments_return_every_whole_page_of_free_blocks() -> None:
    allocator = expandable()
    for key in range(4):
        allocator.allocate(key, 30 * MIB)
    assert allocator.reserved == 120 * MIB
    allocator.free(1)  # 30 to 60 MiB, whose only whole page is 40 to 60
    assert allocator.released() == 20 * MIB
    assert allocator.reserved == 100 * MIB


def test_holes_of_expandable_segments_are_mapped_again_at_the_lowest_address() -> None:
    allocator = expandable()
    for key in range(4):
        allocator.allocate(key, 40 * MIB)
    allocator.replay([(1, -1)])
    allocator.released()
    assert allocator.reserved == 120 * MIB
    allocator.allocate(9, 25 * MIB)  # two pages of the hole
    assert allocator.reserved == 160 * MIB
    allocator.allocate(10, 15 * MIB)  # the rest of them
    assert allocator.reserved == 160 * MIB
    assert allocator.segments == 1
    allocator.replay([(key, -1) for key in (0, 2, 3, 9, 10)])
    assert allocator.released() == 160 * MIB
    assert (allocator.reserved, allocator.segments) == (0, 0)


def test_a_full_gpu_with_expandable_segments_retries_in_the_middle_too() -> None:
    events = [(0, 40 * MIB), (1, 40 * MIB), (2, 20 * MIB), (1, -1), (3, 60 * MIB)]
    allocator = expandable(cap=120 * MIB).replay(events)
    assert allocator.retries == 1 and allocator.reserved == 120 * MIB
    with pytest.raises(SimulatedOutOfMemoryError):
        expandable(cap=100 * MIB).replay(events)


def test_a_cap_counts_all_streams() -> None:
    allocator = Allocator(cap=60 * MIB)
    allocator.allocate(0, 40 * MIB, stream=1)
    allocator.free(0)
    allocator.allocate(1, 40 * MIB, stream=2)  # releases the cached segment of the other stream
    assert allocator.retries == 1 and allocator.reserved == 40 * MIB


def test_garbage_collection_releases_the_longest_idle_blocks() -> None:
    rules = Rules(gc_threshold=0.5)
    # 30 and 40 MiB are idle; 30 MiB for longer.
    events = [(0, 30 * MIB), (1, 40 * MIB), (0, -1), (2, 12 * MIB), (3, 14 * MIB), (1, -1), (4, 100 * MIB)]
    allocator = Allocator(rules, fraction_bytes=100 * MIB).replay(events[:-1])
    before = allocator.reserved
    allocator.replay(events[-1:])
    assert allocator.collections and allocator.reserved < before + 100 * MIB
    assert allocator.retries == 0
    # torch collects nothing without a memory fraction.
    assert Allocator(rules).replay(events).reserved == before + 100 * MIB


def test_oversize_blocks_are_released_first() -> None:
    rules = Rules(max_split=30 * MIB)
    events = [(0, 50 * MIB), (1, 20 * MIB), (2, 40 * MIB), (0, -1), (1, -1), (2, -1)]
    allocator = Allocator(rules, cap=120 * MIB).replay(events)
    allocator.allocate(3, 80 * MIB)
    assert allocator.reserved == 100 * MIB  # the segment of 20 MiB stays
    assert allocator.retries == 0


def test_a_segment_can_be_adopted_as_it_is() -> None:
    allocator = Allocator()
    allocator.adopt(1 << 40, (0, False), [(10 * MIB, 5, 9 * MIB), (4 * MIB, None, 0), (6 * MIB, 6, 6 * MIB)])
    assert (allocator.reserved, allocator.active, allocator.requested) == (20 * MIB, 16 * MIB, 15 * MIB)
    allocator.allocate(7, 4 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.replay([(5, -1), (6, -1), (7, -1)])
    assert allocator.active == 0 and allocator.released() == 20 * MIB


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
    gc_threshold=st.sampled_from([0.0, 0.3]),
)


@given(requests(), RULES, st.booleans())
def test_invariants(events: list[tuple[int, int]], rules: Rules, descending: bool) -> None:
    allocator = Allocator(rules, descending=descending)
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


@given(requests(), RULES, st.integers(20, 200))
def test_a_replay_under_a_cap_stays_within_it(
    events: list[tuple[int, int]], rules: Rules, cap_mib: int
) -> None:
    allocator = Allocator(rules, cap=cap_mib * MIB, fraction_bytes=cap_mib * MIB)
    try:
        allocator.replay(events)
    except SimulatedOutOfMemoryError:
        # Nothing is left to release but parts of segments in use.
        assert allocator.released() == 0
    assert allocator.active <= allocator.reserved <= allocator.peak_reserved <= cap_mib * MIB
    for key, _ in events:
        allocator.free(key)
    freed = sum(size for pool in allocator._free.values() for size, _, _ in pool)
    assert freed == allocator.reserved
    allocator.released()
    assert allocator.reserved == 0
    assert not any(allocator._free.values())
