"""What a script can notice of the observer: nothing but what docs/noticeable.md lists, also where the observer fails.

Of many kinds of scripts: tests/same. Here: the state of a process, errors of the observer, kills, files that it cannot
write, exceptions of a signal handler, and values that are not as torch makes them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from observed import SUBJECTS, recorded, run
from tests.tiers import few
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ndd_engine.api.observing import Observation
from ndd_engine.script.records import Room
from ndd_watch import FOLDER, SITE
from ndd_watch.apart import dumps
from ndd_watch.looks import Looks, Places, groups_of, whole
from ndd_watch.slowing import Sizes

STATE = """
import atexit, gc, glob, json, os, signal, sys, threading, warnings
from collections import Counter
from common import *
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader

def get_batch(): return torch.randn(4, 8)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad(); loss = model(get_batch()).sum(); loss.backward(); optimizer.step()
for x, y in DataLoader(data(), batch_size=32):
    optimizer.zero_grad(); loss = model(x).sum(); loss.backward(); optimizer.step()
functions = [
    torch.autograd.backward, nn.Module.__call__, nn.Module.train, nn.Module.zero_grad, torch.save,
    optimizers.Optimizer.zero_grad, optimizers.Optimizer.__init__, torch.optim.SGD.step, DataLoader.__init__,
    dataloader._BaseDataLoaderIter.__next__, nn.utils.clip_grad_norm_, get_batch,
]
del loss, x, y
gc.collect()
objects = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
print(json.dumps({
    "objects": {name: count for name, count in objects.items() if name.startswith(("torch.", "__main__.", "common."))},
    "environment": sorted(os.environ), "path": [name for name in sys.path if name],
    "meta_path": len(sys.meta_path),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "path_hooks": len(sys.path_hooks), "threads": len(os.listdir("/proc/self/task")),
    "active": threading.active_count(),
    "names": [thread.name for thread in threading.enumerate()],
    "descriptors": sorted(
        os.readlink(path).partition(":")[0] for path in glob.glob("/proc/self/fd/*") if os.path.exists(path)
    ),
    "exits": atexit._ncallbacks(), "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "profile": [sys.getprofile() is None, sys.gettrace() is None], "recursion": sys.getrecursionlimit(),
    "switch": sys.getswitchinterval(), "filters": len(warnings.filters), "garbage": len(gc.garbage),
    "threshold": gc.get_threshold(),
    "callbacks": len(gc.callbacks),
    "modules": sorted(name for name in sys.modules if "ndd" in name or name == "sitecustomize"),
    "hooks of torch": [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)],
    "functions": [
        [one.__module__, one.__qualname__, type(one).__name__, one.__code__.co_flags, one.__code__.co_firstlineno,
         one.__code__.co_filename, list(one.__code__.co_varnames), str(one.__defaults__), sorted(vars(one))]
        for one in functions
    ],
    "builtins": len(dir(__builtins__)), "weights": [float(one.sum()).hex() for one in model.state_dict().values()],
}))
"""
# What docs/noticeable.md lists.
LISTED = {"environment", "callbacks", "modules"}


def state(folder: Path, observed: bool) -> dict[str, Any]:
    ran = run(folder, "-c", STATE, observed=observed)
    assert ran.status == 0, ran.errors
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.promise
def test_nothing_differs_but_what_the_documentation_lists(tmp_path: Path) -> None:
    bare, seen = state(tmp_path, observed=False), state(tmp_path, observed=True)
    assert {key for key in bare if bare[key] != seen[key]} == LISTED
    more = {name for name in seen["environment"] if name not in bare["environment"]}
    assert all(name == "PYTHONPATH" or name.startswith("NDD_WATCH") for name in more)
    assert seen["callbacks"] == bare["callbacks"] + 1
    assert all(
        name == "sitecustomize" or name.startswith("_ndd_watch")
        for name in set(seen["modules"]) - set(bare["modules"])
    )


BREAKS = Path(__file__).with_name("breaks.py")


@pytest.mark.long
@pytest.mark.budget(30)
@pytest.mark.parametrize("part", few([*"0123"], 1))
@pytest.mark.parametrize("call", ["1", pytest.param("3", marks=pytest.mark.slow)])
def test_an_error_in_any_function_that_a_hook_reaches_never_reaches_the_script(
    tmp_path: Path, call: str, part: str
) -> None:
    ran = run(
        tmp_path, str(BREAKS), call, part, "4", read=False, NDD_WATCH_PROFILE_S="0.01", NDD_WATCH_WINDOW_S="0.001",
        NDD_WATCH_CAPTURES=str(tmp_path),
    )  # fmt: skip
    assert ran.status == 0, ran.errors
    bare, *broken = map(json.loads, ran.out.splitlines())
    # About as many as today: a test that reaches nothing shows nothing. Fewer are called three times.
    assert sum(told.get("hit", True) for told in broken) >= (60 if call == "1" else 40), ran.out
    wrong = [
        told for told in broken
        if told.get("died") or (told["loss"], told["steps"], told["errors"]) != (bare["loss"], bare["steps"], "")
    ]  # fmt: skip
    assert not wrong, (bare, wrong)


COUNTS = """
import os, sys
from common import *
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
    os.write(1, b"%d " % (step + 1))
