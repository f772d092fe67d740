"""Values derived from events: phases that add up, idle time and its causes, headroom; missing is not zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_help import GIB, folded, phase, run_event, setting, window, work

from ndd_engine.record.events import PHASES, Event, KernelsEvent, MemoryEvent, SampleEvent
from ndd_engine.record.figures import LOWER_BOUND, SAFE_SHARE, capture_text, figures, setting_text, throughput
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import STARTED_WINDOWS

WAITING = "waiting for data"


def snapshot(*events: Event, device: str = "cpu") -> Snapshot:
    return folded(run_event(device=device), *events).snapshot()


def host_sample(**host: int | None) -> SampleEvent:
    return SampleEvent(None, host)


def memory(**changes: int | None) -> MemoryEvent:
    body: dict[str, int | None] = {
        "allocated_bytes": 2 * GIB, "reserved_bytes": 3 * GIB, "peak_allocated_bytes": 4 * GIB,
        "peak_reserved_bytes": 5 * GIB, "growth_bytes": 2 * GIB, "retries": 0, "ooms": 0,
        "free_bytes": 8 * GIB, "total_bytes": 16 * GIB, "others_bytes": None,
    }  # fmt: skip
    return MemoryEvent(**{**body, **changes})  # type: ignore[arg-type]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(PHASES), st.integers(1, 10**9), min_size=1), min_size=1, max_size=12
    )
)
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


def test_idle_of_a_gpu_comes_from_the_device_clock() -> None:
    phases = {
        "data_wait": phase(10, 600),
        "to_device": phase(10, 100),
        "forward": phase(70, 250),
        "other": phase(10, 50),
    }
    shot = snapshot(window(1, 1, 100, phases=phases, device_steps=1), device="cuda:0")
    assert shot.idle.method == "events"
    assert dict(shot.idle.causes) == pytest.approx({WAITING: 0.6, "other": 0.05})
    assert shot.idle.share == pytest.approx(0.65)


def test_what_the_device_waits_for_by_its_clock() -> None:
    phases = {
        "data_wait": phase(10, 100),
        "forward": phase(50, 800),
        "log": phase(10, 60),
        "other": phase(10, 40),
        "evaluate": phase(150),
        "checkpoint": phase(50),
    }
    shot = snapshot(window(1, 1, 280, phases=phases, device_steps=1), device="cuda:0")
    stepping = 80 / 280
    assert shot.idle.causes == (
        (WAITING, pytest.approx(0.1 * stepping)),
        ("synchronising", pytest.approx(0.06 * stepping)),
        ("checkpoint", pytest.approx(50 / 280)),  # an evaluation computes
        ("other", pytest.approx(0.04 * stepping)),
    )
    assert shot.idle.reason == ""  # the device lags behind the host: no gaps inside its spans


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


def test_the_hosts_clock_takes_a_checkpoint_for_idle_and_an_evaluation_not() -> None:
    phases = {
        "forward": phase(50),
        "log": phase(2),
        "other": phase(8),
        "evaluate": phase(30),
        "checkpoint": phase(10),
    }
    shot = snapshot(window(1, 1, 100, phases=phases))
    assert shot.idle.causes == (("checkpoint", pytest.approx(0.1)), ("other", pytest.approx(0.1)))


def capture(step: int, method: str = "kernels", **idle_ns: int) -> KernelsEvent:
    causes = idle_ns or {WAITING: 300, "launch gaps": 100}
    return KernelsEvent(method, step, 3, 1000, 1000 - sum(causes.values()), 50, causes, 40)


def test_a_capture_takes_the_place_of_the_estimate() -> None:
    for device, method in (("cuda:0", "kernels"), ("cpu", "operators")):
        phases = {
            "forward": phase(60, 90),
            "data_wait": phase(20, 10),
            "evaluate": phase(15),
            "checkpoint": phase(5),
        }
        windows = [window(step, 1, 100, phases=phases, device_steps=1) for step in (1, 2)]
        shot = snapshot(windows[0], capture(1, method), windows[1], device=device)
        assert (shot.idle.method, shot.idle.step) == (method, 1)
        # It does not cover evaluations and checkpoints; the host clock gives their duration.
        assert dict(shot.idle.causes) == pytest.approx(
            {WAITING: 0.3 * 0.8, "launch gaps": 0.1 * 0.8, "checkpoint": 0.05}
        )
        assert shot.idle.share == pytest.approx(sum(share for _, share in shot.idle.causes))


def test_a_capture_before_the_first_window_counts() -> None:
    idle = snapshot(capture(4, "operators")).idle
    assert (idle.share, idle.step) == (pytest.approx(0.4), 4)


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


def test_without_a_device_clock_idle_is_what_the_driver_says() -> None:
    gpu = SampleEvent({"util_percent": 37}, {})
    shot = snapshot(window(1), gpu, device="cuda:0")
    assert (shot.idle.method, shot.idle.causes) == ("nvml", ())
    assert shot.idle.share == pytest.approx(0.63)


@pytest.mark.parametrize("sample", [SampleEvent({"util_percent": None}, {}), SampleEvent(None, {}), None])
def test_idle_that_cannot_be_known_is_none_with_the_reason(sample: SampleEvent | None) -> None:
    shot = snapshot(window(1), *([sample] if sample else []), device="cuda:0")
    assert (shot.idle.share, shot.idle.causes) == (None, ())
    assert "NVML" in shot.idle.reason


def test_headroom_of_the_host() -> None:
    room = snapshot(
        host_sample(memory_limit_bytes=100, memory_available_bytes=40, rss_bytes=20, workers_rss_bytes=5)
    ).headroom
    assert (room.kind, room.free_bytes, room.total_bytes, room.used_bytes, room.others_bytes) == (
        "host",
        40,
        100,
        25,
        35,
    )


@pytest.mark.parametrize("missing", ["memory_limit_bytes", "memory_available_bytes", "rss_bytes"])
def test_missing_on_the_host_is_none_not_zero(missing: str) -> None:
    host = {"memory_limit_bytes": 100, "memory_available_bytes": 40, "rss_bytes": 20}
    for sample in (
        host_sample(**{**host, missing: None}),
        host_sample(**{k: v for k, v in host.items() if k != missing}),
    ):
        room = snapshot(sample).headroom
        found = {
            "memory_limit_bytes": room.total_bytes,
            "memory_available_bytes": room.free_bytes,
            "rss_bytes": room.used_bytes,
        }
        assert found[missing] is None
        assert room.others_bytes is None
        assert [value for key, value in found.items() if key != missing] == [
            v for k, v in host.items() if k != missing
        ]


def test_nothing_sampled_is_nothing_known() -> None:
    for device in ("cpu", "cuda:0"):
        room = snapshot(device=device).headroom
        assert (room.free_bytes, room.total_bytes, room.used_bytes, room.others_bytes, room.peak_bytes) == (
            None,
        ) * 5
        assert room.fits_micro is None


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


def test_before_anything_is_measured_nothing_is_claimed() -> None:
    assert throughput(None, 20e6).reason == "not counted yet"
    early = throughput(work(), None)
    assert (early.flops_per_s, early.mfu, early.side) == (None, None, "bandwidth")
    assert throughput(work(flops_per_step=None), 20e6).flops_per_s is None
    assert throughput(work(bytes_per_step=None), 20e6).intensity is None


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
    event = KernelsEvent("operators", 14, 3, 1000, 500, 0, idle, 40, [["aten::mm", 300, 6]], "t.json")
    text = capture_text(event)
    assert all(part in text for part in ("3 steps", "50%", "aten::mm 30%", "t.json"))
    text = setting_text(setting("loader.workers", False, applied="0", verified="no fork here"))
    assert all(part in text for part in ("loader.workers", " = 4", "applied as 0", "no fork here"))
    assert "applied" not in setting_text(setting("loader.workers"))
