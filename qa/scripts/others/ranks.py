"""Two ranks with DistributedDataParallel, one with slower data: `torchrun --nproc-per-node 2 ranks.py EPOCHS`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from ended import ended
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
RANK = dist.get_rank()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4005

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        again = 3 if RANK == 1 else 1
        row = [index * place % 17 / 17 for place in range(300) for _ in range(again)][::again]
        return torch.tensor(row), torch.tensor(float(index % 2))


data = Rows()
sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
steps = items = 0
loss = torch.zeros(())
for epoch in range(int(sys.argv[1])):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps, items = steps + 1, items + len(x)
    if RANK == 0:
        print("epoch", epoch, loss.item(), flush=True)
if RANK == 0:
    ended(model.module, steps, items * dist.get_world_size(), loss.item())
dist.barrier()  # a rank that is gone is an error of the other one
dist.destroy_process_group()
