"""The same trace as the other vendor writes it: what tests make or read in the names of CUDA, in those of ROCm.

Older versions of ROCm have names of their own for copies and fills; newer ones use those of CUDA, but call both kinds
of host memory "Host".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndd_engine.measure.timeline import RUNTIME

VENDORS = ("CUDA", "ROCm", "ROCm 6")
_MEMORY = {"HtoD": "CopyHostToDevice", "DtoH": "CopyDeviceToHost", "DtoD": "CopyDeviceToDevice"}
# Categories of torch.profiler for what runs on a GPU.
_ON_GPU = ("kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset")


def renamed(seen: Sequence[tuple[str, bool, int]], vendor: str) -> list[str]:
    """The names of events. seen: (name, whether it is on the GPU, correlation id, 0 without one) of each of them.

    A copy of pageable memory is asked for by hipMemcpyWithStream, which returns when it is done.
    """
    if vendor == "CUDA":
        return [name for name, _, _ in seen]
    pageable = {number for name, on_gpu, number in seen if on_gpu and number and "Pageable" in name}
    return [
        _on_gpu(name, vendor) if on_gpu else _on_host(name, number in pageable)
        for name, on_gpu, number in seen
    ]


def _on_host(name: str, pageable: bool) -> str:
    if RUNTIME.match(name):
        call = "hip" + name.removeprefix("cuda").removeprefix("cu").removeprefix("hip")
        return "hipMemcpyWithStream" if pageable and call == "hipMemcpyAsync" else call
    return name.replace("cudnn", "miopen").replace("Cudnn", "Miopen")


def _on_gpu(name: str, vendor: str) -> str:
    if name.startswith("Memcpy "):
        if vendor == "ROCm":
            return _MEMORY.get(name.split()[1], name)
        return name.replace("Pageable", "Host").replace("Pinned", "Host")
    if name.startswith("Memset"):
        return "FillBuffer" if vendor == "ROCm" else name
    return name.replace("cudnn", "miopen").replace("nccl", "rccl")


def rename(events: Sequence[dict[str, Any]], vendor: str) -> None:
    """Rename the events of a trace in place."""
    timed = [event for event in events if isinstance(event.get("name"), str)]
    seen = [
        (
            event["name"],
            str(event.get("cat", "")).lower() in _ON_GPU,
            event.get("args", {}).get("correlation") or 0,
        )
        for event in timed
    ]
    for event, name in zip(timed, renamed(seen, vendor), strict=True):
        event["name"] = name
