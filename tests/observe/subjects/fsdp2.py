import torch
import torch.distributed as dist
from common import data, net, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = net(64)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
dataset = data()
steps = 0
for epoch in range(2):
    for x, y in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
if dist.get_rank() == 0:
    report(steps, loss)
dist.destroy_process_group()
