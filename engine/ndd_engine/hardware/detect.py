"""Detects the machine: NVML's GPUs, which of them torch sees, which one is chosen, each with its reason."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from ndd_engine.errors import MachineError, UsageError

from .gpu import Gpu, Machine, Process, VisibleGpus, names
from .host import Host, detect_host
from .nvml import Nvml
from .profiles import match, split_mig
from .torch_gpus import ask_torch
from .visible import Entry, visible


def detect(
    choice: str = "auto",
    use_torch: bool = True,
    *,
    nvml: Nvml | None = None,
    torch: Any = None,
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
) -> Machine:
    """Detect the GPUs and choose the device of a run.

    choice: "auto" (the first visible GPU, else the CPU), "cpu", "cuda", "cuda:N". use_torch: ask torch which GPUs it
    sees, which initialises CUDA in this process (a forked child can then not use it). Otherwise only NVML is queried,
    torch is not imported, and CUDA_VISIBLE_DEVICES is interpreted here. nvml, torch, environ, host: for tests.

    Raises MachineError if the requested GPU does not exist, UsageError for any other choice. A missing or broken driver
    raises nothing.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", choice):
        raise UsageError(f'unknown device "{choice}"; allowed: auto, cpu, cuda, cuda:N')
    variables = os.environ if environ is None else environ
    reasons: dict[str, str] = {}
    own = nvml is None
    nvml = Nvml() if nvml is None else nvml
    try:
        gpus = list_gpus(nvml)
        reasons["nvml"] = _nvml_reason(nvml, gpus)
    finally:
        if own:
            nvml.close()
    if use_torch and choice != "cpu":
        view = ask_torch(gpus, variables, torch)
        reasons["torch"] = view.reason
    else:
        view = _without_torch(gpus, variables)
        reasons["torch"] = "not queried"
    device, chosen, reasons["device"] = _choose(choice, view, reasons["nvml"])
    known = host if host is not None else detect_host()
    return Machine(view.gpus, chosen, device, reasons, known, view.problems)


def equal_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that ranks could use, "cuda:0" first: those like it, in torch's order, without MIG instances.

    [] without GPUs, or if the run's device is another than the first.
    """
    if machine.chosen is None or machine.device != "cuda:0":
        return []
    numbered = {gpu.index: gpu for gpu in machine.gpus if gpu.index is not None and not gpu.mig}
    found: list[Gpu] = []
    while (gpu := numbered.get(len(found))) is not None and gpu.name == machine.chosen.name:
        found.append(gpu)
    return found


def list_gpus(nvml: Nvml) -> tuple[Gpu, ...]:
    """NVML's GPUs in PCI bus order, with MIG instances in place of the GPU that they divide. Never raises."""
    if not nvml.open():
        return ()
    driver, cuda = nvml.driver_version(), nvml.cuda_version()
    gpus: list[Gpu] = []
    for index in range(nvml.count() or 0):
        handle = nvml.handle(index)
        if handle is None:
            unknown = Gpu(None, index, None, f"GPU {index}", None, None, driver, cuda)
            gpus.append(unknown.because("gpu", nvml.reasons.get("handle", "")))
            continue
        instances = nvml.mig_instances(handle)
        whole = _read_gpu(nvml, handle, index, driver, cuda)
        if instances is None:
            gpus.append(whole)
        elif not instances:
            why = "MIG is enabled but has no instance: CUDA cannot use this GPU"
            gpus.append(whole.because("mig", why))
        else:
            gpus.extend(_instance(nvml, instance, whole) for instance in instances)
    return tuple(gpus)


def _read_gpu(nvml: Nvml, handle: Any, index: int, driver: str | None, cuda: str | None) -> Gpu:
    name, memory = nvml.name(handle), nvml.memory(handle)
    total = memory.total_bytes if memory is not None else None
    processes = nvml.processes(handle)
    named = (Process(item.pid, item.used_bytes, _process_name(item.pid)) for item in processes or ())
    profile = match(name, total) if name is not None else None
    gpu = Gpu(
        index=None,
        nvml_index=index,
        uuid=nvml.uuid(handle),
        name=name if name is not None else f"GPU {index}",
        memory_total_bytes=total,
        compute_capability=nvml.compute_capability(handle),
        driver=driver,
        cuda_driver=cuda,
        profile=profile,
        processes=tuple(named) if processes is not None else None,
        free_bytes=memory.free_bytes if memory is not None else None,
        used_bytes=memory.used_bytes if memory is not None else None,
    )
    wanted = ("name", "uuid", "memory", "compute_capability", "processes", "driver_version")
    reasons = {key: nvml.reasons[key] for key in wanted if key in nvml.reasons}
    if profile is None:
        reasons["profile"] = "no published figures for this GPU"
    elif profile.note is not None:
        reasons["profile"] = profile.note
    return replace(gpu, reasons=reasons)


