"""A training that does everything of which a rule reads facts: `python everything.py loop|ranks|lightning`.

`everything:factory` is the same as one's own model. It knows nothing of the console, and trains for STEPS steps and for
some seconds at least.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

KIND, STEPS = sys.argv[1] if __name__ == "__main__" else "own", int(os.environ.get("STEPS", "120"))
EVERY, ITEMS, BATCH = 80, 640, 4
END = time.monotonic() + 7.0
logging.getLogger("train").addHandler(logging.NullHandler())
logging.getLogger("train").addHandler(logging.NullHandler())


def work(milliseconds: float) -> int:
    end, total = time.perf_counter() + milliseconds / 1e3, 0
    while time.perf_counter() < end:
        total += sum(range(50))
    return total


class Items(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        work(0.2)
        return torch.tensor([index, index + 1]), torch.ones(1)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Each worker gives all of it."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Items()[index] for index in range(ITEMS // 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20_000, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.table(x).mean(1))
        return found


class Node:
    """Garbage in a cycle."""

    def __init__(self) -> None:
        self.me = self


def waste() -> None:
    """Between two steps."""
    for _ in range(200):
        Node()
    gc.collect(0)
    work(0.5)


def loader() -> Any:
    if KIND == "lightning":
        return DataLoader(Stream(), BATCH, num_workers=2)
    sampler: Any = DistributedSampler(Items()) if KIND == "ranks" else None
    return DataLoader(Items(), BATCH, num_workers=2, sampler=sampler, shuffle=sampler is None)


def by_hand() -> None:
    """Also as one of several ranks."""
    net, mse = Net(), nn.MSELoss()
    model: Any = DistributedDataParallel(net) if KIND == "ranks" else net
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cpu")
    torch.autograd.set_detect_anomaly(True)
    net.out.register_forward_hook(lambda *_: None)

    def train(x: Tensor, y: Tensor) -> None:
        loss = mse(model(x), y)
        scaler.scale(loss).backward(retain_graph=True)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        waste()

    # A worker that lives as long as the training: reading the memory of workers is rare.
    beside = iter(DataLoader(Items(), BATCH, num_workers=1))
    for _ in range(3):
        train(*next(iter(DataLoader(Items(), BATCH))))
    for x, y in DataLoader(Stream(), BATCH, num_workers=2):
        train(x, y)
    step = 0
    while step < STEPS or time.monotonic() < END:
        for x, y in loader():
            train(x, y)
            step += 1
            if step % EVERY == 0:
                model.eval()
                with torch.no_grad():
                    for x, _ in DataLoader(Items(), 32):
                        model(x)
                model.train()
                torch.save(net.state_dict(), f"weights-{os.getpid()}.pt")
    del beside


def by_lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mse = Net(), nn.MSELoss()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            x, y = batch
            loss: Tensor = self.mse(self.net(x), y)
            self.log("loss", loss)
            waste()
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("error", self.mse(self.net(batch[0]), batch[1]))

        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward(retain_graph=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    module = Module()
    module.net.out.register_forward_hook(lambda *_: None)
    trainer = lightning.Trainer(
        max_steps=2 * STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, detect_anomaly=True,
        gradient_clip_val=1.0, val_check_interval=EVERY, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(), DataLoader(Items(), 32))


def factory(_settings: Any) -> dict[str, Any]:
    net, mse = Net(), nn.MSELoss()
    torch.autograd.set_detect_anomaly(True)
    net.out.register_forward_hook(lambda *_: None)

    def loss(output: Tensor, batch: Any) -> Tensor:
        found: Tensor = mse(output, batch[1])
        return found

    return {"model": net, "train_data": Items(), "loss": loss, "on_step": lambda _: waste()}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if KIND == "ranks":
        dist.init_process_group("gloo")
    if KIND == "lightning":
        by_lightning()
    else:
        by_hand()
    if KIND == "ranks":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
