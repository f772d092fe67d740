"""Checks that all ranks read the same data in the same order, and begin with the same model."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from ndd_engine.errors import UsageError
from ndd_engine.train.data.checksum import checksum
from ndd_engine.train.data.loader import Batches

from .world import World

# Of each parameter, this many elements are compared: what is drawn at random differs everywhere.
LOOKED_AT = 1024


def check_data(world: World, batches: Batches) -> None:
    """Raise UsageError on all ranks if one of them has other training data than rank 0: items would be lost.

    Of a stream, the first micro-batch is compared.
    """
    streams = batches.items is None
    crc = checksum([batches.sample()], 1) if streams else batches.crc
    words = {
        "items": "another number of training items",
        "order": "training data in another order",
        "crc": "another first batch of its stream" if streams else "other training data",
    }
    advice = "every rank has to read all of the data alike, and the run deals each its share of the batches"
    _compare(world, {"items": batches.items, "order": batches.order, "crc": crc}, words, advice)


def check_model(world: World, model: nn.Module) -> None:
    """Raise UsageError on all ranks if one of them has built another model than rank 0.

    DistributedDataParallel begins with the parameters of rank 0, but shards come from every rank. Call it before.
    """
    crc = 0
    for name, parameter in model.named_parameters():
        value = parameter.detach().flatten()[:LOOKED_AT].cpu()
        crc = zlib.crc32(bytes(value.view(torch.uint8).tolist()), zlib.crc32(name.encode(), crc))
    advice = "draw them from torch's generator, or from one that is seeded by settings.seed"
    _compare(world, {"crc": crc}, {"crc": "other initial parameters"}, advice)


def _compare(world: World, mine: dict[str, Any], words: dict[str, str], advice: str) -> None:
    first, *others = world.exchange.everywhere(mine)
    for member, other in zip(world.members[1:], others, strict=True):
        for key, text in words.items():
            if other[key] != first[key]:
                raise UsageError(f"rank {member.rank} ({member.host}) has {text} than rank 0: {advice}")
