"""Runs made by hand for the rules: real configurations, and events folded as those of a real run are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ndd_engine.config import read
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import (
    BaselineEvent,
    Event,
    FunctionsEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    StacksEvent,
    StageEvent,
    TrialEvent,
    WindowEvent,
    WorkEvent,
)
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from tests import records

MS = 1_000_000
GIB, MB = 1 << 30, 1 << 20
# A step of 20 ms in which nothing but the model costs anything.
HEALTHY = {
    "data_wait": 0.2, "forward": 7.0, "loss": 0.5, "backward": 11.5, "optimizer": 0.4, "zero_grad": 0.1, "log": 0.1,
    "other": 0.2,
}  # fmt: skip
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "profile": {"name": "H100", "dense_tflops": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}},
}
NVML = {
    "util_percent": 99, "power_w": 600.0, "power_limit_w": 700.0, "sm_clock_mhz": 1900, "sm_clock_max_mhz": 1980,
    "throttle": [], "processes": 0, "memory_others_bytes": 0, "temperature_c": 60,
}  # fmt: skip


@dataclass
class Planted:
    """What a run shows. phases: milliseconds of a step. device: the same by the device clock, on a GPU.

    grows: milliseconds by which a phase grows with each window. sets: as on the command line. wobble: relative
    difference between windows. windows: of `steps` steps each.
    """

    workload: str = "eeg"
    sets: Sequence[str] = ()
    phases: Mapping[str, float] = field(default_factory=lambda: dict(HEALTHY))
    device: Mapping[str, float] | None = None
    grows: Mapping[str, float] = field(default_factory=dict)
    windows: int = 12
    steps: int = 20
    wobble: float = 0.02
    run: Mapping[str, Any] = field(default_factory=dict)
    loader: LoaderEvent | None = None
    baseline: BaselineEvent | None = None
    work: WorkEvent | None = None
    kernels: KernelsEvent | None = None
    stacks: StacksEvent | None = None
    functions: FunctionsEvent | None = None
    memory: MemoryEvent | None = None
    host: Mapping[str, Any] | None = None
    gpu: Mapping[str, Any] | None = None
    settings: Sequence[SettingEvent] = ()
    trials: Sequence[TrialEvent] = ()
    marks: Sequence[MarkEvent] = ()
    # What happens after some of the windows: their number -> events.
    after: Mapping[int, Sequence[Event]] = field(default_factory=dict)
    # Resident or allocated bytes after each window.
    used: Sequence[float] = ()
    window: Mapping[str, Any] = field(default_factory=dict)
    prepared_s: float = 2.0
    preparing: bool = True

    def events(self) -> list[tuple[float, Event]]:
        """With their times."""
        run = self.run_event()
        events: list[tuple[float, Event]] = (
            [(0.0, StageEvent("prepare", "importing torch"))] if self.preparing else []
        )
        t = self.prepared_s
        events.append((t, run))
        first: list[Event | None] = [*self.marks, self.loader, self.baseline, self.work, *self.settings]
        events += [(t, event) for event in first if event is not None]
        micro = int(run.config["batch"]["accumulation"])
        for index in range(self.windows):
            window = self.window_event(index, micro)
            t += window.wall_ns * 1e-9
            events.append((t, window))
            events += [(t, event) for event in self.after.get(index, ())]
            if self.host is not None or self.gpu is not None:
                host = dict(self.host or {})
                if self.used and run.device == "cpu":
                    host["rss_bytes"] = self.used[index]
                events.append((t, SampleEvent(dict(self.gpu) if self.gpu else None, host)))
        last: list[Event | None] = [self.kernels, self.stacks, self.functions, self.memory, *self.trials]
        return events + [(t, event) for event in last if event is not None]

    def run_event(self) -> RunEvent:
        """On two cores with as many threads, unless `run` says otherwise; 200 steps an epoch, 100,000 in all."""
        config = configuration(self.workload, tuple(self.sets))
        body: dict[str, Any] = {
            "workload": self.workload, "config": config, "device": "cpu" if self.device is None else "cuda:0",
            "gpu": None if self.device is None else GPU, "parameters": 10_000, "token": None, "tokens_per_item": 0,
            "items_per_step": config["batch"]["micro"] * config["batch"]["accumulation"], "items_per_epoch": 6400,
            "steps_per_epoch": 200, "epochs": 500, "total_steps": 100_000, "threads": 2,
        }  # fmt: skip
        return records.run_event(**{**body, **self.run})

    def window_event(self, index: int, micro: int) -> WindowEvent:
        """Window `index`; its phases differ a little from those of the others."""
        step = (index + 1) * self.steps
        phases = {}
        for place, (name, ms) in enumerate(self.phases.items()):
            sign = 1 if (index + place) % 2 else -1
            host = round((ms + self.grows.get(name, 0.0) * index) * MS * (1 + sign * self.wobble))
            device = self.device.get(name) if self.device is not None else None
            there = None if device is None else round(device * MS)
            phases[name] = records.phase(host * self.steps, there, self.steps)
        wall = sum(figures["host_ns"] or 0 for name, figures in phases.items() if "/" not in name)
        body: dict[str, Any] = {
            "epoch": step // 200, "epoch_step": step % 200, "micro_steps": self.steps * micro, "tokens": 0,
            "items": self.steps * 32, "phases": phases, "device_steps": 0 if self.device is None else self.steps,
        }  # fmt: skip
        return records.window(step, self.steps, wall, **{**body, **self.window})

    def state(self) -> RunState:
        """After all events."""
        state = RunState()
        for t, event in self.events():
            state.fold(t, event)
        return state

    def snapshot(self) -> Snapshot:
        return self.state().snapshot()

    def found(self) -> tuple[Finding, ...]:
        return diagnose(self.snapshot())

    def causes(self) -> list[str]:
        return [item.cause for item in self.found()]

    def verdict(self) -> Finding:
        return self.found()[0]

    def named(self, cause: str) -> Finding:
        """The finding of this cause; fails when there is none."""
        found = [item for item in self.found() if item.cause == cause]
        assert found, f"{cause} is not among {self.causes()}"
        return found[0]


@cache
def configuration(workload: str, sets: tuple[str, ...]) -> dict[str, Any]:
    """As a run event has it."""
    own = ["run.epochs=500"] if ":" in workload else []
    return read(None, [*own, *sets], workload).resolve().model_dump(mode="json")


def healthy(**changes: float) -> dict[str, float]:
    """A healthy step with some phases changed, in milliseconds."""
    return {**HEALTHY, **changes}


def data(**changes: Any) -> LoaderEvent:
    """Items in memory that cost nothing."""
    body: dict[str, Any] = {
        "items": 1000, "micro": 32, "in_memory": True, "encoded": None, "epochs_differ": False,
        "batch_bytes": 32 * 4096, "item_ns": 5e3, "item_cpu_ns": 5e3, "collate_ns": 1e5, "gather_ns": 5e4, "probed": 32,
    }  # fmt: skip
    return LoaderEvent(**{**body, **changes})


def files(**changes: Any) -> LoaderEvent:
    """Items that have to be made one by one: 1 ms of CPU time each."""
    return data(**{"in_memory": False, "gather_ns": None, "item_ns": 1e6, "item_cpu_ns": 0.98e6, **changes})


def alone(**changes: Any) -> BaselineEvent:
    """A micro-batch that takes as long by itself as in a healthy step."""
    body: dict[str, Any] = {
        "micro": 32, "micro_ns": 19e6, "runs": 5, "other_micro": 16, "other_ns": 9.6e6, "threads": 2,
        "operations": 300,
    }  # fmt: skip
    return BaselineEvent(**{**body, **changes})


def work(**changes: Any) -> WorkEvent:
    """A step of 10^9 operations."""
    body: dict[str, Any] = {
        "flops_per_step": 10**9, "bytes_per_step": 10**8, "flops_forward": 3 * 10**8, "accumulation": 1,
    }  # fmt: skip
    return WorkEvent(**{**body, **changes})


def cores(used: float, own: float, usable: float = 2.0, **more: Any) -> dict[str, Any]:
    """A sample of the host, in cores."""
    return {
        "cpu_percent": 100 * used / usable, "process_cpu_percent": 100 * own, "rss_bytes": 400 << 20,
        "memory_available_bytes": 16 * GIB, "memory_limit_bytes": 32 * GIB, **more,
    }  # fmt: skip


def seen(*frames: tuple[str, str, int, str, int, int]) -> StacksEvent:
    """(phase, file, line, function, looks, own) each."""
    return StacksEvent(100, sum(frame[4] for frame in frames), [list(frame) for frame in frames])


def profiled(
    *functions: tuple[str, str, int, str, float], phases: dict[str, int] | None = None
) -> FunctionsEvent:
    """A profiled step; (phase, file, line, name, milliseconds by itself) each. phases: its phases, in nanoseconds."""
    rows = [
        [file, line, name, 1, round(ms * MS), round(ms * MS), "", phase]
        for phase, file, line, name, ms in functions
    ]
    return FunctionsEvent(100, 20 * MS, rows, [], {} if phases is None else phases)


def beside(phase: str, ms: float, step: int = 0) -> WindowEvent:
    """A window without a step, as an evaluation or a checkpoint leaves one."""
    ns = round(ms * MS)
    body = {"host_ns": ns, "p50_ns": None, "p95_ns": None, "max_ns": None, "device_ns": None}
    return WindowEvent(step, 0, step, 0, 0, 0, 0, ns, None, None, None, {phase: body})


def evaluated(ms: float, step: int, batches: int = 10) -> tuple[Event, ...]:
    """An evaluation, as the loop records it."""
    figures = {"metrics": {"rmse": 1.0}, "seconds": ms / 1e3, "batches": batches}
    return MarkEvent("evaluation", step, "", figures), beside("evaluate", ms, step)


def saved(ms: float, step: int) -> tuple[Event, ...]:
    """A checkpoint."""
    return MarkEvent("checkpoint", step, "", {"file": "f.pt", "bytes": 1}), beside("checkpoint", ms, step)


def of_workers(memory: Sequence[tuple[int, int]]) -> dict[int, list[Event]]:
    """After each window, (private, shared) megabytes of two loader workers."""
    return {
        window: [
            SampleEvent(
                None,
                {
                    "workers": 2, "workers_private_bytes": private << 20, "workers_shared_bytes": shared << 20,
                    "memory_available_bytes": 16 * GIB,
                },
            )
        ]
        for window, (private, shared) in enumerate(memory)
    }  # fmt: skip


def saving(used: int, step: int = 140) -> list[Event]:
    """A short checkpoint during which so many megabytes are in use."""
    return [SampleEvent(None, cores(1.9, 1.9, rss_bytes=used << 20)), *saved(40.0, step)]


def evaluating(used: int, step: int = 140) -> list[Event]:
    """A short evaluation during which so many megabytes are in use."""
    return [SampleEvent(None, cores(1.9, 1.9, rss_bytes=used << 20)), *evaluated(40.0, step)]


GPU_STEP = {
    "to_device": 0.2,
    "forward": 7.0,
    "loss": 0.5,
    "backward": 11.5,
    "optimizer": 0.4,
    "log": 0.1,
    "other": 0.1,
}
GPU_HOST = cores(1.2, 1.1, usable=16.0)
GPU_RUN = {"usable_cores": 16.0, "threads": 16}


def script(
    facts: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    **more: Any,
) -> Planted:
    """A script that is only observed, without a fault. facts: more of what is known of it. loader: its settings."""
    config: dict[str, Any] = {
        "script": {"command": ["python", "train.py"], **(facts or {})}, "batch": {"accumulation": 1, "micro": 8},
    }  # fmt: skip
    if loader is not None:
        config["loader"] = loader
    return Planted(run={"config": config, **(run or {})}, **more)


def gpu(**changes: Any) -> Planted:
    """A healthy run on a GPU."""
    body: dict[str, Any] = {
        "phases": healthy(to_device=0.1), "device": GPU_STEP, "gpu": NVML, "host": GPU_HOST, "run": GPU_RUN,
        "sets": ("precision.amp=bf16",), "baseline": alone(threads=16),
    }  # fmt: skip
    body |= changes
    if "precision" not in body["run"]:
        body["run"] = {**body["run"], "precision": "bf16"}
    return Planted(**body)


def capture(
    method: str = "operators", launches: int = 300, convolution_ns: int = 0, **idle: int
) -> KernelsEvent:
    """A profiler capture of 100 ms; idle: cause -> milliseconds."""
    causes = {name.replace("_", " "): ms * 10**6 for name, ms in idle.items()}
    busy = 100_000_000 - sum(causes.values())
    return KernelsEvent(
        100_000_000,
        busy,
        0,
        causes,
        launches,
        convolution_ns=convolution_ns,
        method=method,
        step=200,
        steps=5,
    )


def worked(**changes: Any) -> KernelsEvent:
    """A capture of a model whose operators are long; each is the operator of a module and a line."""
    body: dict[str, Any] = {
        "passes": {"forward": 30_000_000, "backward": 60_000_000}, "model_ns": 100_000_000, "small": 60,
        "small_ns": 5_000_000, "median_ns": 300_000,
        "modules": [("body", "Body", 28_000_000, 56_000_000, 4, 1 << 20, 0)],
        "operations": [operation("linear", "64x64, 512x64, 512")],
    }  # fmt: skip
    return replace(capture(), **{**body, **changes})


def operation(name: str, shapes: str, detail: str = "", ms: float = 20.0) -> tuple[Any, ...]:
    """An operator that takes so many milliseconds in forward, and twice that in backward."""
    place = "my/model.py", 12, "Net.forward", "head", "Linear"
    ns = round(ms * 1e6)
    return name, shapes, "float", detail, *place, ns, 2 * ns, 1, ns


def memory(**changes: Any) -> MemoryEvent:
    """8 of 80 GiB used."""
    body: dict[str, Any] = {
        "allocated_bytes": 6 << 30, "reserved_bytes": 8 << 30, "peak_allocated_bytes": 7 << 30,
        "peak_reserved_bytes": 8 << 30, "growth_bytes": 1 << 30, "retries": 0, "ooms": 0, "free_bytes": 70 << 30,
        "total_bytes": 80 << 30, "others_bytes": None,
    }  # fmt: skip
    return MemoryEvent(**{**body, **changes})


def own(**changes: Any) -> Planted:
    """A healthy run of a user's own workload, whose forward and backward keep the same pace."""
    found = profiled(("forward", "my/model.py", 10, "Net.forward", 0.5))
    return replace(Planted(workload="my.model:make", work=work(), functions=found), **changes)
