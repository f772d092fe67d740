"""One side of a trial, seen from the trial. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildProcess, Json, Tick

from .side import SideFacts

# The same for both sides, so that only the tried settings differ: the iteration order of sets of strings, and glibc's
# handling of freed memory, which otherwise depends on the heap layout.
SHARED_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class SideProcess(ChildProcess):
    """The process of one side or of both: `prepare` it, `train` runs, `close` it. Its methods raise ChildError.

    spec: the configuration, see Side; with "change", that of the candidate in the same process. both: facts of
    each of its sides; facts: of the first. place: where its temporary folder is created; None: the system's.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        place: Path | None = None,
        environment: Mapping[str, str] = SHARED_ENVIRONMENT,
    ) -> None:
        super().__init__("ndd_engine.trial.side", place, environment)
        self.spec = spec
        self.facts = SideFacts()
        self.both = [self.facts]

    def choose(self, tick: Tick) -> str:
        """The configuration as TOML with its size chosen and its paths made absolute."""
        return str(self.ask({"do": "choose", **self.spec}, None, tick)["config"])

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Prepare the run up to its first step."""
        self._know(self.ask({"do": "prepare", **self.spec}, limit_s, tick)["ready"])

    def train(
        self,
        steps: int,
        limit_s: float,
        tick: Tick,
        *,
        lead: int = 1,
        until_s: float | None = None,
        least: int = 1,
        within: bool = False,
        index: int = 0,
    ) -> tuple[float, int]:
        """(seconds, steps) of a run; with until_s it may end before `steps`, but not before `least`.

        index: the side, of a process with both.
        """
        command = {"do": "train", "steps": steps, "lead": lead, "until_s": until_s, "least": least}
        answer = self.ask({**command, "within": within, "side": index}, limit_s, tick)
        return float(answer["seconds"]), int(answer["steps"])

    def learn(self, tick: Tick) -> None:
        """Update `facts`."""
        self._know(self.ask({"do": "facts"}, 60.0, tick))

    def _know(self, body: Json) -> None:
        self.both = [SideFacts(**facts) for facts in body.get("sides", [body])]
        self.facts = self.both[0]
