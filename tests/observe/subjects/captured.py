"""Trains, and asks for captures as the console does. Arguments: words of what happens besides."""

import cProfile
import gc
import io
import os
import sys
import threading

import torch.profiler
from common import report
from torch import nn

import torch

words = sys.argv[1:]
clock, mapped = sys.modules.get("_ndd_watch.clock"), sys.modules.get("_ndd_watch.mapped")
observer = getattr(sys.modules.get("_ndd_watch.install"), "observer", None)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if "works" in words:
            first = self.head(x)
            for _ in range(20):
                x = torch.tanh(x * 0.9)
            return first + self.head(x) + self.head(x)
        return self.head(x)


model, teacher = Net(), Net()
optimizer = torch.optim.AdamW((model.head if "works" in words else model).parameters())
x = torch.randn(16, 8)
y = x.sum(1, keepdim=True)


def step():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if "teaches" in words:
        teacher.eval()
        with torch.no_grad():
            wanted = teacher(x)
        loss = loss + (model.head(x) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def captured():
    """Whether a step of a capture is measured at present: True in one of its steps of each capture."""
    return observer is not None and observer.captures._measured == 1


def ask():
    if clock is not None:
        clock.S[mapped.CAPTURES] += 1


def events(profiler):
    names = [event.name for event in profiler.events()]
    return len(names), names.count("aten::addmm")


def once():
    """What happens within a captured step; without an observer, within another one."""
    if "folder" in words and observer is not None:
        os.rmdir(os.environ["NDD_WATCH_CAPTURES"])
    if "profiles" in words:
        with torch.profiler.profile() as profiler:
            step()
        print("EVENTS", *events(profiler), flush=True)
    if "python" in words:
        profiler = cProfile.Profile()
        profiler.enable()
        step()
        profiler.disable()
    if "evaluates" in words:
        model.eval()
        with torch.no_grad():
            for _ in range(50):
                model(x)
        model.train()
    if "forks" in words:
        child = os.fork()
        if not child:
            for _ in range(5000):
                torch.ones(2)
            autograd = torch._C._autograd
            count = len(autograd._disable_profiler().events()) if autograd._profiler_enabled() else 0
            os._exit(count > 5000)  # those of the steps before are in it
        print("RECORDED", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    if "after" in words:
        sys.modules["time"].sleep(3)  # longer than a step may take
        gc.collect()
        print("RECORDS", torch.autograd._profiler_enabled(), flush=True)
    if "elsewhere" in words:
        found = []
        thread = threading.Thread(target=profiled, args=(found,))
        thread.start()
        thread.join()
        print("EVENTS", *found, flush=True)
    if "saves" in words:
        torch.save(model.state_dict(), io.BytesIO())


def profiled(found):
    with torch.profiler.profile() as profiler:
        for _ in range(5):
            torch.ones(2) + 1
    found.append([event.name for event in profiler.events()].count("aten::add"))


def main():
    if "profiled" in words:
        with torch.profiler.profile():
            step()
    before = open_files()
    done = False
    for number in range(160):
        if number in (60, 110):
            ask()
        loss = step()
        if not done and (captured() if observer is not None else number == 80):
            done = True
            once()
            if "ends" in words:
                break
    report(number + 1, loss)
    # What the process has left of it: descriptors, the environment, the profiler.
    print(
        "LEFT", open_files() == before, "KINETO_LOG_LEVEL" in os.environ, torch.autograd._profiler_enabled()
    )
    if clock is not None:
        lengths = clock.S[mapped.LENGTHS_AT : mapped.LENGTHS_AT + clock.S[mapped.DONE]]
        left_out = [number for number, length in enumerate(lengths) if not length]
        print("OUT", ",".join(map(str, left_out)), flush=True)


def open_files():
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    if "thread" in words:
        training = threading.Thread(target=main)
        training.start()
        training.join()
    else:
        main()
