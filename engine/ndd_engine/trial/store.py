"""Writes the result of a trial to the record of its run: through the run if it is live, else directly to its log."""

from __future__ import annotations

import json
import os
import time

from ndd_engine.errors import RunLockedError, UsageError
from ndd_engine.record.channel import RECORD, send
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.file import truncate_torn_line, write_whole
from ndd_engine.record.rundir import RunDir, RunLock, check_regular
from ndd_engine.text import printable


def record_trial(run: RunDir, event: TrialEvent) -> None:
    """Add the trial to the run's record. Raises UsageError if it cannot be written."""
    line = event.to_json(time.time())
    if run.live_owner() is not None:
        try:
            send(run.control_socket, RECORD, event=json.loads(line))
            return
        except UsageError:
            if run.live_owner() is not None:
                raise
    lock = RunLock(run)
    try:
        lock.acquire()
        check_regular(run.events)
        truncate_torn_line(run.events)
        handle = os.open(run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_whole(handle, line.encode() + b"\n")  # or nothing
            os.fsync(handle)
        finally:
            os.close(handle)
    except RunLockedError:
        raise
    except OSError as error:
        raise UsageError(
            f"the trial cannot be recorded: {printable(str(run.events))}: {error.strerror}"
        ) from None
    finally:
        lock.release()
