"""What traces of others show, and what they do not: each kind made here, with its twin where one could be mistaken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.rocm import VENDORS, rename

from ndd_console.__main__ import status_of
from ndd_engine.diagnose import Finding
from ndd_engine.recordings.traces import TraceUse, examine, findings

MAIN, ENGINE = 10, 11


class Made:
    """A trace, made in the names of CUDA and written in those of `vendor`: one of `tests.rocm.VENDORS`."""

    vendor: ClassVar[str] = "CUDA"

    def __init__(self, gpus: int = 1, **top: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._top = {"deviceProperties": [{"id": index, "name": "Test GPU"} for index in range(gpus)], **top}
        self._id = 0

    def host(
        self, name: str, begin: float, length: float, thread: int = MAIN, cat: str = "cpu_op", **args: Any
    ) -> None:
        self._add(name, cat, begin, length, (900, thread), args)

    def named(self, name: str, begin: float, length: float, thread: int = MAIN) -> None:
        self.host(name, begin, length, thread, "user_annotation")

    def call(self, name: str, begin: float, length: float, thread: int = MAIN) -> int:
        """A runtime call; returns its correlation id."""
        self._id += 1
        self.host("cuda" + name, begin, length, thread, "cuda_runtime", correlation=self._id)
        return self._id

    def gpu(
        self, name: str, begin: float, length: float, correlation: int = 0, stream: int = 7, device: int = 0,
        cat: str = "kernel", **args: Any,
    ) -> None:  # fmt: skip
        args |= {"device": device, "stream": stream} | ({"correlation": correlation} if correlation else {})
        self._add(name, cat, begin, length, (device, stream), args)

    def kernel(
        self, begin: float, length: float, name: str = "gemm", thread: int = MAIN, before: float = 0.05
    ) -> None:
        """A kernel that was launched right before."""
        self.gpu(name, begin, length, self.call("LaunchKernel", begin - before, 0.005, thread))

    def write(self, folder: Path, name: str = "made.json") -> Path:
        path = folder / name
        rename(self.events, self.vendor)
        path.write_text(json.dumps({**self._top, "traceEvents": self.events}))
        return path

    def _add(
        self, name: str, cat: str, begin: float, length: float, where: tuple[int, int], args: dict[str, Any]
    ) -> None:
        """where: process and thread, or GPU and stream."""
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": where[0], "tid": where[1], "ts": 5e6 + 1000 * begin,
            "dur": 1000 * length, "args": args,
        })  # fmt: skip


@pytest.fixture(autouse=True, params=VENDORS)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every trace here is one of CUDA and one of ROCm, with the same phases and causes."""
    monkeypatch.setattr(Made, "vendor", request.param)
    return str(request.param)


def shares(use: TraceUse) -> dict[str, float]:
    """Idle causes in percent of the time."""
    found = use.devices[0].time
    return {cause: round(100 * ns / found.wall_ns, 1) for cause, ns in found.idle_ns.items()}


def phases(use: TraceUse) -> dict[str, float]:
    found = use.phase_ns(use.begin, use.end)
    return {phase: round(100 * ns / use.wall_ns, 1) for phase, ns in found.items()}


def found_in(use: TraceUse) -> list[Finding]:
    return findings(use, use.devices[0])


def causes(use: TraceUse) -> list[str]:
    return [finding.cause for finding in found_in(use)]


