"""Part "first checks": `first_scripts script|trial`, an observed script on the GPU, and trials of it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from benchmarks.engine import Json, events_of, now

from ndd_engine.record.rundir import RunDir
from qa.scripts.gpu_script import Training

from .figures import Task, last, one_line
from .first import SCRIPTS, device_ns, named, phases, typical

# Steps of a trial against those of a synchronised loop.
SAME_TIME = 0.1
RUN = "script"
SCRIPT = SCRIPTS / "gpu_script.py"
# Steps of the script in a trial, which ends it before.
ENDLESS = 1_000_000_000


def measure(given: Task) -> None:
    """Run one check."""
    with tempfile.TemporaryDirectory(prefix="ndd-gpu-first-") as folder:
        {"script": script, "trial": trial}[given.args[0]](given, Path(folder))


def script(given: Task, folder: Path) -> None:
    """The script with a loss that it reads in each step, without it, and a fused optimizer in a trial."""
    reads = observed(given, folder / "reads", "item")
    if reads is not None:
        first = next((item.cause for item in named(given, "loss.item() in each step", reads)), "")
        # The GPU is busy while the host waits, so the code outside the model costs nothing.
        target = "not host code between operators"
        given.check_gpu("loss.item(): first finding", first, target, first != "user-code")
    run = observed(given, folder / "plain")
    if run is None:
        return
    windows = [event for event in events_of(run) if event["type"] == "window"]
    window = typical(windows)
    phases(given, "script", window)
    named(given, "script", run)
    for phase in ("to_device", "forward", "backward"):
        spent = 0 if window is None else device_ns(window, phase)
        given.check_gpu(f"script: {phase} on the device", f"{spent / 1e6:.3f} ms", "> 0", spent > 0)
    fused = tried(given, folder / "plain", "optimizer.implementation=fused")
    if fused is not None:
        effect, why = fused["in_effect"], fused["not_in_effect"]
        given.check_gpu("fused optimizer: in effect", str(effect), "True", effect is True, why)


def trial(given: Task, folder: Path) -> None:
    """Both sides of a trial of TF32 against a synchronised loop of the same steps."""
    if observed(given, folder) is None:
        return
    # A processor has no TF32; the fused optimizer shows there that trials work.
    found = tried(given, folder, "precision.tf32=true" if given.on_gpu else "optimizer.implementation=fused")
    if found is None:
        return
    for side, precision in (("base", "highest"), ("change", "high")):
        torch.set_float32_matmul_precision(precision)
        true_s, trial_s = synchronised(given), (found[side] or {}).get("step_s")
        name = f"step of the {side} in a trial vs. a synchronised loop"
        target = f"within {SAME_TIME * 100:.0f} %"
        if trial_s:
            shown = f"{trial_s * 1e3:.2f} ms vs. {true_s * 1e3:.2f} ms"
            given.check_gpu(name, shown, target, abs(trial_s / true_s - 1) <= SAME_TIME)
        else:
            given.check(name, "the trial has no step", target, False)


def synchronised(given: Task) -> float:
    """Seconds of a step of the script, without anything around it."""
    width, rows = sizes(given)
    training, batch = Training(given.device, width), torch.rand(rows, width)
    begin, steps = 0.0, 10
    for step in range(steps + 3):
        if step == 3:
            begin = now(torch.device(given.device))
        training.step(batch)
    return (now(torch.device(given.device)) - begin) / steps


def sizes(given: Task) -> tuple[int, int]:
    """(width of the model, rows of a batch): on a GPU few long kernels, which the host does not wait for."""
    return (8192, 2048) if given.on_gpu else (64, 64)


def observed(given: Task, root: Path, *words: str) -> RunDir | None:
    """The record of the script, observed from outside; None if that failed, which is a figure."""
    name = f"script {' '.join(words)}".strip()
    written(root, int(given.of(150, 150, 200)))
    script = (sys.executable, str(SCRIPT), given.device, *map(str, sizes(given)), *words)
    done = given.console(root, "run", "--headless", "--run", RUN, "--runs", "runs", "--", *script)
    run = RunDir(root / "runs" / RUN)
    recorded = done.returncode == 0 and run.events.exists()
    why = "" if recorded else last(done)
    given.check(f"{name}: observed", f"exit status {done.returncode}", "0", recorded, why)
    return run if recorded else None


def tried(given: Task, root: Path, change: str) -> Json | None:
    """The result of a trial of the observed script; None if that failed, which is a figure."""
    written(root, ENDLESS)
    words = ("--budget", str(int(given.of(25, 20, 10))), "--set", change, "--allow-side-effects", "--json")
    done = given.console(root, "try", RUN, "--runs", "runs", *words)
    try:
        found: Json = json.loads(done.stdout)
    except ValueError:
        given.check(f"trial of {change}", f"exit status {done.returncode}", "a result", False, last(done))
        return None
    measured = found["verdict"] not in ("failed", "stopped", "out of memory")
    why = "" if measured else one_line(found["text"])
    given.check(f"trial of {change}", one_line(found["text"], 160), "measured", measured, why)
    return found


def written(root: Path, steps: int) -> None:
    """Write the number of steps of the script."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "steps").write_text(str(steps), "utf-8")
