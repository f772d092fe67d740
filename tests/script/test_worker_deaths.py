"""Workers of a script that die: the record names how, and what they were making, for each way to start them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_help import events, run
from tests.tiers import few

from ndd_engine.record.events import DeathEvent

DIES = """
import ctypes, os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __init__(self, how):
        self.how = how
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.002)
        if index == 240:
            if self.how == "SIGSEGV":
                ctypes.string_at(0)
            os._exit(3) if self.how == "status 3" else os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8)

if __name__ == "__main__":
    method, how = sys.argv[1:]
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x in DataLoader(Items(how), 4, num_workers=2, multiprocessing_context=method):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""
CASES = [
    (method, how) for how in ("SIGKILL", "status 3", "SIGSEGV") for method in ("fork", "spawn", "forkserver")
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.long
@pytest.mark.parametrize(("method", "how"), few(CASES, 1))
def test_a_worker_that_dies_is_recorded_with_what_it_was_making(
    tmp_path: Path, method: str, how: str
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    words = "run", "--headless", "--run", "it", "--", sys.executable, str(script), method, how
    run(tmp_path, *words, status=1)
    (death,) = [one for one in events(tmp_path, "it") if isinstance(one, DeathEvent)]
    assert death.name.startswith("loader worker") and "items 240," in death.doing
    assert death.how in (how, "")  # the system may forget it before anybody looks
