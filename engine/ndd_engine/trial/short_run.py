"""A short run of its own process, watched through its record: for what is read off a run and not off a trial.

`python -m ndd_engine.trial.short_run` reads {"workload", "sets", "root", "seconds"} from its standard input and trains
for that long, counted from the first steps on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ndd_engine.config import read
from ndd_engine.errors import NddError
from ndd_engine.record.rundir import RunDir

from .recorded import Recorded, read_recorded

# Nothing but the training, in windows short enough to tell how much they differ.
QUIET = (
    "run.name=observed", "run.max_steps=1000000000", "evaluate.at_end=false", "checkpoint.every_steps=0",
    "checkpoint.every_epochs=0", "checkpoint.every_minutes=0", "checkpoint.at_end=false", "log.window_s=0.25",
    "log.every_steps=1000", "log.stacks_hz=0", "evaluate.every_epochs=0",
)  # fmt: skip
# What preparing and the first steps may take before the process is given up.
PREPARE_S = 300.0
_LOOK_S = 0.1


def observe(workload: str, sets: Sequence[str], seconds: float, stop: threading.Event) -> Recorded | None:
    """Train so long and read the record; None when asked to stop. Raises NddError when the run failed."""
    with tempfile.TemporaryDirectory(prefix="ndd-observe-", ignore_cleanup_errors=True) as root:
        request = {"workload": workload, "sets": [*QUIET, *sets], "root": root, "seconds": seconds}
        log = Path(root, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ndd_engine.trial.short_run"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, process_group=0,
            )  # fmt: skip
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            deadline = time.monotonic() + seconds + PREPARE_S
            while process.poll() is None:
                if stop.wait(_LOOK_S):
                    return None
                if time.monotonic() > deadline:
                    raise NddError(f"the run had no steps for {PREPARE_S:.0f} s")
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            raise NddError(lines[-1] if lines else f"its process ended with status {process.returncode}")
        return read_recorded(RunDir(Path(root, "observed")))


def main() -> int:
    """The process."""
    request = json.load(sys.stdin)
    from ndd_engine.train.run import Run, RunRequest

    try:
        draft = read(None, request["sets"], request["workload"])
        run = Run.open(RunRequest(draft, Path(request["root"]), probes=False))
    except NddError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status

    def end() -> None:
        while run.recorder.snapshot().step == 0 and not run.finished.is_set():
            time.sleep(_LOOK_S)
        time.sleep(request["seconds"])
        run.control.request("kill", "seen enough", "stopped")

    threading.Thread(target=end, daemon=True).start()
    try:
        found = run.execute()
    finally:
        run.close()
    if found.status == "failed":
        sys.stderr.write(f"{found.reason}\n")
        return found.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
