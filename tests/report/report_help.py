"""Hand-written records for the tests of the report: the whole life of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ndd_console.render import html, text
from ndd_console.report.model import Report, load
from ndd_console.report.sections import page
from ndd_engine.record.events import (
    EndEvent,
    Event,
    FindingEvent,
    FunctionsEvent,
    KernelsEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    StacksEvent,
    StageEvent,
    TrialEvent,
    WindowEvent,
    WorkEvent,
)
from ndd_engine.record.rundir import RunDir

T0 = 1_750_000_000.0
GIB = 1 << 30
PHASES = {
    "data_wait": 30.0,
    "to_device": 1.0,
    "forward": 7.0,
    "loss": 0.6,
    "backward": 12.6,
    "optimizer": 2.1,
}
CONFIG: dict[str, Any] = {
    "run": {"seed": 7, "epochs": 25},
    "batch": {"micro": 128, "accumulation": 1},
    "log": {"every_steps": 10},
}

Timed = tuple[float, Event]


def write(folder: Path, events: list[Timed], name: str = "one") -> RunDir:
    """Write a run folder with this record."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.events.write_text("".join(event.to_json(t) + "\n" for t, event in events), encoding="utf-8")
    return run


def pages(run: RunDir) -> tuple[Report, str, str]:
    """The report as data, as HTML and as text."""
    report = load(run)
    made = page(report)
    return report, html.render(made), text.page_text(made)


def run_event(cuda: bool = True, **changes: Any) -> RunEvent:
    body: dict[str, Any] = {
        "name": "one", "workload": "chartext", "config": CONFIG, "pid": 1, "host": "trainer",
        "device": "cuda:0" if cuda else "cpu", "device_name": "NVIDIA GeForce RTX 4080 SUPER" if cuda else "CPU",
        "gpu": {"memory_total_bytes": 16 * GIB} if cuda else None, "versions": {"torch": "2.6.0"},
        "parameters": 10_788_929, "precision": "bf16", "item": "window", "token": "character", "tokens_per_item": 256,
        "items_per_step": 128, "items_per_epoch": 35_328, "steps_per_epoch": 276, "epochs": 25, "total_steps": 6_900,
        "model": "6 layers, width 384", "data": "465,231 characters", "threads": 16,
    }  # fmt: skip
    return RunEvent(**{**body, **changes})


def window(
    step: int, steps: int = 18, wait_ms: float = 30.0, cuda: bool = True, **changes: Any
) -> WindowEvent:
    """A window of steps that each wait `wait_ms` for the loader."""
    each = {**PHASES, "data_wait": wait_ms, "other": 0.4}
    phases = {
        name: {
            "host_ns": round(value * 1e6 * steps), "p50_ns": round(value * 1e6), "p95_ns": round(value * 1.2e6),
            "max_ns": round(value * 2.5e6), "device_ns": value * 0.98e6 if cuda else None,
        }
        for name, value in each.items()
    }  # fmt: skip
    wall = sum(figures["host_ns"] or 0 for figures in phases.values())
    step_ns = round(wall / max(steps, 1))
    body: dict[str, Any] = {
        "step": step, "epoch": step // 276, "epoch_step": step % 276, "steps": steps, "micro_steps": steps,
        "items": steps * 128, "tokens": steps * 128 * 256, "wall_ns": wall, "step_p50_ns": step_ns,
        "step_p95_ns": round(step_ns * 1.2), "step_max_ns": step_ns * 3, "phases": phases,
        "loss": 1.3 + 3.1 * math.exp(-step / 800), "lr": 1e-3 * math.cos(step / 6900), "grad_norm": 0.8,
        "device_steps": 2 if cuda else 0, "gc_ns": 900_000 * steps, "gc_count": 1, "gc_max_ns": 41_000_000,
    }  # fmt: skip
    return WindowEvent(**{**body, **changes})


def evaluation(step: int, loss: float, seconds: float = 2.1) -> MarkEvent:
    data = {"metrics": {"loss": loss, "bits": loss / 0.69}, "seconds": seconds, "better": "lower"}
    return MarkEvent("evaluation", step, f"evaluation at step {step}: loss {loss:.3g}", data)


def evaluating(step: int, seconds: float = 2.1) -> WindowEvent:
    """The window of an evaluation, without steps."""
    took = round(seconds * 1e9)
    return window(
        step, 0, wall_ns=took, phases={"evaluate": {"host_ns": took}}, loss=None, lr=None, grad_norm=None
    )


def finding(cause: str, title: str, ceiling: float | None) -> dict[str, Any]:
    return {"cause": cause, "title": title, "confidence": "certain", "ceiling": ceiling}


def trial(
    change: str, verdict: str, interval: tuple[float, float, float] | None, text: str, **more: Any
) -> TrialEvent:
    ratio, low, high = interval or (None, None, None)
    body: dict[str, Any] = {
        "abba_blocks": 6, "seconds": 41.0, "budget_s": 60.0, "device": "NVIDIA GeForce RTX 4080 SUPER", "loss": "same",
        "loss_text": "equal over the first 20 steps", "base": {"peak_bytes": 6 * GIB, "prepare_s": 3.1},
        "change": {"peak_bytes": None if interval is None else 7 * GIB, "prepare_s": 12.4},
        "in_effect": True if interval is not None else None,
    }  # fmt: skip
    return TrialEvent([change], "run one at step 4,218", verdict, text, ratio, low, high, **{**body, **more})


