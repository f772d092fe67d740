"""A rank of a run with several."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, NddError
from ndd_engine.text import printable
from ndd_engine.train.parallel.rank_place import ENV_STOPPED, OtherRankError, RankPlace, own_launcher
from ndd_engine.train.request import RunRequest

from .headless import Signals, status_of, trained

T = TypeVar("T")


def rank_command(*words: str) -> list[str]:
    """What each rank runs: these words of a command line, or this one again."""
    return [sys.executable, "-m", "ndd_console", *(words or sys.argv[1:])]


def _while_listening(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread: torch waits for a store without listening to signals."""
    result = ThreadPoolExecutor(1, "ndd-meeting").submit(work)
    while not result.done():
        time.sleep(0.05)
    return result.result()


def run_rank(make: Callable[[], RunRequest | None], here: RankPlace, as_json: bool) -> NoReturn:
    """Train as a rank and end the process. make: the request; only rank 0 reports what is wrong with it."""
    if ENV_STOPPED in os.environ:
        os._exit(EXIT_DONE)
    from ndd_engine.train.rank_run import leave, met, open_rank, refused

    training = None
    status, broken = EXIT_FAILED, False
    try:
        signals = Signals()
        # It may wait for a rank that does not start, or that failed: the launcher then sends SIGTERM to the others.
        signals.impatient = True
        training = _while_listening(partial(met, make, here))
        signals.impatient = False
        if training is None:
            leave(None, EXIT_DONE)
        opened, quiet = partial(open_rank, training), own_launcher() is not None
        if here.first:
            # The console that started the ranks prints what rank 0 records.
            run = trained(opened, training.request, as_json, training=training, signals=signals, quiet=quiet)
        else:
            run = opened()
            signals.obey(run, lambda _: None, survive_hangup=True)
            run.execute()
            run.close()
        status = status_of(run)
    except OtherRankError as error:
        status = error.exit_status
    except NddError as error:
        status, broken = error.exit_status, not here.first
        if here.first:
            refused(error)
        with contextlib.suppress(OSError):
            for line in str(error).splitlines() or ["failed"]:
                print(f"ndd-console: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201
    except BaseException:  # noqa: BLE001  the interpreter would wait for torch's threads at its end
        traceback.print_exc()
        broken = True
    leave(training, status, broken)
