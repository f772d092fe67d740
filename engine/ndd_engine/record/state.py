"""Folds events into the state of a run and returns it as a Snapshot, for live, attached and replayed runs.

Its size is bounded: it is written to the record from time to time, so that long ones open by reading their end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from operator import gt, lt

from pydantic_core import from_json

from .event import (
    OVER,
    VERSION,
    Count,
    DeathEvent,
    DescriptorsEvent,
    Event,
    Figure,
    Flag,
    StallEvent,
    across,
    brief,
    line_of,
    writable,
)
from .events import (
    BaselineEvent,
    EndEvent,
    FunctionsEvent,
    HoldersEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    NotFiniteEvent,
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
    WorkersEvent,
    WorkEvent,
    checker,
)
from .figures import (
    Aside,
    core_use,
    death_text,
    headroom,
    idle,
    memory_bytes,
    on_gpu,
    phase_shares,
    setting_text,
    shares_across,
    throughput,
    time_left,
)
from .snapshot import Curve, Evaluation, Facts, NotFinite, Pace, Snapshot, TimedMark, TimeLeft, Totals

# Windows that the current rates and shares are computed from.
RECENT_WINDOWS = 12
# The first window contains startup costs (loader workers, caches); it is dropped after this many windows.
STARTED_WINDOWS = 4
KEPT_MARKS = 60
KEPT_EVALUATIONS = 60
KEPT_SETTINGS = 80
KEPT_TRIALS = 20
KEPT_SCALARS = 12
KEPT_DEATHS = 8
RECENT_SAMPLES = 12
# Samples of a busy GPU that show its usual clock: about the first two minutes.
FIRST_CLOCKS = 60
# Maximum number of points of a curve.
CAPACITY = 256


@dataclass(slots=True)
class Trend:
    """A curve of any length: means of consecutive values in at most CAPACITY points. When full, adjacent points merge.

    points: (step, mean of `stride` values). The last three are of the values that do not fill a point yet.
    """

    points: list[tuple[Count, Figure]] = field(default_factory=list)
    stride: Count = 1
    last_step: Count = 0
    sum: Figure = 0.0
    count: Count = 0

    def add(self, step: int, value: float) -> None:
        """Add a value at an optimizer step, which must not decrease."""
        self.sum += value
        self.count += 1
        self.last_step = step
        if self.count == self.stride:
            self.points.append((step, self.sum / self.count))
            self.sum, self.count = 0.0, 0
            if len(self.points) >= CAPACITY:
                pairs = zip(self.points[::2], self.points[1::2], strict=True)
                self.points = [(right[0], (left[1] + right[1]) / 2) for left, right in pairs]
                self.stride *= 2

    def cut(self, step: int) -> None:
        """Remove everything after a step: a resumed run repeats those steps."""
        self.points = [point for point in self.points if point[0] <= step]
        self.sum, self.count = 0.0, 0

    def view(self) -> Curve:
        """The points, including the incomplete last one."""
        return (*self.points, (self.last_step, self.sum / self.count)) if self.count else tuple(self.points)


@dataclass(slots=True)
class Levels:
    """How much memory training takes, and how much more evaluations and checkpoints.

    training: the most in use in windows without either. high: the most since the last window; peak: the highest peak
    that the system has reported. beside: "evaluate" or "checkpoint" if the newest window had one, whose peak may not be
    known yet; "" otherwise. rises: by what of these, the most by which one exceeded `training`, and what that was.
    """

    training: Figure = 0.0
    high: Figure = 0.0
    peak: Figure = 0.0
    beside: str = ""
    rises: dict[str, tuple[Figure, Figure]] = field(default_factory=dict)

    def used(self, now: float, peak: float) -> None:
        """Bytes in use, and their peak so far, which counts where it is a new one."""
        if peak > self.peak:
            self.peak, now = peak, max(now, peak)
        self.high = max(self.high, now)
        if self.beside:
            self._ended(self.beside)
        self.beside = ""

    def window(self, aside: str) -> None:
        """A window ends."""
        if aside:
            self._ended(aside)
        else:
            self.training = max(self.training, self.high)
        self.beside, self.high = aside, 0.0

    def _ended(self, aside: str) -> None:
        rise = self.high - self.training
        if self.training and rise > self.rises.get(aside, (0.0, 0.0))[0]:
            self.rises[aside] = rise, self.training
        self.high = 0.0


@dataclass(slots=True, kw_only=True)
class RunState(Facts):
    """The state of a run, folded from its events; all of it is written to the record.

    evaluating, saving: for the time left. recent: the newest windows; recent_ranks: the same of all ranks, all but the
    newest without their rows. first_clocks: SM clocks in MHz of the first samples in which the GPU was busy.
    own_trends: of the scalars that the user's own training code logged. overcome: the newest stall that has ended.
    """

    wall_ns: Count = 0
    evaluating: Aside = field(default_factory=Aside)
    saving: Aside = field(default_factory=Aside)
    recent: tuple[WindowEvent, ...] = ()
    recent_ranks: tuple[RanksEvent, ...] = ()
    samples: tuple[SampleEvent, ...] = ()
    first_clocks: list[Count] = field(default_factory=list)
    lower_is_better: Flag = True
    overcome: StallEvent | None = None
    losses: Trend = field(default_factory=Trend)
    rates: Trend = field(default_factory=Trend)
    memories: Trend = field(default_factory=Trend)
    gaps: Trend = field(default_factory=Trend)
    heaps: Trend = field(default_factory=Trend)
    free_heaps: Trend = field(default_factory=Trend)
    levels: Levels = field(default_factory=Levels)
    residents: Trend = field(default_factory=Trend)
    worker_memories: Trend = field(default_factory=Trend)
    worker_shares: Trend = field(default_factory=Trend)
    open_files: Trend = field(default_factory=Trend)
    own_trends: dict[str, Trend] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def to_line(self, t: float) -> str:
        """The state as a line of the record without newline; `from_line` restores an equal state."""
        return line_of("fold", t, {"state": self})

    @classmethod
    def from_line(cls, line: bytes | str) -> RunState:
        """The state from its line. Raises ValueError if it is damaged, or does not have exactly the present fields."""
        body = from_json(line, allow_inf_nan=False)
        state = body.get("state") if isinstance(body, dict) and body.get("v") == VERSION else None
        if not isinstance(state, dict) or state.keys() != {item.name for item in fields(cls)}:
            raise ValueError("not the state of a run")
        restored: RunState = checker(cls).validate_python(state)
        return restored

    def fold(self, t: float, event: Event) -> None:
        """Apply an event."""
        self.t = t
        match event:
            case WindowEvent():
                self._window(event)
            case RanksEvent():
                if event.steps:
                    before = (*self.recent_ranks[:-1], *map(brief, self.recent_ranks[-1:]))
                    self.recent_ranks = (*before, event)[-RECENT_WINDOWS:]
            case SampleEvent():
                self.sample = event
                self.samples = (*self.samples, event)[-RECENT_SAMPLES:]
                self._clock(event)
                self._host_memory(event)
            case MemoryEvent():
                self.memory = event
                self._memory(event.allocated_bytes)
                self._gap(event)
                self.levels.used(event.allocated_bytes, event.peak_allocated_bytes)
            case MarkEvent():
                self._mark(t, event)
            case SettingEvent():
                self._setting(t, event)
            case FunctionsEvent() if event.inside:
                self.asides = {**self.asides, event.inside: event}
            case (
                WorkEvent()
                | LoaderEvent()
                | BaselineEvent()
                | KernelsEvent()
                | StacksEvent()
                | FunctionsEvent()
                | TextsEvent()
                | WorkersEvent()
            ):
                setattr(self, event.type, event)
                if isinstance(event, FunctionsEvent) and self.first_functions is None:
                    self.first_functions = event
            case NotFiniteEvent():
                known_origin = self.not_finite.origin
                # Of several ranks, the others see only what the gradients of one of them have become.
                vague = known_origin is None or known_origin.what in ("", "gradient", "parameter")
                if vague or event.what == "input":
                    self.not_finite.origin = event
            case HoldersEvent() if event.inside:
                self.collected = event
            case HoldersEvent():
                self.looked = event
                if event.steps:
                    self.holders = event
            case TrialEvent():
                self.trials = (*self.trials, event)[-KEPT_TRIALS:]
            case ScalarsEvent():
                for name, value in event.values.items():
                    kept = name in self.own_trends or len(self.own_trends) < KEPT_SCALARS
                    if kept and value is not None and math.isfinite(value):
                        self.own_trends.setdefault(name, Trend()).add(event.step, value)
            case StallEvent():
                over = event.kind == OVER
                self.overcome = self.stall if over else None
                self.stall = None if over else event
                self._mark(t, MarkEvent("note" if over else "warning", event.step, event.text))
            case DeathEvent():
                self.deaths = (*self.deaths, event)[:KEPT_DEATHS]
                self._mark(t, MarkEvent("warning", event.step, death_text(event)))
            case DescriptorsEvent():
                self.descriptors = event
                self.open_files.add(event.step, float(event.open))
            case StageEvent():
                self._stage(t, event)
            case RunEvent():
                self._run(t, event)
            case EndEvent():
                self.end = event
                self.status = event.status
                self.step = max(self.step, event.step)
                if event.status == "failed" and self.overcome is not None and self.step <= self.overcome.step:
                    self.stall = self.overcome  # what ended it, ended the run as well

    def _stage(self, t: float, event: StageEvent) -> None:
        self.stage = event.text
        if self.preparing_t is None or event.name == "resume":
            self.preparing_t = t
        if event.name == "resume":
            self.end = None
            self.status = "preparing"
            self.recent, self.recent_ranks, self.samples = (), (), ()
            # The new process applies and verifies its settings again.
            self.settings = ()
            self.stall = self.overcome = self.descriptors = None
            self.deaths, self.open_files = (), Trend()
            self.work = self.loader = self.baseline = self.kernels = self.stacks = self.functions = None
            self.workers = None
            self.asides, self.first_functions = {}, None
            self.looked = self.holders = self.collected = None
            self.totals, self.pace, self.not_finite = Totals(), Pace(), NotFinite()
            self.levels = Levels()
            self.first_clocks.clear()

    @property
    def _host_trends(self) -> tuple[Trend, ...]:
        return self.residents, self.worker_memories, self.worker_shares

    def _cut(self, step: int) -> None:
        """Forget what the curves have after a step."""
        for trend in (
            self.losses,
            self.rates,
            self.memories,
            self.gaps,
            self.heaps,
            self.free_heaps,
            *self._host_trends,
            self.open_files,
            *self.own_trends.values(),
        ):
            trend.cut(step)
        self.pace.cut(step)
        if self.last_loss is not None and self.last_loss[0] > step:
            self.last_loss = None

    def _run(self, t: float, event: RunEvent) -> None:
        self.started_t = self.started_t if self.started_t is not None else t
        self.run = event
        self.end = None
        self.status = "preparing"
        if event.resumed_step is not None:
            step = event.resumed_step
            self.step = step
            self.epoch = step // event.steps_per_epoch if event.steps_per_epoch else 0
            if event.resumed_epoch is not None:
                self.epoch = event.resumed_epoch
            self.items = step * event.items_per_step
            self.tokens = round(self.items * event.tokens_per_item)
            self.recent, self.recent_ranks = (), ()
            self._cut(step)
            if self.texts is not None and self.texts.step > step:
                self.texts = None
            self.evaluating.resume(step)
            self.saving.resume(step)
            self.evaluations = tuple(each for each in self.evaluations if each.step <= step)
            if self.best is not None and self.best.step > step:
                self.best = None
                for evaluation in self.evaluations:
                    self._judge(evaluation)

    def _window(self, event: WindowEvent) -> None:
        if self.status == "preparing":
            self.status = "training"
            self.stage = ""
        if event.step < self.step:  # steps of a script that were counted have turned out to be none
            self._cut(event.step)
        self.step, self.epoch = event.step, event.epoch
        self.items += event.items
        self.tokens += event.tokens
        self.wall_ns += event.wall_ns
        evaluate, checkpoint = _host_ns(event, "evaluate"), _host_ns(event, "checkpoint")
        self.evaluating.window(evaluate, event.evaluations)
        self.saving.window(checkpoint, event.checkpoints)
        self.totals.evaluations += event.evaluations
        self.totals.checkpoints += event.checkpoints
        overhead = evaluate + checkpoint
        self.levels.window("evaluate" if evaluate else "checkpoint" if checkpoint else "")
        self._total(event)
        self._finite(event)
        self.pace.add(event, self.t or 0.0)
        if event.heap_bytes is not None:
            self.heaps.add(event.step, float(event.heap_bytes))
        if event.heap_free_bytes is not None:
            self.free_heaps.add(event.step, float(event.heap_free_bytes))
        if event.profiled:
            pass  # the profiler made these steps slow
        elif self.recent and not event.steps and not self.recent[-1].steps:
            # Merge the windows of a long evaluation, so that windows with steps remain for the rates.
            self.recent = (*self.recent[:-1], _joined(self.recent[-1], event))
        else:
            self.recent = (*self.recent, event)[-RECENT_WINDOWS:]
        for name in ("loss", "lr", "grad_norm", "loss_scale"):
            value = getattr(event, name)
            if value is not None and math.isfinite(value):
                setattr(self, name, value)
                if name == "loss":
                    self.losses.add(event.step, value)
        self.last_loss = event.last_loss or self.last_loss
        if event.steps and event.wall_ns > overhead and not event.profiled:
            self.rates.add(event.step, event.items / ((event.wall_ns - overhead) * 1e-9))

    def _total(self, event: WindowEvent) -> None:
        self.totals.kept_steps = max(self.totals.kept_steps, event.kept_steps)
        if event.profiled:
            return
        totals = self.totals
        totals.wall_ns += event.wall_ns
        totals.steps += event.steps
        totals.passes += event.passes
        if event.steps:
            totals.windows += 1
            if totals.windows == STARTED_WINDOWS and len(self.recent) > 1:
                self.recent = self.recent[1:]
                self.recent_ranks = self.recent_ranks[1:] or self.recent_ranks
        for name, figures in event.phases.items():
            totals.phases[name] = totals.phases.get(name, 0) + figures["host_ns"]
        for name, count in event.received.items():
            totals.received[name] = totals.received.get(name, 0) + count
        if event.gc_ns is not None:
            totals.gc_ns = (totals.gc_ns or 0) + event.gc_ns
            totals.gc_count += event.gc_count or 0
            totals.gc_max_ns = max(totals.gc_max_ns, event.gc_max_ns or 0)

    def _finite(self, event: WindowEvent) -> None:
        known = self.not_finite
        known.updates += event.steps
        if event.skipped and known.begun is None:
            begun = event.first_skipped
            known.begun = event.step - event.steps if begun is None else begun
        known.skipped += event.skipped
        known.since = event.skipping_since if event.steps else known.since
        known.loss = event.bad_loss
        if event.left_out:
            known.left_out += event.left_out * max(event.steps, 1) / max(event.timed_steps, 1)
            if known.left_out_since is None:
                known.left_out_since = event.step - event.steps
        if (scale := event.loss_scale) is not None:
            first, lowest = known.scales or (scale, scale)
            known.scales = first, min(lowest, scale)

    def _alive_sample(self) -> SampleEvent | None:
        """The newest sample in which the run used memory: the last one may be from after its end."""
        alive = (one for one in reversed(self.samples) if one.host.get("rss_bytes"))
        return self.sample if on_gpu(self.run) else next(alive, self.sample)

    def _clock(self, event: SampleEvent) -> None:
        gpu = event.gpu or {}
        clock, util = gpu.get("sm_clock_mhz"), gpu.get("util_percent")
        if clock and util is not None and util >= 50 and len(self.first_clocks) < FIRST_CLOCKS:
            self.first_clocks.append(int(clock))

    def _memory(self, used: int | None) -> None:
        # Allocations during preparation are not growth.
        if used is not None and self.step > 0 and self.end is None:
            self.memories.add(self.step, float(used))

    def _gap(self, event: MemoryEvent) -> None:
        """What the allocator of a GPU keeps beyond the most that was ever in use at a time."""
        if self.step > 0 and self.end is None:
            self.gaps.add(self.step, float(max(event.reserved_bytes - event.peak_allocated_bytes, 0)))

    def _host_memory(self, event: SampleEvent) -> None:
        keys = ("rss_bytes", "workers_private_bytes", "workers_shared_bytes")
        for trend, key in zip(self._host_trends, keys, strict=True):
            value = event.host.get(key)
            # Allocations during preparation are not growth; workers begin to copy with their first batch.
            known = self.step > 0 or trend is not self.residents
            # Without a new step, as while a process ends, nothing is growth per step.
            if (
                value is not None
                and self.end is None
                and known
                and (self.step > trend.last_step or not trend.points)
            ):
                trend.add(self.step, float(value))
        if (used := memory_bytes(self.run, event)) is not None and self.step > 0:
            self.levels.used(used, event.host.get("rss_peak_bytes") or 0.0)

    def _setting(self, t: float, event: SettingEvent) -> None:
        newest = {setting.name: setting for setting in self.settings}
        before = newest.get(event.name)
        newest[event.name] = event
        self.settings = tuple(newest.values())[-KEPT_SETTINGS:]
        if event.in_effect is False and (before is None or before.in_effect is not False):
            self._mark(t, MarkEvent("warning", event.step, setting_text(event), {"setting": event.name}))

    def _mark(self, t: float, mark: MarkEvent) -> None:
        if mark.kind == "status":
            self.status = str(mark.data.get("status", self.status))
            return
        if mark.kind == "evaluation":
            # NaN is null in the log: make a live run and its replay identical.
            mark = replace(mark, data=writable(mark.data))
        timed = TimedMark(t, mark)
        self.marks = (*self.marks, timed)[-KEPT_MARKS:]
        totals = self.totals
        match mark.kind:
            case "warning" | "error":
                self.warnings += 1
            case "checkpoint":
                self.checkpoint = timed
                self.saving.mark(mark.step)
                totals.checkpoints += 1
            case "compile" | "recompile":
                spent = round((mark.data.get("seconds") or 0.0) * 1e9)
                totals.compile_ns += spent
                if mark.kind == "recompile":
                    totals.recompiles += mark.data.get("graphs", 1)
                    totals.recompile_ns += spent
            case "evaluation":
                evaluation = Evaluation(mark.step, mark.data.get("metrics") or {}, mark.data.get("seconds"))
                self.evaluations = (*self.evaluations, evaluation)[-KEPT_EVALUATIONS:]
                if not self._counted:
                    self.evaluating.mark(mark.step)
                    totals.evaluations += 1
                self.lower_is_better = mark.data.get("better", "lower") == "lower"
                self._judge(evaluation)

    @property
    def _counted(self) -> bool:
        """Whether windows tell how many evaluations there were: of a script, only frameworks tell their values."""
        return self.run is not None and "script" in self.run.config

    def _judge(self, evaluation: Evaluation) -> None:
        value = next(iter(evaluation.metrics.values()), None)
        held = next(iter(self.best.metrics.values()), None) if self.best else None
        better = lt if self.lower_is_better else gt
        if value is not None and (held is None or better(value, held)):
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
        run, clocks = self.run, self.first_clocks
        cuda = on_gpu(run)
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
        facts = {item.name: getattr(self, item.name) for item in fields(Facts)}
        totals = self.totals
        facts["totals"] = replace(totals, phases=dict(totals.phases), received=dict(totals.received))
        facts["not_finite"] = replace(self.not_finite)
        return Snapshot(
            **facts,
            reason=self.end.reason if self.end else "",
            step_ns=step_ns,
            steps_per_s=steps / busy_s if steps and busy_s > 0 else None,
            items_per_s=items / busy_s if steps and items and busy_s > 0 else None,
            tokens_per_s=tokens / busy_s if tokens and busy_s > 0 else None,
            micro_steps=micro / steps if steps else None,
            left=left,
            elapsed_s=self.wall_ns * 1e-9,
            phases=shares,
            idle=idle(run, self.recent, shares, self.sample, self.kernels),
            headroom=headroom(run, self._alive_sample(), self.memory),
            loss_trend=self.losses.view(),
            rate_trend=self.rates.view(),
            memory_trend=(self.memories if cuda else self.residents).view(),
            gap_trend=self.gaps.view(),
            heap_trend=self.heaps.view(),
            heap_free_trend=self.free_heaps.view(),
            pace=self.pace.view(),
            aside_bytes=dict(self.levels.rises),
            resident_trend=self.residents.view(),
            workers_trend=self.worker_memories.view(),
            workers_shared_trend=self.worker_shares.view(),
            descriptor_trend=self.open_files.view(),
            scalars=tuple((name, trend.view()) for name, trend in self.own_trends.items()),
            throughput=throughput(self.work, step_ns),
            cores=core_use(run.usable_cores if run is not None else None, self.samples),
            # Before it is known, nothing is usual.
            usual_clock_mhz=sorted(clocks)[len(clocks) // 2] if len(clocks) >= FIRST_CLOCKS // 4 else None,
            ranks=ranks,
            dropped_events=dropped_events,
        )


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
