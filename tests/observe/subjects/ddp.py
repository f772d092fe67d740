import torch
import torch.distributed as dist
from common import data, net, report
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(net(64))
optimizer = torch.optim.AdamW(model.parameters())
dataset = data()
steps = 0
for epoch in range(3):
    for x, y in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
if rank == 0:
    report(steps, loss)
dist.destroy_process_group()
