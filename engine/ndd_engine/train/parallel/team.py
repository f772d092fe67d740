"""The ranks while they train: their votes, and the windows of all ranks, which rank 0 records."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ndd_engine.measure.clock import PhaseClock
from ndd_engine.measure.ranks import FIGURES, RanksFold
from ndd_engine.record.events import Event, FunctionsEvent, MarkEvent, WindowEvent
from ndd_engine.run.control import Control
from ndd_engine.text import printable

from .agreement import Decision, SharedControl, Votes
from .calls import Calls
from .profiles import Places
from .spans import WindowSpans, step_spans
from .world import World

_AT = {name: index for index, name in enumerate(FIGURES)}
# The last loss, and whether there is one, follow the figures.
_LAST_LOSS, _HAS_LOSS = len(FIGURES), len(FIGURES) + 1
Put = Callable[[Event], None]
# Votes are as frequent as windows, within these bounds.
MOST_OFTEN_S, LEAST_OFTEN_S = 0.25, 1.0


class Team:
    """What a loop of several ranks asks beside a loop of one.

    control: the requests that all ranks have agreed on. put: records events; windows wait for the figures of the other
    ranks. wants_end: whether this rank wants training to end early; early: the rank that does, when all know it.
    hidden_ns: see Strategy. bad: what is not finite on this rank. voted: called after each vote of a pause.
    """

    def __init__(
        self, world: World, own: Control, put: Put, clock: PhaseClock, strategy: str, window_s: float
    ) -> None:
        self.world, self.clock = world, clock
        self._every_s = min(max(window_s, MOST_OFTEN_S), LEAST_OFTEN_S)
        self.votes = Votes(world.control, world.rank, self._every_s)
        self.calls = Calls(world.store, world.rank, world.size)
        self.control = SharedControl(own, self._agree_in_pause)
        self.wants_end: Callable[[], bool] = lambda: False
        self.early: int | None = None
        self.voted: Callable[[], None] = lambda: None
        self.hidden_ns: Callable[[], float | None] = lambda: None
        self.bad: str | None = None
        self._bad_rank: int | None = None
        self._put, self._window_ns = put, int(window_s * 1e9)
        self._fold = RanksFold(strategy, world.hosts) if world.place.first else None
        self._places = Places(world.notes, world.rank)
        self._held: list[WindowEvent] = []
        self._figures = [0.0] * (len(FIGURES) + 2)
        # Sum and number of the losses that no recorded window has yet.
        self._losses = 0.0, 0.0
        self._flying: tuple[Tensor, list[Tensor] | None, Any] | None = None
        self._flying_held: list[WindowEvent] = []
        self._least = self._most = 0.0
        self._flying_bounds = (0.0, 0.0)
        self._cpu_ns = time.process_time_ns()
        self._process = psutil.Process()
        self._step_spans, self._window_spans = step_spans(clock), WindowSpans()
        self._step, self._called = 0, False
        # What votes ask the next turn to do; and whether a window ended since the last turn.
        self._kept: Mapping[str, int] = {}
        self._settled = False

    def begin(self, step: int) -> None:
        """Training begins after so many steps."""
        self._step = step
        self.votes.begin(step)
        self.calls.start(step)
        self._cpu_ns = time.process_time_ns()

    def end(self) -> None:
        """Training has ended, or failed."""
        self.calls.stop()

    # Each step.

    def after_step(self, step: int, counts: bool) -> bool:
        """Note the step; returns whether all ranks vote now. counts: whether its times are compared with others."""
        self._step = step
        if counts:
            self._step_spans.step(step)
        if self._hurries():
            self.calls.call()
        self._called = self.calls.after_step(step)
        return self._called or step >= self.votes.next

    def _hurries(self) -> bool:
        """Whether this rank cannot wait for the next regular vote."""
        if self.control.unheard or (self.bad is not None and self._bad_rank is None):
            return True
        # Steps that have become slow put off the next vote.
        late = self.clock.window_ns >= 2 * max(self._window_ns, self._every_s * 1e9)
        return late or (self.early is None and self.wants_end())

    def turn(self, profile: bool) -> Mapping[str, int]:
        """All ranks vote. Returns what all of them do now, with a rank that asked for it.

        "window": end the window, and call `cut`. "profile": profile the next step.
        """
        self._arrived()
        decision = self.votes.read()
        if decision is not None:
            self._keep(decision)
        asks = self._asks() | {"profile": profile}
        if self._called:
            if decision is not None:
                self._take(decision, pauses=False)
            asks["window"] = self.clock.window_ns >= self._window_ns
            decision = self._vote_now(asks)
            self._keep(decision)
            self.votes.continues(self._step, decision.gap)
        asked, self._kept, self._settled = self._kept, {}, False
        if not self._called:
            gap = decision.gap if decision is not None else self.votes.gap
            # The window that ends in this turn, if that was asked for, ends at the step nearest to its length.
            lasted_ns = 0 if "window" in asked else self.clock.window_ns
            next_ns = 1e9 * self.votes.since_s * gap / self.votes.gap
            asks["window"] = lasted_ns + 1.5 * next_ns >= self._window_ns
            self.votes.cast(self._step, asks, self._step_spans.voting(self.votes.place), gap)
            if decision is not None:
                self._take(decision)
        self._step_spans.voted()
        return asked

    def agree(self) -> None:
        """Between steps, where all ranks are: wait for all of them, and take over what they ask for.

        What the vote in flight asks for at the next turn is kept until then.
        """
        if (flying := self.votes.read()) is not None:
            self._take(flying, pauses=False)  # cast before a pause that lasts
            self._keep(flying)
        self._vote_now(self._asks())
        self.votes.paused()

    def _agree_in_pause(self) -> None:
        self.agree()
        self.voted()

    def _vote_now(self, asks: Mapping[str, bool]) -> Decision:
        decision = self.votes.now(self._step, asks, self._step_spans.voting(self.votes.place))
        self._take(decision)
        return decision

    def _keep(self, decision: Decision) -> None:
        asked = {**self._kept, **decision.asked}
        if self._settled:
            asked.pop("window", None)
        self._kept = asked

    def _asks(self) -> dict[str, bool]:
        return self.control.asks() | {"early": self.wants_end(), "not_finite": self.bad is not None}

    def _take(self, decision: Decision, pauses: bool = True) -> None:
        self._least += decision.least_wait_ns
        self._most += decision.most_own_ns
        if "early" in decision.asked:
            self.early = decision.asked["early"]
        self._bad_rank = decision.asked.get("not_finite", self._bad_rank)
        self.control.obey(decision, pauses)

    def note_bad(self, step: int, text: str) -> None:
        """Something of a step is not finite on this rank: all ranks have to end after the same step."""
        if self.bad is None:
            self.bad = text
            self.world.notes.put(f"bad/{self.world.rank}", json.dumps([step, text]))

    @property
    def agreed_bad(self) -> str | None:
        """What is not finite, when all ranks know it: on rank 0 that of the rank that found it first."""
        if self._bad_rank is None:
            return None
        ranks = range(self.world.size) if self.world.place.first else (self._bad_rank,)
        found = [(*json.loads(text), rank) for rank in ranks if (text := self.world.notes.get(f"bad/{rank}"))]
        if not found:
            return self.bad or f"rank {self._bad_rank} has a loss or a parameter that is not finite"
        _step, text, rank = min(found)
        return text if rank == self.world.rank else f"rank {rank}: {text}"

    # Windows.

    def put(self, event: Event) -> None:
        """Record an event; a window waits for the other ranks."""
        if isinstance(event, WindowEvent):
            self._held.append(event)
            if not event.profiled:
                self._add(event)
        else:
            if isinstance(event, FunctionsEvent):
                self._places.tell(event)
            self._put(event)

    def _add(self, window: WindowEvent) -> None:
        figures = self._figures
        for phase, (work, wait) in self._window_spans.of(window).items():
            figures[_AT[phase]] += work
            figures[_AT["wait"]] += wait
        figures[_AT["wall"]] += window.wall_ns
        figures[_AT["steps"]] += window.steps
        if window.loss is not None:
            figures[_AT["loss_sum"]] += window.loss * max(window.steps, 1)
            figures[_AT["loss_count"]] += max(window.steps, 1)
        if window.last_loss is not None:
            figures[_LAST_LOSS], figures[_HAS_LOSS] = window.last_loss[1], 1.0

    def cut(self) -> None:
        """After all ranks ended a window: send its figures to rank 0, which records it when they have arrived."""
        self._arrived()
        figures, self._figures = self._figures, [0.0] * (len(FIGURES) + 2)
        now = time.process_time_ns()
        figures[_AT["cpu"]], self._cpu_ns = float(now - self._cpu_ns), now
        hidden = self.hidden_ns()
        figures[_AT["hidden"]] = -1.0 if hidden is None else hidden * figures[_AT["steps"]]
        with contextlib.suppress(psutil.Error):
            figures[_AT["rss"]] = float(self._process.memory_info().rss)
        if self.world.device.type == "cuda":
            figures[_AT["allocated"]] = float(torch.cuda.memory_allocated(self.world.device))
        mine = torch.tensor(figures, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.world.size)] if self.world.place.first else None
        work = dist.gather(mine, every, dst=0, group=self.world.control, async_op=True)
        self._flying = mine, every, work
        self._flying_held, self._held = self._held, []
        self._flying_bounds = self._least, self._most
        self._least = self._most = 0.0

    def settle(self) -> None:
        """As `cut`, and wait until it is recorded. Where all ranks are at the same place."""
        self.cut()
        self._settled = True
        self._kept = {name: rank for name, rank in self._kept.items() if name != "window"}
        self._arrived()

    def give_up(self) -> None:
        """After an error: record the windows that wait, without the other ranks."""
        for window in (*self._flying_held, *self._held):
            self._put(window)
        self._flying_held, self._held = [], []

    def _arrived(self) -> None:
        if self._flying is None:
            return
        (_mine, every, work), self._flying = self._flying, None
        work.wait()
        held, self._flying_held = self._flying_held, []
        if every is None or self._fold is None:
            for window in held:
                self._put(window)
            return
        rows = [row.tolist() for row in every]
        # Losses of a GPU arrive later than their steps: in other windows than those of another rank, or in none.
        total, count = self._losses
        total += sum(row[_AT["loss_sum"]] for row in rows)
        count += sum(row[_AT["loss_count"]] for row in rows)
        last = [row[_LAST_LOSS] for row in rows if row[_HAS_LOSS]]
        used = False
        for window in held:
            if window.loss is not None and count:
                step, mine = window.last_loss if window.last_loss is not None else (window.step, window.loss)
                found = sum(last) / len(last) if last else mine
                window, used = replace(window, loss=total / count, last_loss=(step, found)), True
            self._put(window)
        self._losses = (0.0, 0.0) if used else (total, count)
        if not held or not sum(row[_AT["steps"]] for row in rows):
            return
        try:
            figures = [row[: len(FIGURES)] for row in rows]
            self._put(self._fold.window(held[-1].step, figures, *self._flying_bounds, self._places.of))
        except Exception as error:  # noqa: BLE001  what is shown must not end training
            self._fold = None
            text = f"cannot compare the ranks: {type(error).__name__}: {printable(str(error))}"
            self._put(MarkEvent("warning", held[-1].step, text))
