"""`ndd-console attach`."""

from __future__ import annotations

import queue
import time

from ndd_console.jobs.run_sources import AttachedSource
from ndd_console.output.run_log import RunProgress
from ndd_console.process.terminal import interactive
from ndd_console.words.run import summary
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, NddError
from ndd_engine.record.events import Event
from ndd_engine.record.file import damage_text
from ndd_engine.record.rundir import find_run

from .options import Asked, command, flag, gathered, run_argument
from .printing import say, show


@command(
    "0 when you close the screen or press Ctrl-C; with --headless, the exit status of the run once it ends",
    "attach",
    "attach chartext-001 --headless",
)
@run_argument
@flag("--headless", help="Print log lines instead of the screen, until the run ends.")
@gathered
def attach(asked: Asked) -> int:
    """Keys pause, evaluate, save and stop a live run. Closing the screen does not affect it."""
    directory = find_run(asked.root, asked.run)
    if not asked.headless and interactive():
        from ndd_console.sessions.training import watch

        return watch(directory, asked.ascii)
    received: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    source = AttachedSource(directory, listener=lambda t, event: received.put((t, event)))
    progress = RunProgress(say)
    told = 0
    try:
        while True:
            snapshot = source.snapshot()
            while not received.empty():
                progress.hear(*received.get())
            progress.look(snapshot)
            if source.damaged > told and (snapshot.final or not told):
                told = source.damaged
                say(f"warning: {damage_text(told)}")
            if snapshot.final:
                break
            if source.trouble and directory.live_owner() is None:
                raise NddError(source.trouble)
            time.sleep(0.5)
    except KeyboardInterrupt:
        say("detached; the run continues")
        return EXIT_DONE
    show(summary(snapshot, snapshot.end, directory.path))
    status = snapshot.end.exit_status if snapshot.end else EXIT_FAILED
    return status if status < 256 else EXIT_FAILED
