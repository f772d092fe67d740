"""Part "first checks": `first NAME`, what everything else depends on. See parts for what each one decides.

On the CPU they run to their end with the smallest sizes, and say which of their figures need a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from benchmarks.engine import Json, Trained, trained

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.settings import rounds_to_tf32
from ndd_engine.train.step.optimizers import set_tf32
from qa.console import sets_of

from .figures import Task, last, one_line

MIB = 1 << 20
# Every step's loss is written, each in a window of its own.
EVERY_STEP = ("log.every_steps=1", "log.window_s=0")
# Where losses are compared: TF32 and mixed precision round differently in a graph and in eager steps.
EXACT = (*EVERY_STEP, "workload.size=small", "precision.amp=off", "precision.tf32=false")
# Two runs compute the same sums in another order.
SAME_LOSS = 1e-3
# Of all steps, whose loss both runs know; the losses of the last ones may not have arrived.
KNOWN = 0.5
# Mean device time of the phases of sampled steps over the mean time of all steps.
DEVICE_OVER_WALL = 1.1
# Of a step in which the GPU waits for data, while a slow loader is hidden behind its work.
HIDDEN = 0.1
COUNTERS = (
    "util_percent", "sm_clock_mhz", "sm_clock_max_mhz", "power_w", "power_limit_w", "temperature_c", "throttle",
    "processes",
)  # fmt: skip
# Causes that blame the loader.
LOADER = ("data-wait", "on-the-fly", "item-collate", "few-workers", "slow-storage")

SCRIPTS = Path(__file__).parents[1] / "scripts"
FALLBACK = "planted_models:fallback"
OWN = (f'workload.path=["{SCRIPTS}"]', "run.epochs=1")


def measure(given: Task) -> None:
    """Run one check."""
    with tempfile.TemporaryDirectory(prefix="ndd-gpu-first-") as folder:
        CHECKS[given.args[0]](given, Path(folder))


def plain(given: Task, folder: Path) -> None:
    """Two runs: a small one in the default precision, and a larger one in fp16."""
    for size, amp in (("small", "auto"), ("medium", "fp16")):
        name = f"{size}, precision.amp={amp}"
        sets = (f"workload.size={size}", f"precision.amp={amp}", "log.window_s=0.3")
        if not given.on_gpu and amp == "fp16":
            given.skip(name)
            continue
        if given.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        found = train(folder / size, "chartext", sets, given.device, int(given.of(150, 150, 8)))
        ended(given, name, found)
        clocks(given, name, found)
        reserved = ([event["peak_reserved_bytes"] for event in found.of("memory")] or [None])[-1] or 0
        own = torch.cuda.max_memory_reserved() if given.on_gpu else 0
        shown, target = f"{reserved / MIB:,.0f} MiB", f"{own / MIB:,.0f} MiB by torch"
        given.check_gpu(f"{name}: reserved memory", shown, target, reserved == own)
        named(given, name, found.directory)


def graph(given: Task, folder: Path) -> None:
    """The same steps eagerly and as one CUDA graph."""
    steps = int(given.of(60, 60, 8))
    found: list[Trained] = []
    for name, value in (("eager", "false"), ("graph", "true")):
        sets = (*EXACT, f"speed.cuda_graph={value}")
        if given.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found.append(train(folder / name, "chartext", sets, given.device, steps))
        ended(given, name, found[-1], in_effect=given.on_gpu)
        given.put(f"{name}: step", f"{step_ms(found[-1]):.2f} ms", why=memory_of(found[-1]))
    largest, count = difference(*(losses(run.events) for run in found))
    shown = f"{largest:.1e} over {count} of {steps} steps"
    reached = largest <= SAME_LOSS and count >= KNOWN * steps
    given.check("largest relative difference of a loss", shown, f"≤ {SAME_LOSS:g}", reached)
    setting = found[1].settings["speed.cuda_graph"]
    given.check_gpu("the graph is in effect", setting["verified"], "captured", setting["in_effect"] is True)
    if not given.on_gpu:
        return
    large = ("workload.size=guide", "batch.micro=64", "speed.cuda_graph=true")
    ended(given, "a large model", train(folder / "large", "chartext", large, given.device, 30))


def fallback(given: Task, folder: Path) -> None:
    """A step that waits for the GPU, and one that only the capture itself refuses."""
    base = (*OWN, "batch.micro=16", "speed.cuda_graph=true")
    found = train(folder / "item", FALLBACK, base, given.device, int(given.of(40, 40, 8)))
    ended(given, "a step that calls .item()", found, in_effect=False)
    verified = found.settings["speed.cuda_graph"]["verified"]
    told = "waits for the GPU" in verified and "planted_models.py" in verified
    target = "waits for the GPU (planted_models.py:…)"
    given.check_gpu("the reason names the line", one_line(verified), target, told)
    names = ("a capture that fails ends the run with its cause", "a new process continues after it")
    if not given.on_gpu:
        for name in names:
            given.skip(name)
        return
    sets = (*base, "workload.options.event=1")
    end = train(folder / "event", FALLBACK, sets, given.device, 40).end
    told = end.status == "failed" and "the CUDA graph cannot be captured" in end.reason
    given.check(names[0], one_line(f"{end.status}: {end.reason}"), "failed, with the cause", told)
    words = ("train", "--headless", "--workload", FALLBACK, *sets_of(*sets, "run.max_steps=40"))
    done = given.console(folder / "console", "--runs", str(folder / "again"), *words)
    again = done.returncode == 0 and "restarting: ndd-console train --resume" in done.stderr
    given.check(names[1], last(done), "exit status 0 after a restart without a graph", again)


def load(given: Task, folder: Path) -> None:
    """The counters of the GPU while it multiplies matrices."""
    machine = detect("auto" if given.on_gpu else "cpu")
    sampler = Sampler(machine.chosen, lambda event: None)
    size, seconds = int(given.of(8192, 8192, 256)), int(given.of(8, 8, 1))
    square = torch.randn(size, size, device=given.device, dtype=torch.bfloat16)
    gpus: list[Json] = []
    for second in range(seconds):
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for _ in range(20):
                torch.mm(square, square)
            if given.on_gpu:
                torch.cuda.synchronize()
        gpu = sampler.read_once().gpu
        if gpu is not None:
            gpus.append(gpu)
            shown = ", ".join(f"{key} {gpu.get(key)}" for key in COUNTERS)
            given.put(f"second {second + 1}", shown)
    errors = f"{sampler.errors} {sampler.last_error or ''} {sampler.reasons or ''}"
    given.check_gpu("errors while sampling", one_line(errors), "0", not sampler.errors and bool(gpus))
    busiest = max((gpu["util_percent"] or 0 for gpu in gpus), default=0)
    given.check_gpu("utilisation under load", f"{busiest} %", "≥ 90 %", busiest >= 90)
    sampler.stop()


def overlap(given: Task, folder: Path) -> None:
    """Slow items, while each step takes the GPU longer than the items take the host."""
    width, rows = int(given.of(8192, 8192, 64)), int(given.of(32, 32, 1))
    sets = (
        *OWN, "batch.micro=64", "precision.amp=off", "precision.tf32=false", "log.window_s=0.3",
        f"workload.options.width={width}", f"workload.options.rows={rows}",
    )  # fmt: skip
    found = train(folder / "run", "planted_models:slow", sets, given.device, int(given.of(40, 40, 8)))
    ended(given, "slow items", found)
    clocks(given, "slow items", found)
    findings = named(given, "slow items", found.directory)
    verdict_on_loader(given, typical(found.of("window")), findings)


def verdict_on_loader(given: Task, window: Json | None, findings: tuple[Finding, ...]) -> None:
    """Whether the GPU hardly waits for data, and no finding says that it does."""
    share = 0.0 if window is None else device_ns(window, "data_wait") * window["steps"] / window["wall_ns"]
    loader = [item.cause for item in findings if item.cause in LOADER]
    blamed = ", ".join(loader) or "no finding about the loader"
    shown = f"the GPU waits {share * 100:.1f} % of a step; {blamed}"
    reached = share <= HIDDEN and not loader
    given.check_gpu("the loader is not blamed", shown, f"≤ {HIDDEN * 100:.0f} %, none", reached)


def tf32(given: Task, folder: Path) -> None:
    """Products of several sizes with TF32 on and off, and what reads the switches afterwards."""
    for on in (False, True):
        word = "on" if on else "off"
        set_tf32(on)
        for size in (64, 128, 512, 2048):
            if not given.on_gpu:
                break
            fine = torch.full((size, size), 1 + 2**-12, device=given.device)
            rounded = bool((fine @ torch.eye(size, device=given.device))[0, 0] == 1)
            name, text = f"TF32 {word}: a product of {size} x {size}", "rounded" if rounded else "exact"
            if size < 512 and on:
                given.put(name, text)  # cuBLAS may have no algorithm with TF32 for it
            else:
                given.check(name, text, "rounded" if on else "exact", rounded == on)
        if given.on_gpu:
            found = rounds_to_tf32(torch.device(given.device))
            given.check(f"TF32 {word}: as settings read it", str(found), str(on), found == on)
        else:
            given.skip(f"TF32 {word}: products")
        for name, read in READERS.items():
            try:
                text, why = str(read()), ""
            except RuntimeError as error:
                text, why = "raises", one_line(error)
            given.check(f"TF32 {word}: {name}", text, "can be read", not why, why)


def _flags() -> str:
    with torch.backends.cudnn.flags(enabled=True):
        return "entered"


READERS: dict[str, Callable[[], object]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cudnn.flags()": _flags,
}
CHECKS = {
    "plain": plain, "graph": graph, "fallback": fallback, "load": load, "overlap": overlap, "tf32": tf32,
}  # fmt: skip


def ended(given: Task, name: str, found: Trained, in_effect: bool = True) -> None:
    """Whether a run ended well, warned of nothing, and all its settings are in effect. in_effect: whether they can."""
    end = found.end
    given.check(f"{name}: run", one_line(f"{end.status}: {end.reason}"), "done", end.status == "done")
    without = [event["name"] for event in found.settings.values() if event["in_effect"] is False]
    if in_effect:
        warnings = found.warnings
        text = one_line("; ".join(warnings))
        given.check(f"{name}: warnings", str(len(warnings)), "0", not warnings, text)
        given.check(f"{name}: settings not in effect", ", ".join(without) or "none", "none", not without)


def typical(windows: list[Json]) -> Json | None:
    """The window with the most steps, of those with device times if there are any."""
    timed = [window for window in windows if window["device_steps"]]
    return max(timed or windows, key=lambda window: window["steps"], default=None)


def device_ns(window: Json, name: str) -> int:
    """Mean device time of a phase in one sampled step, 0 if it has none."""
    return (window["phases"].get(name) or {}).get("device_ns") or 0


def phases(given: Task, name: str, window: Json | None) -> None:
    """The phases of a step by both clocks."""
    if window is None:
        return
    for phase, row in window["phases"].items():
        device = row.get("device_ns")
        shown = f"host {row['host_ns'] / max(window['steps'], 1) / 1e6:.3f} ms"
        given.put(f"{name}: {phase}", shown + ("" if device is None else f", device {device / 1e6:.3f} ms"))


def clocks(given: Task, name: str, found: Trained) -> None:
    """The phases of a step, and whether the device clock agrees with the host's."""
    window = typical(found.of("window"))
    phases(given, name, window)
    if window is None or not window["device_steps"]:
        given.check_gpu(f"{name}: device clock", "no window has device times", "device times", False)
    else:
        whole = [key for key in window["phases"] if "/" not in key]  # the others are parts of these
        total, wall = sum(device_ns(window, key) for key in whole), window["wall_ns"] / window["steps"]
        shown = f"{total / 1e6:.2f} ms on the device, {wall / 1e6:.2f} ms by the host"
        reached = 0 < total <= DEVICE_OVER_WALL * wall and device_ns(window, "backward") > 0
        given.check_gpu(f"{name}: device clock", shown, f"≤ {DEVICE_OVER_WALL:g} x", reached)


