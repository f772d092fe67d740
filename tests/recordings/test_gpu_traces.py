"""Traces of torch.profiler: recordings from real GPUs, one made here, and damaged files."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rocm import VENDORS, rename
from tests.tiers import few

from ndd_console.__main__ import status_of
from ndd_engine.errors import UsageError
from ndd_engine.measure.timeline import is_transfer, on_gpu
from ndd_engine.recordings.recorded_files import read_trace
from ndd_engine.recordings.traces import TraceUse, examine, findings, trace_files

# Idle share of the whole trace in percent (computed independently), and some of its causes in percent.
REFERENCE = {
    "v100-resnet50-workers0": (39.43, {"waiting for data": 28.47, "between queued kernels": 0.99}),
    "a100-cuda-graphs-6-streams": (
        64.40,
        {"between queued kernels": 55.80, "launch gaps": 1.54, "synchronising": 6.79},
    ),
    "a100-ddp-nccl": (76.16, {"launch gaps": 75.85, "between queued kernels": 0.18}),
    "two-ranks-rank0": (55.21, {"launch gaps": 27.81, "between queued kernels": 25.53}),
    "two-ranks-rank1": (52.89, {"launch gaps": 25.38, "between queued kernels": 25.18}),
}
# Of the time of kernels.
CONVOLUTIONS = {"v100-resnet50-workers0": 67.5, "a100-ddp-nccl": 34.5}
COLLECTIVES = {
    "a100-cuda-graphs-6-streams": (15.26, 15.05),
    "a100-ddp-nccl": (7.10, 5.99),
    "v100-resnet50-workers0": (0, 0),
}


@cache
def real(folder: Path, name: str, whole: bool = False) -> TraceUse:
    return examine(folder / "traces" / f"{name}.json.gz", whole=whole)


def shares(use: TraceUse) -> dict[str, float]:
    """Idle causes in percent of the time."""
    found = use.devices[0].time
    assert found.busy_ns + sum(found.idle_ns.values()) == found.wall_ns
    return {cause: 100 * ns / found.wall_ns for cause, ns in found.idle_ns.items()}


@pytest.mark.parametrize("name", REFERENCE)
def test_idle_time_and_causes_of_real_traces(gpu_data: Path, name: str) -> None:
    use = real(gpu_data, name, whole=True)
    idle, causes = REFERENCE[name]
    assert 100 * use.devices[0].idle == pytest.approx(idle, abs=0.006)
    found = shares(use)
    assert {cause: found.get(cause, 0) for cause in causes} == pytest.approx(causes, abs=0.02)
    time = use.devices[0].time
    if name in COLLECTIVES:
        measured = 100 * time.collective_ns / time.wall_ns, 100 * time.exposed_ns / time.wall_ns
        assert measured == pytest.approx(COLLECTIVES[name], abs=0.02)
    if name in CONVOLUTIONS:
        events = on_gpu(read_trace(gpu_data / "traces" / f"{name}.json.gz").events)
        kernels = sum(item.end - item.begin for item in events if not is_transfer(item))
        assert 100 * time.convolution_ns / kernels == pytest.approx(CONVOLUTIONS[name], abs=0.06)
    assert use.skipped == 0


def test_what_is_between_the_kernels_of_a_real_cuda_graph(gpu_data: Path) -> None:
    found = real(gpu_data, "a100-cuda-graphs-6-streams").devices[0].time
    assert sum(int(ns) for _, ns, _ in found.queued) == found.idle_ns["between queued kernels"]
    between = {kind: 100 * ns / found.wall_ns for kind, ns, _ in found.queued}
    assert between == pytest.approx(
        {
            "before a CUDA graph": 45.3,
            "CUDA graph": 11.2,
            "another stream": 2.3,
            "one stream": 2.0,
            "short": 2.0,
        },
        abs=0.1,
    )


@pytest.mark.long
@pytest.mark.budget(30)
@pytest.mark.parametrize("vendor", few(VENDORS, 2))
def test_the_findings_name_what_holds_each_real_run_back(gpu_data: Path, tmp_path: Path, vendor: str) -> None:
    def idle(use: TraceUse) -> dict[str, int]:
        """By cause. ROCm does not tell pinned memory, so that a copy of it may count as a wait."""
        found = dict(use.devices[0].time.idle_ns)
        return {
            **found,
            "synchronising": 0,
            "copying": found.get("copying", 0) + found.get("synchronising", 0),
        }

    def causes(name: str) -> list[str]:
        use = real(gpu_data, name)
        if vendor != "CUDA":
            body = json.loads(gzip.decompress((gpu_data / "traces" / f"{name}.json.gz").read_bytes()))
            rename(body["traceEvents"], vendor)
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(body))
            of_cuda, use = use, examine(path)
            assert idle(use) == idle(of_cuda)
            assert use.phase_ns(use.begin, use.end) == of_cuda.phase_ns(use.begin, use.end)
        return [finding.cause for finding in findings(use, use.devices[0])]

    assert causes("v100-resnet50-workers0") == ["data-wait"]
    # A step of CUDA graphs is not launch-bound, however many gaps its kernels have.
    assert causes("a100-cuda-graphs-6-streams") == ["queue-gaps", "collectives"]
    assert causes("a100-ddp-nccl")[0] == "launch-bound"


def test_ranks_of_a_folder_are_shown_side_by_side(gpu_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gpu_data / "traces"
    status = status_of(
        ["trace", str(folder / "two-ranks-rank1.json.gz"), str(folder / "two-ranks-rank0.json.gz")]
    )
    out = capsys.readouterr().out
    assert status == 0
    lines = out.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("rank "))
    assert lines[table + 1].split()[:2] == ["0", "two-ranks-rank0.json.gz"]
    assert lines[table + 2].split()[:2] == ["1", "two-ranks-rank1.json.gz"]
    assert "126 ranks of 128" in lines[table + 4]
    assert "two-ranks-rank1.json.gz" in lines[table + 5]  # waits least for the other
    assert len(trace_files((folder,))) == 5


def test_json_and_report_of_a_real_trace(
    gpu_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(gpu_data / "traces" / "a100-ddp-nccl.json.gz")
    assert status_of(["trace", trace, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)["traces"][0]
    device = body["devices"][0]
    assert (body["rank"], body["world_size"]) == (0, 2) and "A100" in device["name"]
    assert device["busy_ns"] + sum(device["idle_ns"].values()) == body["wall_ns"]
    assert sum(body["phases_ns"].values()) == body["wall_ns"]
    assert device["findings"][0]["cause"] == "launch-bound"
    assert "Optimizer.step" in body["phases_inferred_from"]["optimizer"]
    page = tmp_path / "trace.html"
    assert status_of(["trace", trace, "-o", str(page)]) == 0
    assert "launch-bound" in page.read_text()


def made_here(path: Path, steps: int = 3) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
        activities=[torch.profiler.ProfilerActivity.CPU],
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(steps + 1):
            loss = model(torch.randn(64, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def test_a_trace_without_a_gpu_is_judged_by_its_operators(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    made_here(path)
    use = examine(path)
    assert len(use.steps) == 2  # the first of three is left out
    assert use.devices[0].index is None
    assert use.devices[0].time.launches > 0
    assert {"forward", "backward", "optimizer"} <= use.phase_ns(use.begin, use.end).keys()
    packed = tmp_path / "here.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert examine(packed).wall_ns == use.wall_ns


DAMAGED = {
    "empty": b"",
    "half an object": b"{",
    "deeply nested": b"[" * 100_000,
    "no events": b'{"a": 1}',
    "an empty list": b"[]",
    "no operators": b'[1, null, {"ph": "X"}, {"ph": "X", "cat": "kernel", "name": 3, "ts": "x", "dur": 1}]',
    "damaged gzip": b"\x1f\x8b\x08\x00broken",
    "half of a gzip file": gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
    "a number of 5,000 digits": b'{"traceEvents": [' + b"9" * 5000 + b"]}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_trace_is_one_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad\x1b.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        examine(path)
    assert "bad\\x1b.json" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def kernel(ts: float = 0, **changes: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": ts,
        "dur": 10,
        "pid": 0,
        "tid": 1,
        "args": {},
        **changes,
    }


def test_damaged_events_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    damaged = [
        kernel(1e400), kernel(3, dur=-5), {"ph": "X", "cat": ["kernel"]}, kernel(1e30), kernel(2, name={}),
        kernel(2, name="elsewhere", cat="mtia_ccp_events", args={"device": "one"}),
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": [kernel(), *damaged]}))
    use = examine(path)
    assert (use.skipped, use.wall_ns) == (5, 10_000)
