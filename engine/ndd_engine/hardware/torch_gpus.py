"""Matches torch's GPUs with NVML's by UUID: NVML has another order and hides none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from .gpu import Gpu, VisibleGpus, names
from .profiles import match
from .visible import VARIABLE


def ask_torch(cards: tuple[Gpu, ...], environ: Mapping[str, str], torch: Any = None) -> VisibleGpus:
    """Import torch, initialise CUDA and number the GPUs. Never raises; `reason` explains why torch sees none.

    A GPU that torch sees and NVML does not (no NVML on this system) is added with what torch knows about it.
    """
    if torch is None:
        try:
            torch = import_module("torch")
        except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
            return _none(cards, f"torch cannot be imported: {error}")
    version = str(getattr(torch, "__version__", "?"))
    built = getattr(torch.version, "cuda", None)
    if built is None and getattr(torch.version, "hip", None) is None:
        reason = f"torch build has no CUDA ({version})"
        if cards:
            return _none(cards, f"{reason} although NVML lists {names(cards)}")
        return VisibleGpus(cards, (), reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            seen = [torch.cuda.get_device_properties(index) for index in range(count)]
        except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways
            return _none(cards, f"torch {version} cannot use CUDA: {error}")
    said = tuple(_plain(item.message) for item in caught)
    if seen:
        return _numbered(cards, seen, built, environ, said)
    if not said and VARIABLE in environ:
        reason = f"{VARIABLE}={environ[VARIABLE]} hides every GPU from torch"
        return VisibleGpus(_hidden(cards, reason), (), reason)
    return _none(cards, f"torch {version} sees no GPU" + "".join(f": {text}" for text in said[:1]))


def _numbered(
    cards: tuple[Gpu, ...],
    seen: list[Any],
    built: str | None,
    environ: Mapping[str, str],
    said: tuple[str, ...],
) -> VisibleGpus:
    found = list(cards)
    order: list[int] = []
    problems = [f"torch warns: {text}" for text in said]
    for index, properties in enumerate(seen):
        place, why = _place(found, properties, order, environ)
        if place is None:
            found.append(_from_torch(properties))
            place, why = len(found) - 1, "NVML does not list it"
        order.append(place)
        card = found[place]
        found[place] = replace(card, index=index, cuda_torch=built, reasons={**card.reasons, "index": why})
        old = _too_old(card)
        if old is not None:
            problems.append(old)
    for place, card in enumerate(found):
        if place not in order:
            shown = f" ({VARIABLE}={environ[VARIABLE]})" if VARIABLE in environ else ""
            reasons = {**card.reasons, "index": f"torch does not see it{shown}"}
            found[place] = replace(card, cuda_torch=built, reasons=reasons)
    return VisibleGpus(
        tuple(found), tuple(order), f"torch sees {len(seen)} of {len(found)} GPUs", tuple(problems)
    )


def _place(
    cards: list[Gpu], properties: Any, taken: list[int], environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """(position in cards of the GPU with these torch properties, the reason)."""
    uuid = str(getattr(properties, "uuid", "")).lower()
    bare = uuid.removeprefix("gpu-").removeprefix("mig-")
    if not bare:
        return None, ""
    free = [place for place in range(len(cards)) if place not in taken]
    for place in free:
        if _bare(cards[place].uuid) == bare:
            return place, "matched by UUID"
    # With MIG, torch may name the whole GPU: it is the visible instance then, or the first one.
    instances = [place for place in free if cards[place].mig and _bare(cards[place].mig_parent) == bare]
    asked = environ.get(VARIABLE, "").split(",")[0].strip()
    for place in instances:
        if asked.startswith("MIG-") and (cards[place].uuid or "").startswith(asked):
            return place, f"the MIG instance that {VARIABLE} names"
    if instances:
        return instances[0], "the first MIG instance of the GPU that torch names"
    return None, ""


def _bare(uuid: str | None) -> str | None:
    return None if uuid is None else uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _from_torch(properties: Any) -> Gpu:
    name, total = str(properties.name), int(properties.total_memory)
    uuid = getattr(properties, "uuid", None)
    return Gpu(
        index=None,
        nvml_index=None,
        uuid=None if uuid is None else f"GPU-{uuid}",
        name=name,
        memory_total_bytes=total,
        compute_capability=(int(properties.major), int(properties.minor)),
        profile=match(name, total),
        reasons={"nvml": "NVML does not list this GPU: its counters are not available"},
    )


def _too_old(card: Gpu) -> str | None:
    """A warning for GPUs that lack features this program offers, or None."""
    capability = card.compute_capability
    if capability is not None and capability < (7, 0):
        shown = f"{capability[0]}.{capability[1]}"
        return f"{card.name} has compute capability {shown}: no tensor cores, and torch.compile needs 7.0"
    return None


def _plain(message: object) -> str:
    """One of torch's warnings as one line, without the location in its source."""
    return " ".join(str(message).partition("(Triggered")[0].split())


def _none(cards: tuple[Gpu, ...], reason: str) -> VisibleGpus:
    """torch sees no GPU: warn if NVML lists one, because the run would silently use the CPU."""
    return VisibleGpus(_hidden(cards, reason), (), reason, (reason,) if cards else ())


def _hidden(cards: tuple[Gpu, ...], reason: str) -> tuple[Gpu, ...]:
    return tuple(replace(card, reasons={**card.reasons, "index": reason}) for card in cards)
