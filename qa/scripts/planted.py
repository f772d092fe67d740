"""An ordinary training script with one planted fault: `python planted.py FAULT MILLISECONDS`.

It knows nothing of the console. MILLISECONDS: roughly what the fault adds to a step; 0 plants nothing. Under torchrun
it trains with DistributedDataParallel.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

FAULT, MS = sys.argv[1], float(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))
BATCH, WIDTH = 128, 320
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def planted(name: str) -> bool:
    return name == FAULT and MS > 0


def damaged(x: Tensor, step: int) -> Tensor:
    """From a step on, one of so many batches lacks the values of a column."""
    if planted("not-finite") and step >= 200 and step % int(MS) == 0:
        return x.index_fill(1, torch.tensor([3]), float("nan"))
    return x


def work(milliseconds: float) -> float:
    """Pure Python that never releases the interpreter lock for long."""
    end, total = time.perf_counter() + milliseconds / 1e3, 0.0
    while time.perf_counter() < end:
        for value in range(50):
            total += value * 0.5
    return total


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        # An epoch takes seconds: its workers start again with each one.
        count = BATCH * int(40 / MS) if planted("worker-restart") else 1 << 16
        if planted("iterator-restart"):
            count = int(MS * (1 << 14))  # all of them are shuffled for each batch
        self.x, self.y = torch.randn(count, 64), torch.randn(count, 1)
        # Reading one writes its reference count: a forked worker copies it.
        notes = int(MS * 200_000) if planted("python-objects") else 0
        self.notes = [{"text": f"note {number}", "number": number} for number in range(notes)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if planted("slow-item"):
            work(MS / BATCH)
        if planted("slow-storage"):
            time.sleep(MS / BATCH / 1e3)
        if self.notes:
            return self.x[index] + 0.0 * len(self.notes[index * 37 % len(self.notes)]["text"]), self.y[index]
        return self.x[index], self.y[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """All items for each worker that reads it, or a short pass that takes long to begin."""

    def __init__(self, data: Items) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if planted("short-epochs"):
            work(8 * MS)
        for index in range(8 * BATCH if planted("short-epochs") else len(self.data)):
            yield self.data.x[index], self.data.y[index]


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if planted("slow-collate"):
        work(MS)
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def get_batch(data: Items) -> tuple[Tensor, Tensor]:
    if planted("slow-batch"):
        work(MS)
    index = torch.randint(len(data), (BATCH,))
    return data.x[index], data.y[index]


def generate(data: Items) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        index = torch.randint(len(data), (BATCH,))
        if planted("slow-generator"):
            tokenize(MS)
        yield data.x[index], data.y[index]


def tokenize(milliseconds: float) -> None:
    work(milliseconds)


def loader(data: Items) -> Iterator[tuple[Tensor, Tensor]]:
    workers = 8 if planted("many-workers") else int(FAULT in ("worker-restart", "python-objects"))
    sampler = DistributedSampler(data) if RANKS > 1 else RandomSampler(data)
    batches = DataLoader(data, BATCH, sampler=sampler, num_workers=workers, collate_fn=collate)
    if planted("repeated-items") or planted("short-epochs"):
        batches = DataLoader(Stream(data), BATCH, num_workers=int(MS) if planted("repeated-items") else 0)
    while planted("iterator-restart"):
        yield next(iter(batches))
    while True:
        yield from batches


class WithIds(nn.Module):
    """A model with a large table, of which a batch reads as many rows as it has items."""

    def __init__(self, body: nn.Module, rows: int) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(rows, 64), body

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.randint(self.table.num_embeddings, (len(x),))
        found: Tensor = self.body(x + self.table(ids))
        return found


def schedule(step: int) -> float:
    if planted("slow-function"):
        work(MS)
    return min(step / 100, 1.0)


def log_norms(model: nn.Module) -> list[float]:
    """Statistics of every parameter, read one by one."""
    found: list[float] = []
    end = time.perf_counter() + MS / 1e3
    while time.perf_counter() < end:
        found += [float(p.grad.norm().item()) for p in model.parameters() if p.grad is not None]
    return found


class Board:
    """Writes each value at once, as some writers do."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115  open until the end

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.file.write(json.dumps({"name": name, "value": value, "step": step}) + "\n")
        self.file.flush()


