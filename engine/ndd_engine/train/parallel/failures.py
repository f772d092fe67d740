"""Explains a failure that another rank caused: which one ended, and why if it could still say so."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time

import psutil
from torch._C._distributed_c10d import Store

from ndd_engine.errors import message_of, shortened
from ndd_engine.text import counted, printable

from .world import Member, World

# Time for the other ranks to leave their notes, and for the system to notice a lost connection.
PATIENCE_S = 2.0
# What torch's process groups say when another rank is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer|remote process|socket|timed? ?out|ncclRemoteError|heartbeat",
    re.IGNORECASE,
)


def leave_note(store: Store, rank: int, text: str) -> None:
    """Tell the other ranks why this one fails."""
    with contextlib.suppress(Exception):  # the store is gone with its rank
        store.set(f"failed/{rank}", json.dumps(shortened(text, 500)))


def others(world: World, error: BaseException, text: str) -> tuple[str, bool]:
    """The text of a failure with what is known of the other ranks, and whether no rank could foresee it.

    Tells the other ranks if this one is the first.
    """
    lost = bool(_LOST.search(message_of(error))) and "Error" in type(error).__name__
    with contextlib.suppress(Exception):  # the store is gone with its rank
        if not lost:
            leave_note(world.store, world.rank, text)
            return (f"rank {world.rank}: {text}" if world.rank else text), True
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            told, gone = _reasons(world)
            if told or gone:
                return f"{'; '.join((*told, *gone))}; this ended {text}", not told
            time.sleep(0.1)
    return f"another of the {counted(world.size, 'rank')} is gone; this ended {text}", True


def _reasons(world: World) -> tuple[list[str], list[str]]:
    """Why other ranks failed, as far as they said so, and those whose processes are gone."""
    told, gone = [], []
    for member in world.members:
        if member.rank == world.rank:
            continue
        key = f"failed/{member.rank}"
        if world.store.check([key]):
            told.append(f"rank {member.rank} failed: {printable(json.loads(world.store.get(key)))}")
        elif _gone(member):
            gone.append(f"rank {member.rank} ({member.host}, process {member.pid}) was killed or ended")
    return told, gone


def _gone(member: Member) -> bool:
    """Whether the process of a rank on this host has ended; a zombie has."""
    if member.host != socket.gethostname():
        return False
    try:
        return psutil.Process(member.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
