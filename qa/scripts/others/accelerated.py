"""Hugging Face Accelerate with accumulated gradients: `accelerate launch --cpu accelerated.py EPOCHS`."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from ended import ended
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(2)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
x = torch.randn(2900, 128)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True)
slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
model, optimizer, loader, slower = accelerator.prepare(model, optimizer, loader, slower)
steps = items = 0
loss = torch.zeros(())
for epoch in range(int(sys.argv[1])):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            items += len(rows)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                steps += 1
            optimizer.step()
            slower.step()
            optimizer.zero_grad()
    accelerator.print(epoch, loss.item(), flush=True)
ended(accelerator.unwrap_model(model), steps, items, loss.item())