def said(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert status_of(["trace", str(path), *options]) == 0
    return capsys.readouterr().out


def a_step(made: Made, begin: float, ranges: bool) -> None:
    """100 ms: forward 30, backward 40 with hundreds of operators in its own thread, optimizer 20, nothing 10."""
    for place in range(20):
        made.host("aten::linear", begin + 1.5 * place, 1.5)
    for place in range(40):
        made.host("autograd::engine::evaluate_function: MmBackward0", begin + 30 + place, 1, ENGINE)
        for inner in range(20):
            made.host("aten::mm", begin + 30 + place + 0.05 * inner, 0.05, ENGINE)
    made.named("Optimizer.step#SGD.step", begin + 70, 20)
    if ranges:
        made.named("ProfilerStep#4", begin, 100)
    for at in (10, 50, 75):
        made.kernel(begin + at, 10, thread=ENGINE if at == 50 else 10)


@pytest.mark.parametrize("ranges", [True, False], ids=["steps", "updates"])
def test_the_main_thread_is_the_one_with_the_ranges_of_the_loop(tmp_path: Path, ranges: bool) -> None:
    made = Made()
    a_step(made, 0, ranges)
    a_step(made, 100, ranges)
    use = examine(made.write(tmp_path), whole=not ranges)
    assert phases(use)["backward"] == pytest.approx(40, abs=0 if ranges else 6)
    assert {"forward", "backward", "optimizer", "other"} == phases(use).keys()
    assert len(use.steps) == 2 and use.whole_steps is ranges


def test_ranges_of_the_user_and_old_operators_of_backward_tell_the_main_thread(tmp_path: Path) -> None:
    made = Made()
    made.named("## forward ##", 0, 20)
    made.host("aten::linear", 0, 20)
    for place in range(50):
        made.host("MmBackward", 20 + place, 1, ENGINE)
        made.host("aten::mm", 20 + place, 1, ENGINE)
        made.host("aten::mul", 20 + place, 1, 99)  # a thread of the loader
    made.kernel(0.05, 20)
    made.kernel(60, 10)
    assert phases(examine(made.write(tmp_path))) == pytest.approx(
        {"forward": 28.6, "backward": 71.4}, abs=0.2
    )


def test_an_optimizer_inside_backward_does_not_make_its_thread_the_main_one(tmp_path: Path) -> None:
    made = Made()
    for place in range(30):
        made.host(
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 20 + place, 1, ENGINE
        )
        made.named("Optimizer.step#SGD.step", 20.2 + place, 0.5, ENGINE)
        made.host("aten::linear", 0.5 * place, 0.5)
    made.kernel(5, 5)
    made.kernel(45, 5)
    use = examine(made.write(tmp_path))
    assert phases(use) == pytest.approx({"forward": 22, "backward": 67, "other": 11}, abs=2)
    assert not use.steps  # there is no update in the main thread


def test_short_forward_passes_are_not_swallowed_by_backward(tmp_path: Path) -> None:
    made = Made()
    for step in range(4):
        made.host("aten::linear", 2 * step, 1)
        made.host("autograd::engine::evaluate_function: AddmmBackward0", 2 * step + 1, 1)
        made.kernel(2 * step + 0.1, 1.9)
    assert phases(examine(made.write(tmp_path))) == pytest.approx({"forward": 49, "backward": 51}, abs=3)


def test_a_wait_ends_when_its_call_returns(tmp_path: Path) -> None:
    made = Made()
    made.kernel(0, 2)
    made.call("StreamSynchronize", 1.9, 0.11)
    made.named("build the index", 2.1, 700)
    made.kernel(900, 2)
    use = examine(made.write(tmp_path))
    assert shares(use)["other"] > 99 and causes(use) == ["gpu-idle"]
    assert '"build the index"' in found_in(use)[0].title
    # Its twin waits as long as the GPU computes, and the model follows: the wait is the cause.
    made = Made()
    for step in range(8):
        made.host("aten::linear", 100 * step, 20)
        made.kernel(100 * step + 20, 30)
        made.call("StreamSynchronize", 100 * step + 20, 31)
        made.host("aten::linear", 100 * step + 51, 49)
    use = examine(made.write(tmp_path))
    assert shares(use) == pytest.approx({"synchronising": 1, "launch gaps": 66}, abs=3)
    found = {finding.cause: finding for finding in found_in(use)}
    assert found.keys() == {"sync", "launch-bound"}
    # It waits for 31 of 100 ms and could launch that much earlier.
    assert found["sync"].share == pytest.approx(0.32, abs=0.03)
    assert "launch gaps" in found["sync"].evidence[0].text


def test_a_pageable_upload_is_synchronising_until_it_returns(tmp_path: Path, vendor: str) -> None:
    made = Made()
    made.kernel(0, 20)
    made.host("aten::to", 18, 63)
    made.host("aten::copy_", 19, 61)
    upload = "Memcpy HtoD (Pageable -> Device)"
    made.gpu(upload, 79, 0.5, made.call("MemcpyAsync", 20, 60), cat="gpu_memcpy")
    made.kernel(82, 18)
    use = examine(made.write(tmp_path))
    assert phases(use)["to_device"] == pytest.approx(63, abs=0.5)
    assert shares(use) == pytest.approx({"copying": 1, "synchronising": 59.5, "other": 1}, abs=0.2)
    (first, *_) = found_in(use)
    call = "cudaMemcpyAsync" if vendor == "CUDA" else "hipMemcpyWithStream"
    assert first.cause == "sync" and call in first.evidence[1].text
    assert "pinned memory" in first.changes[0].text and all(
        ".item()" not in one.text for one in first.changes
    )


@pytest.mark.parametrize(
    ("kind", "call", "cause"),
    [
        ("M2D (Memory -> Device)", "urEnqueueUSMMemcpy", "sync"),
        ("H2D (Host -> Device)", "zeCommandListAppendMemoryCopy", "transfer"),
    ],
)
def test_a_gpu_of_intel_has_names_of_its_own(tmp_path: Path, kind: str, call: str, cause: str) -> None:
    made = Made()
    for step in range(5):
        at = 100.0 * step
        made.host("aten::to", at, 41)
        made.host(call, at, 40 if cause == "sync" else 0.1, cat="xpu_runtime", correlation=2 * step + 1)
        begin = at + (39.5 if cause == "sync" else 0.2)
        made.gpu(f"Memcpy {kind}", begin, at + 40 - begin, 2 * step + 1, cat="gpu_memcpy")
        made.host("aten::conv2d", at + 41, 3)
        made.host("urEnqueueKernelLaunch", at + 42, 0.1, cat="xpu_runtime", correlation=2 * step + 2)
        made.gpu("gen_conv", at + 43, 57, 2 * step + 2)
    use = examine(made.write(tmp_path))
    assert causes(use)[0] == cause
    assert phases(use)["to_device"] == pytest.approx(41, abs=6)  # the first copy begins late
    assert use.devices[0].time.convolution_ns == pytest.approx(5 * 57e6)
    assert use.devices[0].time.launches == 5


@pytest.mark.parametrize("length", [40, 2])
def test_copies_that_nothing_hides_are_a_finding(tmp_path: Path, length: int) -> None:
    made = Made()
    for step in range(5):
        made.host("aten::to", 100 * step, length)
        made.gpu(
            "Memcpy HtoD (Pinned -> Device)", 100 * step, length, made.call("MemcpyAsync", 100 * step, 0.1),
            cat="gpu_memcpy",
        )  # fmt: skip
        made.kernel(100 * step + length, 99 - length, before=length - 0.5)
    assert causes(examine(made.write(tmp_path))) == (["transfer"] if length == 40 else ["healthy"])


def copying(name: str, length: float, call: str = "MemcpyAsync", hidden: bool = False) -> Made:
    """Five steps of 100 ms with a copy or fill of this length, beside a kernel if it is hidden."""
    made = Made()
    for step in range(5):
        at = 100.0 * step
        made.named(f"ProfilerStep#{step}", at, 100)
        made.host("aten::linear", at + 1, 97)
        made.kernel(at + 1.5, 30)
        number = made.call(call, at + 2, 0.01)
        begin = at + 32 if not hidden else at + 40 if length < 50 else at + 2
        category = "gpu_memset" if call.startswith("Memset") else "gpu_memcpy"
        made.gpu(name, begin, length, number, stream=8, cat=category)
        end = at + 32 if hidden else begin + length
        made.kernel(end, at + 99.5 - end, before=end - at - 3)
    return made


@pytest.mark.parametrize(
    ("name", "call", "title", "advice"),
    [
        (
            "Memcpy DtoD (Device -> Device)",
            "MemcpyAsync",
            "copies within the GPU take 50 % of the time",
            ".clone()",
        ),
        ("Memset (Device)", "MemsetAsync", "fills of GPU memory take 50 % of the time", "set_to_none=True"),
    ],
)
def test_copies_within_a_gpu_and_fills_are_a_finding_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, call: str, title: str, advice: str
) -> None:
    path = copying(name, 50, call).write(tmp_path)
    (found,) = found_in(examine(path))
    assert (found.cause, found.title) == ("device-copies", title)
    assert found.share == pytest.approx(0.5) and found.ceiling == pytest.approx(2)
    assert [advice in change.text for change in found.changes] == [True]
    out = said(path, capsys)
    assert "no bottleneck" not in out and re.search(r"copies alone +(within the GPU|fill) 50 %", out)
    # Short ones, and long ones beside a kernel, cost nothing worth a finding.
    assert causes(examine(copying(name, 2, call).write(tmp_path))) == ["healthy"]
    assert causes(examine(copying(name, 45, call, hidden=True).write(tmp_path))) == ["healthy"]


