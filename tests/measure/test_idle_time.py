"""Busy and idle time from hand-made profiler events, also of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rocm import VENDORS, renamed

from ndd_engine.measure import timeline as timelines
from ndd_engine.measure.timeline import TraceEvent
from ndd_engine.record.events import PHASES
from ndd_engine.record.figures import LAUNCH_GAPS, QUEUED, SYNCHRONISING, WAITING_FOR_DATA
from ndd_engine.record.profile_events import CaptureTimeline

VENDOR = [VENDORS[0]]


@pytest.fixture(autouse=True, scope="module", params=VENDORS)
def vendor(request: pytest.FixtureRequest) -> str:
    """Every timeline here is one of CUDA and one of ROCm."""
    VENDOR[0] = request.param
    return str(request.param)


def timeline(seen: Sequence[TraceEvent], *given: Any, **more: Any) -> CaptureTimeline:
    """Of the events, which have the names of CUDA, in those of the vendor."""
    names = renamed([(item.name, item.on_gpu, item.correlation) for item in seen], VENDOR[0])
    twins = [replace(item, name=name) for item, name in zip(seen, names, strict=True)]
    return timelines.timeline(twins, *given, **more)


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


def of_host(*seen: TraceEvent) -> CaptureTimeline:
    return timeline(list(seen), STEP, 0, 100, gpu=False)


STEP = [
    (0, "data_wait"), (30, "to_device"), (40, "forward"), (60, "backward"), (80, "optimizer"), (95, "log"),
]  # fmt: skip


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
    # A GPU of which nothing else was seen is not called idle.
    with pytest.raises(ValueError, match="no GPU kernels"):
        of_gpu(host(10, 50), named(0, 100, "step", on_gpu=True), marks=STEP)


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
    inside = 9 if names[0] in ("aten::is_nonzero", "aten::_to_copy") else 10  # the other name is the wait
    assert found.idle_ns == {SYNCHRONISING: inside, "other": 30 - inside}
    assert sum(int(wait[1]) for wait in found.waits) == inside
    found = of_gpu(kernel(0, 50), host(40, 60, "aten::add"), kernel(80, 100), marks=[(0, "other")])
    assert found.idle_ns == {"other": 30}


def test_without_a_gpu_operators_compute_and_what_is_between_them_does_not() -> None:
    found = of_host(
        host(0, 30, "aten::stft"),  # makes a batch: that is waiting for data
        host(40, 50, "aten::linear"),
        host(42, 48, "aten::addmm"),  # inside the other one
        host(60, 80, "autograd::engine::evaluate_function: AddmmBackward0"),
        host(61, 79, "AddmmBackward0"),
        host(65, 70, thread=2),  # the engine's own thread
        named(80, 95, "Optimizer.step#AdamW.step"),
        host(85, 90, "aten::_fused_adamw_"),
    )
    assert (found.busy_ns, found.launches, found.copy_ns) == (20, 3, 0)
    assert found.idle_ns == {WAITING_FOR_DATA: 30, "copying": 10, LAUNCH_GAPS: 35, "other": 5}
    assert [name for name, _, _ in found.top] == ["aten::linear", "aten::_fused_adamw_", "aten::mm"]
    # What a compiler made computes.
    found = of_host(named(40, 60, "## Call CompiledFxGraph abc ##"), host(45, 50, "extern_kernels::mm"))
    assert (found.busy_ns, found.launches) == (20, 1)


def call(begin: int, end: int, name: str, correlation: int) -> TraceEvent:
    return TraceEvent(name, begin, end, 1, False, False, 0, correlation)


def launched(begin: int, end: int, correlation: int, name: str = "gemm", device: int = 0) -> TraceEvent:
    return TraceEvent(name, begin, end, 0, True, False, device, correlation)


@pytest.mark.parametrize(
    ("seen", "marks", "idle"),
    [
        # The host waits until 52; then it is slow.
        (
            [
                kernel(0, 50), host(45, 52, "aten::item"), host(46, 51, "cudaStreamSynchronize"), kernel(65, 70),
                kernel(75, 100),
            ],
            [(0, "forward"), (60, "backward")],
            {LAUNCH_GAPS: 18, SYNCHRONISING: 2},
        ),
        # Waiting for data stays that even after a synchronisation.
        (
            [kernel(0, 50), host(40, 51, "cudaDeviceSynchronize"), kernel(90, 100)],
            [(0, "log"), (55, "data_wait"), (85, "forward")],
            {WAITING_FOR_DATA: 30, SYNCHRONISING: 1, LAUNCH_GAPS: 5, "other": 4},
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
                causes,
            )
            for kind, causes in (
                ("Pageable", {SYNCHRONISING: 35, LAUNCH_GAPS: 20}), ("Pinned", {LAUNCH_GAPS: 55})
            )
        ],
    ],
)  # fmt: skip
def test_idle_time_of_a_gpu_has_the_cause_of_what_the_host_did(
    seen: list[TraceEvent], marks: list[tuple[int, str]], idle: dict[str, int], vendor: str
) -> None:
    if vendor != "CUDA" and any("Pinned" in item.name for item in seen):
        # ROCm does not tell the kinds of host memory apart: a call as long as its copy has waited for it.
        idle = {SYNCHRONISING: 35, LAUNCH_GAPS: 20}
    assert of_gpu(*seen, marks=marks).idle_ns == idle


def test_another_gpu_of_the_process_does_not_count() -> None:
    seen = [launched(0, 30, 1), launched(30, 90, 2, device=1)]
    assert timeline(seen, [(0, "forward")], 0, 100, True, 0).busy_ns == 30
    assert timeline(seen, [(0, "forward")], 0, 100, True, 1).busy_ns == 60


def test_collectives_are_split_into_exposed_and_hidden() -> None:
    found = of_gpu(
        kernel(0, 40),
        kernel(30, 70, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        kernel(70, 80),
        marks=[(0, "backward")],
    )
    assert (found.collective_ns, found.exposed_ns, found.busy_ns) == (40, 30, 80)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("cutlass_80_simt_sgemm_128x128_8x4_nn_align1", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", "fp32"),
        ("cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4", "tf32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "tf32"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_tn", ""),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn", ""),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", ""),
        ("implicit_convolve_sgemm", ""),
        ("vectorized_elementwise_kernel", ""),
    ],
)
def test_the_number_format_of_a_matrix_product(name: str, kind: str) -> None:
    found = of_gpu(kernel(0, 40, name), kernel(50, 60), marks=[(0, "forward")])
    assert found.products_ns == ({kind: 40} if kind else {})


def test_a_wait_costs_at_most_the_launch_gap_after_it_that_is_as_long() -> None:
    # Without the wait of 20, the host would have launched 20 earlier.
    seen = [kernel(0, 50), host(32, 52, "aten::item"), kernel(90, 100)]
    assert of_gpu(*seen, marks=[(0, "forward")]).after_waits_ns == 20
    # A short wait explains little of a long gap, and nothing of one outside of the model.
    seen = [kernel(0, 50), host(49, 52, "aten::item"), kernel(90, 100)]
    assert of_gpu(*seen, marks=[(0, "forward")]).after_waits_ns == 3
    assert of_gpu(*seen, marks=[(0, "other")]).after_waits_ns == 0


def test_all_kinds_of_work_and_waits_in_one_step() -> None:
    found = of_gpu(
        call(0, 1, "cudaLaunchKernel", 1), launched(2, 20, 1),
        # An upload from pageable memory blocks until it is done; then the host is slow.
        call(18, 34, "cudaMemcpyAsync", 2), launched(30, 33, 2, "Memcpy HtoD (Pageable -> Device)"),
        launched(36, 40, 3, "Memcpy DtoD (Device -> Device)"), launched(40, 42, 4, "Memset (Device)"),
        host(41, 50, "cudaDeviceSynchronize"), host(50, 52, "cudaFree"), launched(60, 61, 5),
        call(55, 70, "cudaMemcpyAsync", 6), launched(61, 70, 6, "Memcpy DtoH (Device -> Pageable)"),
        call(70, 71, "cudaGraphLaunch", 7), launched(74, 80, 7), launched(92, 100, 7),
        marks=[(0, "forward"), (18, "to_device"), (35, "forward")],
    )  # fmt: skip
    assert (found.copy_ns, found.launches) == (3 + 9, 4)
    assert found.exposed_copies_ns == {"host to GPU": 3, "GPU to host": 9, "within the GPU": 4, "fill": 2}
    assert found.idle_ns == {
        "copying": 1, LAUNCH_GAPS: 2 + 1 + 3 + 4, QUEUED: 12, SYNCHRONISING: 10 + 1 + 8 + 2 + 5
    }  # fmt: skip
    assert found.queued == [("short", 12, 1)]


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (launched(60_000, 80_000, 2), "one stream"),
        (launched(25_000, 80_000, 2), "short"),
        (TraceEvent("gemm", 60_000, 80_000, 9, True, False, 0, 2), "another stream"),
        (launched(60_000, 80_000, 3), "before a CUDA graph"),
        (launched(60_000, 80_000, 1), "CUDA graph"),
    ],
    ids=["one stream", "short", "another stream", "before", "inside"],
)
def test_what_is_between_kernels_that_were_launched_in_time(second: TraceEvent, kind: str) -> None:
    calls = [
        call(0, 2, "cudaGraphLaunch" if kind == "CUDA graph" else "cudaLaunchKernel", 1),
        call(2, 4, "cudaLaunchKernel", 2),
        call(4, 6, "hipGraphLaunch", 3),
    ]
    found = timeline([*calls, launched(10, 20_000, 1), second], [(0, "forward")], 10, 80_000, True)
    assert found.queued == [(kind, second.begin - 20_000, 1)]
    assert found.idle_ns == {QUEUED: second.begin - 20_000}


@pytest.mark.parametrize(
    ("name", "exchanges"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgs)", True),
        ("oneccl_allreduce_pcie", True),
        ("void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>", True),
        ("void (anonymous namespace)::multimem_all_gather_kernel<16>", True),
        ("void vllm::cross_device_reduce_2stage<half, 8>(vllm::RankData*)", True),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<4>", True),
        ("nvshmemi_alltoall_kernel", True),
        ("void deep_ep::intranode::dispatch<8>(int*)", True),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", False),
        ("void cunn_SoftMaxForward<4, float, AllReduce>", False),
        ("void BlockAllReduceNorm<float>(float*)", False),
        ("void at::native::index_kernel_gather<int>", False),
        ("triton_red_fused__softmax_0d1d", False),
        ("triton_poi_fused_add_all_reduce_wait_tensor_3", False),
    ],
)
def test_collectives_of_all_libraries_are_told_from_reductions(name: str, exchanges: bool) -> None:
    assert (of_gpu(kernel(0, 10, name), marks=[(0, "backward")]).collective_ns == 10) is exchanges


@pytest.mark.parametrize(
    ("operators", "name", "convolves"),
    [
        (["aten::conv2d", "aten::cudnn_convolution"], "cutlass_80_tensorop_s1688gemm_128x128", True),
        (["aten::convolution_backward"], "void cudnn::ops::nchwToNhwcKernel", True),
        (["CudnnConvolutionBackward0"], "volta_sgemm_64x64_nt", True),
        (["aten::miopen_convolution"], "Cijk_Ailk_Bljk_SB", True),
        # Its bias is added by another operator.
        (["aten::conv2d", "aten::add_"], "vectorized_elementwise_kernel", False),
        (["aten::mm"], "void implicit_convolve_sgemm<float>", False),
        (["aten::_convert_indices_from_coo_to_csr"], "convert_kernel", False),
        # Without an operator, as in a CUDA graph, the name of the kernel tells.
        ([], "void cudnn::detail::dgrad_engine<float, 512, 6>", True),
        ([], "winograd_forward_main_kernel", True),
        ([], "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", False),
        ([], "convertTensor_kernel", False),
    ],
)
def test_convolutions_are_told_by_the_operator_that_launches_them(
    operators: list[str], name: str, convolves: bool
) -> None:
    around = [host(10 + place, 40 - place, operator) for place, operator in enumerate(operators)]
    seen = [
        host(2, 5, "aten::conv1d"),
        *around,
        call(20, 22, "cudaLaunchKernel", 7),
        launched(50, 60, 7, name),
    ]
    assert (of_gpu(*seen, marks=[(0, "forward")]).convolution_ns == 10) is convolves
