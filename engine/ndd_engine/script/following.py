"""The process that records a script which observes itself: `python -m ndd_engine.script.following FOLDER PID`.

The script's process writes its observations to files; this one turns them into the record of the run until that process
has ended, however it ends. It answers on the control socket.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from ndd_engine.diagnose.watch import FindingWatch
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, RunLockedError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.channel import ControlServer
from ndd_engine.record.events import EndEvent, StageEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import Recorder
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.text import counted

from .command import command_of
from .control import ScriptControl
from .follower import Follower
from .records import Room

POLL_S = 0.2
# Name of the file that tells the follower that the observation has been closed.
CLOSED = "closed"


def follow(directory: RunDir, pid: int) -> None:
    """Record until the process has ended, or until the observation was closed."""
    process = psutil.Process(pid)
    lock = RunLock(directory)
    try:
        lock.acquire()
    except RunLockedError:
        return
    recorder = Recorder(directory.events, None, None, FindingWatch())
    recorder.start()
    control = ScriptControl()

    def asked(action: str, holder: int | None) -> None:
        control.request(action, "stopped from another terminal", holder=holder)
        if action in ("stop", "kill"):
            os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGINT)

    server = ControlServer(directory.control_socket, asked, recorder.put)
    try:
        server.start()
        recorder.put(StageEvent("prepare", "waiting for the first step"))
        room = Room(directory.ranks, shared=False)
        follower = Follower(directory, command_of(directory), detect(use_torch=False), recorder.put)
        sampler = Sampler(None, recorder.put, run_dir=directory.path, pid=pid)
        sampler.start()
        closed = directory.ranks / CLOSED
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and not closed.exists():
            if control.take_capture():
                follower.capture()
            follower.poll()
            if follower.trains != sampler.followed:
                sampler.follow(*follower.trains)
            room.fill()
            time.sleep(POLL_S)
        sampler.stop()
        follower.finish()
        room.close()
        recorder.put(_end(directory, recorder, follower, control, closed.exists()))
        recorder.flush()
    finally:
        server.close()
        recorder.close()
        lock.release()


def _end(
    directory: RunDir, recorder: Recorder, follower: Follower, control: ScriptControl, closed: bool
) -> EndEvent:
    recorder.settle()
    data = {
        "run": directory.name,
        "dropped_events": recorder.dropped,
        "figures": figures(recorder.snapshot()),
        "not_shown": follower.not_shown,
    }
    steps = f"after {counted(follower.step, 'step')}"
    if control.stop_status is not None:
        return EndEvent(
            control.stop_status, f"{control.stop_reason}, {steps}", follower.step, EXIT_DONE, None, data
        )
    if follower.ended is not None and follower.ended[0] == "failed":
        reason = f"the script failed {steps}: {follower.ended[1]}"
        return EndEvent("failed", reason, follower.step, EXIT_FAILED, None, data)
    if closed or follower.ended is not None:
        return EndEvent("done", f"the observation ended {steps}", follower.step, EXIT_DONE, None, data)
    reason = f"the process of the script is gone {steps}, without an end"
    return EndEvent("failed", reason, follower.step, EXIT_FAILED, None, data)


if __name__ == "__main__":
    follow(RunDir(Path(sys.argv[1])), int(sys.argv[2]))
