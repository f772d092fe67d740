import torch
from accelerate import Accelerator
from common import data, net, report
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = net()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=16))
steps = 0
for epoch in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
report(steps, loss)
