"""Kernels of a recording beside their estimate for the GPU, from the shapes of the operators that launched them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ndd_engine.hardware.gpus import GpuProfile, load
from ndd_engine.hardware.kernels import Card, Op, Shape, fitted, kernels_of
from ndd_engine.measure.recorded_operations import recorded_kernels
from ndd_engine.measure.timeline import TraceEvent, timeline
from ndd_engine.recordings.traces import examine

A100 = next(gpu for gpu in load() if gpu.slug == "a100-80gb-sxm")
PRODUCT = {"Input Dims": [[512, 256], [256, 1024]], "Input type": ["c10::Half", "c10::Half"]}
USUAL_NS = round(
    1e9
    * sum(
        map(
            Card(A100).seconds,
            kernels_of(
                Op("", "mm", (Shape((512, 256), 2, "fp16"), Shape((256, 1024), 2, "fp16")), None), False
            ),
        )
    )
)


def captured(
    ns: int, given: Any, name: str = "aten::mm", profile: GpuProfile | None = A100
) -> dict[str, int]:
    """A step of one kernel of `ns` nanoseconds and of one that no operator has launched."""
    seen = [
        TraceEvent(
            "aten::linear", 0, 90, 1, False, False, given={"Input Dims": [[1]], "Input type": ["float"]}
        ),
        TraceEvent(name, 10, 80, 1, False, False, given=given),
        TraceEvent("cudaLaunchKernel", 20, 30, 1, False, False, 0, 7),
        TraceEvent("gemm", 100, 100 + ns, 0, True, False, 0, 7),
        TraceEvent("other", 100 + ns, 110 + ns, 0, True, False, 0, 8),
    ]
    return timeline(seen, [(0, "forward")], 0, 200 + ns, True, 0, profile).estimated_ns


def test_a_kernel_is_compared_with_the_estimate_of_its_operator() -> None:
    found = captured(2 * USUAL_NS, PRODUCT)
    assert found["measured"] == 2 * USUAL_NS and found["kernels"] == 2 * USUAL_NS + 10
    assert found["usual"] == pytest.approx(USUAL_NS, abs=1)
    assert found["low"] < found["usual"] < found["high"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "aten::mm"),
        ({"Input Dims": "x", "Input type": 3}, "aten::mm"),
        ({"Input Dims": [[512, 256]], "Input type": ["c10::Half"]}, "aten::mm"),
        ({"Input Dims": [[512, -1], [256, 1024]], "Input type": ["float", "float"]}, "aten::mm"),
        (PRODUCT, "mine::mm"),
        (PRODUCT, "aten::cudnn_convolution"),
    ],
)
def test_what_has_no_shapes_is_not_estimated(given: Any, name: str) -> None:
    assert captured(1000, given, name) == {}


def test_a_gpu_without_a_profile_is_not_estimated() -> None:
    assert captured(1000, PRODUCT, profile=None) == {}


@given(
    st.sampled_from(["aten::mm", "aten::convolution", "aten::cat", "aten::sum", "aten::_fused_adamw_"]),
    st.lists(st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(-2, 9), max_size=4)), max_size=9),
    st.lists(st.sampled_from(["float", "TensorList", "Scalar", "", "ScalarList"]), max_size=9),
    st.lists(st.sampled_from(["", "True", "[1, 1]", "[0]", "1", "(", "None"]), max_size=11),
)
def test_no_recording_is_too_strange(name: str, dims: list[Any], types: list[str], values: list[str]) -> None:
    given = {"Input Dims": dims, "Input type": types, "Concrete Inputs": values}
    assert isinstance(recorded_kernels(name, given, False), list)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    st.integers(1, 2),
)
def test_a_convolution_has_the_operations_that_torch_gives_it(
    kernel: int, stride: int, padding: int, dilation: int, transposed: bool, groups: int
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(4, 6, kernel, stride, padding, dilation=dilation, groups=groups, bias=False, device="meta")
    x = torch.empty(2, 4, 11, 9, device="meta")
    out = layer(x)
    values = ["", "", "", f"[{stride}, {stride}]", f"[{padding}, {padding}]", f"[{dilation}, {dilation}]"]
    given = {
        "Input Dims": [list(x.shape), list(layer.weight.shape), [], [], [], [], [], [], []],
        "Input type": ["float", "float", "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
        "Concrete Inputs": [*values, str(transposed), "[0, 0]", str(groups)],
    }  # fmt: skip
    (found,) = recorded_kernels("aten::convolution", given, False)
    # Each element of the result, or of the input of a transposed one, is a sum over a filter.
    of = x if transposed else out
    assert found.flops == 2 * of.numel() * layer.weight[0].numel()


@pytest.mark.skipif("NDD_TEST_DATA" not in os.environ, reason="NDD_TEST_DATA is not set")
@pytest.mark.parametrize("name", ["a100-cuda-graphs-6-streams"])
def test_recorded_kernels_take_about_as_long_as_estimated(name: str) -> None:
    path = Path(os.environ["NDD_TEST_DATA"], "gpu", "traces", f"{name}.json.gz")
    (found,) = (device.time.estimated_ns for device in examine(path).devices)
    assert found["measured"] > 0.1 * found["kernels"]
    assert found["low"] < found["measured"] < found["high"]
    assert fitted().p90_error > 0.2
