"""A training script of Lightning or Hugging Face's Trainer with one planted fault: `python frameworks.py FAULT LEVEL`.

FAULT: `lightning-data`, `trainer-leak` and so on. It knows nothing of the console. LEVEL: roughly the milliseconds that
the fault adds to a step; with 0 it is the innocent twin.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FRAMEWORK, _, FAULT = sys.argv[1].partition("-")
LEVEL = float(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))
BATCH = 32
# A step takes several milliseconds, so that what the framework itself does is little.
WIDTH = 768 if LEVEL or FAULT != "data" else 1024
kept: list[Tensor] = []


def work(milliseconds: float) -> None:
    end, total = time.perf_counter() + milliseconds / 1e3, 0.0
    while time.perf_counter() < end:
        for value in range(50):
            total += value * 0.5


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.x, self.y = torch.randn(count, 64), torch.randn(count, 1)
        if FAULT == "not-finite" and LEVEL:
            self.x[3000 :: int(BATCH * LEVEL), 3] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if FAULT == "data":
            work((LEVEL or 0.1) / BATCH)
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.body(x)
        if FAULT == "leak" and self.training:
            kept.append(torch.ones(int((LEVEL or 0.5) * (1 << 16))))
            if not LEVEL:
                del kept[:-20]
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def metric(_output: Any) -> float:
    """Of an evaluation."""
    work(40 * LEVEL)
    return 1.0


TRAIN = Items(BATCH * 20 if FAULT == "restart" and LEVEL else 1 << 16)
EVALUATED = Items(BATCH)
# Steps between two evaluations.
EVERY = 20 if LEVEL else 400
torch.manual_seed(0)
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


def train_with_lightning() -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            for number in range(int(12 * LEVEL) or 1 if FAULT == "logging" else 0):
                self.log(f"metric_{number}", loss, on_step=True, on_epoch=LEVEL > 0)
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("score", metric(self.net(**batch)["logits"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    workers = int(FAULT == "restart")

    def loader(data: Items) -> Any:
        return DataLoader(data, BATCH, shuffle=data is TRAIN, num_workers=workers)

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if FAULT == "callback":
                work(LEVEL or 0.05)

    often = FAULT == "logging" and LEVEL > 0
    trainer = lightning.Trainer(
        max_epochs=1000, max_time={"seconds": SECONDS}, accelerator="cpu", logger=CSVLogger("logs") if often else False,
        log_every_n_steps=1 if often else 500, enable_progress_bar=often, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, callbacks=[Watch()],
        val_check_interval=EVERY if FAULT == "evaluation" else None,
        limit_val_batches=1 if FAULT == "evaluation" else 0,
    )  # fmt: skip
    trainer.fit(Module(), loader(TRAIN), loader(EVALUATED))


def train_with_trainer() -> None:
    import transformers

    class Stop(transformers.TrainerCallback):
        begin = 0.0

        def on_train_begin(self, *_: Any, **_more: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_more: Any) -> None:
            if FAULT == "callback":
                work(LEVEL or 0.05)
            control.should_training_stop = time.perf_counter() - self.begin > SECONDS

    class Logs(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            found = super().compute_loss(model, inputs, *given, **more)
            for number in range(int(12 * LEVEL) if FAULT == "logging" else 0):
                self.log({f"metric_{number}": 1.0})
            return found

    often = FAULT == "logging" and LEVEL > 0
    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=1_000_000, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=not often, learning_rate=1e-3, optim="sgd",
        logging_steps=1 if often else 500, logging_nan_inf_filter=False, max_grad_norm=0.0,
        dataloader_num_workers=int(FAULT == "restart"), eval_strategy="steps" if FAULT == "evaluation" else "no",
        eval_steps=EVERY,
    )  # fmt: skip
    trainer = Logs(
        model=Net(), args=arguments, train_dataset=TRAIN, eval_dataset=EVALUATED, callbacks=[Stop()],
        compute_metrics=lambda output: {"score": metric(output)},
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    {"lightning": train_with_lightning, "trainer": train_with_trainer}[FRAMEWORK]()
