"""Runs of several ranks: the process that starts them, and a rank itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from ndd_console.output.progress import RunProgress
from ndd_console.output.run_log import Output
from ndd_console.words.run import summary
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, NddError
from ndd_engine.record.events import Event
from ndd_engine.train.parallel.rank_place import ENV_STOPPED, OtherRankError, Place, own_launcher
from ndd_engine.train.ranks_run import RanksRun
from ndd_engine.train.run import RunRequest

from .headless import Signals, Unheard, finish, stop_on_signals, trained

T = TypeVar("T")


def ranks_headless(request: RunRequest, command: Sequence[str], as_json: bool) -> int:
    """Start the ranks, print what rank 0 records, and return the exit status of the run."""
    words, data = Output(sys.stderr, "error"), Output(sys.stdout, "output")
    every_s = request.draft.resolve().log.headless_s
    since = time.time()

    def hear(t: float, event: Event) -> None:
        if as_json:
            data.data(event.to_json(t))
        progress.hear(t, event)

    run = RanksRun.open(request, command, hear)
    progress = RunProgress(words.say, every_s, run.recorder.snapshot().run, since)
    run.recorder.polled = progress.look

    stop_on_signals(run, words.say, hangup=request.draft.resolve().console.on_hangup == "stop")
    end = run.execute()
    run.close()
    if not as_json:
        data.data("\n".join(summary(run.recorder.snapshot(), end, str(run.directory.path))))
    finish(words, data)
    return end.exit_status


def rank_command(*words: str) -> list[str]:
    """What each rank runs: these words of a command line, or this one again."""
    return [sys.executable, "-m", "ndd_console", *(words or sys.argv[1:])]


def _while_listening(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread: torch waits for a store without listening to signals."""
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  it is raised again
            failed.append(error)

    thread = threading.Thread(target=run, name="ndd-meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]
    return results[0]


def run_rank(make: Callable[[], RunRequest | None], here: Place, as_json: bool) -> NoReturn:
    """Train as a rank and end the process. make: the request; only rank 0 reports what is wrong with it."""
    if ENV_STOPPED in os.environ:
        os._exit(EXIT_DONE)
    from ndd_engine.train.rank_run import leave, met, refused

    run = None
    status, broken = EXIT_FAILED, False
    try:
        signals = Signals()
        # It may wait for a rank that does not start, or that failed: the launcher then sends SIGTERM to the others.
        signals.impatient = True
        meeting = _while_listening(partial(met, make, here))
        signals.impatient = False
        if meeting is None:
            leave(None, EXIT_DONE)
        if here.first:
            # The console that started the ranks prints what rank 0 records.
            run = trained(meeting.request, as_json, meeting.open, signals, quiet=own_launcher() is not None)
        else:
            run = meeting.open(meeting.request)
            signals.obey(Unheard(run), survive_hangup=True)
            run.execute()
            run.close()
        status = EXIT_FAILED if run.end is None else run.end.exit_status
    except OtherRankError as error:
        status = error.exit_status
    except NddError as error:
        status, broken = error.exit_status, not here.first
        if here.first:
            refused(error)
        with contextlib.suppress(OSError):
            for line in str(error).splitlines() or ["failed"]:
                print(f"ndd-console: {line}", file=sys.stderr, flush=True)  # noqa: T201
    except BaseException:  # noqa: BLE001  the interpreter would wait for torch's threads at its end
        traceback.print_exc()
        broken = True
    leave(run, status, broken)
