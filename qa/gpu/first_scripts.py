"""Part "first checks": `first_scripts script|trial`, an observed script on the GPU, and trials of it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from ndd_engine.record.rundir import RunDir

from .figures import NO_GPU, Task, one_line, task
from .first import device_ns, module, named, phases, typical
from .processes import console, last
from .runs import Json, events_of

# Steps of a trial against those of a synchronised loop.
SAME_TIME = 0.1
RUN = "script"
# Of the script in a trial, which ends it before.
ENDLESS = 1_000_000_000
SCRIPT = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    device, width, rows = sys.argv[1], *map(int, sys.argv[2:4])
    steps = int(open("steps").read())
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader([torch.rand(rows, width) for _ in range(8)], batch_size=None)
    done = 0
    while done < steps:
        for x in loader:
            x = x.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            done += 1
            if "item" in sys.argv:
                loss.item()
"""


def main() -> int:
    """Run one check."""
    given = task()
    with tempfile.TemporaryDirectory(prefix="ndd-gpu-first-") as folder:
        {"script": script, "trial": trial}[given.args[0]](given, Path(folder))
    return 0


def script(given: Task, folder: Path) -> None:
    """The script with a loss that it reads in each step, without it, and a fused optimizer in a trial."""
    reads = observed(given, folder / "reads", "item")
    if reads is not None:
        first = next((item.cause for item in named(given, "loss.item() in each step", reads)), "")
        # The GPU is busy while the host waits, so the code outside the model costs nothing.
        if given.on_gpu:
            name = "loss.item(): first finding"
            given.check(name, first, "not host code between operators", first != "user-code")
    run = observed(given, folder / "plain")
    if run is None:
        return
    windows = [event for event in events_of(run) if event["type"] == "window"]
    window = typical(windows)
    phases(given, "script", window)
    named(given, "script", run)
    for phase in ("to_device", "forward", "backward"):
        if given.on_gpu:
            spent = 0 if window is None else device_ns(window, phase)
            given.check(f"script: {phase} on the device", f"{spent / 1e6:.3f} ms", "> 0", spent > 0)
        else:
            given.skip(f"script: {phase} on the device", NO_GPU)
    fused = tried(given, folder / "plain", "optimizer.implementation=fused")
    if fused is not None and given.on_gpu:
        effect = fused["in_effect"]
        given.check("fused optimizer: in effect", str(effect), "True", effect is True, fused["not_in_effect"])


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
        if not trial_s:
            given.check(name, "the trial has no step", f"within {SAME_TIME * 100:.0f} %", False)
        elif given.on_gpu:
            shown = f"{trial_s * 1e3:.2f} ms vs. {true_s * 1e3:.2f} ms"
            reached = abs(trial_s / true_s - 1) <= SAME_TIME
            given.check(name, shown, f"within {SAME_TIME * 100:.0f} %", reached)
        else:
            given.skip(name, NO_GPU)


def synchronised(given: Task) -> float:
    """Seconds of a step of the script, without anything around it."""
    width, rows = sizes(given)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)), torch.nn.Linear(width, 1))
    model.to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.rand(rows, width)
    begin, steps = 0.0, 10
    for step in range(steps + 3):
        if step == 3:
            wait(given)
            begin = time.perf_counter()
        x = batch.to(given.device, non_blocking=True)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    wait(given)
    return (time.perf_counter() - begin) / steps


def wait(given: Task) -> None:
    """For the GPU, if there is one."""
    if given.on_gpu:
        torch.cuda.synchronize()


def sizes(given: Task) -> tuple[int, int]:
    """(width of the model, rows of a batch): on a GPU few long kernels, which the host does not wait for."""
    return (8192, 2048) if given.on_gpu else (64, 64)


def written(root: Path, steps: int) -> None:
    """Write the script and the number of its steps."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "steps").write_text(str(steps), "utf-8")
    module(root, RUN, SCRIPT)


def observed(given: Task, root: Path, *words: str) -> RunDir | None:
    """The record of the script, observed from outside; None if that failed, which is a figure."""
    arguments = [sys.executable, f"{RUN}.py", given.device, *map(str, sizes(given)), *words]
    name = f"script {' '.join(words)}".strip()
    written(root, int(given.of(150, 150, 200)))
    done = console(
        given,
        root,
        "run",
        "--headless",
        "--run",
        RUN,
        "--runs",
        "runs",
        "--",
        *arguments,
    )
    run = RunDir(root / "runs" / RUN)
    recorded = done.returncode == 0 and run.events.exists()
    given.check(
        f"{name}: observed",
        f"exit status {done.returncode}",
        "0",
        recorded,
        last(done) if not recorded else "",
    )
    return run if recorded else None


def tried(given: Task, root: Path, change: str) -> Json | None:
    """The result of a trial of the observed script; None if that failed, which is a figure."""
    budget = str(int(given.of(25, 20, 10)))
    written(root, ENDLESS)
    done = console(
        given,
        root,
        "try",
        RUN,
        "--runs",
        "runs",
        "--budget",
        budget,
        "--set",
        change,
        "--allow-side-effects",
        "--json",
    )
    try:
        found: Json = json.loads(done.stdout)
    except ValueError:
        given.check(f"trial of {change}", f"exit status {done.returncode}", "a result", False, last(done))
        return None
    measured = found["verdict"] not in ("failed", "stopped", "out of memory")
    why = "" if measured else one_line(found["text"])
    given.check(f"trial of {change}", one_line(found["text"], 160), "measured", measured, why)
    return found


if __name__ == "__main__":
    sys.exit(main())