"""


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize("times", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_kill_costs_at_most_one_step(tmp_path: Path, times: int) -> None:
    moments = random.Random(0)
    for number in range(times):
        records = tmp_path / str(number)
        records.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", COUNTS, "1000000000"], cwd=SUBJECTS, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, FOLDER: str(records), "PYTHONPATH": str(SITE), "NDD_WATCH_WINDOW_S": "0.05"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.read(1)
            time.sleep(moments.uniform(0.0, 0.3))
            process.kill()
            numbers = ("1" + process.stdout.read()).split()
        true = int(numbers[-1])
        ((_, found),) = recorded(records).items()
        told = sum(line["steps"] for line in found if line["type"] == "window")
        assert true <= told <= true + 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["no folder", "no file", "a file that was made before"])
def test_what_cannot_be_written_costs_the_record_only(tmp_path: Path, kind: str) -> None:
    """A folder that is a file; and a limit of the length of files, below which the console can make one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    records = tmp_path / "records"
    if kind == "no folder":
        records.write_text("a file")
        limited = None
    else:
        records.mkdir()
        limited = limit
    if kind == "a file that was made before":
        Room(records, shared=False)
    ran = run(tmp_path, "-c", COUNTS, "40", before=limited, read=records.is_dir())
    assert ran.status == 0 and ran.out.split()[-1] == "40" and "ndd" not in ran.errors
    windows = [line for lines in ran.records.values() for line in lines if line["type"] == "window"]
    assert sum(window["steps"] for window in windows) == (40 if kind.startswith("a file") else 0)


class Slow:
    """Says things slowly: a signal arrives meanwhile."""

    class emitter:  # noqa: N801
        @staticmethod
        def say(*_: Any, **__: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(params=[TimeoutError, ValueError, RuntimeError])
def raised(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """A signal handler of the script raises this."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise request.param("time is up")

    before = signal.signal(signal.SIGUSR1, handler)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


def test_a_timeout_of_the_script_goes_on_while_a_metric_is_told(raised: type[Exception]) -> None:
    with pytest.raises(raised, match="time is up"):
        Observation(Slow(), None, None).evaluation(3, loss=0.5)


def test_errors_of_the_observer_and_of_what_it_calls_end_there() -> None:
    Observation(None, None, None).evaluation(3, loss=0.5)  # None has no emitter
    Observation(SimpleNamespace(emitter=SimpleNamespace(say=json.loads)), None, None).note("note")


class Scalar:
    """As a number of NumPy 2: it has a device, which is text."""

    device = "cpu"

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value == other

    __hash__ = None  # type: ignore[assignment]


class Whole(Scalar):
    """A whole number of it."""


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("numpy")
    module.float64, module.int64 = Scalar, Whole
    monkeypatch.setitem(sys.modules, "numpy", module)


@pytest.mark.usefixtures("numpy")
def test_numbers_of_numpy_are_read() -> None:
    looks = Looks(torch)
    assert looks.number(Scalar(0.1)) == 0.1 and looks.number(Whole(3)) == 3.0
    assert (whole(Whole(2)), whole(2), whole(Scalar(2.5)), whole("2")) == (2, 2, None, None)
    assert looks.number(Scalar(float("nan"))) is None


def test_what_only_behaves_like_a_number_is_not_asked() -> None:
    class Asked:
        device = "cpu"

        def __float__(self) -> float:
            raise AssertionError

        __int__ = __index__ = __bool__ = __float__

    assert Looks(torch).number(Asked()) is None and whole(Asked()) is None
    # A field that is no JSON is null, and the others of its line stay.
    assert json.loads(dumps({"workers": Asked(), "steps": 3})) == {"workers": None, "steps": 3}


def test_groups_that_are_not_as_torch_makes_them_are_left_out() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    good = optimizer.param_groups[0]
    optimizer.param_groups += [None, {"lr": 1.0}, {"params": iter(())}]  # type: ignore[list-item]
    assert groups_of(optimizer) == [good]
    sizes = Sizes(Looks(torch))
    sizes.optimizers([optimizer])
    assert sizes.counts() == {"parameters:SGD": 2}
    optimizer.param_groups = tuple(optimizer.param_groups)  # type: ignore[assignment]
    assert groups_of(optimizer) == []


@pytest.mark.usefixtures("numpy")
def test_settings_of_a_loader_are_plain_numbers() -> None:
    class Named(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise AssertionError

    class Data(TensorDataset, metaclass=Named):
        pass

    loader = DataLoader(Data(torch.zeros(8, 1)), batch_size=4)
    iterator: Any = iter(loader)
    iterator._num_workers = Whole(0)
    found, _ = Places(lambda _: False).loader_of(iterator)
    assert (found["workers"], found["batch_size"], found["dataset"]) == (0, 4, "Data")
