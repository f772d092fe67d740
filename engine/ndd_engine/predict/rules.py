"""The settings of CUDA's caching allocator, and how they round sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB
ROUND_LARGE = 2 * MIB
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Rules:
    """Allocator settings from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, in bytes.

    large_segment: size of a new segment for requests below 10 MiB. max_split: blocks of this size or more are not
    split. max_rounding: how much larger than such a request a block may be. expandable: one growing segment per pool.
    divisions: round sizes up to 1/divisions of a power of two; 0 rounds to multiples of 512 bytes. gc_threshold: share
    of the memory limit above which idle blocks are released; 0 never.
    """

    large_segment: int = 20 * MIB
    max_split: int = UNLIMITED
    max_rounding: int = 20 * MIB
    expandable: bool = False
    divisions: int = 0
    gc_threshold: float = 0.0

    @classmethod
    def of_environment(cls, text: str | None = None) -> Rules:
        """Parse the environment variable, or `text`. Unknown and malformed options are ignored; torch reports them."""
        if text is None:
            text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        options = dict(re.findall(r"(\w+)\s*:\s*([^,\[\]]+)", text))

        def number(name: str, default: int, unit: int) -> int:
            value = options.get(name, "").strip()
            return int(value) * unit if value.isdecimal() and len(value) < 10 else default

        share = options.get("garbage_collection_threshold", "").strip()
        return cls(
            large_segment=number("large_segment_size_mb", cls.large_segment, MIB),
            max_split=number("max_split_size_mb", cls.max_split, MIB),
            max_rounding=number("max_non_split_rounding_mb", cls.max_rounding, MIB),
            expandable=options.get("expandable_segments", "").strip().lower() == "true",
            divisions=number("roundup_power2_divisions", cls.divisions, 1),
            gc_threshold=float(share) if re.fullmatch(r"0?\.\d{1,9}", share) else cls.gc_threshold,
        )

    @classmethod
    def of_snapshot(cls, settings: Mapping[str, object]) -> Rules:
        """The settings of the process that wrote a memory snapshot (`allocator_settings`; {} before torch 2.2)."""
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
        rules = cls.of_environment(text[:4096] if isinstance(text, str) else "")
        # These are also right where the program changed them later.
        split, share = settings.get("max_split_size"), settings.get("garbage_collection_threshold")
        expandable, divisions = settings.get("expandable_segments"), settings.get("roundup_power2_divisions")
        if isinstance(split, int) and 0 < split < UNLIMITED:
            rules = replace(rules, max_split=split)
        if isinstance(share, float) and 0 < share < 1:
            rules = replace(rules, gc_threshold=share)
        if isinstance(expandable, bool):
            rules = replace(rules, expandable=expandable)
        # Different divisions for different sizes are not modelled.
        known = divisions.values() if isinstance(divisions, Mapping) else ()
        parts = {part for part in known if isinstance(part, int)}
        if len(parts) == 1 and 0 <= (part := parts.pop()) <= 1024:
            rules = replace(rules, divisions=int(part))
        return rules

    def rounded(self, size: int) -> int:
        """Bytes that a request occupies in a block."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if self.divisions > 1 and size > MIN_BLOCK * self.divisions:
            power = 1 << (size.bit_length() - 1)
            step = power // self.divisions
            return power + -(-(size - power) // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment(self, size: int) -> int:
        """Bytes requested from the driver for a request of `size` (rounded) bytes."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_SEGMENT:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE
