"""Matches torch's GPUs with NVML's by UUID: NVML lists them in another order and hides none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from .gpu import Gpu, Machine, VisibleGpus, names
from .profiles import match
from .visible import VARIABLE


def ask_torch(gpus: tuple[Gpu, ...], environ: Mapping[str, str], torch: Any = None) -> VisibleGpus:
    """Import torch, initialise CUDA and number the GPUs. Never raises; `reason` explains why torch sees none.

    A GPU that torch sees and NVML does not (no NVML on this system) is added with what torch knows about it.
    """
    if torch is None:
        try:
            torch = import_module("torch")
        except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
            return _none(gpus, f"torch cannot be imported: {error}")
    version = str(getattr(torch, "__version__", "?"))
    built = getattr(torch.version, "cuda", None)
    if built is None and getattr(torch.version, "hip", None) is None:
        reason = f"torch build has no CUDA ({version})"
        return _none(gpus, f"{reason} although NVML lists {names(gpus)}" if gpus else reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            seen = [torch.cuda.get_device_properties(index) for index in range(count)]
        except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways
            return _none(gpus, f"torch {version} cannot use CUDA: {error}")
    said = tuple(_plain(item.message) for item in caught)
    if seen:
        return _numbered(gpus, seen, built, environ, said)
    if not said and VARIABLE in environ:
        reason = f"{VARIABLE}={environ[VARIABLE]} hides every GPU from torch"
        return _none(gpus, reason, warn=False)
    return _none(gpus, f"torch {version} sees no GPU" + "".join(f": {text}" for text in said[:1]))


def with_free_memory(machine: Machine, torch: Any = None) -> Machine:
    """The machine with the free memory of the chosen GPU from CUDA, if NVML does not report it. Never raises.

    NVML may not report it of virtual GPUs and MIG instances, and may be missing. CUDA's answer creates a context on the
    GPU in this process, whose memory is not free then.
    """
    gpu = machine.chosen
    if gpu is None or gpu.free_bytes is not None:
        return machine
    index = int(machine.device.partition(":")[2])
    try:
        free, total = (torch or import_module("torch")).cuda.mem_get_info(index)
    except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways
        found = gpu.because("memory", f"CUDA does not report it either: {error}")
    else:
        known = {"free_bytes": free, "used_bytes": total - free, "memory_total_bytes": total}
        found = gpu.because("memory", "by CUDA; NVML does not report it", **known)
    gpus = tuple(found if each is gpu else each for each in machine.gpus)
    return replace(machine, gpus=gpus, chosen=found)


def _numbered(
    gpus: tuple[Gpu, ...],
    seen: list[Any],
    built: str | None,
    environ: Mapping[str, str],
    said: tuple[str, ...],
) -> VisibleGpus:
    found = list(gpus)
    order: list[int] = []
    problems = [f"torch warns: {text}" for text in said]
    for index, properties in enumerate(seen):
        uuid = _uuid(properties)
        place, why = _place(found, uuid, order, environ.get(VARIABLE, ""))
        if place is None:
            capability = int(properties.major), int(properties.minor)
            found.append(_from_torch(str(properties.name), uuid, int(properties.total_memory), capability))
            place, why = len(found) - 1, "NVML does not list it"
        order.append(place)
        gpu = found[place]
        found[place] = gpu.because("index", why, index=index, cuda_torch=built)
        if gpu.compute_capability is not None and gpu.compute_capability < (7, 0):
            shown = ".".join(map(str, gpu.compute_capability))
            lacks = "no tensor cores, and torch.compile needs 7.0"
            problems.append(f"{gpu.name} has compute capability {shown}: {lacks}")
    for place, gpu in enumerate(found):
        if place not in order:
            shown = f" ({VARIABLE}={environ[VARIABLE]})" if VARIABLE in environ else ""
            found[place] = gpu.because("index", f"torch does not see it{shown}", cuda_torch=built)
    reason = f"torch sees {len(seen)} of {len(found)} GPUs"
    return VisibleGpus(tuple(found), tuple(order), reason, tuple(problems))


def trained_on(
    gpus: Sequence[Gpu], uuid: str | None, name: str, total: int, capability: tuple[int, int], shown: str
) -> Gpu:
    """The GPU that another process trains on, as its torch describes it. shown: its CUDA_VISIBLE_DEVICES, or "".

    One that NVML does not list gets what torch knows about it.
    """
    place, why = _place(gpus, uuid, [], shown)
    if place is None:
        return _from_torch(name, uuid, total, capability)
    return gpus[place].because("index", f"the process trains on it: {why}")


def _place(gpus: Sequence[Gpu], uuid: str | None, taken: Sequence[int], shown: str) -> tuple[int | None, str]:
    """(position in gpus of the GPU with this UUID of torch, the reason). shown: CUDA_VISIBLE_DEVICES, or ""."""
    bare = _bare(uuid)
    if not bare:
        return None, ""
    free = [place for place in range(len(gpus)) if place not in taken]
    for place in free:
        if _bare(gpus[place].uuid) == bare:
            return place, "matched by UUID"
    # With MIG, torch may name the whole GPU: it is the visible instance then, or the first one.
    instances = [place for place in free if gpus[place].mig and _bare(gpus[place].mig_parent) == bare]
    asked = shown.split(",")[0].strip()
    for place in instances:
        if asked.startswith("MIG-") and (gpus[place].uuid or "").startswith(asked):
            return place, f"the MIG instance that {VARIABLE} names"
    if instances:
        return instances[0], "the first MIG instance of the GPU that torch names"
    return None, ""


def _bare(uuid: str | None) -> str | None:
    return None if uuid is None else uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def _from_torch(name: str, uuid: str | None, total: int, capability: tuple[int, int]) -> Gpu:
    return Gpu(
        index=None,
        nvml_index=None,
        uuid=None if uuid is None else f"GPU-{uuid}",
        name=name,
        memory_total_bytes=total,
        compute_capability=capability,
        profile=match(name, total),
        reasons={"nvml": "NVML does not list this GPU: its counters are not available"},
    )


def _plain(message: object) -> str:
    """One of torch's warnings as one line, without the location in its source."""
    return " ".join(str(message).partition("(Triggered")[0].split())


def _none(gpus: tuple[Gpu, ...], reason: str, warn: bool = True) -> VisibleGpus:
    """torch sees no GPU. warn: if NVML lists one, because the run would silently use the CPU."""
    hidden = tuple(gpu.because("index", reason) for gpu in gpus)
    return VisibleGpus(hidden, (), reason, (reason,) if gpus and warn else ())
