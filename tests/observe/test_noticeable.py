"""What an observed process differs in from a bare one: nothing but what docs/noticeable.md lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observed import run

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
