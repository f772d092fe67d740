"""Why a rank cannot go on: its own failure, or another rank that failed, was stopped or is gone."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from ndd_engine.errors import message_of, shortened
from ndd_engine.text import printable

from .notes import Notes

if TYPE_CHECKING:
    from ndd_engine.train.request import Ranks

# Time for the other ranks to leave their notes, and for the system to notice a lost connection.
PATIENCE_S = 2.0
LONGEST = 1500
# What torch's process groups say when another rank is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer|remote process|socket|timed? ?out|ncclRemoteError|heartbeat",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """Why a rank ends before training does.

    status, exit_status: as in the end event. own: whether the reason lies in this rank, not in another one. curable:
    whether nobody could foresee it, so that the same ranks may succeed another time.
    """

    status: str
    text: str
    own: bool
    curable: bool
    exit_status: int | None = None


def introduce(ranks: Ranks) -> None:
    """Tell the other ranks which process this is."""
    body = {"host": socket.gethostname(), "pid": os.getpid()}
    ranks.notes.put(f"here/{ranks.place.rank}", json.dumps(body))


def leave_cause(ranks: Ranks, cause: Cause) -> Cause:
    """Tell the other ranks why this one ends; returns the cause."""
    body = asdict(cause) | {"text": shortened(cause.text, LONGEST)}
    ranks.notes.put(f"over/{ranks.place.rank}", json.dumps(body))
    ranks.notes.put("over", str(ranks.place.rank))
    return cause


def first_over(ranks: Ranks) -> Cause | None:
    """Why another rank ended early, if one said so."""
    rank = ranks.notes.get("over")
    return None if rank is None or int(rank) == ranks.place.rank else _told(ranks.notes, int(rank))


def others(ranks: Ranks, error: BaseException, text: str, place: str) -> Cause:
    """The cause of an error: text, unless the error says that another rank is gone. Waits for its reason then.

    place: where this rank noticed, such as "at step 20 in backward".
    """
    rank = ranks.place.rank
    if not (_LOST.search(message_of(error)) and "Error" in type(error).__name__):
        return leave_cause(ranks, Cause("failed", f"rank {rank}: {text}", own=True, curable=True))
    noticed = f"rank {rank} noticed {place}"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        told = [cause for other in _others(ranks) if (cause := _told(ranks.notes, other)) is not None]
        gone = [
            words
            for other in _others(ranks)
            if (words := _gone(ranks.notes, other, _member(ranks.notes, other)))
        ]
        if stopped := next((cause for cause in told if cause.status != "failed"), None):
            return stopped
        if told or gone:
            words = "; ".join((*dict.fromkeys(cause.text for cause in told), *gone))
            status = told[0].exit_status if told else None
            curable = not told or any(cause.curable for cause in told)
            return Cause("failed", f"{words} ({noticed})", own=False, curable=curable, exit_status=status)
        time.sleep(0.1)
    lost = f"rank {rank} lost the connection to another rank {place}, which cannot be found out: {text}"
    return leave_cause(ranks, Cause("failed", lost, own=True, curable=True))


def _others(ranks: Ranks) -> Iterable[int]:
    here = ranks.place
    return (rank for rank in range(here.size) if rank != here.rank)


def _told(notes: Notes, rank: int) -> Cause | None:
    """Why a rank ended, in its own words."""
    body = _read(notes, f"over/{rank}")
    if body is None:
        return None
    text, status = str(body["text"]), str(body["status"])
    if status == "failed" and not text.startswith("rank "):
        text = f"rank {rank}: {text}"
    elif status != "failed":
        text = f"{text} at rank {rank}, immediately"
    return Cause(status, printable(text), False, bool(body["curable"]), body["exit_status"])


class Neighbours:
    """The other ranks of this host. One that was killed cannot say so."""

    def __init__(self, ranks: Ranks) -> None:
        here = ranks.place
        first = here.rank - here.local_rank
        self._notes = ranks.notes
        self._others = [rank for rank in range(first, first + here.local_size) if rank != here.rank]
        # What they said of themselves, which does not change: looking at processes does not ask the store.
        self._known: dict[int, Any] = {}

    def gone(self) -> Cause | None:
        """That the process of one of them has ended without leaving."""
        for rank in self._others:
            member = self._known[rank] = self._known.get(rank) or _member(self._notes, rank)
            if words := _gone(self._notes, rank, member):
                return Cause("failed", words, own=False, curable=True)
        return None


def _gone(notes: Notes, rank: int, member: Any) -> str:
    """That the process of a rank on this host has ended without leaving; "" if it has not. A zombie has ended.

    member: what it said of itself, None before it did.
    """
    if member is None or member["host"] != socket.gethostname():
        return ""
    try:
        if psutil.Process(member["pid"]).status() != psutil.STATUS_ZOMBIE:
            return ""
    except psutil.NoSuchProcess:
        pass
    except psutil.Error:
        return ""
    if notes.get(f"left/{rank}") is not None:
        return ""
    return f"rank {rank} ({printable(member['host'])}, process {member['pid']}) was killed or ended"


def _member(notes: Notes, rank: int) -> Any:
    """What a rank said of itself; None before it did."""
    return _read(notes, f"here/{rank}")


def _read(notes: Notes, name: str) -> Any:
    text = notes.get(name)
    return None if text is None else json.loads(text)
