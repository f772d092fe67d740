import torch
from common import data, report
from torch import nn
from torch.utils.data import DataLoader


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, inputs):
        x = inputs["x"]
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 1)
        self.criterion = nn.MSELoss()

    def forward(self, inputs, targets=None):
        return self.criterion(self.head(self.encoder(inputs)), targets)


def collate(items):
    x, y = zip(*items)
    return {"x": torch.stack(x)}, torch.stack(y)


model = Model()
groups = [{"params": model.encoder.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
optimizer = torch.optim.RMSprop(groups)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
steps = 0
for epoch in range(5):
    for inputs, targets in DataLoader(data(), batch_size=16, collate_fn=collate):
        loss = model(inputs, targets=targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps += 1
report(steps, loss)
