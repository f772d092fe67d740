"""Whatever goes wrong in the observer, the script ends as it would without it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from observed import SUBJECTS, run

from ndd_watch import FOLDER, SITE

# Makes a function of the observer raise from a certain call on, and notes that it did.
BREAK = """
import os, sys
from importlib import import_module

def broken(module, place, call, _calls=[0]):
    owner = import_module("_ndd_watch." + module)
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    def raises(*args, **kwargs):
        _calls[0] += 1
        if _calls[0] >= int(call):
            open(os.environ["PLANTED"], "w").close()
            raise RuntimeError("planted")
        return original(*args, **kwargs)
    setattr(owner, name, raises)

import torch
broken(*sys.argv[1:4])
del sys.argv[1:4]
import runpy
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[1], run_name="__main__")
"""
PLACES = [
    ("steps", "Steps.stepped"),
    ("steps", "Steps.end"), ("steps", "Steps._sometimes"), ("census", "Census.listen"),
    ("profiler", "StepProfiler.begin"),
    ("profiler", "StepProfiler.end"), ("modules", "Modules.hook"), ("hooks", "Hooks.promote"),
    ("hooks", "Hooks._begins_training"), ("record", "Recorder.window"), ("record", "Recorder._look"),
    ("record", "Recorder._write"),
    ("record", "figures"), ("install", "Observer.put"),
]  # fmt: skip


# From the third call on where there are so many.
ONCE = {
    "Census.listen", "Hooks.promote", "Hooks._begins_training", "Modules.hook", "Recorder._write",
    "Recorder.window", "figures",
}  # fmt: skip
# A hook, the thread that writes, and the code that looks closely; the rest runs with `make test-slow`.
QUICK = {"Steps.end", "Recorder._write"}


@pytest.mark.parametrize(
    ("module", "place"),
    [
        pytest.param(*broken, marks=() if broken[1] in QUICK else pytest.mark.slow, id=broken[1])
        for broken in PLACES
    ],
)
def test_an_error_of_the_observer_never_reaches_the_script(tmp_path: Path, module: str, place: str) -> None:
    breaker = tmp_path / "breaker.py"
    breaker.write_text(BREAK, encoding="utf-8")
    wanted = run(tmp_path, "no_loader.py", observed=False).word("LOSS")
    planted = tmp_path / "planted"
    ran = run(
        tmp_path, str(breaker), module, place, "1" if place in ONCE else "3", "no_loader.py",
        NDD_WATCH_PROFILE_S="0.01", NDD_WATCH_STACKS_HZ="50", PLANTED=str(planted),
    )  # fmt: skip
    assert planted.exists()
    assert ran.status == 0, ran.errors
    assert ran.word("LOSS") == wanted and ran.word("STEPS") == "60"
    assert "planted" not in ran.errors


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    ran = run(tmp_path, "plain.py", read=False)
    assert ran.status == 0 and ran.word("STEPS") == "40"
    assert ran.errors.count("ndd-console: this process is not observed") == 1


def test_a_full_disk_costs_lines_only(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    ran = run(tmp_path, "plain.py", before=limit)
    assert ran.status == 0 and ran.word("STEPS") == "40"
    (lines,) = ran.records.values()
    assert lines[0]["type"] == "process" and len(lines) <= 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_as_without_us(tmp_path: Path, number: signal.Signals) -> None:
    loop = "for x in range(10**9):\n    l = net()(torch.randn(4, 8)).sum(); l.backward()\n    print(x, flush=True)"
    code = f"from common import *\n{loop}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=SUBJECTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, FOLDER: str(tmp_path / "records"), "PYTHONPATH": str(SITE)},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("30"):
            break
    time.sleep(0.1)
    process.send_signal(number)
    process.stdout.close()
    assert process.wait(20) in (-number, 1 if number == signal.SIGINT else -number)


def test_os_exit_and_forks_are_left_alone(tmp_path: Path) -> None:
    code = """
import os
from common import *
def train(count):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
train(10)
child = os.fork()
if not child:
    train(5)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train(3)
"""
    ran = run(tmp_path, "-c", code)
    assert ran.status == 0 and ran.out.split() == ["7"], ran.errors
    ends = sorted(line["step"] for lines in ran.records.values() for line in lines if line["type"] == "end")
    # os._exit leaves no time for an end; the child's process is recorded.
    assert len(ran.records) in (1, 2) and ends == [13]
