"""Watches the processes of a run from outside: progress, the ends of their children, and open descriptors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ndd_engine.hardware.process_state import children_of, command_of, state_of
from ndd_engine.record.events import Event

from .child_processes import Children
from .descriptors import Descriptors
from .spy import Frame
from .stalls import MOST_MAINS, Stalls, Subject, Untold

_LAUNCHERS = re.compile(
    r"(^|/)(torchrun|accelerate|deepspeed|lightning)$|^torch\.distributed\.|^accelerate\.commands"
)


class ProcessWatch:
    """stack_of, ignored: see Stalls. where: see Descriptors. Never raises."""

    def __init__(
        self,
        stack_of: Callable[[Subject], Sequence[Frame] | None] = lambda _: None,
        ignored: Callable[[], frozenset[int]] = frozenset,
        where: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.children = Children()
        self.descriptors = Descriptors(where)
        self._stalls = Stalls(stack_of=stack_of, ignored=ignored)

    def look(self, subjects: Sequence[Subject], names: Mapping[int, str] | None = None) -> Iterator[Event]:
        """What is new. subjects: the processes that are to make progress. names: of them, such as "rank 1"."""
        children = self.children
        if subjects:  # else they are paused, or asked to end: so are their children
            yield from children.look(subjects)
        if subjects and (event := self.descriptors.look(subjects[0].pid, subjects[0].steps)) is not None:
            yield event
        yield from self._stalls.look(subjects, children.deaths, {**children.names, **(names or {})})

    def close(self) -> None:
        """Watch no more."""
        self.children.close()


def untold(root: int) -> list[Untold]:
    """The Python programs among a process and its descendants, without launchers, helpers and forked workers."""
    found: list[Untold] = []
    commands: dict[int, tuple[str, ...]] = {}
    for pid in (root, *children_of(root)):
        command = commands[pid] = command_of(pid)
        state = state_of(pid)
        if state is None or not command or "python" not in command[0].rpartition("/")[2]:
            continue
        forked = commands.get(state.parent) == command
        helps = any("multiprocessing" in word or "_inductor" in word for word in command)
        if not forked and not helps and not any(_LAUNCHERS.search(word) for word in command[1:4]):
            found.append(Untold(pid))
    return found[:MOST_MAINS]