def test_copies_within_a_gpu_and_fills_that_only_together_matter(tmp_path: Path) -> None:
    made = copying("Memcpy DtoD (Device -> Device)", 4)
    for step in range(5):
        made.gpu("Memset (Device)", 100 * step + 0.5, 1, cat="gpu_memset")
        made.gpu("Memset (Device)", 100 * step + 99.5, 0.5, cat="gpu_memset")
    (found,) = found_in(examine(made.write(tmp_path)))
    assert found.title == "copies within the GPU and fills of its memory take 5.5 % of the time"
    assert len(found.changes) == 2


# What is never advised for copies in a direction.
FOREIGN = {
    "from the host to the GPU": r"to the host|between GPUs",
    "from the GPU to the host": r"host-to-device|from pinned|on the GPU$|between GPUs",
    "between GPUs": r"\bhost\b|pinned",
}


@pytest.mark.parametrize(
    ("name", "direction", "pinned"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "from the host to the GPU", True),
        ("Memcpy HtoD (Pageable -> Device)", "from the host to the GPU", False),
        ("Memcpy DtoH (Device -> Pinned)", "from the GPU to the host", True),
        ("Memcpy DtoH (Device -> Pageable)", "from the GPU to the host", False),
        ("Memcpy PtoP (Device -> Device)", "between GPUs", True),
    ],
)
def test_copies_are_called_by_their_direction_and_pinned_memory_is_not_advised_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vendor: str, name: str, direction: str, pinned: bool
) -> None:
    path = copying(name, 50).write(tmp_path)
    found = next(one for one in found_in(examine(path)) if one.cause == "transfer")
    assert found.title == f"copies {direction} take 50 % of the time"
    words = [item.text for item in (*found.evidence, *found.changes)]
    assert not any(re.search(FOREIGN[direction], text) for text in words), words
    assert not any(" 0 %" in text for text in words)
    # ROCm calls both kinds of host memory "Host": there, pinned memory may help.
    known = pinned and (vendor == "CUDA" or direction == "between GPUs")
    assert any("pinned memory" in text for text in words) is not known
    assert "host-to-device" not in said(path, capsys)


