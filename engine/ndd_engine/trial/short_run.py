"""A short run in a child process, read from its record: for figures that a trial does not measure."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ndd_engine.child import (
    ChildError,
    ChildProcess,
    ChildServer,
    Json,
    Pipe,
    StoppedError,
    draft_of,
    spec_of,
    ticker,
)
from ndd_engine.errors import NddError
from ndd_engine.record.rundir import RunDir

from .compare import Recorded, read_recorded

NAME = "observed"
# Training only, in windows short enough to show how much they vary.
QUIET = (
    f"run.name={NAME}", "run.max_steps=1000000000", "evaluate.at_end=false", "checkpoint.every_steps=0",
    "checkpoint.every_epochs=0", "checkpoint.every_minutes=0", "checkpoint.at_end=false", "log.window_s=0.25",
    "log.every_steps=1000", "log.profile_every_s=0", "evaluate.every_epochs=0",
)  # fmt: skip
# Time limit for preparing and the first steps.
PREPARE_S = 300.0
_POLL_S = 0.1


def observe(workload: str, sets: Sequence[str], seconds: float, stop: threading.Event) -> Recorded | None:
    """Train for `seconds` after the first step and read the record; None when stopped. Raises NddError on failure."""
    spec = spec_of(None, workload, [*QUIET, *sets])
    try:
        with ChildProcess("ndd_engine.trial.short_run") as child:
            tick = ticker("", lambda _: None, stop)
            child.ask({"do": "observe", "seconds": seconds, **spec}, seconds + PREPARE_S, tick)
            return read_recorded(RunDir(child.folder / NAME))
    except StoppedError:
        return None
    except ChildError as error:
        late = f"no steps within {PREPARE_S:.0f} s"
        raise NddError(late if error.kind == "late" else str(error)) from None


class ShortRun(ChildServer):
    """The process."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        self.commands = {"observe": self.observe}

    def observe(self, command: Json) -> Json:
        """See the function of this name."""
        from ndd_engine.run.run import Run
        from ndd_engine.train.request import RunRequest
        from ndd_engine.train.training_run import Training

        run = Run.open(Training(RunRequest(draft_of(command), self.folder, probes=False)))

        def end() -> None:
            while run.recorder.snapshot().step == 0 and not run.finished.is_set():
                time.sleep(_POLL_S)
            time.sleep(command["seconds"])
            run.control.request("kill", "measured for long enough", "stopped")

        threading.Thread(target=end, daemon=True).start()
        try:
            found = run.execute()
        finally:
            run.close()
        if found.status == "failed":
            raise NddError(found.reason)
        return {}


if __name__ == "__main__":
    ShortRun.main(sys.argv[1:])
