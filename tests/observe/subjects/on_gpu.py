"""Trains on a fake GPU. Arguments: seconds, milliseconds of forward and backward kernels, of the host, and words."""

import gc
import sys
import time
from typing import Any

import torch
from fake_gpu import Gpu, Work
from torch import nn
from torch.overrides import TorchFunctionMode

seconds, forward_ms, backward_ms, host_ms = map(float, sys.argv[1:5])
words = sys.argv[5:]
if "warms" in words:  # a model on the CPU comes first
    torch.nn.Linear(4, 1)(torch.ones(8, 4)).mean().backward()
gpu = Gpu()
gpu.install()
if "apart" in words:  # the model is on the GPU, and its loss is computed on the CPU
    looks: Any = sys.modules["_ndd_watch.install"].observer.looks  # type: ignore[attr-defined]
    looks.device = lambda tensor: torch.device("cuda:0" if isinstance(tensor, nn.Parameter) else "cpu")
if "broken" in words:
    torch.cuda.Event.query = None
if "uncounted" in words:  # as torch has it, with an allocator of somebody else
    source = 'def stats(device=None):\n    raise RuntimeError("does not yet support getDeviceStats")'
    names: dict[str, Any] = {}
    exec(compile(source, torch.cuda.memory.__file__, "exec"), names)
    torch.cuda.memory_stats = names["stats"]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        if "inside" in words:
            large.to("cpu", copy=True)
        return Work.apply(self.inner(x), gpu, forward_ms, backward_ms)


class Image(torch.Tensor):
    """As torchvision's tensors of images: it stays of its class in the functions of a table."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return found.as_subclass(cls) if function in kept else found


kept = {torch.Tensor.to, torch.Tensor.item}
image = torch.ones(4).as_subclass(Image)
if "subclass" not in words:
    del Image, image
    gc.collect()
kinds = set()
# A mode that knows the methods of torch.Tensor from before the training.
table, seen = {torch.Tensor.to: "to", torch.Tensor.item: "item", torch.Tensor.__getitem__: "getitem"}, []


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in table:
            seen.append(table[function])
        return function(*args, **(kwargs or {}))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaled" in words)
x, large = torch.ones(8, 4), torch.ones(1 << 22)
begin, steps, value = time.monotonic(), 0, 0.0
while time.monotonic() - begin < seconds:
    if "asks" in words and steps == 20:
        modules: Any = sys.modules
        modules["_ndd_watch.clock"].S[modules["_ndd_watch.mapped"].CAPTURES] += 1
    if "moves" in words and steps == 40:
        gpu.index = 1
    time.sleep(host_ms / 1e3)
    if "mode" in words and steps == 10:
        Mode().__enter__()
    if "copies" in words:
        large.to("cpu", copy=True)
    if "casts" in words:
        large.to(torch.float64)
    optimizer.zero_grad()
    if "streams" in words:
        gpu.stream = "second"
    loss = (model(x) - 1.0).square().mean()
    gpu.stream = "first"
    gpu.capturing = "captures" in words and steps % 5 == 4
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    gpu.capturing = False
    if "evaluates" in words and steps % 3 == 0:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    value = float(loss) if "float" in words else loss.item()
    steps += 1
    if "subclass" in words:
        kinds.add(type(image.to(torch.float64)).__name__)
waits = gpu.waits
print("seen", seen.count("to"), seen.count("item"), seen.count("getitem"), "moved", max(steps - 10, 0))
print("kinds", ",".join(kinds), "steps", steps, "loss", value, "waits", waits)
