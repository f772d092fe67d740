"""Hugging Face's Trainer with a small language model, an evaluation and a checkpoint after each epoch."""

from __future__ import annotations

import sys

import torch
from ended import ended
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

EPOCHS, ITEMS = int(sys.argv[1]), 330


class Sequences(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        signs = torch.tensor([(index * place + place) % 97 for place in range(64)])
        return {"input_ids": signs, "labels": signs}


set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=2))
given = TrainingArguments(
    "out", per_device_train_batch_size=16, num_train_epochs=EPOCHS, gradient_accumulation_steps=2, logging_steps=5,
    report_to=[], use_cpu=True, eval_strategy="epoch", save_strategy="epoch", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, given, train_dataset=Sequences(ITEMS), eval_dataset=Sequences(128))
loss = trainer.train().training_loss
ended(model, trainer.state.global_step, ITEMS * EPOCHS, loss)