def test_copies_in_both_directions_are_between_host_and_gpu(tmp_path: Path) -> None:
    made = copying("Memcpy HtoD (Pinned -> Device)", 30)
    for step in range(5):
        made.gpu("Memcpy DtoH (Device -> Pinned)", 100 * step + 99.5, 0.5, cat="gpu_memcpy")
        made.gpu("Memcpy DtoH (Device -> Pinned)", 100 * step + 0.5, 1, cat="gpu_memcpy")
    found = found_in(examine(made.write(tmp_path)))[0]
    assert found.title == "copies between host and GPU take 32 % of the time"
    assert [item.text.split(" run ")[0] for item in found.evidence] == [
        "copies from the host to the GPU", "copies from the GPU to the host"
    ]  # fmt: skip


@pytest.mark.parametrize(("kernels", "length"), [(1, 100), (4, 30), (6, 0.5)])
def test_a_trace_with_hardly_any_work_is_too_short_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: int, length: float
) -> None:
    for steps, expected in ((0, "too-short"), (1, "healthy")):
        made = Made()
        for place in range(kernels):
            made.kernel(length * place + 0.06, length)
        if steps:
            made.named("ProfilerStep#3", 0, length * kernels + 0.06)
        path = made.write(tmp_path)
        assert causes(examine(path)) == [expected]
        assert ("no bottleneck" in said(path, capsys)) is bool(steps)


def of_rank(rank: int, exposed: float, world: int = 2) -> Made:
    """Four steps of 100 ms in which the rank waits for so long in a collective."""
    made = Made(distributedInfo={"rank": rank, "world_size": world})
    for step in range(4):
        at = 100.0 * step
        made.named(f"ProfilerStep#{step}", at, 100)
        made.host("aten::linear", at + 1, 98)
        made.kernel(at + 1.5, 98 - exposed)
        made.gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 99.5 - exposed, exposed, stream=20)
    return made


@pytest.mark.parametrize("waits", [(20, 6), (20, 19)], ids=["straggler", "even"])
def test_the_straggler_itself_is_not_told_to_find_the_straggler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], waits: tuple[int, int]
) -> None:
    for rank, exposed in enumerate(waits):
        of_rank(rank, exposed).write(tmp_path, f"rank{rank}.json")
    out = said(tmp_path, capsys)
    late = waits == (20, 6)
    assert "rank1.json waits least" in out and "find the straggler" not in out
    assert ("what makes this rank slower" in out) is ("up to 20 % of the time" in out) is late
    # Each rank has findings of its own in the document.
    traces = json.loads(said(tmp_path, capsys, "--json"))["traces"]
    advice = [str(trace["devices"][0]["findings"]) for trace in traces]
    assert ["rank 1 waits least, 6.0 %" in text for text in advice] == [late, False]
    assert "find the straggler" in said(
        tmp_path / "rank0.json", capsys
    )  # which of them it is, this one does not show


