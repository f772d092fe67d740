"""In a profiled step, waits for the GPU that Python's profiler does not see are named with their function.

`float(t)`, `int(t)` and `bool(t)` call `Tensor.__float__`, `__int__` and `__bool__` (torch/csrc/autograd/
python_variable_methods.cpp) from C, for which Python has no event. `t.to(...)` waits where it copies to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import SUBJECTS, run

import ndd_watch.clock
from ndd_watch.profiler import StepProfiler

HOST = torch.float64
SCRIPT = SUBJECTS / "on_gpu.py"
LINE = next(at for at, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "float(loss)" in text)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are on a GPU here, except those of 64 bits."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ndd_watch.clock, "on_host", lambda tensor: tensor.dtype == HOST)
    before = dict(vars(torch.Tensor))
    yield
    assert dict(vars(torch.Tensor)) == before


def waits(work: Any) -> dict[str, int]:
    """What waits in a step, and how often."""
    profiler = StepProfiler(lambda code: code is work.__code__)
    assert not profiler.begin()
    try:
        work()
    finally:
        found = profiler.end()
    counts: dict[str, int] = {}
    for file, line, name, what, calls, _ in found["waits"]:
        assert file == __file__ and line >= work.__code__.co_firstlineno and name == work.__name__
        counts[what] = counts.get(what, 0) + calls
    return counts


@pytest.mark.usefixtures("_gpu")
def test_reads_of_a_value_are_waits() -> None:
    loss, here = torch.ones((), requires_grad=True), torch.ones((), dtype=HOST)

    def work() -> None:
        total = float(here) + bool(here)  # values on the host, which nothing waits for
        for _ in range(3):
            total += float(loss)
        if loss and int(loss):
            f"{loss:.3f}"
        loss.item()
        loss.tolist()

    assert waits(work) == {"float": 3, "bool": 1, "int": 1, "format": 1, "item": 1, "tolist": 1}


@pytest.mark.usefixtures("_gpu")
def test_what_torch_reads_to_print_a_tensor_is_a_wait_of_the_line_that_prints() -> None:
    there = torch.linspace(0, 1, 4)

    def work() -> None:
        repr(there)
        str([there])

    def searched() -> None:
        assert 0.0 in there

    assert set(waits(work)) == {"repr"}
    assert set(waits(searched)) == {"in"}


@pytest.mark.usefixtures("_gpu")
def test_a_copy_to_the_host_is_a_wait_and_another_one_is_none() -> None:
    there, here = torch.ones(4), torch.ones(4, dtype=HOST)

    def work() -> None:
        there.to(HOST)
        there.to(torch.float16)
        here.to(HOST)
        here.to(torch.float32)

    assert waits(work) == {"to": 1}


def test_synchronize_is_a_wait_also_in_the_training_loop_itself() -> None:
    """The function with the loop is called before a step begins, so that the profiler has no entry of it."""

    def loop() -> dict[str, Any]:
        assert not profiler.begin()
        for module in (torch.cuda, torch.accelerator):
            with suppress(AssertionError, RuntimeError):  # there is no GPU
                module.synchronize()
        return profiler.end()

    profiler = StepProfiler(lambda code: code is loop.__code__)
    found = loop()["waits"]
    assert {(wait[0], *wait[2:4]) for wait in found} == {(__file__, "loop", "synchronize")}
    assert sum(wait[4] for wait in found) == 2


@pytest.mark.long
def test_a_script_that_reads_its_loss_is_told_where(tmp_path: Path) -> None:
    ran = run(
        tmp_path, "on_gpu.py", "2", "1", "1", "1", "float", NDD_WATCH_SHARE="10", NDD_WATCH_PROFILE_S="0.3",
    )  # fmt: skip
    assert ran.status == 0, ran.errors
    found = [wait for line in ran.of("functions") for wait in line["waits"]]
    assert found and {(Path(wait[0]).name, *wait[1:5]) for wait in found} == {
        ("on_gpu.py", LINE, "<module>", "float", 1)
    }
