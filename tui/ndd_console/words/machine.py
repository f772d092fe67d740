"""The detected hardware in words, with a reason for every value, and what `check` predicts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ndd_engine.config import Config
from ndd_engine.hardware.gpus import Gpu, GpuProfile, Host, Machine
from ndd_engine.record.figures import others_text
from ndd_engine.record.snapshot import CoreUse
from ndd_engine.text import MISSING, counted, duration, factor, number, percent, printable, size

from .blocks import Block, NamedValues, Text

DETECTING = "detecting the hardware…"
# Levels of `memory.recompute` in words.
LEVELS = {
    "all": "compute all of it again",
    "cheap": "compute again, except matrix products and attention",
    "offload": "keep it in host memory",
}

_FEW_STEPS = 10


def machine_blocks(machine: Machine) -> Iterator[Block]:
    for gpu in machine.gpus:
        yield NamedValues(tuple(_gpu(gpu)))
    why = machine.reasons["device"]
    if not machine.gpus:
        yield Text(f"no CUDA GPU: {machine.reasons['nvml']}")
        why = "" if why == machine.reasons["nvml"] else why
    yield NamedValues((_row("device", machine.device, why), *_host(machine.host)))
    yield from (Text(problem, "warn") for problem in machine.problems)


def _row(label: str, value: str, why: str | None = None) -> tuple[str, str]:
    return label, value + (f" ({why})" if why else "")


def _gpu(gpu: Gpu) -> Iterator[tuple[str, str]]:
    why = gpu.reasons.get
    yield _row("GPU", gpu.name)
    yield _row("device", f"cuda:{gpu.index}" if gpu.index is not None else "no PyTorch device", why("index"))
    memory = f"{size(gpu.memory_total_bytes)}, {size(gpu.free_bytes)} free"
    yield _row("memory", memory, why("memory"))
    if gpu.processes is None:
        users = why("processes", "processes are not listed")
    else:
        others = [process for process in gpu.processes if process.pid != os.getpid()]
        texts = (f"{other.name or 'process'} (pid {other.pid}) {size(other.used_bytes)}" for other in others)
        users = ", ".join(texts) or "no processes listed"
    yield _row("in use", f"{size(gpu.used_bytes)} used", users)
    if gpu.mig:
        yield _row("MIG", f"instance {gpu.mig_profile or MISSING} of {gpu.mig_parent or MISSING}")
    elif "mig" in gpu.reasons:
        yield _row("MIG", "on", why("mig"))
    versions = (("supports CUDA", gpu.cuda_driver), ("PyTorch built with CUDA", gpu.cuda_torch))
    cuda = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    yield _row("driver", gpu.driver or MISSING, cuda)
    capability = gpu.compute_capability
    shown = MISSING if capability is None else f"{capability[0]}.{capability[1]}"
    yield _row("compute", f"capability {shown}", why("compute_capability"))
    profile = gpu.profile
    if profile is None:
        yield _row("peak", MISSING, why("profile"))
    else:
        yield from peak_rows(profile, why("profile"))
    if gpu.uuid is not None:
        yield _row("id", gpu.uuid)


def peak_rows(profile: GpuProfile, why: str | None = None) -> Iterator[tuple[str, str]]:
    """What a GPU can reach at most, by its published specifications."""
    rates = ", ".join(f"{kind} {number(value)}" for kind, value in profile.dense_tflops.items())
    yield _row("peak", f"dense peak TFLOP/s: {rates}", why)
    yield _row("", f"memory {number(profile.bandwidth_gb_s)} GB/s; {profile.source}")


def _host(host: Host) -> list[tuple[str, str]]:
    limit = "" if host.memory_limit_bytes is None else f"{size(host.memory_limit_bytes)} of "
    memory, why = f"{limit}{size(host.memory_total_bytes)}", host.reasons.get("memory_limit_bytes")
    return [
        _row("host", host.hostname),
        _row("CPU", host.cpu, f"bf16: {', '.join(host.bf16_units)}" if host.bf16_units else None),
        _row("cores", f"{host.usable_cpus:g} usable", host.reasons.get("usable_cpus")),
        _row("memory", memory, why),
    ]


def advice(config: Config, host: Host, device: str, steps_per_epoch: int | None) -> Iterator[str]:
    """Warnings about settings that are valid but probably unintended."""
    loader, amp = config.loader, config.precision.amp
    if loader.workers > host.usable_cpus:
        yield f"loader.workers = {loader.workers} exceeds the {host.usable_cpus:g} cores this process can use"
    if loader.pin_memory and device == "cpu":
        yield "loader.pin_memory has no effect without a CUDA GPU"
    if device == "cpu" and (amp == "fp16" or (amp == "bf16" and not host.bf16_units)):
        yield f"precision.amp = {amp}: this CPU has no {amp} instructions; measure the effect with ndd-console try"
    saved = config.checkpoint
    if not (saved.every_epochs or saved.every_steps or saved.every_minutes):
        yield "no checkpoint is saved before the end: a crash loses the whole run"
    if not (config.evaluate.every_epochs or config.evaluate.every_steps):
        yield "no evaluation runs before the end"
    if steps_per_epoch is not None and steps_per_epoch < _FEW_STEPS:
        few = f"an epoch has only {counted(steps_per_epoch, 'step')} of {config.items_per_step} items"
        yield f"{few}; a smaller effective batch gives more updates"


def busy_cores(use: CoreUse) -> dict[str, Any]:
    """The cores that this process and others used while steps were timed, and in words."""
    names = "pid", "name", "cores"
    return {
        "text": f"while steps were timed, {others_text(use, 'used')}; check again when they have ended",
        "cores": use.usable,
        "used_by_steps": use.by_run,
        "used_by_others": use.others,
        "processes": [dict(zip(names, process, strict=True)) for process in use.neighbours],
    }


def cores_facts(cores: CoreUse) -> NamedValues:
    """How many cores this run and others have used recently."""
    used = f"{number(cores.used)} of {number(cores.usable)} in use: {number(cores.by_run)} by this run"
    busy = ", ".join(f"{name} (pid {pid}, {number(count)})" for pid, name, count in cores.neighbours)
    throttled = percent(cores.throttled) if cores.throttled is not None else ""
    rest = (("busy processes", busy), ("throttled by quota", throttled))
    return NamedValues.of(("recent cores", f"{used}, {number(cores.others)} by others"), *rest)


def check_facts(report: dict[str, Any]) -> NamedValues:
    return NamedValues(tuple(_rows(report)))


def _budget(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What memory.budget asks for."""
    if not plan["found"]:
        yield "budget", f"not reached: at least {size(plan['peak_bytes'])}; {plan['why']}"
    elif not plan["levels"]:
        yield "budget", "no block has to compute again"
    else:
        known, slower = plan["levels"].items(), plan["slower"]
        by_level = {level: [name for name, own in known if own == level] for level in LEVELS}
        costs = "" if slower is None else f"; a micro-batch takes {factor(slower)} times as long"
        yield "budget", f"{len(known)} of {counted(plan['blocks'], 'block')} keep less for backward{costs}"
        yield (
            "",
            "; ".join(f"{LEVELS[level]}: {', '.join(names)}" for level, names in by_level.items() if names),
        )
    for name, why in plan["refused"].items():
        yield "", f"{printable(name)} keeps what it needs: {why}"


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, micro = report["predicted_bytes"], report["micro_batch"]
    fits = {True: "fits", False: "DOES NOT FIT", None: "available memory unknown"}[report["fits"]]
    if report["retries"]:
        fits += ", with retries"
    step = "measured" if report["step_measured"] else f"extrapolated from micro-batches smaller than {micro}"
    yield "config", "no problems"
    yield "data", report["data"]
    yield "device", f"{report['device']} ({report['device_reason']})"
    yield "model", f"{number(report['parameters'])} parameters ({report['model']})"
    if report["size"]:
        yield "size", f"{report['size']} ({report['size_reason']})"
    parts = ", ".join(f"{name} {size(count)}" for name, count in memory.items() if name != "total" and count)
    available = size(report["available_bytes"])
    where = f"for each of {report['ranks']} ranks" if report["ranks"] > 1 else "available"
    yield "memory", f"predicted {size(memory['total'])} of {available} {where}, {fits}: {parts}"
    yield "", f"from {report['memory_source']}"
    if not report["memory_reliable"]:
        why = report["memory_why_not"]
        yield "", f"low confidence: {why}; measure it with: ndd-console wizard, or train a few steps"
    if (sharded := report["sharded"]) is not None:
        one = "GPU" if report["device"].startswith("cuda") else "rank"
        with_ddp = " with DDP" if report["ranks"] > 1 else ""
        unfit = f"does not fit one {one}{with_ddp}: {size(memory['total'])} of {available}"
        sets = f": --set parallel.ranks={sharded['ranks']} --set parallel.strategy=fsdp2"
        outcome = sets if sharded["fits"] else " do not fit either"
        each = f"{sharded['ranks']} ranks {size(sharded['peak_bytes'])} each"
        yield "", f"{unfit}; with FSDP2 on {each}{outcome}"
    if report["retries"]:
        retries = f"{counted(report['retries'], 'allocator retry')} in the first steps"
        costs = "cached memory is released and allocated again, which costs time"
        yield "", f"{retries}: {costs}; {size(report['bytes_without_retries'])} would avoid that"
    if report["budget"] is not None:
        yield from _budget(report["budget"])
    for place, way in enumerate(report["ways"]):
        sets = " ".join(f"--set {text}" for text in way["sets"])
        takes = "" if way["step_s"] is None else f", {duration(way['step_s'])} a step"
        note = f"; {way['note']}" if way["note"] else ""
        yield "" if place else "would fit", f"{sets}: predicted {size(way['peak_bytes'])}{takes}{note}"
    if report["nearest"] is not None and not report["ways"]:
        micro, times = report["nearest"]
        what = "same effective batch" + (", no retries" if report["retries"] else "")
        yield "fits", f"--set batch.micro={micro} --set batch.accumulation={times} ({what})"
    if report["step_range_s"] is not None:
        low, high = map(duration, report["step_range_s"])
        step = f"predicted, {low} to {high}, limited by the {report['decides']}"
    if report["ranks"] > 1:
        step += "; without the time to exchange gradients"
    doubts = [*([report["busy"]["text"]] if report["busy"] else []), *filter(None, [report["step_doubt"]])]
    step += ", with low confidence" if doubts else ""
    yield "step", f"{duration(report['step_s'])} for {report['effective_batch']:,} items ({step})"
    yield from (("", text) for text in doubts)
    total = f"{duration(report['total_s'])} total ({number(report['total_steps'])} steps)"
    if report["epoch_s"] is not None:
        epoch = f"{duration(report['epoch_s'])} per epoch ({number(report['steps_per_epoch'])} steps)"
        yield "time", f"predicted {epoch}, {total}, without evaluation and checkpoints"
    else:
        known = f"{MISSING}:" if report["total_s"] is None else f"predicted {total},"
        yield "time", f"{known} the length of the training data is unknown"
    yield from (("note", text) for text in report["notes"])
    yield from (("advice", text) for text in report["advice"])
