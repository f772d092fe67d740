"""Busy and idle time from hand-made profiler events, also of a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.measure.timeline import CaptureTimeline, TraceEvent, timeline
from ndd_engine.record.events import PHASES
from ndd_engine.record.figures import LAUNCH_GAPS, QUEUED, SYNCHRONISING, WAITING_FOR_DATA


def kernel(begin: int, end: int, name: str = "gemm") -> TraceEvent:
    return TraceEvent(name, begin, end, 0, True, False)


def host(begin: int, end: int, name: str = "aten::mm", thread: int = 1) -> TraceEvent:
    return TraceEvent(name, begin, end, thread, False, False)


def named(begin: int, end: int, name: str, on_gpu: bool = False) -> TraceEvent:
    return TraceEvent(name, begin, end, 1, on_gpu, True)


NAMES = (
    "gemm", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "aten::mm", "cudaStreamSynchronize", "aten::item",
    "cudaLaunchKernel", "cudaMemcpyAsync", "ncclDevKernel_AllReduce",
    "Memcpy DtoH (Device -> Pageable)", "Stream Sync", "autograd::engine::evaluate_function: MmBackward0",
)  # fmt: skip
TIME = st.integers(-10, 120)
SEEN = st.builds(
    lambda name, begin, length, thread, on_gpu, annotation, correlation: TraceEvent(
        f"range {name}" if annotation else name, begin, begin + length, thread, on_gpu, annotation, 0, correlation
    ),
    st.sampled_from(NAMES), TIME, st.integers(0, 60), st.integers(1, 2), st.booleans(), st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
MARKS = st.lists(st.tuples(TIME, st.sampled_from([*PHASES, "forward/encoder"])), min_size=1, max_size=12).map(
    sorted
)


@given(st.lists(SEEN, max_size=20), MARKS, st.booleans())
def test_busy_and_the_causes_add_up_to_the_wall(
    seen: list[TraceEvent], marks: list[tuple[int, str]], gpu: bool
) -> None:
    seen += [kernel(40, 41), host(40, 41)]
    try:
        found = timeline(seen, marks, 0, 100, gpu)
    except ValueError:
        assert not gpu  # all operators may lie where a batch is made
        return
    assert found.wall_ns == 100
    assert found.busy_ns + sum(found.idle_ns.values()) == 100
    assert all(value > 0 for value in found.idle_ns.values())
    assert found.copy_ns <= found.busy_ns
    assert 0 <= found.exposed_ns <= found.collective_ns <= found.busy_ns
    assert SYNCHRONISING not in found.idle_ns or gpu


def of_gpu(*seen: TraceEvent, marks: list[tuple[int, str]]) -> CaptureTimeline:
    return timeline(list(seen), marks, 0, 100, gpu=True)


STEP = [
    (0, "data_wait"),
    (30, "to_device"),
    (40, "forward"),
    (60, "backward"),
    (80, "optimizer"),
    (95, "log"),
]


def test_a_gpu_is_busy_while_a_kernel_or_a_copy_runs() -> None:
    found = of_gpu(
        kernel(35, 45, "Memcpy HtoD (Pageable -> Device)"),
        kernel(40, 50),
        kernel(48, 60),  # on another stream: the time counts once
        kernel(70, 96, "adam<float>"),
        host(41, 43, "cudaLaunchKernel"),
        marks=STEP,
    )
    assert (found.busy_ns, found.copy_ns, found.launches) == (25 + 26, 10, 3)
    assert found.idle_ns == {WAITING_FOR_DATA: 30, "copying": 5, LAUNCH_GAPS: 10, "other": 4}
    assert found.top[0] == ("adam<float>", 26, 1)
    assert found.top[1] == ("gemm", 22, 2)


def test_named_ranges_on_the_gpu_compute_nothing() -> None:
    found = of_gpu(
        kernel(50, 60),
        named(0, 100, "Optimizer.step#AdamW.step", on_gpu=True),
        TraceEvent("Context Sync", 0, 100, 0, True, False),
        TraceEvent("ndd: forward", 0, 100, 0, True, False),  # the profiler does not mark it
        named(0, 100, "ndd: forward"),
        marks=STEP,
    )
    assert (found.busy_ns, found.launches) == (10, 1)


@pytest.mark.parametrize(
    "names",
    [
        ("aten::_local_scalar_dense", "cudaStreamSynchronize"),  # float(t), int(t): Tensor.item on the host
        ("aten::is_nonzero", "aten::item"),  # bool(t), if t:
        ("aten::_to_copy", "cudaStreamSynchronize"),  # t.to("cpu"), which waits for the stream of its copy
        ("cudaDeviceSynchronize",),  # torch.cuda.synchronize()
        ("cudaEventSynchronize",),
        ("hipDeviceSynchronize",),
    ],
    ids="-".join,
)
def test_every_way_of_waiting_is_synchronising(names: tuple[str, ...]) -> None:
    waits = [host(40 + place, 60 - place, name) for place, name in enumerate(names)]
    found = of_gpu(kernel(0, 50), *waits, kernel(80, 100), marks=[(0, "other")])
    assert found.idle_ns == {SYNCHRONISING: 30}
    found = of_gpu(kernel(0, 50), host(40, 60, "aten::add"), kernel(80, 100), marks=[(0, "other")])
    assert found.idle_ns == {"other": 30}


def test_a_gpu_of_which_nothing_was_seen_is_not_called_idle() -> None:
    with pytest.raises(ValueError, match="no GPU kernels"):
        of_gpu(host(10, 50), named(0, 100, "step", on_gpu=True), marks=STEP)


def of_host(*seen: TraceEvent, marks: list[tuple[int, str]]) -> CaptureTimeline:
    return timeline(list(seen), marks, 0, 100, gpu=False)


def test_without_a_gpu_operators_compute_and_what_is_between_them_does_not() -> None:
    found = of_host(
        host(40, 50, "aten::linear"),
        host(42, 48, "aten::addmm"),  # inside the other one
        host(60, 80, "autograd::engine::evaluate_function: AddmmBackward0"),
        host(61, 79, "AddmmBackward0"),
        host(65, 70, thread=2),  # the engine's own thread
        named(80, 95, "Optimizer.step#AdamW.step"),
        host(85, 90, "aten::_fused_adamw_"),
        marks=STEP,
    )
    assert (found.busy_ns, found.launches, found.copy_ns) == (20, 3, 0)
    assert found.idle_ns == {WAITING_FOR_DATA: 30, "copying": 10, LAUNCH_GAPS: 35, "other": 5}
    assert [name for name, _, _ in found.top] == ["aten::linear", "aten::_fused_adamw_", "aten::mm"]


def test_operators_that_make_a_batch_are_waiting_for_data() -> None:
    found = of_host(host(0, 30, "aten::stft"), host(40, 80), marks=STEP)
    assert found.busy_ns == 40
    assert found.idle_ns[WAITING_FOR_DATA] == 30
    assert [name for name, _, _ in found.top] == ["aten::mm"]


def test_what_a_compiler_made_computes() -> None:
    found = of_host(
        named(40, 60, "## Call CompiledFxGraph abc ##"), host(45, 50, "extern_kernels::mm"), marks=STEP
    )
    assert (found.busy_ns, found.launches) == (20, 1)


def test_names_are_made_printable_and_short() -> None:
    found = of_gpu(kernel(10, 20, "k\x1b[2J" + "x" * 5000), marks=STEP)
    name = str(found.top[0][0])
    assert name.isprintable()
    assert len(name) < 200


def call(begin: int, end: int, name: str, correlation: int) -> TraceEvent:
    return TraceEvent(name, begin, end, 1, False, False, 0, correlation)


def launched(begin: int, end: int, correlation: int, name: str = "gemm", device: int = 0) -> TraceEvent:
    return TraceEvent(name, begin, end, 0, True, False, device, correlation)


@pytest.mark.parametrize(
    ("seen", "marks", "idle"),
    [
        # The queue is empty because of the wait from 50 on; from 70 on the host was only slow.
        (
            [
                kernel(0, 50), host(45, 52, "aten::item"), host(46, 51, "cudaStreamSynchronize"), kernel(65, 70),
                kernel(75, 100),
            ],
            [(0, "forward"), (60, "backward")],
            {LAUNCH_GAPS: 5, SYNCHRONISING: 15},
        ),
        # Waiting for data stays that even after a synchronisation.
        (
            [kernel(0, 50), host(40, 51, "cudaDeviceSynchronize"), kernel(90, 100)],
            [(0, "log"), (55, "data_wait"), (85, "forward")],
            {WAITING_FOR_DATA: 30, SYNCHRONISING: 10},
        ),
        # The second kernel was launched before the gap at 40 began, the third within the gap at 80.
        (
            [
                call(0, 2, "cudaLaunchKernel", 1), launched(0, 40, 1), call(2, 4, "cudaLaunchKernel", 2),
                launched(50, 80, 2), call(85, 88, "cudaLaunchKernel", 3), launched(90, 100, 3),
            ],
            [(0, "forward")],
            {LAUNCH_GAPS: 10, QUEUED: 10},
        ),
        # A replayed graph is one phase with all its kernels.
        (
            [host(5, 7, "cudaGraphLaunch"), *(kernel(begin, begin + 8) for begin in range(10, 90, 10))],
            [(0, "forward"), (2, "forward/graph")],
            {LAUNCH_GAPS: 36},
        ),
        # A copy to pageable memory is a wait, and one to pinned memory is not.
        *[
            (
                [
                    launched(0, 20, 1), call(10, 60, "cudaMemcpyAsync", 2),
                    launched(55, 60, 2, f"Memcpy DtoH (Device -> {kind})"), launched(80, 100, 3),
                ],
                [(0, "forward")],
                {cause: 55},
            )
            for kind, cause in (("Pageable", SYNCHRONISING), ("Pinned", LAUNCH_GAPS))
        ],
    ],
)  # fmt: skip
def test_idle_time_of_a_gpu_has_the_cause_of_what_the_host_did(
    seen: list[TraceEvent], marks: list[tuple[int, str]], idle: dict[str, int]
) -> None:
    assert of_gpu(*seen, marks=marks).idle_ns == idle


def test_another_gpu_of_the_process_does_not_count() -> None:
    seen = [launched(0, 30, 1), launched(30, 90, 2, device=1)]
    assert timeline(seen, [(0, "forward")], 0, 100, True, 0).busy_ns == 30
    assert timeline(seen, [(0, "forward")], 0, 100, True, 1).busy_ns == 60


def test_copies_within_the_gpu_are_no_transfer() -> None:
    found = of_gpu(
        kernel(0, 10, "Memcpy DtoD (Device -> Device)"), kernel(20, 25, "Memcpy HtoD (Pinned -> Device)"),
        kernel(30, 40), marks=[(0, "forward")],
    )  # fmt: skip
    assert (found.copy_ns, found.busy_ns) == (5, 25)


def test_collectives_are_split_into_exposed_and_hidden() -> None:
    found = of_gpu(
        kernel(0, 40),
        kernel(30, 70, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        kernel(70, 80),
        marks=[(0, "backward")],
    )
    assert (found.collective_ns, found.exposed_ns, found.busy_ns) == (40, 30, 80)


@pytest.mark.parametrize(
    ("name", "convolves"),
    [
        ("void cudnn::detail::dgrad_engine<float, 512, 6>", True),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16", True),
        ("void implicit_convolve_sgemm<float>", True),
        ("winograd_forward_main_kernel", True),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", False),
        ("cutlass_80_tensorop_s1688gemm_128x128", False),
        ("void cudnn::ops::nchwToNhwcKernel", False),
        ("convertTensor_kernel", False),
    ],
)
def test_convolutions_are_told_by_the_name_of_the_kernel(name: str, convolves: bool) -> None:
    assert (of_gpu(kernel(0, 10, name), marks=[(0, "forward")]).convolution_ns == 10) is convolves
