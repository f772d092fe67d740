"""Why a rank cannot go on: it failed itself, or another rank failed, was stopped or is gone. Records such an end."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.errors import RunLockedError, message_of, shortened
from ndd_engine.record.events import EndEvent, Event
from ndd_engine.record.file import Recorder, RunReader
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.text import printable

from .rank_place import Member, Notes

if TYPE_CHECKING:
    from ndd_engine.train.request import Ranks


# Time for the other ranks to leave their notes, and for the system to notice a lost connection.
PATIENCE_S = 2.0
LONGEST = 1500
UNKNOWN = ", and it is not known which one"
# Where errors of a collective arise: these parts of torch, and this package, which waits for some.
_COLLECTIVES = ("distributed", "autograd", "nn/parallel", "_ops.py")
_HERE = str(Path(__file__).parent)
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
    ranks.notes.put(f"here/{ranks.place.rank}", json.dumps(asdict(Member.mine(ranks.place.rank))))


def leave_cause(ranks: Ranks, cause: Cause, rank: int | None = None) -> Cause:
    """Tell the other ranks why a rank ends, by default this one; returns the cause."""
    rank = ranks.place.rank if rank is None else rank
    body = asdict(cause) | {"text": shortened(cause.text, LONGEST)}
    ranks.notes.put(f"over/{rank}", json.dumps(body))
    ranks.notes.put("over", str(rank))
    return cause


def first_over(ranks: Ranks) -> Cause | None:
    """Why another rank ended early, if one said so."""
    rank = ranks.notes.get("over")
    return None if rank is None or int(rank) == ranks.place.rank else _told(ranks.notes, int(rank))


def other_over(ranks: Ranks) -> Cause | None:
    """Why another rank ended early: what one of them said, or that the process of one of this host is gone."""
    return first_over(ranks) or Neighbours(ranks).gone()


def others(ranks: Ranks, error: BaseException, text: str, place: str) -> Cause:
    """The cause of an error: text, unless the error says that another rank is gone. Waits for its reason then.

    place: where this rank noticed, such as "at step 20 in backward".
    """
    rank = ranks.place.rank
    if not _lost(error):
        return leave_cause(ranks, Cause("failed", f"rank {rank}: {text}", own=True, curable=True))
    ranks.notes.put(f"noticed/{rank}", "")
    noticed = f"rank {rank} noticed {place}"
    deadline = time.monotonic() + PATIENCE_S
    neighbours = Neighbours(ranks)
    while time.monotonic() < deadline:
        neighbours.gone()
        told = [cause for other in _others(ranks) if (cause := _told(ranks.notes, other)) is not None]
        if stopped := next((cause for cause in told if cause.status != "failed"), None):
            return stopped
        if told:
            words = "; ".join(dict.fromkeys(cause.text for cause in told))
            curable, status = any(cause.curable for cause in told), told[0].exit_status
            return Cause("failed", f"{words} ({noticed})", own=False, curable=curable, exit_status=status)
        time.sleep(0.1)
    lost = f"rank {rank} lost the connection to another rank {place}{_silent(ranks)}: {text}"
    return leave_cause(ranks, Cause("failed", lost, own=True, curable=True))


def _lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone: one of a collective, not of a connection of the user's own."""
    import torch  # the console reads this module before torch is loaded

    torch_folder = Path(torch.__file__).parent
    places = (*(str(torch_folder / part) for part in _COLLECTIVES), _HERE)
    seen: BaseException | None = error
    while seen is not None:
        if _LOST.search(message_of(seen)) and "Error" in type(seen).__name__:
            frames = [frame.f_code.co_filename for frame, _line in traceback.walk_tb(seen.__traceback__)]
            if frames and frames[-1].startswith(places):
                return True
        seen = seen.__cause__
    return False


def _silent(ranks: Ranks) -> str:
    """Which ranks have said nothing since this one noticed; those that live have noticed it as well by now."""
    notes = ranks.notes
    if notes.get(f"noticed/{ranks.place.rank}") is None:
        return UNKNOWN
    silent = [rank for rank in _others(ranks) if notes.get(f"noticed/{rank}") is None]
    named = []
    for rank in silent[:4]:
        member = _member(notes, rank)
        named.append(f"rank {rank}" if member is None else str(member))
    if not named or len(silent) > ranks.place.size // 2 + 1:
        return UNKNOWN
    more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
    return f"; no response since from {', '.join(named)}{more}"


def _others(ranks: Ranks) -> Iterable[int]:
    here = ranks.place
    return (rank for rank in range(here.size) if rank != here.rank)


def _told(notes: Notes, rank: int) -> Cause | None:
    """Why a rank ended, in its own words."""
    found = notes.get(f"over/{rank}")
    if found is None:
        return None
    body = json.loads(found)
    text, status = str(body["text"]), str(body["status"])
    if status == "failed" and not text.startswith("rank "):
        text = f"rank {rank}: {text}"
    elif status != "failed":
        text = f"{text} at rank {rank}, immediately"
    return Cause(status, printable(text), False, bool(body["curable"]), body["exit_status"])


class Neighbours:
    """The other ranks of this host. One that was killed cannot say so."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Whose host is not known yet: launchers may deal out ranks to hosts in any order.
        self._unknown = set(_others(ranks))
        # Those of this host: looking at them does not ask the store.
        self._known: list[Member] = []

    def gone(self) -> Cause | None:
        """That the process of one of them has ended without leaving. Tells all ranks."""
        notes = self._ranks.notes
        if len(self._known) < self._ranks.place.local_size - 1:
            for rank in sorted(self._unknown):
                if (member := _member(notes, rank)) is not None:
                    self._unknown.discard(rank)
                    self._known += [member] if member.here else []
        for member in self._known:
            if member.ended and notes.get(f"left/{member.rank}") is None:
                cause = Cause("failed", f"{member} was killed or ended", own=False, curable=True)
                return leave_cause(self._ranks, cause, member.rank)
        return None


def _member(notes: Notes, rank: int) -> Member | None:
    """What a rank said of itself; None before it did."""
    text = notes.get(f"here/{rank}")
    return None if text is None else Member(**json.loads(text))


def ended_since(run: RunDir, begun: float) -> EndEvent | None:
    """The end that was recorded since then (Unix time in seconds), or None."""
    ended_t = 0.0

    def hear(t: float, event: Event) -> None:
        nonlocal ended_t
        ended_t = t if isinstance(event, EndEvent) else ended_t

    reader = RunReader(run, hear)
    reader.poll()
    return reader.snapshot().end if ended_t >= begun else None


def record_end(run: RunDir, end: EndEvent) -> None:
    """Record the end of a run that no process writes; its step is the last one of the record. Never raises OSError."""
    lock = RunLock(run)
    try:
        lock.acquire(patience_s=2.0)
    except (RunLockedError, OSError):
        return
    try:
        reader = RunReader(run)
        reader.poll()
        snapshot = reader.snapshot()
        how = ""
        if end.status == "failed" and (saved := snapshot.checkpoint) is not None:
            resume = f"resume with: ndd-console train --resume {run.name}"
            how = f"; the last checkpoint is step {saved.mark.step:,}; {resume}"
        recorder = Recorder(run.events, reader.state)
        recorder.start()
        recorder.put(replace(end, reason=end.reason + how, step=snapshot.step))
        recorder.flush()
        recorder.close()
    except OSError:
        return
    finally:
        lock.release()
