"""Folds events into the state of a run and returns it as a Snapshot, for live, attached and replayed runs.

The state has a bounded size: it is written to the log as a FoldEvent, so that long logs open by reading their end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .across import across, brief
from .derive import (
    core_use,
    headroom,
    idle,
    memory_bytes,
    phase_shares,
    setting_text,
    throughput,
)
from .events import (
    BaselineEvent,
    EndEvent,
    Event,
    FunctionsEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    RanksEvent,
    RunEvent,
    SampleEvent,
    ScalarsEvent,
    SettingEvent,
    StacksEvent,
    StageEvent,
    TextsEvent,
    TrialEvent,
    WindowEvent,
    WorkEvent,
    finite,
)
from .shared import shares_across
from .snapshot import Evaluation, Snapshot, TimedMark, TimeLeft, Totals
from .timeleft import Aside, time_left
from .trend import Trend

# Windows that the current rates and shares are computed from.
RECENT_WINDOWS = 12
# The first window contains startup costs (loader workers, caches); it is dropped after this many windows.
STARTED_WINDOWS = 4
KEPT_MARKS = 60
KEPT_EVALUATIONS = 60
KEPT_SETTINGS = 80
KEPT_TRIALS = 20
KEPT_SCALARS = 12
RECENT_SAMPLES = 12
# Samples of a busy GPU that show its usual clock: about the first two minutes.
FIRST_CLOCKS = 60


class RunState:
    """The state of a run, folded from its events."""

    def __init__(self) -> None:
        self.run: RunEvent | None = None
        self.status = "preparing"
        self.stage = ""
        self.end: EndEvent | None = None
        self.started_t: float | None = None
        self.preparing_t: float | None = None
        self.t: float | None = None
        self.step = self.epoch = self.epoch_step = self.items = self.tokens = self.wall_ns = 0
        self.evaluating, self.saving = Aside(), Aside()  # for the time left
        self.recent: deque[WindowEvent] = deque(maxlen=RECENT_WINDOWS)
        self.loss: float | None = None
        self.lr: float | None = None
        self.grad_norm: float | None = None
        self.loss_scale: float | None = None
        self.evaluations: deque[Evaluation] = deque(maxlen=KEPT_EVALUATIONS)
        self.best: Evaluation | None = None
        self.lower_is_better = True
        self.checkpoint: TimedMark | None = None
        self.sample: SampleEvent | None = None
        self.memory: MemoryEvent | None = None
        self.settings: dict[str, SettingEvent] = {}
        self.work: WorkEvent | None = None
        self.loader: LoaderEvent | None = None
        self.baseline: BaselineEvent | None = None
        self.kernels: KernelsEvent | None = None
        self.stacks: StacksEvent | None = None
        self.samples: deque[SampleEvent] = deque(maxlen=RECENT_SAMPLES)
        # SM clocks in MHz of the first samples in which the GPU was busy.
        self.first_clocks: list[int] = []
        self.totals = asdict(Totals())
        self.trials: deque[TrialEvent] = deque(maxlen=KEPT_TRIALS)
        self.losses = Trend()
        self.rates = Trend()
        self.memories = Trend()
        self.heaps = Trend()
        self.marks: deque[TimedMark] = deque(maxlen=KEPT_MARKS)
        self.warnings = 0
        self.scalars: dict[str, Trend] = {}
        self.texts: TextsEvent | None = None
        self.functions: FunctionsEvent | None = None
        # All but the newest without their rows.
        self.recent_ranks: deque[RanksEvent] = deque(maxlen=RECENT_WINDOWS)

    def fold(self, t: float, event: Event) -> None:
        """Apply an event."""
        self.t = t
        if isinstance(event, WindowEvent):
            self._window(event)
        elif isinstance(event, RanksEvent):
            self._ranks(event)
        elif isinstance(event, SampleEvent):
            self.sample = event
            self.samples.append(event)
            self._clock(event.gpu or {})
            self._memory(memory_bytes(self.run, event))
        elif isinstance(event, MemoryEvent):
            self.memory = event
            self._memory(event.allocated_bytes)
        elif isinstance(event, MarkEvent):
            self._mark(t, event)
        elif isinstance(event, SettingEvent):
            self._setting(t, event)
        elif isinstance(
            event, (WorkEvent, LoaderEvent, BaselineEvent, KernelsEvent, StacksEvent, FunctionsEvent)
        ):
            setattr(self, event.type, event)
        elif isinstance(event, TrialEvent):
            self.trials.append(event)
        elif isinstance(event, ScalarsEvent):
            self._scalars(event)
        elif isinstance(event, TextsEvent):
            self.texts = event
        elif isinstance(event, StageEvent):
            self.stage = event.text
            if self.preparing_t is None or event.name == "resume":
                self.preparing_t = t
            if event.name == "resume":
                self.end = None
                self.status = "preparing"
                self.recent.clear()
                self.recent_ranks.clear()
                # The new process applies and verifies its settings again.
                self.settings.clear()
                self.work = self.loader = self.baseline = self.kernels = self.stacks = None
                self.functions = None
                self.totals = asdict(Totals())
                self.samples.clear()
                self.first_clocks.clear()
        elif isinstance(event, RunEvent):
            self._run(t, event)
        elif isinstance(event, EndEvent):
            self.end = event
            self.status = event.status
            self.step = max(self.step, event.step)

    @property
    def _trends(self) -> tuple[Trend, ...]:
        return self.losses, self.rates, self.memories, self.heaps, *self.scalars.values()

    def _run(self, t: float, event: RunEvent) -> None:
        self.started_t = self.started_t if self.started_t is not None else t
        self.run = event
        self.end = None
        self.status = "preparing"
        if event.resumed_step is not None:
            step = event.resumed_step
            self.step = step
            self.epoch, self.epoch_step = (
                divmod(step, event.steps_per_epoch) if event.steps_per_epoch else (0, step)
            )
            if event.resumed_epoch is not None:
                self.epoch = event.resumed_epoch
            self.items = step * event.items_per_step
            self.tokens = round(self.items * event.tokens_per_item)
            self.recent.clear()
            self.recent_ranks.clear()
            for trend in self._trends:
                trend.cut(step)
            if self.texts is not None and self.texts.step > step:
                self.texts = None
            self.evaluating.resume(step)
            self.saving.resume(step)
            while self.evaluations and self.evaluations[-1].step > step:
                self.evaluations.pop()
            if self.best is not None and self.best.step > step:
                self.best = None
                for evaluation in self.evaluations:
                    self._judge(evaluation)

    def _window(self, event: WindowEvent) -> None:
        if self.status == "preparing":
            self.status = "training"
            self.stage = ""
        if event.step < self.step:  # steps of a script that were counted have turned out to be none
            for trend in self._trends:
                trend.cut(event.step)
        self.step, self.epoch, self.epoch_step = event.step, event.epoch, event.epoch_step
        self.items += event.items
        self.tokens += event.tokens
        self.wall_ns += event.wall_ns
        evaluate, checkpoint = _host_ns(event, "evaluate"), _host_ns(event, "checkpoint")
        self.evaluating.window(evaluate)
        self.saving.window(checkpoint)
        overhead = evaluate + checkpoint
        self._total(event)
        if event.heap_bytes is not None:
            self.heaps.add(event.step, float(event.heap_bytes))
        if event.profiled:
            pass  # the profiler made these steps slow
        elif self.recent and not event.steps and not self.recent[-1].steps:
            # Merge the windows of a long evaluation, so that windows with steps remain for the rates.
            self.recent.append(_joined(self.recent.pop(), event))
        else:
            self.recent.append(event)
        for name in ("loss", "lr", "grad_norm", "loss_scale"):
            value = getattr(event, name)
            if value is not None and math.isfinite(value):
                setattr(self, name, value)
                if name == "loss":
                    self.losses.add(event.step, value)
        if event.steps and event.wall_ns > overhead and not event.profiled:
            self.rates.add(event.step, event.items / ((event.wall_ns - overhead) * 1e-9))

    def _total(self, event: WindowEvent) -> None:
        if event.profiled:
            return
        totals = self.totals
        totals["wall_ns"] += event.wall_ns
        totals["steps"] += event.steps
        if event.steps:
            totals["windows"] += 1
            if totals["windows"] == STARTED_WINDOWS and len(self.recent) > 1:
                self.recent.popleft()
                if len(self.recent_ranks) > 1:
                    self.recent_ranks.popleft()
        phases = totals["phases"]
        for name, figures in event.phases.items():
            phases[name] = phases.get(name, 0) + figures["host_ns"]
        if event.gc_ns is not None:
            totals["gc_ns"] = (totals["gc_ns"] or 0) + event.gc_ns
            totals["gc_count"] += event.gc_count or 0
            totals["gc_max_ns"] = max(totals["gc_max_ns"], event.gc_max_ns or 0)

    def _ranks(self, event: RanksEvent) -> None:
        if not event.steps:
            return
        if self.recent_ranks:
            self.recent_ranks.append(brief(self.recent_ranks.pop()))
        self.recent_ranks.append(event)

    def _scalars(self, event: ScalarsEvent) -> None:
        for name, value in event.values.items():
            if value is None or not math.isfinite(value):
                continue
            if name in self.scalars or len(self.scalars) < KEPT_SCALARS:
                self.scalars.setdefault(name, Trend()).add(event.step, value)

    def _clock(self, gpu: Mapping[str, Any]) -> None:
        clock, util = gpu.get("sm_clock_mhz"), gpu.get("util_percent")
        if clock and util is not None and util >= 50 and len(self.first_clocks) < FIRST_CLOCKS:
            self.first_clocks.append(int(clock))

    def _memory(self, used: int | None) -> None:
        # Allocations during preparation are not growth.
        if used is not None and self.step > 0 and self.end is None:
            self.memories.add(self.step, float(used))

    def _setting(self, t: float, event: SettingEvent) -> None:
        before = self.settings.get(event.name)
        self.settings[event.name] = event
        if len(self.settings) > KEPT_SETTINGS:
            del self.settings[next(iter(self.settings))]
        if event.in_effect is False and (before is None or before.in_effect is not False):
            self._mark(t, MarkEvent("warning", event.step, setting_text(event), {"setting": event.name}))

    def _mark(self, t: float, mark: MarkEvent) -> None:
        if mark.kind == "status":
            self.status = str(mark.data.get("status", self.status))
            return
        if mark.kind == "evaluation":
            # NaN is null in the log: make a live run and its replay identical.
            mark = MarkEvent(mark.kind, mark.step, mark.text, finite(mark.data))
        timed = TimedMark(t, mark)
        self.marks.append(timed)
        if mark.kind in ("warning", "error"):
            self.warnings += 1
        elif mark.kind == "checkpoint":
            self.checkpoint = timed
            self.saving.mark(mark.step)
            self.totals["checkpoints"] += 1
        elif mark.kind in ("compile", "recompile"):
            self._compiled(mark)
        elif mark.kind == "evaluation":
            self._evaluation(mark)

    def _compiled(self, mark: MarkEvent) -> None:
        spent = round((mark.data.get("seconds") or 0.0) * 1e9)
        self.totals["compile_ns"] += spent
        if mark.kind == "recompile":
            self.totals["recompiles"] += mark.data.get("graphs", 1)
            self.totals["recompile_ns"] += spent

    def _evaluation(self, mark: MarkEvent) -> None:
        metrics = mark.data.get("metrics") or {}
        evaluation = Evaluation(mark.step, metrics, mark.data.get("seconds"))
        self.evaluations.append(evaluation)
        self.evaluating.mark(mark.step)
        self.totals["evaluations"] += 1
        self.lower_is_better = mark.data.get("better", "lower") == "lower"
        self._judge(evaluation)

    def _judge(self, evaluation: Evaluation) -> None:
        value = next(iter(evaluation.metrics.values()), None)
        held = next(iter(self.best.metrics.values()), None) if self.best else None
        if value is None:
            return
        if held is None or (value < held if self.lower_is_better else value > held):
            self.best = evaluation

    def snapshot(self, dropped_events: int = 0) -> Snapshot:
        """The state as one frozen value."""
        steps = micro = items = tokens = overhead = wall = 0
        for window in self.recent:
            steps += window.steps
            micro += window.micro_steps
            items += window.items
            tokens += window.tokens
            wall += window.wall_ns
            overhead += _host_ns(window, "evaluate") + _host_ns(window, "checkpoint")
        busy_s = (wall - overhead) * 1e-9
        step_ns = (wall - overhead) / steps if steps else None
        run = self.run
        left = TimeLeft()
        if run is not None and step_ns is not None:
            left = time_left(
                run, self.step, step_ns, self.evaluating, self.saving, ended=self.end is not None
            )
        ranks = across(self.recent_ranks)
        shares = phase_shares(self.recent)
        if ranks is not None:
            shares = shares_across(shares, self.recent, ranks, self.recent_ranks)
            step_ns = ranks.step_ns
        # Fields of the same name; those that are converted or derived follow.
        kept = {name: value for name, value in vars(self).items() if name in Snapshot.__dataclass_fields__}
        derived = {
            "reason": self.end.reason if self.end else "",
            "step_ns": step_ns,
            "steps_per_s": steps / busy_s if steps and busy_s > 0 else None,
            "items_per_s": items / busy_s if steps and busy_s > 0 else None,
            "tokens_per_s": tokens / busy_s if tokens and busy_s > 0 else None,
            "left": left,
            "elapsed_s": self.wall_ns * 1e-9,
            "phases": shares,
            "idle": idle(run, self.recent, shares, self.sample, self.kernels),
            "headroom": headroom(run, self.sample, self.memory),
            "evaluations": tuple(self.evaluations),
            "loss_trend": self.losses.view(),
            "rate_trend": self.rates.view(),
            "memory_trend": self.memories.view(),
            "heap_trend": self.heaps.view(),
            "marks": tuple(self.marks),
            "scalars": tuple((name, trend.view()) for name, trend in self.scalars.items()),
            "settings": tuple(self.settings.values()),
            "throughput": throughput(self.work, step_ns),
            "micro_steps": micro / steps if steps else None,
            "totals": Totals(**{**self.totals, "phases": dict(self.totals["phases"])}),
            "cores": core_use(run, self.samples),
            "usual_clock_mhz": usual_clock_mhz(self.first_clocks),
            "trials": tuple(self.trials),
            "dropped_events": dropped_events,
            "ranks": ranks,
        }
        return Snapshot(**kept | derived)


def usual_clock_mhz(first: Sequence[int]) -> int | None:
    """The SM clock of the first minutes; None before it is known."""
    return sorted(first)[len(first) // 2] if len(first) >= FIRST_CLOCKS // 4 else None


def _joined(first: WindowEvent, second: WindowEvent) -> WindowEvent:
    """Two windows without steps as one."""
    phases = dict(first.phases)
    for name, figures in second.phases.items():
        before = phases.get(name, {}).get("host_ns", 0)
        phases[name] = {**figures, "host_ns": before + figures["host_ns"]}
    return replace(second, wall_ns=first.wall_ns + second.wall_ns, phases=phases)


def _host_ns(window: WindowEvent, phase: str) -> int:
    found = window.phases.get(phase)
    return int(found["host_ns"]) if found else 0
