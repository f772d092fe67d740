"""Tells when steps have become slower, so that another close look at one shows what has grown meanwhile."""

from __future__ import annotations

# From this factor on, and windows of which the fastest one is the pace of the beginning.
SLOWER, FIRST_WINDOWS = 1.2, 4


class Slowing:
    """Hears the usual time of a step once a window."""

    def __init__(self) -> None:
        self._windows = self._looked_ns = 0

    def worth_a_look(self, step_ns: int) -> bool:
        """Whether steps are slower by SLOWER than at the last look, or than at the beginning. 0: unknown."""
        if not step_ns:
            return False
        self._windows += 1
        if self._windows <= FIRST_WINDOWS:
            self._looked_ns = min(self._looked_ns or step_ns, step_ns)
        elif step_ns > SLOWER * self._looked_ns:
            self._looked_ns = step_ns
            return True
        return False
