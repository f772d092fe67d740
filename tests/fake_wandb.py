"""A package `wandb` for tests of loggers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# A package `wandb` that writes what it is told to a file, and fails as a test wants it.
FAKE = """
import json, os, signal, time
from pathlib import Path

class Settings:
    model_fields = {"console": 0, "silent": 0}
    def __init__(self, **more):
        assert set(more) <= set(self.model_fields)

def told(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + chr(10))

class Run:
    class config:
        update = staticmethod(lambda values, allow_val_change: told(config=values))
    def define_metric(self, name, step_metric=None):
        pass
    def log(self, values):
        fail = os.environ.get("FAIL", "")
        if values["step"] >= 3:
            if fail == "raise":
                raise OSError(28, "No space left on device")
            if fail == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fail == "hang":
                told(pid=os.getpid())
                time.sleep(1000)
        told(log=values)
    def finish(self, exit_code):
        print("noise", flush=True)
        if os.environ.get("FAIL") == "slow":
            told(pid=os.getpid())
            time.sleep(1000)
        told(finish=exit_code)

def init(**more):
    if os.environ.get("FAIL") == "init":
        raise ValueError("no key")
    told(init={key: value for key, value in more.items() if key != "settings"}, pid=os.getpid())
    return Run()
"""


class Told:
    """The package in a folder, and what it was told. environment: with which a process imports it."""

    def __init__(self, folder: Path) -> None:
        package = folder / "packages" / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE)
        self.path = folder / "told"
        paths = os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", "")))
        self.environment = {"PYTHONPATH": paths, "TOLD": str(self.path)}

    def all(self, key: str) -> list[Any]:
        """What it was told of one kind, in order."""
        if not self.path.exists():
            return []
        every = map(json.loads, self.path.read_text().splitlines())
        return [each[key] for each in every if key in each]
