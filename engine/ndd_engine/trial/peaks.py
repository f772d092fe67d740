"""Peak memory of a process that trains, with its loader workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ndd_engine.hardware.host import resident_peak

if TYPE_CHECKING:
    import psutil
    import torch


def peak_memory(device: torch.device, without: Iterable[int] = ()) -> tuple[int | None, int | None]:
    """(peak allocated, peak reserved) bytes on the GPU; (peak resident, None) on the CPU.

    without: processes that do not count, with those that they started.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device)), int(torch.cuda.max_memory_reserved(device))
    import psutil

    own, others = resident_peak(), set(without)
    direct = [child for child in psutil.Process().children() if child.pid not in others]
    workers = [child.pid for one in direct for child in (one, *descendants(one))]
    return (None if own is None else own + worker_bytes(workers)), None


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The processes that a process started; [] once it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def worker_bytes(workers: Iterable[int]) -> int:
    """Resident bytes of processes; pages that they share count once in total."""
    import psutil

    total = 0
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(worker).memory_full_info()
            total += int(getattr(found, "pss", found.rss))
    return total
