import torch
from common import data, net, report
from torch.utils.data import DataLoader

model = net(512, 2)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
steps = 0
for epoch in range(6):
    for number, (x, y) in enumerate(DataLoader(data(8192), batch_size=256, shuffle=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ((model(x) - y) ** 2).mean() / 4
        scaler.scale(loss).backward()
        if number % 4 == 3:
            if steps == 7:  # an update that the scaler skips
                next(model.parameters()).grad[:] = float("inf")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps += 1
report(steps, loss)
