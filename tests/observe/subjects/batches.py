"""Trains on batches that it makes itself. Argument: which function makes them.

The loop of the module calls "get_batch" and "batches", a generator; a function with a loop calls the methods. With
"ahead", the next batch is made between forward and backward.
"""

import functools
import sys

import torch
from common import busy, net, report

how = sys.argv[1]
ahead = how == "ahead"
model = net(512, 2) if ahead else net()
optimizer = torch.optim.AdamW(model.parameters())


def get_batch(size=16):
    busy(0.0 if ahead else 0.004)
    x = torch.randn(size, 8)
    return x, x.sum(1, keepdim=True)


def batches(count):
    for _ in range(count):
        busy(0.004)
        x = torch.randn(16, 8)
        yield x, x.sum(1, keepdim=True)


def passed_on(function):
    @functools.wraps(function)
    def inner(*given):
        return function(*given)

    return inner


def noise():  # as large as the lists of a batch
    return torch.randn(16, 8).tolist()


class Source:
    class Feed:
        def __init__(self, columns):
            self.__columns = columns

        def get(self, size=16):
            busy(0.004)
            x = torch.randn(size, self.__columns)
            return x, x.sum(1, keepdim=True)


class Feed(Source.Feed):
    def __init__(self):
        super().__init__(8)

    def __iter__(self):
        return self

    def __next__(self):
        return super().get()

    @staticmethod
    def made():
        return feed.get()

    @passed_on
    def wrapped(self):
        return self.get()

    @property
    def newest(self):
        return self.get()

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def cached(self, number):
        return self.get()

    def listed(self):
        return [one.tolist() for one in self.get()]


def train(x, y):
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def epoch(steps):
    for number in range(steps):
        if how == "newest":
            x, y = feed.newest
        elif how == "cached":
            x, y = feed.cached(number)
        elif how == "listed":
            noise()
            x, y = map(torch.tensor, feed.listed())
        else:
            x, y = next(feed) if how == "__next__" else getattr(feed, how)()
        loss = train(x, y)
    return loss


feed = Feed()
if how == "get_batch":
    for step in range(60):
        x, y = get_batch()
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
elif how == "batches":
    for x, y in batches(60):
        loss = train(x, y)
elif ahead:
    x, y = get_batch(256)
    for step in range(60):
        loss = ((model(x) - y) ** 2).mean()
        x, y = get_batch(256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    loss = epoch(60)
report(60, loss)
