"""The ladder in a terminal: the climb in a thread, the screen over it, and both ended together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.app import TuningApp
from ndd_console.process.hosting import hosted
from ndd_console.process.terminal import capabilities
from ndd_engine.config import read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable
from ndd_engine.train.preflight import preflight
from ndd_engine.trial.request import Base

from .saving import save_new

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningState

Climb = Callable[[Callable[["TuningState"], None], threading.Event], "TuningState"]


class TuningJob:
    """A climb in a thread of its own. output: where the result is written at the end, None: only when asked to."""

    def __init__(self, name: str, climb: Climb, output: Path | None = None) -> None:
        self.name = name
        self.state: TuningState | None = None
        self.error: BaseException | None = None
        self.saved = ""
        self._climb = climb
        self._output = output
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-ladder")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def problem(self) -> str:
        if self.error is None:
            return ""
        text = str(self.error)
        return text if isinstance(self.error, NddError) else f"{type(self.error).__name__}: {text}"

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        """Wait for its end; the trial that was running ends its processes."""
        if self._thread.ident is not None:
            self._thread.join()

    def save(self) -> str:
        """Write the result into a new file; what is wrong, "" when it was written."""
        if self.state is None or self.saved:
            return ""
        try:
            self.saved = str(save_new("ladder", self.state.toml))
        except UsageError as error:
            return str(error)
        return ""

    def _work(self) -> None:
        try:
            state = self._climb(self._told, self._stop)
            if self._output is not None:
                try:
                    self._output.write_text(state.toml, encoding="utf-8")
                except OSError as error:
                    raise UsageError(
                        f"-o {printable(str(self._output))}: cannot be written: {error.strerror}"
                    ) from None
                self.saved = str(self._output)
            self.state = state
        except BaseException as error:  # noqa: BLE001  told on the screen, and raised again when it is closed
            self.error = error

    def _told(self, state: TuningState) -> None:
        self.state = state


def show(
    base: Base,
    budget_s: float,
    only: Sequence[str],
    output: Path | None,
    beside: Sequence[RunDir],
    ascii_only: bool,
) -> tuple[TuningState, int, str]:
    """Climb with a live screen. Returns, once it is closed, the result, the exit status so far, and the file of the
    resulting configuration, "" where it was not written.

    Raises what the climb raised. output: as of `-o`; without it a key writes a new file. beside: live runs that are
    paused meanwhile.
    """

    # Mistakes in the configuration are told before the screen opens.
    preflight(read(base.config, base.sets, base.workload), use_torch=False)

    def climb(tell: Callable[[TuningState], None], stop: threading.Event) -> TuningState:
        # Torch may come with it: after the first paint.
        from ndd_engine.trial.pausing import held
        from ndd_engine.trial.tuning import TuningState, run_tuning

        with held(beside, lambda text: tell(TuningState((), text)), stop):
            return run_tuning(base, budget_s, only, tell, stop)

    return run_screen(TuningJob(base.name, climb, output), ascii_only)


def run_screen(job: TuningJob, ascii_only: bool) -> tuple[TuningState, int, str]:
    """The screen of a climb that is not begun; see `show`."""
    can = capabilities(ascii_only)
    app = TuningApp(job, ascii_only=can.ascii_only, monochrome=can.monochrome, on_first_paint=job.start)
    status = hosted(app, job.stop)
    job.stop()
    job.join()
    if job.error is not None:
        raise job.error
    assert job.state is not None
    return job.state, status, job.saved