def whole_life(cuda: bool = True) -> list[Timed]:
    """Prepare, train with a slow loader, pause, evaluate, stop, resume a day later, finish."""
    t, step = T0, 0
    out: list[Timed] = []

    def put(*events: Event) -> None:
        out.extend((t, event) for event in events)

    put(StageEvent("prepare", "importing torch"))
    t += 4
    put(run_event(cuda), *_applied())
    put(MarkEvent("compile", 0, "compiled in 8.4 s (default)", {"seconds": 8.4}))
    t += 9
    for index in range(240):
        step += 18
        item = window(step, wait_ms=30 + 6 * math.sin(index / 9), cuda=cuda)
        t += item.wall_ns * 1e-9
        put(item, _sample(index, cuda), *((_memory(index),) if cuda else ()))
        if index == 20:
            title = "input-bound: the GPU waits 57 % of each step for the loader"
            put(FindingEvent(step, "few-workers", title, False, finding("few-workers", title, 2.3)))
            put(FindingEvent(step, "gc", "collections take 2 % of the time", False, {}))
        if index == 90:
            put(FindingEvent(step, "gc", "collections take 2 % of the time", True, {}))
            put(MarkEvent("pause", step, f"paused at step {step}"))
            t += 30
            put(MarkEvent("resume", step, "resumed after 30.0 s", {"seconds": 30.0}))
        if index % 48 == 47:
            t += 2.1
            put(evaluating(step), evaluation(step, 1.5 - index / 900))
            put(MarkEvent("checkpoint", step, f"checkpoint at step {step} (123 MB)", {"bytes": 1}))
        if index == 100:
            put(MarkEvent("warning", step, "2 losses were not finite; the scaler skipped their steps"))
        if index == 120:
            frames = [
                ["data_wait", "data.py", 41, "__getitem__", 120, 1],
                ["backward", "model.py", 8, "f", 60, 1],
            ]
            rows = [
                ["data.py", 38, "Clips.__getitem__", 32, 9_000_000, 8_100_000, "", "data_wait"],
                ["model.py", 8, "f", 1, 700_000, 600_000, "Net.forward", "forward"],
            ]
            # Runs before 0.6 recorded stacks.
            put(_capture(step, cuda), StacksEvent(step, 240, frames), FunctionsEvent(step, 14_000_000, rows))
            put(*_trials())
        if index == 150:
            put(EndEvent("stopped", "stopped from the console; checkpoint", step, 0, "step.pt"))
            t += 86_400
            put(StageEvent("resume", "importing torch"))
            t += 3
            put(run_event(cuda, resumed_step=step, resumed_from="step.pt"), *_applied())
            t += 2
    put(EndEvent("done", f"all {step} steps are done", step, 0, f"step-{step:08d}.pt"))
    return out


def _applied() -> tuple[Event, ...]:
    """Settings and work as a process records them."""
    work = WorkEvent(
        1_940_000_000_000, 31_000_000_000, 640_000_000_000, peak_tflops=104.4, peak_kind="bf16",
        bandwidth_gb_s=736.0, peak_source="the vendor's sheet", attention=["flash"], method="operation by operation",
    )  # fmt: skip
    return (
        SettingEvent("loader.workers", "4", "0", False, "the data is on the device"),
        SettingEvent("precision.amp", "bf16", "bf16", True, "98 % of the products in bfloat16"),
        SettingEvent("optimizer.implementation", "auto", "fused", None),
        work,
    )


def _sample(index: int, cuda: bool) -> SampleEvent:
    gpu = {
        "util_percent": 35 + index % 5, "temperature_c": 55 + index / 20, "power_w": 210.0 + index % 9,
        "sm_clock_mhz": 2505 - (index % 7), "memory_free_bytes": 7 * GIB,
    }  # fmt: skip
    host = {
        "cpu_percent": 53.0, "process_cpu_percent": 101.0, "rss_bytes": 2.1 * GIB, "workers_rss_bytes": 0,
        "memory_available_bytes": 24 * GIB, "memory_limit_bytes": 64 * GIB,
    }  # fmt: skip
    return SampleEvent(gpu if cuda else None, host)


def _memory(index: int) -> MemoryEvent:
    held = 5 * GIB + index * 2_000_000
    return MemoryEvent(held, 7 * GIB, held + GIB, 7 * GIB, GIB, 0, 0, 8 * GIB, 16 * GIB, GIB)


def _capture(step: int, cuda: bool) -> KernelsEvent:
    idle = {"waiting for data": 92_000_000, "launch gaps": 6_000_000, "synchronising": 2_000_000}
    top = [["ampere_bf16_gemm_128x64", 31_000_000, 36], ["flash_fwd_kernel", 12_000_000, 18]]
    return KernelsEvent(
        "kernels" if cuda else "operators", step, 3, 162_000_000, 62_000_000, 2_100_000, idle, 1_872, top
    )


def _trials() -> list[TrialEvent]:
    return [
        trial(
            "loader.workers=4", "faster", (2.11, 2.02, 2.2), "faster 2.11x: more workers keep the GPU busy"
        ),
        trial(
            "speed.compile=default",
            "no difference",
            (1.01, 0.985, 1.035),
            "no difference",
            in_effect=True,
        ),
        trial("speed.deterministic=true", "slower", (0.83, 0.8, 0.87), "slower by 17 %", in_effect=True),
        trial("batch.micro=1024", "out of memory", None, "out of GPU memory in a test step"),
    ]