def test_gaps_of_a_graph_and_a_busy_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for gap, expected in ((0.002, "healthy"), (4, "queue-gaps")):
        made = Made()
        graph = made.call("GraphLaunch", 0, 0.03)
        for place in range(20):
            made.gpu(f"node_{place % 3}", 0.04 + place * (1 + gap), 1, graph)
        path = made.write(tmp_path)
        assert causes(examine(path)) == [expected]
        out = said(path, capsys)
        assert not re.search(r"\bmodel\b|\bsteps?\b|training", out.replace("same steps", ""))


def test_a_model_whose_code_a_trace_does_not_show_gets_no_advice_about_its_loops(tmp_path: Path) -> None:
    made = Made()
    for place in range(12):
        made.host("aten::linear", 10 * place, 9)
        made.kernel(10 * place + 2, 2, before=1)
    (found,) = found_in(examine(made.write(tmp_path)))
    assert found.cause == "launch-bound"
    assert found.changes and not any("loops" in change.text for change in found.changes)


def test_an_idle_gpu_without_operators_of_the_host_is_never_healthy(tmp_path: Path) -> None:
    made = Made()
    for place in range(6):
        made.kernel(3 * place, 0.02)
    (found,) = found_in(examine(made.write(tmp_path)))
    assert found.cause == "gpu-idle" and "not show" in found.title
    assert "ProfilerActivity.CPU" in found.changes[0].text


@pytest.mark.parametrize(("length", "expected"), [(19, "healthy"), (12, "user-code")])
def test_a_processor_that_often_computes_nothing_is_not_healthy(
    tmp_path: Path, length: int, expected: str
) -> None:
    made = Made(gpus=0)
    for place in range(9):
        made.host("aten::linear", 20 * place, length)
    (found,) = found_in(examine(made.write(tmp_path)))
    assert found.cause == expected
    assert {item.source for item in found.evidence} == {"trace"}
    assert "model" not in found.title and ("37 %" in found.title) is (length == 12)


def test_figures_per_step_are_those_of_the_steps_of_the_trace(tmp_path: Path) -> None:
    made = Made()
    made.gpu("Memset (Device)", 0, 0.01, cat="gpu_memset")
    for step in range(5):
        made.named(f"ProfilerStep#{step + 2}", 40 * step, 40)
        made.named("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 40 * step + 0.01, 14.99)
        made.host("aten::conv2d", 40 * step + 15, 24)
        made.kernel(40 * step + 15.1, 24.9)
    (found,) = found_in(examine(made.write(tmp_path), whole=True))
    assert " 15 ms " in found.evidence[0].text and "(37 %)" in found.evidence[0].text
    made = Made()
    for update in range(3):
        made.host("aten::linear", 60 * update, 40)
        made.host("autograd::engine::evaluate_function: X", 60 * update + 40, 10, ENGINE)
        # Two optimizers, one after the other, are one update.
        made.named("Optimizer.step#Adam.step", 60 * update + 50, 4)
        made.named("Optimizer.step#SGD.step", 60 * update + 55, 5)
        made.kernel(60 * update + 0.05, 10)
    made.kernel(179, 1)
    use = examine(made.write(tmp_path))
    assert len(use.steps) == 3
    assert any(" 50 ms " in item.text for item in found_in(use)[0].evidence)


def counters(made: Made) -> None:
    for place in range(4):
        made.host("aten::conv2d", 3 * place, 1)
        made.call("LaunchKernel", 3 * place + 0.5, 0.01)
        made.gpu("conv", 3 * place, 3, cat="cuda_profiler_range", smsp__inst_executed=place)


def another(made: Made) -> None:
    for place in range(4):
        made.host("aten::sum", 3 * place, 1)
        made.gpu("job", 3 * place + 0.5, 2, device=5, cat="privateuse1_kernels")


def unrecorded(made: Made) -> None:
    for place in range(4):
        made.host("aten::linear", 3 * place, 2)


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (counters, "counters of 4 kernels instead of their times"),
        (another, "4 events of another accelerator (privateuse1_kernels, device 5), which are not analysed"),
        (unrecorded, "names 2 GPUs, but has no activity of a GPU: profile with ProfilerActivity.CUDA"),
    ],
)
def test_what_a_trace_does_not_show_of_an_accelerator_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fill: Callable[[Made], None], words: str
) -> None:
    made = Made(gpus=2)
    fill(made)
    path = made.write(tmp_path)
    assert causes(examine(path)) == ["gpu-unseen"]
    out = said(path, capsys)
    assert words in out and out.count(words) == 1 and "CPU alone" in out and "no bottleneck" not in out


