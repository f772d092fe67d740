"""Subcommands, a batch sampler of its own without a length, and data beside the folder; needs PYTHONPATH."""

from __future__ import annotations

import argparse
import random

import torch
from ended import ended
from texts import Buckets, Texts
from torch import nn
from torch.utils.data import DataLoader


def train(given: argparse.Namespace) -> None:
    random.seed(given.seed)
    torch.manual_seed(given.seed)
    data = Texts(given.data)
    loading = {"num_workers": given.workers, "collate_fn": data.collate}
    loader = DataLoader(data, batch_sampler=Buckets(data.lengths, given.tokens), **loading)
    model = nn.Sequential(nn.EmbeddingBag(500, 64), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())
    steps = items = 0
    loss = torch.zeros(())
    for epoch in range(given.epochs):
        for words, labels in loader:
            loss = nn.functional.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, items = steps + 1, items + len(words)
        print("epoch", epoch, loss.item(), flush=True)
    ended(model, steps, items, loss.item())


def count(given: argparse.Namespace) -> None:
    print(len(Texts(given.data)))


parser = argparse.ArgumentParser()
tasks = parser.add_subparsers(required=True)
for task in (train, count):
    options = tasks.add_parser(task.__name__)
    options.add_argument("--data", default="../data/texts.txt")
    options.add_argument("--tokens", type=int, default=800)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--seed", type=int, default=0)
    options.set_defaults(task=task)
arguments = parser.parse_args()
arguments.task(arguments)
