"""Which device each rank trains on: on GPUs, every rank has one of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ndd_engine.errors import UsageError
from ndd_engine.text import counted, printable

from .place import Place


def device_of(asked: str, place: Place) -> str:
    """The device of a rank: with several on a host, each has a GPU of its own. Raises UsageError if it has none.

    asked: run.device.
    """
    if asked == "cpu" or not torch.cuda.is_available():
        return asked
    # Where a cluster gives each process a GPU of its own, it is the only one that the process sees.
    gpus = torch.cuda.device_count()
    if asked.startswith("cuda:"):
        if place.local_size > 1 and gpus > 1:
            raise UsageError(f'run.device = "{asked}", which all ranks would share: set run.device = "auto"')
        return asked
    if gpus > 1 and place.local_rank >= gpus:
        text = (
            f"{counted(place.local_size, 'rank')} on {printable(socket.gethostname())}, which has {gpus} GPUs"
        )
        raise UsageError(f"{text}: start at most {gpus} there (parallel.ranks, --nproc-per-node)")
    return f"cuda:{place.local_rank if gpus > 1 else 0}"


@dataclass(frozen=True)
class Used:
    """What a rank trains on. device: "cpu" or "cuda". gpu: what tells the GPUs of a host apart."""

    host: str
    device: str
    gpu: str = ""


def used(device: torch.device) -> Used:
    """What this rank trains on."""
    gpu = ""
    if device.type == "cuda":
        known = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        gpu = str(known or f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}")
    return Used(socket.gethostname(), device.type, gpu)


def conflict(each: Sequence[Used]) -> str:
    """Why these ranks cannot train together, or "". each: in the order of the ranks."""
    on_gpu = [rank for rank, one in enumerate(each) if one.device == "cuda"]
    if 0 < len(on_gpu) < len(each):
        without = next(rank for rank, one in enumerate(each) if one.device != "cuda")
        have = f"rank {on_gpu[0]} (on {each[on_gpu[0]].host}) has a GPU"
        return (
            f"{have}, rank {without} (on {each[without].host}) has none that it can use: repair that, or set "
            'run.device = "cpu" for all of them'
        )
    owner: dict[Used, int] = {}
    for rank in on_gpu:
        first = owner.setdefault(each[rank], rank)
        if first != rank:
            text = f"ranks {first} and {rank} (on {each[rank].host}) have the same GPU: each rank needs one of its own"
            return f"{text}; start at most as many ranks on a host as it has GPUs (parallel.ranks, --nproc-per-node)"
    return ""
