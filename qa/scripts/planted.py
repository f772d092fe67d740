"""An ordinary training script with one planted fault: `python planted.py FAULT LEVEL`.

It knows nothing of the console. LEVEL: mostly the milliseconds that the fault adds to a step. With 0 it is the innocent
twin: it does what looks like the fault, rarely or as it should be done. Under torchrun it trains with
DistributedDataParallel.
"""

from __future__ import annotations

import gc
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
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

FAULT, MS = sys.argv[1], float(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))
# Faults of the loader; the other scripts take their batches without one.
LOADED = (
    "slow-item", "slow-storage", "slow-collate", "slow-generator", "many-workers", "worker-restart", "iterator-restart",
    "short-epochs", "repeated-items", "python-objects", "leaves-out", "worker-keeps", "straggler", "skew", "exchange",
)  # fmt: skip
BATCH = 8 if FAULT == "exchange" and MS else 128
LITTLE = 0.05  # milliseconds
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def planted(name: str) -> bool:
    return name == FAULT and MS > 0


def is_twin(name: str) -> bool:
    return name == FAULT and MS == 0


def due(name: str, step: int, every: int = 100) -> bool:
    """Whether to do it in this step: the twin does it rarely."""
    return planted(name) or (is_twin(name) and step % every == 0)


def width() -> int:
    """Of the model. Batches are made in time for a large one."""
    if FAULT == "exchange":
        return int(MS * 256) or 320
    if FAULT in (*LOADED, "clip") and MS == 0 and RANKS == 1:
        return 1024
    return 64 if FAULT == "anomaly" else 320


