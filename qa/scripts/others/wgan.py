"""A Wasserstein GAN: five steps of the critic for each of the generator."""

from __future__ import annotations

import sys

import torch
from ended import ended
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(6000, 64)), batch_size=50, shuffle=True)
generator = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
of_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
steps = items = 0
loss = torch.zeros(())
for epoch in range(int(sys.argv[1])):
    for number, (real,) in enumerate(loader):
        of_critic.zero_grad()
        noise = torch.randn(real.size(0), 32)
        loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        loss.backward()
        of_critic.step()
        items += real.size(0)
        for weight in critic.parameters():
            weight.data.clamp_(-0.01, 0.01)
        if number % 5 == 0:
            of_generator.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            of_generator.step()
            steps += 1
    print(epoch, loss.item(), flush=True)
ended(critic, steps, items, loss.item())
