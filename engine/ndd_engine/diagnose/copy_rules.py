"""Copies from and to the memory of a GPU, copies within it, and fills of it. The rules apply to runs on a GPU only."""

from __future__ import annotations

from ndd_engine.record.figures import (
    BETWEEN_GPUS,
    FILL,
    OTHER_COPY,
    PINNED_TO_GPU,
    TO_GPU,
    TO_HOST,
    TO_PINNED_HOST,
    WITHIN_GPU,
)
from ndd_engine.text import percent, size

from .data_facts import data_bytes
from .finding import Finding
from .gpu_rules import CAPTURE, LEAST, PINNED, TO_PINNED, in_capture
from .view import CONFIG, FLOOR, FindingDraft, View, taken

# Direction of a copy -> its kinds.
DIRECTIONS = {
    "from the host to the GPU": (TO_GPU, PINNED_TO_GPU),
    "from the GPU to the host": (TO_HOST, TO_PINNED_HOST),
    "between GPUs": (BETWEEN_GPUS,),
    "of other kinds": (OTHER_COPY,),
}
UP, DOWN, BETWEEN, _ = DIRECTIONS


def transfer(view: View) -> Finding | None:
    """Copies from and to the host or another GPU that the GPU waits for."""
    cost, capture = view.device_cost("to_device"), view.kernels
    if view.get("loader.placement") == "device":
        return None
    ways = {UP: cost.share}
    if cost.clear:
        draft = FindingDraft(
            "transfer", f"host-to-device copies take {percent(cost.share)} of each step", cost
        )
        draft.add(taken(cost, "copies take"))
    elif capture is not None:
        prepared = in_capture(view, "copying") or 0.0
        alone = {way: sum(_alone(view, kind) for kind in kinds) for way, kinds in DIRECTIONS.items()}
        share = prepared + sum(alone.values())
        if share < FLOOR:
            return None
        ways = {way: part for way, part in {**alone, UP: alone[UP] + prepared}.items() if part >= LEAST}
        title = f"copies {_route(tuple(ways))} take {percent(share)} of the time"
        draft = FindingDraft("transfer", title, view.part(share))
        for way, part in alone.items():
            if part >= LEAST:
                draft.saw(
                    f"copies {way} run without a kernel beside them for {percent(part)} of the time", CAPTURE
                )
        if prepared >= LEAST:
            another = "another " if any(part >= LEAST for part in alone.values()) else ""
            draft.saw(
                f"the GPU is idle while the host prepares copies for {another}{percent(prepared)} of the time",
                CAPTURE,
            )
    else:
        return None
    loader, free = view.snapshot.loader, view.snapshot.headroom.free_bytes
    if UP in ways:
        if loader is not None and loader.batch_bytes:
            draft.saw(f"a micro-batch is {size(loader.batch_bytes)}", "record")
        pinned, deferred = view.get("loader.pin_memory"), view.get("loader.non_blocking")
        if pinned is not None or deferred is not None:
            draft.saw(
                f"loader.pin_memory is {str(pinned).lower()}, loader.non_blocking {str(deferred).lower()}",
                CONFIG,
            )
        if view.trace is not None:
            if ways[UP] - _alone(view, PINNED_TO_GPU) >= LEAST:
                draft.change(PINNED)
        elif sets := [
            f"{key}=true" for key in ("loader.pin_memory", "loader.non_blocking") if view.get(key) is False
        ]:
            draft.change("use pinned memory and non-blocking copies", *sets)
        needed = data_bytes(loader)
        fits = needed is not None and free is not None and 0 < needed < 0.4 * free
        if loader is not None and loader.in_memory and fits and not view.workers:
            draft.change("keep all data in GPU memory", "loader.placement=device")
        draft.change("transfer smaller data types and convert them on the GPU")
    if DOWN in ways:
        if _alone(view, TO_HOST) >= LEAST:
            draft.change(TO_PINNED)
        draft.change(
            "copy less to the host: reduce tensors on the GPU first, and copy them every few steps only"
        )
    if BETWEEN in ways:
        draft.change("keep what works together on one GPU, so that less is copied between GPUs")
    if capture is not None and not cost.clear:
        draft.change("copy on another stream, while the GPU computes")
    return draft.done()


def _route(ways: tuple[str, ...]) -> str:
    """The direction of copies, or a word for several."""
    if len(ways) == 1:
        return ways[0]
    return "between host and GPU" if set(ways) == {UP, DOWN} else "from and to other memory"


def _alone(view: View, kind: str) -> float:
    """Fraction of a profiler capture in which copies or fills of a kind run without a kernel; 0 without a capture."""
    capture = view.kernels
    return 0.0 if capture is None else capture.exposed_copies_ns.get(kind, 0) / capture.wall_ns


def device_copies(view: View) -> Finding | None:
    """Copies within the memory of the GPU, and fills of it, while no kernel runs."""
    within, fills = _alone(view, WITHIN_GPU), _alone(view, FILL)
    if within + fills < FLOOR:
        return None
    named = {"copies within the GPU": within, "fills of its memory": fills}
    found = {name: share for name, share in named.items() if share >= LEAST}
    what = "fills of GPU memory" if within < LEAST else " and ".join(found)
    draft = FindingDraft(
        "device-copies", f"{what} take {percent(within + fills)} of the time", view.part(within + fills)
    )
    for name, share in found.items():
        draft.saw(f"{name} run without a kernel beside them for {percent(share)} of the time", CAPTURE)
    if within >= LEAST:
        draft.change(
            "copy less within the GPU: avoid .clone(), .contiguous(), torch.cat and torch.stack; write in place or "
            "into preallocated tensors"
        )
    if fills >= LEAST:
        draft.change(
            "fill less: zero_grad(set_to_none=True), torch.empty instead of torch.zeros where every value is written, "
            "and tensors that are allocated once"
        )
    return draft.done()


RULES = (transfer, device_copies)