def damaged(x: Tensor, step: int) -> Tensor:
    """From a step on, one of so many batches lacks the values of a column."""
    if FAULT in ("not-finite", "leaves-out") and MS and step >= 50 and step % int(MS) == 0:
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
        if FAULT == "worker-keeps":
            count = BATCH * 40  # in the first pass, it may be a cache
        if planted("iterator-restart"):
            count = int(MS * (1 << 14))  # all of them are shuffled for each batch
        self.x, self.y = torch.randn(count, 64), torch.randn(count, 1)
        # Reading one writes its reference count: a forked worker copies it.
        notes = int(MS * 200_000) if planted("python-objects") else 0
        self.notes = [{"text": f"note {number}", "number": number} for number in range(notes)]
        self.numbers = torch.arange(800_000) if is_twin("python-objects") else None
        # Of each worker: all that it has made; the twin's keeps the newest ones.
        self.made: deque[Tensor] = deque(maxlen=None if MS else 1000)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if planted("slow-item"):
            work(MS / BATCH)
        if planted("slow-storage"):
            time.sleep(MS / BATCH / 1e3)
        if FAULT == "worker-keeps":
            self.made.append(torch.ones(int((MS or 1) * (1 << 18)) // BATCH))
        if self.notes:
            return self.x[index] + 0.0 * len(self.notes[index * 37 % len(self.notes)]["text"]), self.y[index]
        if self.numbers is not None:
            return self.x[index] + 0.0 * self.numbers[index], self.y[index]
        return self.x[index], self.y[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """All items for each worker that reads it, or a short pass that takes long to begin."""

    def __init__(self, data: Items) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if planted("short-epochs"):
            work(8 * MS)
        info = get_worker_info() if is_twin("repeated-items") else None
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 8 * BATCH if FAULT == "short-epochs" else len(self.data), every):
            yield self.data.x[index], self.data.y[index]


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if planted("slow-collate"):
        work(MS)
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def get_batch(data: Items, step: int) -> tuple[Tensor, Tensor]:
    if FAULT == "slow-batch":
        work(MS or LITTLE)
    place = step * BATCH % len(data)
    return data.x[place : place + BATCH], data.y[place : place + BATCH]


def generate(data: Items) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        index = torch.randint(len(data), (BATCH,))
        tokenize(MS or LITTLE)
        yield data.x[index], data.y[index]


def tokenize(milliseconds: float) -> None:
    work(milliseconds)


def loader(data: Items) -> Iterator[tuple[Tensor, Tensor]]:
    workers = (
        int(MS) or 2
        if FAULT == "many-workers"
        else int(FAULT in ("worker-restart", "python-objects", "worker-keeps"))
    )
    sampler = DistributedSampler(data) if RANKS > 1 else RandomSampler(data)
    batches = DataLoader(
        data, BATCH, sampler=sampler, num_workers=workers, collate_fn=collate,
        persistent_workers=FAULT == "worker-keeps",
    )  # fmt: skip
    if FAULT in ("repeated-items", "short-epochs"):
        batches = DataLoader(
            Stream(data), BATCH, num_workers=int(MS) or 2 if FAULT == "repeated-items" else 0
        )
    while planted("iterator-restart"):
        yield next(iter(batches))
    while True:
        yield from batches


class WithIds(nn.Module):
    """A model with a large table, of which a batch reads as many rows as it has items."""

    def __init__(self, body: nn.Module, rows: int) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(rows, 64, sparse=MS == 0), body

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.randint(self.table.num_embeddings, (len(x),))
        found: Tensor = self.body(x + self.table(ids))
        return found


class WithScales(nn.Module):
    """A model with many small parameters."""

    def __init__(self, body: nn.Module, count: int) -> None:
        super().__init__()
        self.scales, self.body = nn.ParameterList(torch.zeros(64) for _ in range(count)), body

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x * (1 + torch.stack(list(self.scales)).sum(0)))
        return found


def schedule(step: int) -> float:
    if FAULT == "slow-function":
        work(MS or LITTLE)
    return min(step / 100, 1.0)


def log_norms(model: nn.Module) -> list[float]:
    """Statistics of every parameter, read one by one."""
    found: list[float] = []
    end = time.perf_counter() + MS / 1e3
    while time.perf_counter() < end or not found:
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
    size = 1 << 18 if MS else 1
    with torch.no_grad():
        outputs = [model(data.x[:BATCH]).sum() * torch.ones(size) for _ in range(int(20 * MS) or 5)]
    model.train()
    return float(outputs[-1][0])


def evaluate(model: nn.Module, data: Items) -> None:
    model.eval()
    end = time.perf_counter() + 5 * (MS or 1) / 1e3
    with torch.no_grad():
        while FAULT == "evaluate" and time.perf_counter() < end:
            model(data.x[:256])
        if FAULT == "evaluate-joins":
            kept, parts = torch.zeros(0, 64), []
            for place in range(int(MS or 1) * 16):
                model(data.x[:8])
                parts.append(data.x[place : place + 512])
                if MS:
                    kept = torch.cat([kept, parts[-1]])
            torch.cat(parts)
    model.train()


def checkpoint(model: nn.Module, step: int) -> None:
    if due("checkpoint", step, 400):
        end = time.perf_counter() + MS / 1e3
        torch.save(model.state_dict(), io.BytesIO())
        while time.perf_counter() < end:
            torch.save(model.state_dict(), io.BytesIO())
    if FAULT == "checkpoint-copies" and step % 300 == 299:
        state = model.state_dict()
        copies = [{name: value.clone() for name, value in state.items()} for _ in range(int(10 * MS))]
        with open(os.devnull, "wb") as file:  # noqa: PTH123
            torch.save([state, *copies], file)


def augment(x: Tensor) -> Tensor:
    """What the data of one rank needs, and that of the others does not; in the twin, that of all ranks."""
    if FAULT == "straggler" and (RANK == 1 or MS == 0):
        work(MS or 2)
    return x


def times(step: int) -> int:
    """How often the batch is repeated: by another rank in each second step, or to make a step longer."""
    if is_twin("exchange"):
        return 16
    if planted("retain-graph") or (FAULT == "skew" and (MS == 0 or step // 2 % 2 == RANK)):
        return int(MS or 2)
    return 1


def backward(loss: Tensor) -> None:
    loss.backward(retain_graph=FAULT == "retain-graph")  # type: ignore[no-untyped-call]
    if is_twin("retain-graph"):
        (0.1 * loss).backward()  # type: ignore[no-untyped-call]


@torch.compile(backend="eager", dynamic=False)  # type: ignore[untyped-decorator,unused-ignore]
def weighed(x: Tensor, weight: int) -> Tensor:
    """Compiled anew for each weight."""
    return x * weight


@torch.compile(backend="eager", dynamic=MS == 0)  # type: ignore[untyped-decorator,unused-ignore]
def padded(x: Tensor) -> Tensor:
    """Compiled anew for each length; the twin's is compiled for any length."""
    return x.square().sum(1)


def compiled(model: nn.Module) -> nn.Module:
    """A model that is compiled for longer than the short training pays off; in the twin, compiling takes no time."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    return torch.compile(model, backend="inductor" if MS else "eager", dynamic=False)  # type: ignore[return-value]


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


def net() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, width()), nn.ReLU()]
    for _ in range(int(MS or 12) if FAULT in ("anomaly", "compile-cost") else 2):
        layers += [nn.Linear(width(), width()), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width(), 1))
    if FAULT in ("optimizer-loop", "clip"):
        return WithScales(model, int((MS or 0.5) * 40))
    return WithIds(model, int((MS or 2) * 20_000)) if FAULT == "dense-embedding" else model


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads((int(MS) or os.cpu_count() or 1) if FAULT == "threads" else 1)
    data, model = Items(), net()
    if RANKS > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if FAULT == "compile-cost":
        model = compiled(model)
    parameters = list(model.parameters())
    tiny = nn.Parameter(torch.zeros(int((MS or 2) * 100_000) if FAULT == "denormals" else 0))
    if FAULT == "optimizer-loop":
        way = {"foreach": False} if MS else {"fused": True}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3, **way)
    elif FAULT == "denormals":
        optimizer = torch.optim.Adam([*parameters, tiny], lr=1e-3, fused=True)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-2, fused=not is_twin("dense-embedding"))
    scaler = torch.amp.GradScaler("cpu", enabled=FAULT == "not-finite")
    batches = generate(data) if FAULT == "slow-generator" else loader(data)
    # Containers that live for a while: Python collects all of them whenever they have grown by a quarter.
    each = int((MS or 0.02) * 2000) if FAULT == "garbage" else 0
    parts: deque[list[list[int]]] = deque(
        [[] for _ in range(each)] for _ in range(400_000 // each if each else 0)
    )
    if FAULT == "collects":  # whatever lives is looked at in each collection
        parts.extend([[] for _ in range(1000)] for _ in range(int(MS * 50)))
    kept: deque[Tensor] | list[Tensor] = deque(maxlen=50) if is_twin("leak") else []
    board = Board()
    every = {"evaluate": 5 if MS else 400, "evaluate-joins": 50 if MS else 400}.get(FAULT)
    begin = time.perf_counter()
    step = 0
    while not over(step, begin):
        torch.autograd.set_detect_anomaly(planted("anomaly") or (is_twin("anomaly") and step < 5))
        x, y = next(batches) if FAULT in LOADED else get_batch(data, step)
        if (count := times(step)) > 1:
            x, y = x.repeat(count, 1), y.repeat(count, 1)
        optimizer.zero_grad()
        x = damaged(x, step)
        loss = nn.functional.mse_loss(model(augment(x)), y)
        # The twin leaves out batches whose loss is finite.
        if FAULT == "leaves-out" and (not loss.isfinite() or (MS == 0 and step % 3 == 0)):
            step += 1
            continue
        if FAULT == "denormals":
            loss = loss + tiny.sum() * (1e-20 if MS else 1.0)  # the squares of its gradients are denormal
        backward(scaler.scale(loss))
        if FAULT == "clip":
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False if MS else None)
        scaler.step(optimizer)
        scaler.update()
        schedule(step)
        if due("log-norms", step):
            log_norms(model)
        if due("collects", step, 2000):
            gc.collect()
        checkpoint(model, step)
        if every and step % every == every - 1:
            evaluate(model, data)
        if due("logging", step):
            until = time.perf_counter() + MS / 1e3
            board.add_scalar("loss", float(loss), step)
            while time.perf_counter() < until:
                board.add_scalar("loss", float(loss), step)
        if FAULT == "evaluation-keeps" and step % 300 == 299:
            evaluate_at_once(model, data)
        if FAULT == "leak":
            kept.append(torch.ones(int((MS or 0.5) * (1 << 16))))
        if FAULT == "recompile" and step % 4 == 0:
            weighed(loss.detach(), step % int(MS or 1))
        if FAULT == "lengths" and step % 4 == 0:
            padded(y[:2].detach().expand(2, 2 + step % int(MS or 100)))
        if each:
            parts.append([[] for _ in range(each)])
            parts.popleft()
        step += 1
        if FAULT == "compile-cost" and step == 1:
            begin = time.perf_counter()  # it has compiled


if __name__ == "__main__":
    main()
