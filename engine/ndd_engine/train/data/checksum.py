"""A checksum of a few items, to detect that a resumed run or another rank has other data."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch.utils.data import Dataset

from ndd_engine.batches import tensors

# Bytes of a tensor that its checksum covers wholly, and the number of blocks that it covers of a larger one.
WHOLE_BYTES = 16 << 20
BLOCKS = 16


def checksum(
    data: Dataset[Any] | list[Any], items: int, looked_at: int = 16, limit: int = WHOLE_BYTES
) -> int:
    """CRC-32 of evenly spread items.

    Of a tensor above `limit` bytes it covers evenly spread blocks and the size.
    """
    crc = 0
    looked_at = min(items, looked_at)
    for index in (place * items // looked_at for place in range(looked_at)):
        for tensor in tensors(data[index]):
            if tensor.numel():
                plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                if plain.numel() > limit:
                    crc = zlib.crc32(plain.numel().to_bytes(8, "little"), crc)
                    block = limit // BLOCKS
                    last = plain.numel() - block
                    parts = [plain[place * last // (BLOCKS - 1) :][:block] for place in range(BLOCKS)]
                else:
                    parts = [plain]
                for part in parts:
                    # The tensor's own memory: copying it to a list takes 40 ms per megabyte.
                    crc = zlib.crc32((ctypes.c_ubyte * part.numel()).from_address(part.data_ptr()), crc)
    return crc
