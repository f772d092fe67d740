"""Records the end of a run whose rank 0 could not do so."""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.errors import RunLockedError
from ndd_engine.record.events import EndEvent, Event
from ndd_engine.record.file import Recorder, RunReader
from ndd_engine.record.rundir import RunDir, RunLock


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
            how = f"; the last checkpoint is step {saved.mark.step}; {resume}"
        recorder = Recorder(run.events, reader.state)
        recorder.start()
        recorder.put(replace(end, reason=end.reason + how, step=snapshot.step))
        recorder.flush()
        recorder.close()
    except OSError:
        return
    finally:
        lock.release()
