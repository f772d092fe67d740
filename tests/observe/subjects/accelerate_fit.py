import torch
from accelerate import Accelerator
from common import data, net, report
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = net()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader, held_out = accelerator.prepare(
    model, optimizer, DataLoader(data(), batch_size=16, shuffle=True), DataLoader(data(64), batch_size=16)
)
steps = 0
for epoch in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            accelerator.gather_for_metrics(model(x))
    model.train()
if accelerator.is_main_process:
    report(steps, loss)
accelerator.end_training()