def evaluate_at_once(model: nn.Module, data: Items) -> float:
    """Keeps the outputs of all batches until the end."""
    model.eval()
    with torch.no_grad():
        outputs = [model(data.x[:BATCH]).sum() * torch.ones(1 << 18) for _ in range(int(20 * MS))]
    model.train()
    return float(outputs[-1][0])


def evaluate(model: nn.Module, data: Items) -> None:
    model.eval()
    end = time.perf_counter() + (5 * MS / 1e3 if planted("evaluate") else 0.0)
    with torch.no_grad():
        while time.perf_counter() < end:
            model(data.x[:256])
        if planted("evaluate-joins"):
            kept = torch.zeros(0, 64)
            for place in range(int(MS) * 16):
                model(data.x[:8])
                kept = torch.cat([kept, data.x[place : place + 512]])
    model.train()


def augment(x: Tensor) -> Tensor:
    """What the data of one rank needs, and that of the others does not."""
    if planted("straggler") and RANK == 1:
        work(MS)
    return x


@torch.compile(backend="eager", dynamic=False)  # type: ignore[untyped-decorator,unused-ignore]
def weighed(x: Tensor, weight: int) -> Tensor:
    """Compiled anew for each weight."""
    return x * weight


def over(step: int, begin: float) -> bool:
    """Whether to stop; all ranks after the same step."""
    late = time.perf_counter() - begin >= SECONDS
    if RANKS == 1:
        return late
    if step % 20:
        return False
    flag = torch.tensor(float(late))
    dist.all_reduce(flag)
    return bool(flag)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(int(MS) if planted("threads") else 1)
    torch.autograd.set_detect_anomaly(planted("anomaly"))
    data = Items()
    width = 64 if planted("anomaly") else WIDTH
    depth = 24 if planted("anomaly") else 2
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    if planted("dense-embedding"):
        model = WithIds(model, int(MS * 20_000))  # type: ignore[assignment]
    if RANKS > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    extra = nn.ParameterList(torch.zeros(8) for _ in range(int(MS * 40) if planted("optimizer-loop") else 0))
    parameters = [*model.parameters(), *extra]
    tiny = nn.Parameter(torch.zeros(int(MS * 100_000) if planted("denormals") else 0))
    if planted("optimizer-loop"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    elif planted("denormals"):
        optimizer = torch.optim.Adam([*parameters, tiny], lr=1e-3, fused=True)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=planted("not-finite"))
    batches = generate(data) if FAULT == "slow-generator" else loader(data)
    # Containers that live for a while: Python collects all of them whenever they have grown by a quarter.
    each = int(MS * 2000) if planted("garbage") else 0
    parts: deque[list[list[int]]] = deque(
        [[] for _ in range(each)] for _ in range(400_000 // each if each else 0)
    )
    kept: list[Tensor] = []
    board = Board()
    begin = time.perf_counter()
    step = 0
    while not over(step, begin):
        x, y = get_batch(data) if FAULT == "slow-batch" else next(batches)
        optimizer.zero_grad()
        x = damaged(x, step)
        loss = nn.functional.mse_loss(model(augment(x)), y)
        if extra:
            loss = loss + sum(p.sum() for p in extra) * 0.0
        if planted("denormals"):
            loss = loss + tiny.sum() * 1e-20  # the squares of its gradients are denormal
        scaler.scale(loss).backward(retain_graph=planted("retain-graph"))
        scaler.step(optimizer)
        scaler.update()
        schedule(step)
        if planted("log-norms"):
            log_norms(model)
        if planted("checkpoint"):
            end = time.perf_counter() + MS / 1e3
            while time.perf_counter() < end:
                torch.save(model.state_dict(), io.BytesIO())
        if planted("evaluate") and step % 5 == 4:
            evaluate(model, data)
        if planted("evaluate-joins") and step % 50 == 49:
            evaluate(model, data)
        if planted("logging"):
            until = time.perf_counter() + MS / 1e3
            while time.perf_counter() < until:
                board.add_scalar("loss", float(loss), step)
        if planted("evaluation-keeps") and step % 300 == 299:
            evaluate_at_once(model, data)
        if planted("leak"):
            kept.append(torch.ones(int(MS * (1 << 16))))
        if planted("recompile"):
            weighed(loss.detach(), step)
        if each:
            parts.append([[] for _ in range(each)])
            parts.popleft()
        step += 1


if __name__ == "__main__":
    main()
