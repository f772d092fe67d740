"""Values derived from events: phases, idle time, headroom, work and the time left; missing is not zero."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_help import CONFIG, GIB, end, folded, mark, phase, run_event, setting, status, window, work

from ndd_engine.record.events import PHASES, Event, KernelsEvent, MemoryEvent, RunEvent, SampleEvent
from ndd_engine.record.figures import (
    LOWER_BOUND,
    SAFE_SHARE,
    Aside,
    capture_text,
    due,
    figures,
    setting_text,
    throughput,
    time_left,
)
from ndd_engine.record.snapshot import Snapshot, TimeLeft
from ndd_engine.record.state import STARTED_WINDOWS
from ndd_engine.text import MISSING, counted, plural, size, times

WAITING = "waiting for data"


def snapshot(*events: Event, device: str = "cpu") -> Snapshot:
    return folded(run_event(device=device), *events).snapshot()


def memory(**changes: int | None) -> MemoryEvent:
    body: dict[str, int | None] = {
        "allocated_bytes": 2 * GIB, "reserved_bytes": 3 * GIB, "peak_allocated_bytes": 4 * GIB,
        "peak_reserved_bytes": 5 * GIB, "growth_bytes": 2 * GIB, "retries": 0, "ooms": 0,
        "free_bytes": 8 * GIB, "total_bytes": 16 * GIB, "others_bytes": None,
    }  # fmt: skip
    return MemoryEvent(**{**body, **changes})  # type: ignore[arg-type]


STEPS = st.dictionaries(st.sampled_from(PHASES), st.integers(1, 10**9), min_size=1)


@given(st.lists(STEPS, min_size=1, max_size=12))
def test_phases_add_up_to_the_whole(windows: list[dict[str, int]]) -> None:
    events = [
        window(index, 1, sum(each.values()), phases={name: phase(ns) for name, ns in each.items()})
        for index, each in enumerate(windows, start=1)
    ]
    shot = snapshot(*events)
    if len(windows) >= STARTED_WINDOWS:  # the startup cost is no longer included
        windows, events = windows[1:], events[1:]
    assert sum(share.share for share in shot.phases) == pytest.approx(1)
    assert sum(share.host_ns for share in shot.phases) * len(events) == pytest.approx(
        sum(event.wall_ns for event in events)
    )
    assert [share.name for share in shot.phases] == [
        name for name in PHASES if any(name in each for each in windows)
    ]
    # Idle is exactly the sum of its causes.
    assert shot.idle.method == "host"
    assert shot.idle.share == pytest.approx(sum(value for _, value in shot.idle.causes))
    waiting = sum(each.get("data_wait", 0) for each in windows) / sum(sum(each.values()) for each in windows)
    assert dict(shot.idle.causes).get(WAITING, 0.0) == pytest.approx(waiting)


def test_a_part_follows_its_phase_and_is_not_counted_twice() -> None:
    phases = {"backward": phase(40), "forward/b": phase(10), "forward/a": phase(20), "forward": phase(60)}
    shares = snapshot(window(1, 1, 100, phases=phases)).phases
    assert [share.name for share in shares] == ["forward", "forward/a", "forward/b", "backward"]
    assert sum(share.share for share in shares if "/" not in share.name) == pytest.approx(1)


def test_quantiles_are_of_the_windows_of_the_mean_which_is_never_above_the_longest() -> None:
    forward, evaluate = snapshot(
        window(1, 1, 10, phases={"forward": phase(90)}),
        window(2, 1, 30, phases={"forward": phase(30)}),
        window(4, 2, 30, phases={"forward": phase(20)}),
        window(4, 0, 50, phases={"evaluate": phase(50)}),
    ).phases
    assert forward.max_ns == 90 and forward.p95_ns == 20
    assert forward.host_ns <= forward.max_ns
    assert (evaluate.p95_ns, evaluate.max_ns) == (None, None)


def test_what_the_device_waits_for_by_its_clock() -> None:
    phases = {
        "data_wait": phase(10, 100), "forward": phase(50, 800), "log": phase(10, 60), "other": phase(10, 40),
        "evaluate": phase(150), "checkpoint": phase(50),
    }  # fmt: skip
    shot = snapshot(window(1, 1, 280, phases=phases, device_steps=1), device="cuda:0")
    stepping = 80 / 280
    assert shot.idle.causes == (
        (WAITING, pytest.approx(0.1 * stepping)),
        ("synchronising", pytest.approx(0.06 * stepping)),
        ("checkpoint", pytest.approx(50 / 280)),  # an evaluation computes
        ("other", pytest.approx(0.04 * stepping)),
    )
    assert shot.idle.method == "events"
    assert shot.idle.reason == ""  # the device lags behind the host: no gaps inside its spans
    # The host's clock takes a checkpoint for idle, and an evaluation not.
    times = {"forward": 50, "log": 2, "other": 8, "evaluate": 30, "checkpoint": 10}
    shot = snapshot(window(1, 1, 100, phases={name: phase(ns) for name, ns in times.items()}))
    assert shot.idle.causes == (("checkpoint", pytest.approx(0.1)), ("other", pytest.approx(0.1)))


def test_a_device_that_keeps_pace_with_the_host_gives_a_lower_bound() -> None:
    phases = {"forward": phase(40, 41), "backward": phase(50, 49), "data_wait": phase(10, 10)}
    shot = snapshot(window(1, 1, 100, phases=phases, device_steps=1), device="cuda:0")
    assert (shot.idle.method, shot.idle.reason) == ("events", LOWER_BOUND)
    assert shot.idle.share == pytest.approx(0.1)


def test_with_a_cuda_graph_the_device_clock_abstains() -> None:
    phases = {"data_wait": phase(10, 10), "forward": phase(90, 90), "forward/graph": phase(90, 90)}
    graphed = window(1, 1, 100, phases=phases, device_steps=1)
    shot = snapshot(graphed, device="cuda:0")
    assert (shot.idle.share, shot.idle.causes) == (None, ())
    assert "CUDA graph" in shot.idle.reason
    shot = snapshot(graphed, SampleEvent({"util_percent": 80}, {}), device="cuda:0")
    assert (shot.idle.method, shot.idle.share) == ("nvml", pytest.approx(0.2))
    shot = snapshot(graphed, capture(1), device="cuda:0")
    assert (shot.idle.method, shot.idle.share) == ("kernels", pytest.approx(0.4))


@pytest.mark.parametrize(
    ("util", "share", "method"),
    [(37, 0.63, "nvml"), (None, None, ""), (0, 1.0, "nvml"), ("no GPU", None, "")],
)
def test_without_a_device_clock_idle_is_what_the_driver_says_or_none_with_the_reason(
    util: Any, share: float | None, method: str
) -> None:
    sample = SampleEvent(None if util == "no GPU" else {"util_percent": util}, {})
    for samples in ([sample],) if share is not None else ([sample], []):
        idle = snapshot(window(1), *samples, device="cuda:0").idle
        assert idle.causes == () and idle.share == (None if share is None else pytest.approx(share))
        assert idle.method == method if share is not None else "NVML" in idle.reason


def capture(step: int, method: str = "kernels", **idle_ns: int) -> KernelsEvent:
    causes = idle_ns or {WAITING: 300, "launch gaps": 100}
    return KernelsEvent(1000, 1000 - sum(causes.values()), 50, causes, 40, method=method, step=step, steps=3)


def test_a_capture_takes_the_place_of_the_estimate() -> None:
    for device, method in (("cuda:0", "kernels"), ("cpu", "operators")):
        steps = {"forward": phase(60, 90), "data_wait": phase(20, 10)}
        phases = {**steps, "evaluate": phase(15), "checkpoint": phase(5)}
        windows = [window(step, 1, 100, phases=phases, device_steps=1) for step in (1, 2)]
        shot = snapshot(windows[0], capture(1, method), windows[1], device=device)
        assert (shot.idle.method, shot.idle.step) == (method, 1)
        # It does not cover evaluations and checkpoints; the host clock gives their duration.
        assert dict(shot.idle.causes) == pytest.approx(
            {WAITING: 0.3 * 0.8, "launch gaps": 0.1 * 0.8, "checkpoint": 0.05}
        )
        assert shot.idle.share == pytest.approx(sum(share for _, share in shot.idle.causes))


def test_a_capture_grows_old() -> None:
    # Steps of 10 s: it stands for the run for 30 of them.
    windows = [window(10 + index, 1, 10_000_000_000) for index in range(40)]
    for count, method in ((1, "operators"), (31, "operators"), (32, "host")):
        assert snapshot(capture(10, "operators"), *windows[:count]).idle.method == method


def test_device_times_are_weighted_by_the_steps_that_carried_events() -> None:
    windows = [
        window(1, 1, 100, phases={"forward": phase(100, 10)}, device_steps=3),
        window(2, 1, 100, phases={"forward": phase(100, 50)}, device_steps=1),
        window(3, 1, 100, phases={"forward": phase(100, None)}, device_steps=0),
    ]
    (share,) = snapshot(*windows, device="cuda:0").phases
    assert share.device_ns == pytest.approx((3 * 10 + 50) / 4)


def test_headroom_of_the_host() -> None:
    host = {"memory_limit_bytes": 100, "memory_available_bytes": 40, "rss_bytes": 20, "workers_rss_bytes": 5}
    room = snapshot(SampleEvent(None, host)).headroom
    assert (room.kind, room.free_bytes, room.total_bytes) == ("host", 40, 100)
    assert (room.used_bytes, room.others_bytes) == (25, 35)


def test_the_memory_of_a_run_that_has_ended_is_what_it_used_last() -> None:
    """A sample after its end shows no memory of its process, which is not memory of others."""
    host = {"memory_limit_bytes": 100, "memory_available_bytes": 40, "rss_bytes": 20}
    after = SampleEvent(None, {**host, "memory_available_bytes": 60, "rss_bytes": 0})
    room = snapshot(SampleEvent(None, host), after).headroom
    assert (room.used_bytes, room.others_bytes, room.free_bytes) == (20, 40, 40)
    gone = snapshot(after).headroom
    assert (gone.used_bytes, gone.others_bytes) == (None, None)


@pytest.mark.parametrize("missing", ["memory_limit_bytes", "memory_available_bytes", "rss_bytes"])
def test_missing_on_the_host_is_none_not_zero(missing: str) -> None:
    host = {"memory_limit_bytes": 100, "memory_available_bytes": 40, "rss_bytes": 20}
    known = {key: value for key, value in host.items() if key != missing}
    for given_ in (known, {**host, missing: None}):
        room = snapshot(SampleEvent(None, given_)).headroom
        found = dict(zip(host, (room.total_bytes, room.free_bytes, room.used_bytes), strict=True))
        assert found == {**host, missing: None}
        assert room.others_bytes is None


def test_nothing_sampled_is_nothing_known() -> None:
    for device in ("cpu", "cuda:0"):
        room = snapshot(device=device).headroom
        assert (room.free_bytes, room.total_bytes, room.used_bytes, room.others_bytes) == (None,) * 4
        assert (room.peak_bytes, room.fits_micro) == (None, None)


def test_headroom_of_a_gpu_takes_the_allocator_first_and_the_driver_for_the_rest() -> None:
    gpu = SampleEvent({"memory_free_bytes": 1, "memory_total_bytes": 2, "memory_others_bytes": 3}, {})
    room = snapshot(memory(), gpu, device="cuda:0").headroom
    assert (room.kind, room.free_bytes, room.total_bytes, room.others_bytes) == ("gpu", 8 * GIB, 16 * GIB, 3)
    assert (room.used_bytes, room.peak_bytes) == (3 * GIB, 5 * GIB)
    room = snapshot(memory(free_bytes=None, total_bytes=None), gpu, device="cuda:0").headroom
    assert (room.free_bytes, room.total_bytes) == (1, 2)
    # A full GPU has 0 bytes free, which differs from unknown.
    assert snapshot(memory(free_bytes=0), gpu, device="cuda:0").headroom.free_bytes == 0
    nothing = SampleEvent({"memory_free_bytes": None}, {})
    assert snapshot(nothing, device="cuda:0").headroom.free_bytes is None


def test_the_batch_that_fits_grows_with_what_is_free() -> None:
    # 2 GiB of growth for 16 items; 8 GiB free and 1 GiB cached.
    room = snapshot(memory(), device="cuda:0").headroom
    assert room.fits_micro == int(9 * GIB * SAFE_SHARE / (2 * GIB / 16))
    assert snapshot(memory(growth_bytes=None), device="cuda:0").headroom.fits_micro is None
    assert snapshot(memory(growth_bytes=0), device="cuda:0").headroom.fits_micro is None
    assert snapshot(memory(free_bytes=None), device="cuda:0").headroom.fits_micro is None


def test_achieved_work_against_the_peak() -> None:
    found = throughput(work(), 20e6)  # 10^9 operations in 20 ms
    assert found.flops_per_s == pytest.approx(5e10)
    assert (found.mfu, found.peak_kind) == (pytest.approx(5e-4), "bf16")
    assert (found.intensity, found.ridge, found.side) == (10.0, 100.0, "bandwidth")
    assert throughput(work(bytes_per_step=10**7), 20e6).side == "compute"  # 100 FLOP/B, at the ridge


def test_without_a_peak_there_is_a_rate_and_a_reason() -> None:
    found = throughput(work(peak_tflops=None, bandwidth_gb_s=None, reason="no GPU"), 20e6)
    assert found.flops_per_s == pytest.approx(5e10)
    assert (found.mfu, found.ridge, found.side, found.peak_kind) == (None,) * 4
    assert (found.intensity, found.reason) == (10.0, "no GPU")
    # A bandwidth without a peak has no ridge either.
    assert throughput(work(peak_tflops=None), 20e6).side is None
    # Before anything is measured, nothing is claimed.
    assert throughput(None, 20e6).reason == "not counted yet"
    early = throughput(work(), None)
    assert (early.flops_per_s, early.mfu, early.side) == (None, None, "bandwidth")
    assert throughput(work(flops_per_step=None), 20e6).flops_per_s is None


def test_figures_for_programs_name_their_units() -> None:
    body = figures(folded(run_event(), work(), window(10, 10, 10**9, micro_steps=20)).snapshot())
    assert body["step_s"] == pytest.approx(0.1)
    assert body["micro_steps_per_step"] == 2
    assert body["epoch_s"] == pytest.approx(10.0)
    assert (body["items_per_s"], body["tokens_per_s"]) == (pytest.approx(160), pytest.approx(10_240))
    assert (body["mfu"], body["roofline_side"]) == (pytest.approx(1e-4), "bandwidth")
    assert (body["evaluation_s"], body["reason"]) == (None, None)


def test_a_capture_and_a_setting_are_told_with_their_figures() -> None:
    idle = {WAITING: 496, "other": 4}
    event = KernelsEvent(
        1000, 500, 0, idle, 40, [["aten::mm", 300, 6]], method="operators", step=14, steps=3, trace="t.json"
    )
    text = capture_text(event)
    assert all(part in text for part in ("3 steps", "50 %", "aten::mm 30 %", "t.json"))
    text = setting_text(setting("loader.workers", False, applied="0", verified="no fork here"))
    assert all(part in text for part in ("loader.workers", " = 4", "applied as 0", "no fork here"))
    assert "applied" not in setting_text(setting("loader.workers"))


# The time left.


def run_with(
    evaluate: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None, **more: Any
) -> RunEvent:
    sections = {"evaluate": evaluate, "checkpoint": checkpoint}
    changed = {name: {**CONFIG[name], **(section or {})} for name, section in sections.items()}
    return run_event(config={**CONFIG, **changed}, **more)


def steps(first: int, last: int) -> list[Event]:
    """Steps of 100 ms, one a window."""
    return [window(step) for step in range(first, last + 1)]


def evaluation(step: int, seconds: float) -> list[Event]:
    """Events of an evaluation: status, windows during it, mark, status, last window."""
    half = window(step, 0, int(seconds * 5e8), phases={"evaluate": phase(int(seconds * 5e8))})
    return [status("evaluating"), half, mark("evaluation", step, metrics={}), status("training"), half]


def checkpoint(step: int, seconds: float) -> list[Event]:
    """The mark comes first: the time is in the window of the next step."""
    aside = int(seconds * 1e9)
    phases = {"checkpoint": phase(aside), "forward": phase(10**8)}
    return [mark("checkpoint", step), window(step + 1, 1, aside + 10**8, phases=phases)]


def left(*events: Event) -> TimeLeft:
    return folded(*events).snapshot().left


@given(st.integers(0, 12), st.integers(0, 3), st.booleans(), st.integers(1, 9), st.integers(1, 60), st.data())
def test_what_is_due_is_what_the_loop_will_do(
    every_steps: int, every_epochs: int, at_end: bool, per_epoch: int, total: int, data: st.DataObject
) -> None:
    section = {"every_steps": every_steps, "every_epochs": every_epochs, "at_end": at_end}
    run = run_event(steps_per_epoch=per_epoch, total_steps=total)
    step = data.draw(st.integers(0, total))

    def comes(at: int) -> bool:
        by_epoch = every_epochs * per_epoch
        periodic = (every_steps and at % every_steps == 0) or (by_epoch and at % by_epoch == 0)
        return bool(periodic or (at_end and at == total))

    later = sum(comes(at) for at in range(step + 1, total + 1))
    assert due(section, run, step, last=step) == later
    now = 1 if step > 0 and comes(step) else 0
    assert due(section, run, step, last=-1) == later + now


@given(st.integers(1, 999), st.integers(0, 50), st.integers(0, 50))
def test_the_time_left_never_grows_with_the_steps_done(step: int, every: int, minutes: int) -> None:
    run = run_with(
        {"every_steps": every, "at_end": True}, {"every_minutes": minutes, "every_steps": every * 2}
    )
    asides = Aside(), Aside()
    for aside in asides:
        aside.mark(step)
        aside.window(2 * 10**9)
    before = time_left(run, step, 1e9, *asides).seconds
    for aside in asides:
        aside.last_step = step + 1
    after = time_left(run, step + 1, 1e9, *asides).seconds
    assert before is not None
    assert after is not None
    assert 0 <= after < before


def test_evaluations_and_checkpoints_to_come_count_at_their_measured_time() -> None:
    run = run_with({"every_steps": 200, "at_end": True}, {"every_epochs": 5, "at_end": True})
    found = left(run, *steps(1, 200), *evaluation(200, 8.0), *checkpoint(200, 1.0))
    # At step 201: evaluations at 400, 600, 800, 1000; checkpoints at 500 and 1000.
    assert (found.evaluations, found.evaluation_s) == (4, pytest.approx(8.0))
    assert (found.checkpoints, found.checkpoint_s) == (2, pytest.approx(1.0))
    assert found.seconds == pytest.approx(799 * 0.1 + 4 * 8.0 + 2 * 1.0)
    assert found.without == ()


def test_of_a_run_of_unknown_length_what_was_measured_is_told() -> None:
    state = folded(run_event(total_steps=0), *steps(1, 200), *evaluation(200, 8.0), *checkpoint(200, 1.0))
    body = figures(state.snapshot())
    assert (body["evaluation_s"], body["checkpoint_s"]) == (pytest.approx(8.0), pytest.approx(1.0))
    assert state.snapshot().left.seconds is None


def test_what_was_not_measured_yet_is_named_and_left_out() -> None:
    run = run_with({"every_steps": 100}, {"at_end": True})
    found = left(run, *steps(1, 50))
    assert found.seconds == pytest.approx(950 * 0.1)
    assert (found.evaluations, found.evaluation_s, found.checkpoints) == (10, None, 1)
    assert found.without == ("evaluations", "checkpoints")
    assert left(run, *steps(1, 100), *evaluation(100, 2.0)).without == ("checkpoints",)


def test_one_that_is_not_done_is_not_measured_and_still_to_come() -> None:
    run = run_with({"every_steps": 100})
    during = [*steps(1, 100), *evaluation(100, 60.0)[:2]]
    found = left(run, *during)
    assert (found.evaluations, found.evaluation_s) == (10, None)
    done = [*steps(1, 100), *evaluation(100, 4.0)]
    again = left(run, *done, *steps(101, 200), *evaluation(200, 60.0)[:2])
    assert (again.evaluations, again.evaluation_s) == (9, pytest.approx(4.0))
    # A mean of all that were measured.
    both = left(run, *done, *steps(101, 200), *evaluation(200, 6.0))
    assert both.evaluation_s == pytest.approx(5.0)


def test_checkpoints_by_the_clock_come_where_the_others_are_far_apart() -> None:
    saved = [*steps(1, 100), *checkpoint(100, 2.0)]  # at step 101: 899 steps of 0.1 s to go, 89.9 s
    assert left(run_with(None, {"every_minutes": 0.5}), *saved).checkpoints == 2
    assert left(run_with(None, {"every_minutes": 2.0}), *saved).checkpoints == 0
    # To step 500 and from there to 1000, 39.9 s and 50 s: each stretch holds one at 30 s.
    both = run_with(None, {"every_minutes": 0.5, "every_steps": 500})
    assert left(both, *saved).checkpoints == 2 + 2
    # Those at 50 steps leave no time for it.
    often = run_with(None, {"every_minutes": 0.5, "every_steps": 50})
    assert left(often, *saved).checkpoints == 18


def test_pauses_do_not_count() -> None:
    state = folded(run_with(), *steps(1, 100))
    before = state.snapshot().left
    for t, event in ((200.0, status("paused")), (9_000.0, mark("pause", 100)), (9_999.0, status("training"))):
        state.fold(t, event)
    assert state.snapshot().left == before


def test_a_resumed_run_does_not_repeat_what_its_checkpoint_followed() -> None:
    run = run_with({"every_steps": 100}, {"every_steps": 100})
    state = folded(run, *steps(1, 150), *evaluation(100, 2.0), *checkpoint(100, 1.0))
    again = run_with({"every_steps": 100}, {"every_steps": 100}, resumed_step=100)
    found = folded(again, window(100, 0, 10**6), *steps(101, 101), state=state).snapshot().left
    assert (found.evaluations, found.checkpoints) == (9, 9)
    assert found.evaluation_s == pytest.approx(2.0)  # measured in the first process, on the same data


def test_nothing_comes_after_the_end() -> None:
    run = run_with({"at_end": True}, {"at_end": True})
    assert left(run, *steps(990, 1000)).evaluations == 1
    found = left(run, *steps(990, 1000), *evaluation(1000, 2.0), mark("checkpoint", 1000), end("done", 1000))
    assert (found.seconds, found.evaluations, found.checkpoints) == (0, 0, 0)


@pytest.mark.parametrize("config", [{}, {"evaluate": 3}, {"evaluate": {"every_steps": "often"}}])
def test_a_configuration_that_says_nothing_means_no_more(config: dict[str, Any]) -> None:
    assert left(run_event(config=config), *steps(1, 10)).seconds == pytest.approx(99.0)


# Words of figures.


def test_ratios_have_three_digits() -> None:
    assert [times(ratio) for ratio in (1, 1.4234, 12.34, 123.4, 1234.5)] == [
        "1.00x",
        "1.42x",
        "12.3x",
        "123x",
        "1,234x",
    ]


def test_counts_with_their_plurals() -> None:
    assert counted(1, "thread") == "1 thread" and counted(1600, "item") == "1,600 items"
    words = {
        "batch": "batches",
        "entry": "entries",
        "series": "series",
        "day": "days",
        "box": "boxes",
        "mesh": "meshes",
    }
    assert {word: plural(word) for word in words} == words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (10 << 10, "10 KiB"), (3 << 19, "1.5 MiB"),
        (512 << 20, "512 MiB"), (1000 << 20, "1,000 MiB"), (16 << 30, "16.0 GiB"), (3 << 39, "1.5 TiB"),
        (2000 << 40, "2,000.0 TiB"), (-3 << 19, "-1.5 MiB"), (None, MISSING), (float("nan"), MISSING),
    ],
)  # fmt: skip
def test_sizes_have_binary_units(count: float | None, text: str) -> None:
    assert size(count) == text
