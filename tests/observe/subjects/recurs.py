"""A recurrent model, updated by hand: gradients are zeroed after the batch was made, and a state is carried on."""

import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(400, 8, 4)
model = nn.GRU(4, 8)
steps = 0


def detached(hidden):
    return hidden.detach()


def get_batch(at):
    return data[at : at + 4]


def train():
    global steps
    hidden = torch.zeros(1, 8, 8)
    for at in range(0, 396, 4):
        x = get_batch(at)
        model.zero_grad()
        hidden = detached(hidden)
        out, hidden = model(x, hidden)
        loss = out.square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        steps += 1
    return loss


loss = train()
print("STEPS", steps, "LOSS", loss.item())
