"""A side of a trial, seen from the trial: its process started, asked and ended. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildProcess, Tick

from .side import SideFacts

# Alike for both sides, so that nothing differs but the change: the order of sets of text, and how glibc's allocator
# treats freed memory: it otherwise gives it back and takes it again, more or less of it as the heap happens to lie.
ALIKE = {
    "PYTHONHASHSEED": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class SideProcess:
    """One side. Made, its process imports what it needs; `prepare` it, `train` blocks, `close` it.

    spec: which configuration, see Side. place: the folder that gets a temporary one for everything it writes; None:
    the system's. environment: for its process, alike for both sides of a trial. Every question raises ChildError where
    the side cannot go on.
    """

    def __init__(
        self, spec: Mapping[str, Any], place: Path | None = None, environment: Mapping[str, str] = ALIKE
    ) -> None:
        self.spec = spec
        self.facts = SideFacts()
        self._child = ChildProcess("ndd_engine.trial.side", place, environment)

    def choose(self, tick: Tick) -> str:
        """The configuration with its size chosen, as TOML, as it holds in any folder."""
        return str(self._child.ask({"do": "choose", **self.spec}, None, tick)["config"])

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Up to the first step."""
        self.facts = SideFacts(**self._child.ask({"do": "prepare", **self.spec}, limit_s, tick)["ready"])

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
    ) -> tuple[float, int]:
        """(seconds, steps) of a block; with until_s it may end before `steps`, and not before `least`."""
        command = {"do": "train", "steps": steps, "lead": lead, "until_s": until_s, "least": least}
        answer = self._child.ask({**command, "within": within}, limit_s, tick)
        return float(answer["seconds"]), int(answer["steps"])

    def learn(self, tick: Tick) -> None:
        """Bring `facts` up to date."""
        self.facts = SideFacts(**self._child.ask({"do": "facts"}, 60.0, tick))

    def close(self) -> None:
        """End the process and remove what it wrote; safe to call twice."""
        self._child.close()
