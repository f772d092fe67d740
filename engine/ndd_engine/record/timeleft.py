"""How long a run still takes, from its own measured times: steps, and the evaluations and checkpoints to come."""

from __future__ import annotations

from math import lcm

from .events import Json, RunEvent
from .snapshot import TimeLeft


class Aside:
    """What happens besides steps, of one kind: how often, and how long it took by the clock of the windows.

    One may go on over several windows; its time counts when it is done, which its mark says.
    """

    def __init__(self) -> None:
        self.count = 0  # done, with their time in total_ns
        self.total_ns = 0
        self.last_step = 0  # the newest one was at this step
        self._open_ns = 0  # time of one that is not done, or whose last window has not come yet
        self._done = 0  # marks whose last window has not come yet

    def window(self, host_ns: int) -> None:
        """A window with so much of it."""
        self._open_ns += host_ns
        if self._done and self._open_ns:
            self.count += self._done
            self.total_ns += self._open_ns
            self._open_ns = self._done = 0

    def mark(self, step: int) -> None:
        """One is done."""
        self._done += 1
        self.last_step = step

    def resume(self, step: int) -> None:
        """The run goes on from `step`, where nothing is due again; an unfinished one is over."""
        self._open_ns = self._done = 0
        self.last_step = step

    @property
    def mean_s(self) -> float | None:
        """Seconds of one, None while none was measured."""
        return self.total_ns / self.count * 1e-9 if self.count else None

    def to_list(self) -> list[int]:
        """For a fold event."""
        return [self.count, self.total_ns, self.last_step, self._open_ns, self._done]

    @classmethod
    def from_list(cls, body: list[int]) -> Aside:
        """The reverse of to_list. Raises ValueError when it is none."""
        aside = cls()
        aside.count, aside.total_ns, aside.last_step, aside._open_ns, aside._done = body
        return aside


def time_left(
    run: RunEvent, step: int, step_ns: float, evaluations: Aside, checkpoints: Aside, ended: bool = False
) -> TimeLeft:
    """Remaining steps at `step_ns` each, and what is due between here and the end at its mean measured time.

    ended: nothing that is due at `step` itself will still come.
    """
    steps_s = max(run.total_steps - step, 0) * step_ns * 1e-9
    evaluating, saving = _section(run, "evaluate"), _section(run, "checkpoint")
    evaluate = due(evaluating, run, step, step if ended else evaluations.last_step)
    save = due(saving, run, step, step if ended else checkpoints.last_step)
    seconds = steps_s + evaluate * (evaluations.mean_s or 0.0)
    minutes = saving.get("every_minutes")
    if isinstance(minutes, (int, float)) and minutes > 0:
        save += _by_the_clock(saving, run, step, max(int(minutes * 60e9 / max(step_ns, 1.0)), 1))
    seconds += save * (checkpoints.mean_s or 0.0)
    return TimeLeft(seconds, evaluate, evaluations.mean_s, save, checkpoints.mean_s)


def due(section: Json, run: RunEvent, step: int, last: int) -> int:
    """How often something comes from `step` (if its `last` was before) to the end of the run, by the configuration.

    section: "every_steps", "every_epochs" (0: never) and "at_end" of the configuration's [evaluate] or [checkpoint].
    """
    total = run.total_steps
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    first = step if last == step else step - 1  # at `step` itself it may still be to come
    found = sum(_multiples(period, first, total) for period in periods)
    both = lcm(*periods) if all(periods) else 0
    found -= _multiples(both, first, total)
    at_total = any(period and total % period == 0 for period in periods)
    if section.get("at_end") and not at_total and total > first:
        found += 1
    return found


def _by_the_clock(section: Json, run: RunEvent, step: int, every: int) -> int:
    """Checkpoints that a clock adds, one after `every` steps without any other: each starts the clock anew."""
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    remaining = max(run.total_steps - step, 0)
    period = min((period for period in periods if period), default=remaining)
    if not period:
        return 0
    first = min(period - step % period if any(periods) else remaining, remaining)
    whole, tail = divmod(remaining - first, period)
    return (first - 1) // every + whole * ((period - 1) // every) + max(tail - 1, 0) // every if first else 0


def _multiples(period: int, first: int, last: int) -> int:
    """Multiples of `period` above `first` (0 is none) and up to `last`."""
    return max(last // period - max(first, 0) // period, 0) if period > 0 else 0


def _section(run: RunEvent, name: str) -> Json:
    found = run.config.get(name) if isinstance(run.config, dict) else None
    return found if isinstance(found, dict) else {}


def _count(section: Json, key: str) -> int:
    value = section.get(key)
    return value if isinstance(value, int) and value > 0 else 0