def _instance(nvml: Nvml, handle: Any, whole: Gpu) -> Gpu:
    """A MIG instance; values that it does not report are those of the whole GPU."""
    gpu = _read_gpu(nvml, handle, whole.nvml_index or 0, whole.driver, whole.cuda_driver)
    name = gpu.name if "name" not in gpu.reasons else f"{whole.name} MIG"
    profile = gpu.profile or match(f"{whole.name} MIG unknown", None)
    reasons = dict(gpu.reasons)
    if profile is not None:
        reasons["profile"] = profile.note or ""
    return replace(
        gpu,
        name=name,
        nvml_index=whole.nvml_index,
        compute_capability=gpu.compute_capability or whole.compute_capability,
        mig=True,
        mig_parent=whole.uuid,
        mig_profile=split_mig(name)[1],
        profile=profile,
        reasons=reasons,
    )


def _process_name(pid: int) -> str | None:
    """The name of a process; None for one of another container or user."""
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError, ValueError):
        return None


def _nvml_reason(nvml: Nvml, gpus: Sequence[Gpu]) -> str:
    if nvml.reason:
        return nvml.reason
    driver = f"NVIDIA driver {nvml.driver_version() or 'of unknown version'}"
    if gpus:
        return f"{driver} lists {names(gpus)}"
    why = nvml.reasons.get("count")
    return f"{driver} cannot list its GPUs: {why}" if why else f"{driver} is loaded but lists no GPU"


def _without_torch(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> VisibleGpus:
    """What torch would see, judged by NVML and the environment alone."""
    usable = [
        place for place, gpu in enumerate(gpus) if "mig" not in gpu.reasons and "gpu" not in gpu.reasons
    ]
    shown = [gpus[place] for place in usable]
    entries = [Entry(gpu.nvml_index, gpu.uuid, gpu.name, gpu.mig, gpu.mig_parent) for gpu in shown]
    seen = visible(entries, environ)
    order = tuple(usable[position] for position in seen.positions)
    marked = []
    for place, gpu in enumerate(gpus):
        index = None
        if place not in order:
            why = "hidden: " + seen.reason if place in usable else "CUDA cannot use it"
        elif seen.certain:
            index, why = order.index(place), f"by {seen.reason}; torch was not queried"
        else:
            why = f"torch's number is unknown until torch is queried: {seen.reason}"
        marked.append(gpu.because("index", why, index=index))
    return VisibleGpus(tuple(marked), order, seen.reason, certain=seen.certain)


def _choose(choice: str, view: VisibleGpus, nvml_reason: str) -> tuple[str, Gpu | None, str]:
    """(device, GPU, reason). Raises MachineError if the requested GPU does not exist."""
    if choice == "cpu":
        return "cpu", None, "the CPU was requested"
    if not view.gpus:
        missing = nvml_reason
    elif not view.order:
        missing = view.reason if view.problems else f"{names(view.gpus)} cannot be used: {view.reason}"
    else:
        missing = ""
    wanted = int(choice.partition(":")[2] or 0)
    if not missing and wanted < len(view.order):
        gpu = view.gpus[view.order[wanted]]
        why = f"{choice} was requested" if choice != "auto" else "the first visible GPU"
        if not view.certain:
            why += f"; torch decides which GPU that is: {view.reason}"
        return f"cuda:{wanted}", gpu, why
    if choice == "auto":
        return "cpu", None, missing
    there = ", ".join(f"cuda:{place} {view.gpus[at].name}" for place, at in enumerate(view.order))
    raise MachineError(
        f"{choice} is not available: {missing or 'this machine has ' + there}; use device auto or cpu"
    )
