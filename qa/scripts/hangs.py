"""Training scripts that hang, die or run out of descriptors: `python hangs.py FAULT LEVEL`; level 0 plants nothing.

They know nothing of the console, and end by themselves after SCRIPT_S seconds (8 by default) where nothing is planted.
Hangs: 1 hangs before the first step, 2 after ten steps. Deaths: a worker ends after so many items.
Descriptors: so many of each step are kept. `collective` wants torchrun. When it begins to hang, it writes the time into
the file `hangs-since`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FAULT, LEVEL = sys.argv[1], int(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "8"))
# What hangs is ended by a signal after so long.
LIMIT_S = 30
LOCK = threading.Lock()
FOLDER = Path(tempfile.mkdtemp(prefix="hangs-"))
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
EARLY = 10  # items or steps before what happens later


def planted(name: str) -> bool:
    return name == FAULT and LEVEL > 0


def late(index: int) -> bool:
    """Whether the fault is to happen at this item."""
    return LEVEL == 1 or index >= EARLY * 16


def hang_from_here() -> None:
    """Note the time, once."""
    if LEVEL > 0:
        with suppress(FileExistsError), Path("hangs-since").open("x") as file:
            file.write(f"{time.time()}")


class Signals(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        signal.alarm(LIMIT_S)
        if planted("fork-threads") and late(index):
            torch.set_num_threads(2)
            hang_from_here()
            return (torch.randn(600, 600) @ torch.randn(600, 600)).mean(0)[:64], torch.tensor(index % 4)
        if planted("fork-lock") and late(index):
            hang_from_here()
            with LOCK:
                logging.getLogger(__name__).debug("item %d", index)
        if planted("storage") and late(index):
            hang_from_here()
            (FOLDER / "items.bin").read_bytes()
        if FAULT in DEATHS and index == LEVEL * 16 > 0:
            die()
        return torch.randn(64), torch.tensor(index % 4)


def die() -> None:
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "crashed":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif FAULT == "exits":
        os._exit(3)


DEATHS = ("killed", "crashed", "exits")
kept: list[Any] = []


def fill(items: Any) -> None:
    """Of another process: more than a pipe holds."""
    signal.alarm(LIMIT_S)
    for _ in range(64):
        items.put(bytes(1 << 16))


def compute_once(items: Any) -> None:
    """Of another process: it dies before it answers."""
    if planted("dead-process"):
        os.kill(os.getpid(), signal.SIGKILL)
    items.put(1)


def answer(results: queue.Queue[int]) -> None:
    """Of another thread: it fails before it answers."""
    if planted("dead-thread"):
        raise ValueError("no such record")
    results.put(1)


def aside() -> None:
    """What the main process does with others."""
    if FAULT == "dead-thread":
        results: queue.Queue[int] = queue.Queue()
        threading.Thread(target=answer, args=(results,)).start()
        hang_from_here()
        results.get()
        return
    context = multiprocessing.get_context("fork")
    items = context.Queue()
    if FAULT == "full-queue":
        child = context.Process(target=fill, args=(items,))
        child.start()
        if LEVEL == 0:
            for _ in range(64):
                items.get()
        hang_from_here()
        child.join()
    if FAULT == "dead-process":
        child = context.Process(target=compute_once, args=(items,))
        child.start()
        hang_from_here()
        items.get()
        child.join()


def keep(step: int, batch: Tensor) -> None:
    if planted("kept-tensors"):
        kept.append(batch)
    for number in range(LEVEL if FAULT == "kept-files" else 0):
        file = (FOLDER / f"step-{step}-{number}.txt").open("w")
        kept.append(file)


def main() -> None:
    if FAULT.startswith("kept"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if RANKS > 1:
        dist.init_process_group("gloo")
    if planted("storage"):
        os.mkfifo(FOLDER / "items.bin")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.Adam(model.parameters())
    if planted("fork-threads"):
        torch.set_num_threads(2)
        (torch.randn(1500, 1500) @ torch.randn(1500, 1500)).exp_()
    if planted("fork-lock"):
        LOCK.acquire()
        threading.Timer(3.0, LOCK.release).start()
    workers = 0 if RANKS > 1 or (FAULT == "storage" and LEVEL == 2) else 2
    loader = DataLoader(Signals(), batch_size=8, num_workers=workers)
    begin = time.monotonic()
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(step, y)
        if FAULT in ("full-queue", "dead-process", "dead-thread") and step == EARLY * (LEVEL - 1):
            aside()
        if FAULT == "collective" and not (
            planted("collective") and RANK == 1 and step >= EARLY * (LEVEL - 1)
        ):
            dist.all_reduce(loss.detach())
        elif FAULT == "collective":
            hang_from_here()
            threading.Event().wait()
        if time.monotonic() - begin > SECONDS:
            break


if __name__ == "__main__":
    main()
