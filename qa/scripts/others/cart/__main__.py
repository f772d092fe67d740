"""PPO on a cart whose physics are plain Python: a rollout, then sixteen steps: `python -m cart ROUNDS`."""

from __future__ import annotations

import math
import random
import sys

import torch
from ended import ended
from torch import Tensor, nn
from torch.distributions import Categorical


class Cart:
    def reset(self) -> Tensor:
        self.x, self.v, self.t = random.uniform(-1, 1), 0.0, 0
        return self.seen()

    def seen(self) -> Tensor:
        return torch.tensor([self.x, self.v, math.sin(self.x), math.cos(self.x)])

    def step(self, action: float) -> tuple[Tensor, float, bool]:
        for _ in range(40):
            self.v += 0.001 * (1 if action else -1) - 0.0005 * math.sin(self.x)
            self.x += 0.001 * self.v
        self.t += 1
        return self.seen(), -abs(self.x), self.t >= 200


random.seed(3)
torch.manual_seed(3)
policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4)
cart, steps, items = Cart(), 0, 0
seen = cart.reset()
loss = torch.zeros(())
for number in range(int(sys.argv[1])):
    states, actions, rewards, before = [], [], [], []
    with torch.no_grad():
        for _ in range(256):
            chances = Categorical(logits=policy(seen))
            action = chances.sample()
            states.append(seen)
            actions.append(action)
            before.append(chances.log_prob(action))
            seen, reward, done = cart.step(action.item())
            rewards.append(reward)
            if done:
                seen = cart.reset()
    played, chosen, likely = torch.stack(states), torch.stack(actions), torch.stack(before)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0) / 100
    for _ in range(4):
        for index in torch.randperm(256).split(64):
            chances = Categorical(logits=policy(played[index]))
            guess = value(played[index]).squeeze(-1)
            gain = returns[index] - guess.detach()
            ratio = (chances.log_prob(chosen[index]) - likely[index]).exp()
            kept = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = 0.5 * (returns[index] - guess).pow(2).mean() - kept
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, items = steps + 1, items + len(index)
    if number % 10 == 0:
        print("round", number, "reward", sum(rewards) / 256, flush=True)
ended(policy, steps, items, loss.item())
