"""Estimates the remaining time of a run from its measured times of steps, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from .event import Count, Json
from .events import RunEvent
from .snapshot import TimeLeft


@dataclass(slots=True)
class Aside:
    """Number and total time of evaluations, or of checkpoints.

    One may span several windows; its time counts when its mark reports that it is done. count: done, with their time in
    total_ns. last_step: of the newest one. open_ns: time of one that is not done, or whose last window is missing.
    done: marks whose last window is missing.
    """

    count: Count = 0
    total_ns: Count = 0
    last_step: Count = 0
    open_ns: Count = 0
    done: Count = 0

    def window(self, host_ns: int) -> None:
        """Add the time in a window."""
        self.open_ns += host_ns
        if self.done and self.open_ns:
            self.count += self.done
            self.total_ns += self.open_ns
            self.open_ns = self.done = 0

    def mark(self, step: int) -> None:
        """One is done."""
        self.done += 1
        self.last_step = step

    def resume(self, step: int) -> None:
        """The run resumes from `step`, where none is due again; drop an unfinished one."""
        self.open_ns = self.done = 0
        self.last_step = step

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of one, None if none was measured."""
        return self.total_ns / self.count * 1e-9 if self.count else None


def time_left(
    run: RunEvent, step: int, step_ns: float, evaluations: Aside, checkpoints: Aside, ended: bool = False
) -> TimeLeft:
    """Remaining steps at `step_ns` each, and remaining evaluations and checkpoints at their mean measured time.

    ended: the run has ended; nothing that is due at `step` remains. Unknown if the run's length is.
    """
    if not run.total_steps:
        return TimeLeft()
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
    """Number of evaluations or checkpoints from `step` (if `last` was before it) to the end of the run.

    section: the [evaluate] or [checkpoint] section of the configuration.
    """
    total = run.total_steps
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    first = step if last == step else step - 1  # one may still be due at `step` itself
    found = sum(_multiples(period, first, total) for period in periods)
    both = lcm(*periods) if all(periods) else 0
    found -= _multiples(both, first, total)
    at_total = any(period and total % period == 0 for period in periods)
    if section.get("at_end") and not at_total and total > first:
        found += 1
    return found


def _by_the_clock(section: Json, run: RunEvent, step: int, every: int) -> int:
    """Additional checkpoints by every_minutes: one after `every` steps without any other checkpoint."""
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    remaining = max(run.total_steps - step, 0)
    period = min((period for period in periods if period), default=remaining)
    if not period:
        return 0
    first = min(period - step % period if any(periods) else remaining, remaining)
    whole, tail = divmod(remaining - first, period)
    return (first - 1) // every + whole * ((period - 1) // every) + max(tail - 1, 0) // every if first else 0


def _multiples(period: int, first: int, last: int) -> int:
    """Number of positive multiples of `period` above `first` and up to `last`."""
    return max(last // period - max(first, 0) // period, 0) if period > 0 else 0


def _section(run: RunEvent, name: str) -> Json:
    found = run.config.get(name) if isinstance(run.config, dict) else None
    return found if isinstance(found, dict) else {}


def _count(section: Json, key: str) -> int:
    value = section.get(key)
    return value if isinstance(value, int) and value > 0 else 0