def test_only_kernels_copies_and_fills_are_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(gpus=0)
    made.gpu("gemm", 0, 3, device=3)
    made.gpu("gemm", 4, 4, device=3)
    made.gpu("range", 0, 900, device=3, cat="cuda_profiler_range")
    made.gpu("Context Sync", 7, 50, device=3, cat="cuda_sync")
    made.gpu("## forward ##", 0, 70, device=3, cat="gpu_user_annotation")
    path = made.write(tmp_path)
    use = examine(path)
    assert (use.wall_ns, use.devices[0].time.busy_ns) == (8_000_000, 7_000_000)
    assert "-- GPU 3\n" in said(path, capsys)


def test_each_gpu_of_a_process_has_its_own_time(tmp_path: Path) -> None:
    made = Made(gpus=2)
    for device, length in ((0, 10), (1, 50)):
        made.gpu("gemm", 50 * device, length, device=device)
    made.gpu("## forward ##", 0, 100, cat="gpu_user_annotation")
    use = examine(made.write(tmp_path))
    assert [(one.index, one.time.busy_ns) for one in use.devices] == [(0, 10_000_000), (1, 50_000_000)]


def test_an_inference_is_told_nothing_about_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made()
    for place in range(15):
        made.host("aten::linear", 2 * place, 2)
        made.kernel(2 * place + 1, 0.4)
    path = made.write(tmp_path)
    use = examine(path)
    assert phases(use).keys() == {"forward"} and causes(use) == ["launch-bound"]
    out = said(path, capsys)
    assert "forward takes" in out
    assert not re.search(r"backward|optimizer|training|\bstep", out)


def test_the_report_of_traces_says_what_they_have_and_nothing_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        made = Made(
            baseTimeNanoseconds=1_600_000_000 * 10**9, distributedInfo={"rank": rank, "world_size": 2}
        )
        for step in range(4):
            made.named(f"ProfilerStep#{step}", 50 * step, 50)
            made.host("aten::linear", 50 * step + 20, 29)
            made.kernel(50 * step + 21, 20)
            made.gpu("oneshot_all_reduce_kernel", 50 * step + 35, 6 + rank, stream=20)
        made.write(tmp_path, f"rank{rank}.json")
    page = tmp_path / "page.html"
    assert (
        status_of(["trace", str(tmp_path / "rank0.json"), str(tmp_path / "rank1.json"), "-o", str(page)]) == 0
    )
    text = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text)
    assert "started 2020-09-13 12:26:45 UTC" in text  # the first of the whole steps, 5.05 s after the base
    assert "ndd-console try" not in text and "such workload" not in text
    assert str(tmp_path / "rank0.json") in text or str(tmp_path / "rank1.json") in text
    assert "exposed" in text and "main thread" in text
    assert not any(word in text for word in ("Learning", "Settings", "Events", "loss"))
    steps = text.split("Steps step time")[1]
    assert [steps.count(f" {number} 50 ms") for number in (1, 2, 3, 4)] == [1, 1, 1, 0]


@pytest.mark.parametrize("missing", [2, 3])
def test_a_rank_whose_trace_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: int
) -> None:
    for rank in range(3):
        made = Made(distributedInfo={"rank": rank, "world_size": 3})
        made.kernel(1, 5 + rank)
        if rank != missing:
            made.write(tmp_path, f"rank{rank}.json")
    assert (" 1 rank of 3: 2." in said(tmp_path, capsys)) == (missing == 2)


def test_the_time_of_a_trace_without_a_base_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made()
    made.kernel(0, 1)
    path = made.write(tmp_path)
    assert json.loads(said(path, capsys, "--json"))["traces"][0]["begin_unix_s"] is None
    page = tmp_path / "page.html"
    said(path, capsys, "-o", str(page))
    assert "started" not in page.read_text()
