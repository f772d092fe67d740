"""Measures one value of a claim, in a trial or in observed runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ndd_engine.errors import NddError
from ndd_engine.record.events import TrialEvent, WindowEvent
from ndd_engine.record.ranks import ASIDES
from ndd_engine.text import duration, number

from .claims_table import Claim, Part, Variant
from .confirm import joined_trials
from .history import History
from .outcome import breaks_even, startup_s
from .paired import Estimate, estimate
from .recorded import Recorded, host_ns_of
from .replicates import Usual
from .request import Base, Measure, Progress, TrialRequest
from .series import Interval, Stretch, rate, ratio, spread

Watch = Callable[[str, Sequence[str], float, threading.Event], Recorded | None]

# Maximum number of trials of one change.
MOST_TRIALS = 3


class NotMeasuredError(Exception):
    """There is no measurement; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A measured value, with an interval if there is one. note: further information for the reader.

    depends: whether the answer changes under a condition that the note names.
    """

    value: Interval
    note: str = ""
    depends: bool = False


@dataclass
class Measurer:
    """Measures the parts of a claim; a measurement that they share is made once. budget_s: of each measurement."""

    claim: Claim
    measure: Measure
    watch: Watch
    budget_s: float
    stop: threading.Event
    tell: Callable[[str, Progress | None], None]
    _trials: dict[Variant, list[TrialEvent]] = field(default_factory=dict)
    _runs: dict[tuple[tuple[str, ...], int], Recorded] = field(default_factory=dict)

    def part(self, part: Part, variant: Variant) -> Found:
        """Measure a part. Raises NotMeasuredError."""
        kinds: dict[str, Callable[[Part, Variant], Found]] = {
            "speed": self._speed, "epoch": self._epoch, "start": self._start, "memory": self._memory,
            "phase": self._phase, "evaluation": self._evaluation, "frequency": self._frequency, "share": self._share,
        }  # fmt: skip
        try:
            return kinds[part.kind](part, variant)
        except NddError as error:
            raise NotMeasuredError(" ".join(str(error).split())) from None

    def again(self, part: Part, variant: Variant) -> Found | None:
        """The value after one more trial, if the previous ones left enough of the budget; else None.

        A trial ends as soon as a difference is clear, which may be before its size is.
        """
        done = self._done(variant)
        left = self.budget_s - sum(trial.seconds for trial in done)
        if not done or self.stop.is_set() or len(done) >= MOST_TRIALS or left < done[-1].seconds:
            return None
        self._one_more(variant, left)
        return self.part(part, variant)

    # Trials.

    def _done(self, variant: Variant) -> list[TrialEvent]:
        """The trials of a change, however its variants are described."""
        return self._trials.setdefault(Variant(variant.base, variant.change), [])

    def _trial(self, variant: Variant) -> TrialEvent:
        done = self._done(variant)
        if not done:
            self._one_more(variant, self.budget_s)
        for trial in done:
            if trial.verdict in ("failed", "out of memory", "stopped"):
                raise NotMeasuredError(trial.text)
            if trial.in_effect is False:
                raise NotMeasuredError(f"not in effect: {trial.not_in_effect}")
        return joined_trials(done)

    def _one_more(self, variant: Variant, budget_s: float) -> None:
        base = Base(f"{self.claim.id} baseline", None, self.claim.workload, variant.base)
        # One process cannot tell the memory and the startup of one side from those of the other.
        restarts = any(part.kind in ("memory", "start") for part in self.claim.parts)
        request = TrialRequest(base, variant.change, budget_s, restarts=restarts)
        trial = self.measure(request, lambda progress: self.tell("", progress), self.stop)
        self._done(variant).append(trial)

    def _speed(self, part: Part, variant: Variant) -> Found:
        return Found(_interval(self._trial(variant)))

    def _epoch(self, part: Part, variant: Variant) -> Found:
        trial = self._trial(variant)
        found = _interval(trial)
        before, after = (
            side.get("items_per_step", 0) * side.get("steps_per_epoch", 0)
            for side in (trial.base, trial.change)
        )
        if not before or not after:
            raise NotMeasuredError("the number of items per epoch is unknown")
        return Found(
            found.map(lambda speed: speed * before / after),
            f"{number(before)} and {number(after)} items per epoch",
        )

    def _start(self, part: Part, variant: Variant) -> Found:
        """The first steps including the startup, computed from the trial's measurements."""
        trial = self._trial(variant)
        found = _interval(trial)
        base, change = trial.base, trial.change
        if any(side.get(key) is None for side in (base, change) for key in ("prepare_s", "step_s")):
            raise NotMeasuredError("the startup time is unknown")
        extra = max(startup_s(change) - startup_s(base), 0.0)
        steps_s = part.steps * base["step_s"]
        note = f"over {part.steps} steps plus {duration(extra)} of additional startup; {found.ratio:.3g}x per step"
        if trial.break_even_steps:
            note += f", {breaks_even(trial.break_even_steps)}"
        over = found.map(lambda speed: float(steps_s / (extra + steps_s / speed)))
        return Found(over, note, depends=bool(trial.break_even_steps))

    def _memory(self, part: Part, variant: Variant) -> Found:
        trial = self._trial(variant)
        before, after = trial.base.get("peak_bytes"), trial.change.get("peak_bytes")
        if not before or after is None:
            raise NotMeasuredError("the peak memory is unknown")
        pairs = list(zip(trial.base.get("peaks", []), trial.change.get("peaks", []), strict=False))
        found = estimate([math.log(candidate / base) for base, candidate in pairs if base and candidate])
        if found is None:
            return Found(Interval.exact(after / before), "from one pair of processes")
        return Found(_of(found), f"from {found.blocks} pairs of processes")

    # Observed runs.

    def _run(self, sets: tuple[str, ...], share: float, turn: int = 0) -> Recorded:
        """A run over `share` of the budget. turn: distinguishes runs of the same settings."""
        if (sets, turn) not in self._runs:
            self.tell("observing a run", None)
            run = self.watch(self.claim.workload, sets, self.budget_s * share, self.stop)
            if run is None:
                raise NotMeasuredError("stopped before it was measured")
            self._runs[sets, turn] = run
        return self._runs[sets, turn]

    def _sides(self, variant: Variant, read: Callable[[Recorded], list[Stretch]], what: str) -> Found:
        """Candidate over baseline, from runs in the order A B B A."""
        stretches: tuple[list[Stretch], list[Stretch]] = ([], [])
        for turn, side in enumerate((0, 1, 1, 0)):
            sets = variant.base if side == 0 else (*variant.base, *variant.change)
            stretches[side].extend(read(self._run(sets, 0.25, turn)))
        if not all(stretches):
            raise NotMeasuredError(f"no {what} within {duration(self.budget_s / 4)}")
        usual = History().usual(self._run(variant.base, 0.25).run.device_name)
        # The interval of the windows lacks what the two pairs of processes differ by.
        return Found(ratio(rate(stretches[1]), rate(stretches[0]), Usual(usual.variance / 2, usual.df)))

    def _phase(self, part: Part, variant: Variant) -> Found:
        def read(run: Recorded) -> list[Stretch]:
            return [found for window in run.windows if (found := _of_phase(window, part.phase)) is not None]

        return self._sides(variant, read, part.phase)

    def _evaluation(self, part: Part, variant: Variant) -> Found:
        def read(run: Recorded) -> list[Stretch]:
            return [Stretch(1, seconds * 1e9) for seconds in _evaluations(run)[1:]]  # the first is a warm-up

        return self._sides(variant, read, "evaluation after the first")

    def _frequency(self, part: Part, variant: Variant) -> Found:
        run = self._run(variant.base, 1.0)
        done = _evaluations(run)
        if not done:
            raise NotMeasuredError(f"no evaluation within {duration(self.budget_s)}")
        step_s = run.run.items_per_step / run.rate.value
        steps_s = part.steps * step_s

        def over_half(evaluation_s: float) -> float:
            return (steps_s + evaluation_s) / (steps_s + evaluation_s / 2)

        found = estimate([math.log(seconds) for seconds in done])
        evaluation = Interval(done[0]) if found is None else _of(found)
        note = f"computed from {duration(step_s)} per step and {duration(evaluation.ratio)} per evaluation"
        return Found(evaluation.map(over_half), note)

    def _share(self, part: Part, variant: Variant) -> Found:
        run = self._run(variant.base, 1.0)
        if part.phase == "idle":
            idle = run.snapshot.idle
            if idle.share is None:
                raise NotMeasuredError(f"the idle share is unknown: {idle.reason}")
            return Found(Interval.exact(idle.share), f"method: {idle.method}")
        on_gpu = any(_device_ns(window, part.phase) is not None for window in run.windows)
        shares = [
            found for window in run.windows if (found := _share_of(window, part.phase, on_gpu)) is not None
        ]
        if not shares or not any(part.items for part in shares):
            raise NotMeasuredError(f"the phase {part.phase} did not occur")
        share = spread(rate(shares)).map(lambda value: value * 1e-9)
        return Found(share, f"by {'GPU' if on_gpu else 'host'} clock")


