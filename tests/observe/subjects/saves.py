"""Clips gradients, and evaluates and saves after each epoch, which takes longer than its steps."""

import os
import tempfile

import torch
from common import busy, data, net, report
from torch.utils.data import DataLoader

model = net(2048)
optimizer = torch.optim.AdamW(model.parameters())
held_out = DataLoader(data(64), batch_size=32)
steps, norms = 0, []
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(8):
        for x, y in DataLoader(data(), batch_size=128):
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            steps += 1
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                busy(0.04)
                model(x)
        model.train()
        for number in range(40):
            torch.save(optimizer.state_dict(), os.path.join(folder, f"{number}.pt"))
report(steps, loss)
print("NORMS", ",".join(map(str, norms)))