def named(given: Task, name: str, directory: RunDir) -> tuple[Finding, ...]:
    """The first findings of a run, as figures; returns all."""
    found = tuple(diagnose(load_state(directory).snapshot()))
    for place, item in enumerate(found[:3], start=1):
        ceiling = "" if item.ceiling is None else f" (at most {item.ceiling:.2f}x)"
        given.put(f"{name}: finding {place}", f"{item.cause}{ceiling}", why=one_line(item.title))
    return found


def step_ms(found: Trained) -> float:
    """The mean step of the second half of the windows, in ms."""
    windows = found.of("window")
    late = windows[len(windows) // 2 :]
    steps = max(sum(window["steps"] for window in late), 1)
    return float(sum(window["wall_ns"] for window in late) / steps / 1e6)


def memory_of(found: Trained) -> str:
    """The peaks in words, "" if unknown."""
    event = (found.of("memory") or [{}])[-1]
    allocated, reserved = event.get("peak_allocated_bytes"), event.get("peak_reserved_bytes")
    if allocated is None or reserved is None:
        return ""
    return f"peak {allocated / MIB:,.0f} MiB allocated, {reserved / MIB:,.0f} MiB reserved"


def train(folder: Path, workload: str, sets: Iterable[str], device: str, steps: int) -> Trained:
    """Train in this process, in a run of its own in `folder`."""
    base = (f"run.device={device}", "evaluate.batches=4", "checkpoint.every_minutes=0")
    return trained(workload, [*base, *sets, f"run.max_steps={steps}", "run.name=gpu"], folder)


def losses(events: Iterable[Json]) -> dict[int, float]:
    """The loss of each step that is known.

    Losses are read back from a GPU without waiting for it, and a window has the last one that has arrived. So two runs
    need not know those of the same steps.
    """
    found = (event["last_loss"] for event in events if event["type"] == "window" and event["last_loss"])
    return {int(step): loss for step, loss in found if loss is not None}


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, int]:
    """(the largest relative difference between losses of the same step, the number of steps that both know)."""
    both = one.keys() & other.keys()
    return max((abs(other[step] - one[step]) / abs(one[step]) for step in both), default=0.0), len(both)