def _evaluations(run: Recorded) -> list[float]:
    return [item.seconds for item in run.snapshot.evaluations if item.seconds]


def _of(found: Estimate) -> Interval:
    return Interval(found.ratio, found.low, found.high)


def _interval(trial: TrialEvent) -> Interval:
    if trial.ratio is None:
        raise NotMeasuredError(trial.text or "the trial has no ratio")
    return Interval(trial.ratio, trial.low, trial.high)


def _device_ns(window: WindowEvent, phase: str) -> float | None:
    found = window.phases.get(phase, {}).get("device_ns")
    return None if found is None else float(found)


def _of_phase(window: WindowEvent, phase: str) -> Stretch | None:
    """Steps and their time in a phase, by the GPU clock if available."""
    device = _device_ns(window, phase)
    if device and window.device_steps:
        return Stretch(window.device_steps, device * window.device_steps)
    host = host_ns_of(window, phase)
    return Stretch(window.steps, host) if host and window.steps else None


def _share_of(window: WindowEvent, phase: str, on_gpu: bool) -> Stretch | None:
    """A phase's time as `items` of the step time, without evaluations and checkpoints."""
    whole = {name: body for name, body in window.phases.items() if "/" not in name and name not in ASIDES}
    if on_gpu:
        times = [body["device_ns"] for body in whole.values() if body.get("device_ns") is not None]
        part = _device_ns(window, phase)
        return None if part is None or not sum(times) else Stretch(part, sum(times))
    total = sum(body["host_ns"] for body in whole.values())
    return Stretch(host_ns_of(window, phase), total) if total and window.steps else None
