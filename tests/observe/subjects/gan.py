import torch
from common import data, report
from torch import nn
from torch.utils.data import DataLoader

generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
g = torch.optim.Adam(generator.parameters(), lr=1e-3)
c = torch.optim.Adam(critic.parameters(), lr=1e-3)
steps = 0
for epoch in range(4):
    for number, (real, _) in enumerate(DataLoader(data(), batch_size=8)):
        fake = generator(torch.randn(8, 4)).detach()
        loss = critic(fake).mean() - critic(real).mean()
        c.zero_grad()
        loss.backward()
        c.step()
        if number % 2 == 1:
            loss = -critic(generator(torch.randn(8, 4))).mean()
            g.zero_grad()
            loss.backward()
            g.step()
            steps += 1
report(steps, loss)
