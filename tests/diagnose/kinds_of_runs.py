"""Which facts of the rules each kind of run records. Recorded runs prove it: `everything.py` has all of them.

A fact is a type of event, a field of a window or of a profiled step, a phase, a counter of the host, a kind of mark or
a key of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

from ndd_engine.record.events import Event, MarkEvent, RunEvent, SampleEvent, WindowEvent

EVERYTHING = Path(__file__).with_name("everything.py")
# The environment of a recorded run: often enough for one of a few seconds.
OFTEN = {"NDD_WATCH_WINDOW_S": "0.2", "NDD_WATCH_PROFILE_S": "0.5"}
_BY_FIELD = ("window", "functions")
# Read now and then while there are workers: workers of a short run may have ended before that, on a busy machine.
WORKERS_MEMORY = ("workers_private_bytes", "workers_shared_bytes")
# What a script, one of a framework (Lightning or Hugging Face's Trainer) and one of two ranks record.
COMMON = frozenset({
    *(f"config.loader.{name}" for name in ("in_order", "persistent", "pin_memory", "prefetch", "workers")),
    "config.optimizer.implementation", "config.optimizer.name", "config.speed.cudnn_benchmark",
    *(f"config.script.{name}" for name in ("anomaly", "batches", "by_item", "command", "dataset", "loader", "retains")),
    "descriptors", "end", "stage", "functions.calls", "functions.sizes", "functions.tables",
    *(f"host.{name}" for name in (
        "cpu_percent", "memory_available_bytes", "memory_limit_bytes", "process_cpu_percent", "rss_bytes", "workers",
        *WORKERS_MEMORY,
    )),
    *(f"phases.{name}" for name in (
        "backward", "checkpoint", "clip", "data_wait", "data_wait/first_batch", "evaluate", "forward", "loss",
        "optimizer", "other", "zero_grad",
    )),
    "window.gc_count", "window.gc_max_ns", "window.gc_ns", "window.passes",
})  # fmt: skip
KNOWN = {
    "script": COMMON | {"window.loss_scale", "config.script.wasted"},
    "framework": COMMON | {"mark.evaluation"},
    "ranks": COMMON
    | {"window.loss_scale", "config.script.wasted", "config.parallel.ranks", "config.parallel.strategy", "ranks"},
}  # fmt: skip
# What a healthy run of some seconds on a CPU has not: fact -> the test that records it, of an observed script.
_FACTS, _DEVICE, _LOOKS = "observe/test_facts.py", "observe/test_device.py", "observe/test_closer_looks.py"
_RUNS, _NEIGHBOURS = "script/test_runs.py", "hardware/test_neighbours.py"
ELSEWHERE = {
    "death": (_RUNS, "test_a_worker_that_is_killed_is_named_with_its_signal_and_no_frame_of_ours"),
    "stall": (_RUNS, "test_a_worker_that_hangs_is_named_at_once_and_first_in_the_summary"),
    "stacks": (_RUNS, "test_a_call_that_keeps_the_interpreter_lock"),
    "trial": (
        "script/test_script_trials.py",
        "test_workers_for_slow_storage_are_faster_and_the_edit_is_applied",
    ),
    "kernels": (
        "observe/test_captures.py",
        "test_the_event_is_that_of_an_own_run_and_the_script_is_the_same",
    ),
    "functions.denormals": (_LOOKS, "test_they_count_where_the_processor_is_slow"),
    "config.script.data_parallel": (_LOOKS, "test_tables_of_a_script"),
    "mark.compile": (_FACTS, "test_recompilations_are_told_with_their_reason_and_the_limit"),
    "mark.recompile": (_FACTS, "test_recompilations_are_told_with_their_reason_and_the_limit"),
    "window.skipped": (_FACTS, "test_skipped_updates_are_told_with_their_first_step_and_what_was_not_finite"),
    "window.bad_loss": (
        _FACTS,
        "test_skipped_updates_are_told_with_their_first_step_and_what_was_not_finite",
    ),
    "memory": (_DEVICE, "test_its_memory_and_which_gpu_of_the_machine_it_is_are_told"),
    "window.device_steps": (
        _DEVICE,
        "test_a_phase_takes_as_long_as_its_kernels_though_the_host_is_faster",
    ),
    "phases.to_device": (
        _DEVICE,
        "test_copies_and_evaluations_are_timed_apart_and_nothing_is_read_while_a_graph_is_captured",
    ),
    "gpu": (_DEVICE, "test_the_diagnosis_of_a_script_is_that_of_its_device"),
    "host.neighbours": (_NEIGHBOURS, "test_samples_name_a_busy_process_from_the_third_on"),
    "host.cpu_throttled": (_NEIGHBOURS, "test_time_that_a_quota_takes"),
}
# What only a run of one's own model records, beside most of its configuration.
OWN_ONLY = frozenset({
    "baseline", "loader", "work", "setting", "functions.anomaly", "functions.retains", "mark.checkpoint", "phases.log",
})  # fmt: skip
# Graphs are kept by a step of one's own only, whose backward pass is no phase: tests/train/test_profiled_steps.py.
OWN = {name for name in COMMON if not name.startswith("config.script.")} | OWN_ONLY - {"functions.retains"}
# The settings with which `everything:factory` is such a run.
SETTINGS = (
    "workload.name=everything:factory", "run.max_steps=320", "run.threads=1", "batch.micro=4", "loader.workers=2",
    "loader.persistent=false", "loader.prefetch=2", "loader.cache=false", "evaluate.every_steps=100",
    "checkpoint.every_steps=100", "clip.max_norm=1", "optimizer.implementation=loop", "log.window_s=0.2",
    "log.profile_every_s=1",
)  # fmt: skip


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return one.default


def _of_config(event: RunEvent) -> dict[str, Any]:
    """Fact -> value."""
    return {
        f"config.{part}.{key}": value for part, keys in event.config.items() for key, value in keys.items()
    }


def facts(events: Iterable[Event]) -> set[str]:
    """What these events tell."""
    found: set[str] = set()
    for event in events:
        if isinstance(event, RunEvent):
            found |= {name for name, value in _of_config(event).items() if value not in (None, [], {}, "")}
        elif isinstance(event, MarkEvent):
            found.add(f"mark.{event.kind}")
        elif isinstance(event, SampleEvent):
            found |= {f"host.{name}" for name, value in (event.host or {}).items() if value is not None}
            found |= {"gpu"} if event.gpu else set()
        elif event.type in _BY_FIELD:
            optional = [one for one in fields(event) if _default(one) is not MISSING]
            found |= {
                f"{event.type}.{one.name}" for one in optional if getattr(event, one.name) != _default(one)
            }
            found |= {f"phases.{name}" for name in event.phases} if isinstance(event, WindowEvent) else set()
        else:
            found.add(event.type)
    return found


def only(event: Event, known: Iterable[str]) -> Event | None:
    """The event with these facts only; None if it tells nothing else."""
    if isinstance(event, RunEvent):
        config: dict[str, dict[str, Any]] = {"script": {}}
        for name, value in _of_config(event).items():
            if name in known:
                _, part, key = name.split(".")
                config.setdefault(part, {})[key] = value
        return replace(event, config=config)
    if isinstance(event, MarkEvent):
        return event if f"mark.{event.kind}" in known else None
    if isinstance(event, SampleEvent):
        host = {name: value for name, value in (event.host or {}).items() if f"host.{name}" in known}
        return replace(event, host=host or None, gpu=event.gpu if "gpu" in known else None)
    if event.type not in _BY_FIELD:
        return event if event.type in known else None
    optional = {one.name: _default(one) for one in fields(event) if _default(one) is not MISSING}
    changes = {name: value for name, value in optional.items() if f"{event.type}.{name}" not in known}
    if isinstance(event, WindowEvent):
        changes["phases"] = {name: body for name, body in event.phases.items() if f"phases.{name}" in known}
    return replace(event, **changes)


def check(kind: str, events: Iterable[Event]) -> None:
    """Fails unless a recorded run of `everything.py` tells what a run of this kind is known to tell."""
    found = facts(events)
    known, others = (OWN, set()) if kind == "own" else (KNOWN[kind], OWN_ONLY)
    missing = known - found - {f"host.{name}" for name in WORKERS_MEMORY}
    assert not missing, sorted(missing)
    assert not others & found, sorted(others & found)
