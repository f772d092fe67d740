"""Forward and backward by module: from hand-made events, also of a GPU, and from real captures on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.measure.model_work import ELSEWHERE, IN_LOSS, OTHER, Watched, model_work
from ndd_engine.measure.module_times import runs_compiled, shown_names
from ndd_engine.measure.timeline import TraceEvent
from ndd_engine.record.event import ModuleTime
from ndd_engine.record.events import KernelsEvent
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock

OUTSIDE, LOSS = ELSEWHERE[OTHER], ELSEWHERE[IN_LOSS]
NODE = "autograd::engine::evaluate_function: "
NAMES = [("Net", "Net"), ("first", "Linear"), ("second", "Linear")]
# `first` runs from 10 to 20, `second` from 20 to 30, both within the model (from 5 to 35).
CALLS = [(5, 0, -1, 1), (10, 1, -1, 1), (20, 0, -1, 0), (21, 2, -1, 1), (30, 0, -1, 0), (35, -1, -1, 0)]
PHASES = [(0, 40, "forward"), (40, 50, "loss"), (50, 100, "backward")]
WATCHED = Watched(NAMES, CALLS, 1)


def op(begin: int, end: int, sequence: int = -1, thread: int = 1, name: str = "aten::mm") -> TraceEvent:
    return TraceEvent(name, begin, end, thread, False, False, sequence=sequence)


def node(begin: int, end: int, sequence: int, name: str = "MmBackward0", thread: int = 1) -> TraceEvent:
    forward = 1 if sequence >= 0 else 0
    return TraceEvent(
        NODE + name, begin, end, thread, False, False, sequence=sequence, forward_thread=forward
    )


def rows(found: list[ModuleTime]) -> dict[str, tuple[int, int, int]]:
    """name -> (forward, backward, calls)."""
    return {row[0]: (row[2], row[3], row[4]) for row in found}


def test_a_node_of_backward_belongs_to_the_module_of_its_operator() -> None:
    seen = [
        op(11, 15, 7), op(22, 28, 8), op(36, 37), op(41, 43, 9),
        node(50, 55, 9), op(51, 53), node(56, 70, 8), op(57, 69), node(71, 80, 7), op(72, 79),
        node(80, 84, -1, "torch::autograd::AccumulateGrad"), op(81, 84, name="aten::add_"),
    ]  # fmt: skip
    found = model_work(seen, WATCHED, PHASES, gpu=False).modules
    assert found[0] == ("second", "Linear", 6, 12, 1, 0, 0)
    # Adding the gradient to the parameter is part of it.
    assert rows(found) == {
        "second": (6, 12, 1), "first": (4, 10, 1), LOSS: (2, 2, 0), OUTSIDE: (1, 0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # The model calls `second` within one composite operator: both have number 7, and the innermost made the node.
        ([op(8, 29, 7), op(22, 25, 7), node(56, 70, 7), op(57, 69)], ("second", (0, 12, 1))),
        # A node of an unknown operator.
        ([op(11, 15, 7), node(56, 70, 3), op(57, 69)], (OUTSIDE, (0, 12, 0))),
    ],
)
def test_the_operator_of_a_node(seen: list[TraceEvent], expected: tuple[str, Any]) -> None:
    assert rows(model_work(seen, WATCHED, PHASES, gpu=False).modules)[expected[0]] == expected[1]


def test_kernels_belong_to_the_module_that_launched_them() -> None:
    def launch(time: int, thread: int, correlation: int) -> TraceEvent:
        return TraceEvent("cudaLaunchKernel", time, time + 1, thread, False, False, 0, correlation)

    def kernel(begin: int, end: int, correlation: int, name: str = "gemm") -> TraceEvent:
        return TraceEvent(name, begin, end, 0, True, False, 0, correlation)

    # Backward runs in a thread of its own, and kernels long after their launches.
    seen = [
        op(11, 15, 7), launch(12, 1, 1), kernel(60, 90, 1),
        op(22, 25, 8), launch(23, 1, 2), kernel(90, 95, 2), launch(24, 1, 3), kernel(95, 99, 3, "Memcpy HtoD (Pinned)"),
        node(56, 70, 8, thread=2), launch(57, 2, 4), kernel(100, 140, 4),
        node(71, 80, 7, thread=2), launch(72, 2, 5), kernel(140, 150, 5),
    ]  # fmt: skip
    found = rows(model_work(seen, WATCHED, PHASES, gpu=True).modules)
    assert found == {"second": (5, 40, 1), "first": (30, 10, 1)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        out: Tensor = self.head(x)
        return out


def test_equal_blocks_have_one_name() -> None:
    named = Net().named_modules()
    names = dict.fromkeys(shown_names([(name, type(module).__name__) for name, module in named]))
    assert list(names) == [
        ("Net", "Net"), ("blocks", "ModuleList"), ("blocks.*", "Block"), ("blocks.*.up", "Linear"),
        ("blocks.*.down", "Linear"), ("head", "Sequential"), ("head.0", "LayerNorm"), ("head.1", "Linear"),
    ]  # fmt: skip


def captured(net: nn.Module, steps: int = 2) -> KernelsEvent:
    """A real capture of steps on the CPU."""
    clock = PhaseClock()
    capture = ProfilerCapture(torch.device("cpu"), clock, model=net)
    capture.start()
    capture.begin()
    for _ in range(steps):
        clock.enter(phase.FORWARD)
        out = net(torch.randn(16, 32))
        clock.enter(phase.LOSS)
        loss = nn.functional.cross_entropy(out, torch.zeros(16, dtype=torch.long))
        clock.enter(phase.BACKWARD)
        loss.backward()
        capture.step_ended()
    return capture.end(steps)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_capture_attributes_backward_to_modules_and_lines(recompute: bool) -> None:
    net = Net(recompute)
    event = captured(net)
    found = rows(event.modules)
    for name in ("blocks.*.up", "blocks.*.down", "head.1", "head.0"):
        forward, backward, _ = found[name]
        assert forward > 0 and backward > 0, found
    assert found["blocks.*.up"][2] == (6 if recompute else 3)
    assert found["head.1"][2] == 1
    assert found[LOSS][0] > 0 and found[LOSS][1] > 0
    # Nearly everything in backward is attributed to a module or the loss.
    backward = {name: times[1] for name, times in found.items()}
    assert backward.get(OUTSIDE, 0) < 0.2 * sum(backward.values())
    assert sum(times[0] + times[1] for times in found.values()) <= event.model_ns
    assert event.model_ns <= event.wall_ns / 2
    # No hook is left.
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    if recompute:
        return
    # The lines that launch the operators have their times: of one line in torch's code, that of the user.
    ours = [row for row in event.lines if row[0].endswith("test_modules.py")]
    (block,) = [row for row in ours if row[2] == "Block.forward"]
    parts = ("blocks.*", "blocks.*.up", "blocks.*.down")
    # A mark can lie a microsecond beside an operator.
    of_blocks = [sum(found[name][part] for name in parts) for part in range(2)]
    assert list(block[3:5]) == pytest.approx(of_blocks, rel=0.05)
    heads = [found[name] for name in ("head", "head.0", "head.1") if name in found]
    of_heads = [sum(times[part] for times in heads) for part in range(2)]
    (head,) = [row for row in ours if row[2] == "Net.forward" and row[4]]
    assert list(head[3:5]) == pytest.approx(of_heads, rel=0.05)
    # All of it closes: what is left of the phases is between operators.
    for part, name in enumerate(("forward", "backward"), 2):
        assert 0 < sum(row[part] for row in event.modules) <= event.passes[name]
    sizes = {row[0]: row[5:] for row in event.modules}
    assert sizes["blocks.*.up"][0] == 3 * 16 * 128 * 4  # the activations
    assert sizes["head.1"][1] == (32 * 4 + 4) * 4  # its parameters
    (linear,) = [row for row in event.operations if row[7] == "blocks.*.up" and row[9]]
    assert linear[:4] == ("linear", "16x32, 128x32, 128", "float", "") and linear[11] == 3
    assert (linear[9], linear[10]) == tuple(found["blocks.*.up"][:2])


def test_an_exception_in_a_module_leaves_the_rest_attributed() -> None:
    class Fragile(Net):
        def forward(self, x: Tensor) -> Tensor:
            try:
                self.blocks[0](x[:, :3])  # the wrong shape
            except RuntimeError:
                pass
            return super().forward(x)

    found = rows(captured(Fragile()).modules)
    assert found["head.1"][0] > 0 and found["head.1"][1] > 0


def test_compiled_models_are_left_alone() -> None:
    assert not runs_compiled(Net())
    compiled = Net()
    compiled.head.compile()
    assert runs_compiled(compiled)
    assert runs_compiled(nn.Sequential(torch.compile(Net())))  # type: ignore[arg-type]
    assert runs_compiled(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
