"""The allocator's counters of a card as an event."""

from __future__ import annotations

import torch

from ndd_engine.record.events import MemoryEvent


def memory_event(device: torch.device) -> MemoryEvent:
    """The allocator's counters of a card, read without resetting any of them."""
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, peak = int(stats["allocated_bytes.all.current"]), int(stats["allocated_bytes.all.peak"])
    return MemoryEvent(
        allocated_bytes=allocated,
        reserved_bytes=int(stats["reserved_bytes.all.current"]),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=int(stats["reserved_bytes.all.peak"]),
        growth_bytes=peak - allocated,
        retries=int(stats["num_alloc_retries"]),
        ooms=int(stats["num_ooms"]),
        free_bytes=int(free),
        total_bytes=int(total),
        others_bytes=None,
    )
