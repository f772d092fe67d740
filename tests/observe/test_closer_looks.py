"""What a profiled step tells: calls and waits of the user's lines, large tables, what grows, denormal numbers.

Graphs and containers that a script keeps: test_kept.py. What is not finite first: test_facts.py.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import run
from tests.tiers import few
from torch import Tensor, nn
from torch.nn import functional

import ndd_watch.blocking
from ndd_watch import profiler as asides
from ndd_watch import slowing
from ndd_watch.called import Called
from ndd_watch.clock import CHECKPOINT, EVALUATE
from ndd_watch.looks import Looks
from ndd_watch.profiler import MOST_NS, Allowance, Asides, StepProfiler
from ndd_watch.slowing import Sizes, Slowing, Tables, denormals, shares, slower

LOOKS = Looks(torch)
LONG = [list(range(200))] * 400


def record(values: list[list[int]]) -> str:
    return json.dumps(values)


def work() -> None:
    record(LONG)


def profiled(function: Any, own: Callable[[Any], bool], *given: Any) -> dict[str, Any]:
    profiler = StepProfiler(own)
    assert not profiler.begin()
    try:
        function()
    finally:
        found = profiler.end(*given)
    return found


def calls(function: Any, inside: str = "") -> dict[str, list[Any]]:
    roots = {nn.Module.__call__.__code__: "forward"}
    found = profiled(
        function, lambda code: not isinstance(code, str) and code.co_filename == __file__, roots, {}, inside
    )
    return {row[3]: row for row in found["calls"]}


def test_a_call_of_a_library_has_the_line_that_makes_it() -> None:
    file, line, name, _, library, count, ns, phase = calls(work)["dumps"]
    assert (file, name, library, count, phase) == (__file__, "record", "", 1, "other") and ns > 0
    assert Path(file).read_text().splitlines()[line - 1].strip() == "return json.dumps(values)"


def prepares_and_trains() -> None:
    json.dumps([])  # before the training
    for _ in range(3):
        sorted(LONG)
    for _ in range(3):
        json.dumps(LONG)  # in it
    json.dumps([])  # after it


def test_a_call_in_a_loop_is_that_of_the_loop() -> None:
    """A script whose loop is not in a function calls the same before its training."""
    file, line = calls(prepares_and_trains)["dumps"][:2]
    assert Path(file).read_text().splitlines()[line - 1].strip() == "json.dumps(LONG)  # in it"


def test_of_a_step_the_model_is_no_call_and_of_an_evaluation_it_is_one_with_its_phase() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256)), torch.ones(64, 64)

    def evaluate() -> None:
        kept = torch.zeros(0, 256)
        for _ in range(30):
            kept = torch.cat([kept, model(x)])

    assert not [row for row in calls(evaluate).values() if row[7] == "forward"]
    found = calls(evaluate, "evaluate")
    assert "torch.cat" in found and found["torch.cat"][5] == 30
    assert "forward" in {row[7] for row in found.values()}


def loses() -> None:
    x, y = torch.ones(256, 256, requires_grad=True), torch.zeros(256, dtype=torch.long)
    for _ in range(30):
        functional.cross_entropy(x, y)
        json.dumps(LONG[:20])


def test_a_loss_that_no_module_computes_is_the_model_and_a_call_of_another_library_is_not() -> None:
    found = calls(loses)
    assert "dumps" in found and not any("cross_entropy" in name for name in found)


def test_closer_looks_wait_until_their_cost_is_a_small_part_of_the_time() -> None:
    """With a profiled step every 30 s, all looks together may take 2 % of the time, and 0.1 s at once."""
    allowance, second = Allowance(30 * 10**9), 10**9
    assert allowance.due(5 * second) == 5 * second  # the first look begins at once
    allowance.add(second // 20)
    assert allowance.due(6 * second) == 6 * second
    allowance.add(second // 4)
    assert allowance.due(6 * second) == 15 * second
    allowance.add(-second)  # a step that was shorter than usual gives nothing back
    assert allowance.due(6 * second) == 15 * second
    assert allowance.due(20 * second) == 20 * second


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Nanoseconds of the clock; a test moves it on."""
    t = [10**9]
    monkeypatch.setattr(asides, "now", lambda: t[0])
    yield t


class Profiles:
    def __init__(self) -> None:
        self.begun = 0
        self.put: list[str] = []
        rows = {"functions": [1], "calls": []}
        self.asides = Asides(self.begin, lambda _: rows, lambda found: self.put.append(found["inside"]))

    def begin(self) -> bool:
        self.begun += 1
        return True

    def evaluate(self, clock: list[int], batches: int, batch_ns: int) -> None:
        self.asides.begins(EVALUATE)
        for _ in range(batches):
            clock[0] += batch_ns
            self.asides.goes_on()
        self.asides.ends(EVALUATE)


def test_an_evaluation_is_profiled_once_and_no_longer_than_ten_seconds(clock: list[int]) -> None:
    """Of short ones the second."""
    one = Profiles()
    for number in range(20):
        one.evaluate(clock, 4, 10**7)
        one.asides.settle(False)
        clock[0] += 10**7
        assert len(one.put) == one.begun == (number > 0)
    one = Profiles()
    one.evaluate(clock, 40, 10**9)
    one.asides.settle(False)
    assert one.put == ["evaluate"] and MOST_NS < 40 * 10**9


def test_a_teacher_in_each_step_is_no_evaluation_and_a_checkpoint_is_one_of_its_own(clock: list[int]) -> None:
    one = Profiles()
    for _ in range(3):
        one.evaluate(clock, 2, 10**6)
        one.asides.settle(True)
    assert one.begun == 1 and not one.put
    for _ in range(2):
        one.asides.begins(CHECKPOINT)
        clock[0] += 10**6
        one.asides.ends(CHECKPOINT)
    one.asides.finish()
    assert one.put == ["checkpoint"]


# `float(t)`, `int(t)` and `bool(t)` call `Tensor.__float__`, `__int__` and `__bool__` (torch/csrc/autograd/
# python_variable_methods.cpp) from C, for which Python has no event. `t.to(...)` waits where it copies to the host.
HOST = torch.float64


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are on a GPU here, except those of 64 bits."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ndd_watch.blocking, "on_host", lambda tensor: tensor.dtype == HOST)
    before = dict(vars(torch.Tensor))
    yield
    assert dict(vars(torch.Tensor)) == before


def waits(work: Any) -> dict[str, int]:
    """What waits in a step, and how often."""
    found = profiled(work, lambda code: code is work.__code__)
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
def test_what_torch_reads_to_print_a_tensor_is_a_wait_of_the_line_and_a_copy_to_the_host_is_one() -> None:
    there, here = torch.linspace(0, 1, 4), torch.ones(4, dtype=HOST)

    def prints() -> None:
        repr(there)
        str([there])

    def searches() -> None:
        assert 0.0 in there

    def copies() -> None:
        there.to(HOST)
        there.to(torch.float16)
        here.to(HOST)
        here.to(torch.float32)

    assert set(waits(prints)) == {"repr"} and set(waits(searches)) == {"in"}
    assert waits(copies) == {"to": 1}


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


ROWS = 5000


def found(
    table: nn.Module,
    loss: Callable[[Tensor], Tensor],
    indices: int = 40,
    optimizer: Any = torch.optim.Adam,
    calls: int = 1,
    rows: int = ROWS,
) -> list[list[Any]]:
    """What a step tells whose model calls the table so often."""
    model = nn.Sequential(nn.ReLU(), table)
    tables = Tables(torch, LOOKS)
    tables.enters(model, 1, ((), {}))
    total = torch.zeros(())
    for _ in range(calls):
        x = torch.randint(rows, (indices // calls,))
        given = (x, torch.zeros(1, dtype=torch.long)) if isinstance(table, nn.EmbeddingBag) else (x,)
        tables.enters(table, 2, (given, {}))
        total = total + loss(table(*given))
    tables.loss(total)
    return tables.found([optimizer(model.parameters())])


def summed(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS])
def test_a_large_table_of_which_a_step_reads_few_rows(kind: Any, rows: int) -> None:
    (row,) = found(kind(rows, 4), summed)
    assert row == ["Sequential.1", kind.__name__, rows, 4, 40, 1.0, "Adam"]
    # Calls within a step are added up.
    assert found(kind(rows, 4), summed, calls=4)[0][4] == 40


def longer(output: Tensor) -> Tensor:
    for _ in range(11_000):
        output = output + 1
    return output.sum()


def sgd(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.1)


TABLE = nn.Embedding(ROWS, 4)
ONE = torch.ones(1, requires_grad=True)


@pytest.mark.parametrize(
    ("table", "loss", "more"),
    [
        (TABLE, summed, {"indices": ROWS // 3}),
        (nn.Embedding(ROWS, 4, sparse=True), summed, {"optimizer": sgd}),
        (nn.Embedding(500, 4), summed, {"indices": 4, "rows": 500}),
        # Each row has a gradient anyway; the second is called by a function, where its indices are not seen.
        (TABLE, lambda output: functional.linear(output, TABLE.weight).sum(), {}),
        (TABLE, lambda output: output.sum() + functional.embedding(torch.arange(ROWS), TABLE.weight).sum(), {}),
        # Without its use in the graph nothing is known; a graph that is too large is not judged.
        (TABLE, lambda output: output.detach().sum() + ONE.sum(), {}),
        (nn.Embedding(ROWS, 4).requires_grad_(False), lambda output: output.sum() * ONE.sum(), {}),
        (TABLE, longer, {}),
    ],
    ids=["many rows", "sparse", "small", "tied", "function", "detached", "frozen", "too large"],
)  # fmt: skip
def test_a_table_that_is_no_finding(table: nn.Module, loss: Callable[[Tensor], Tensor], more: Any) -> None:
    assert not found(table, loss, **more)


@pytest.mark.long
@pytest.mark.parametrize(("words", "name"), few([("", "Net"), ("parallel", "Parallel.module")], 1))
def test_tables_of_a_script(tmp_path: Path, words: str, name: str) -> None:
    ran = run(tmp_path, "embeds.py", "5000", words, NDD_WATCH_PROFILE_S="0.05", NDD_WATCH_WINDOW_S="0.05")
    assert not ran.status, ran.errors
    profiles = ran.of("functions")
    expected = [[f"{name}.encoder.table", "Embedding", 5000, 8, 40]]
    assert profiles and all([table[:5] for table in one["tables"]] == expected for one in profiles)
    if words:
        assert ran.of("run")[-1]["config"]["script"]["data_parallel"] == 2


def attention(loss: Tensor, attends: bool = True) -> str | None:
    tables = Tables(torch, LOOKS, attends)
    tables.loss(loss)
    tables.loss(torch.ones(2, requires_grad=True).sum())  # another loss of the same step
    return tables.attention


class ScaledDotProduct(torch.autograd.Function):
    """A node of the script, which is no attention."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 1

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0]


def test_the_backend_of_attention_is_in_the_graph() -> None:
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    fused = summed(functional.scaled_dot_product_attention(x, x, x))
    assert attention(fused) == "flash" and attention(fused, attends=False) is None
    assert attention(summed(torch.softmax(x @ x.mT, -1) @ x)) == ""  # by hand: no backend can be chosen
    assert attention(summed(ScaledDotProduct.apply(x))) == ""


def counts(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
    sizes = Sizes(LOOKS)
    sizes.model(model)
    sizes.optimizers(optimizers)
    sizes.handlers()
    return sizes.counts()


def test_hooks_and_handlers_are_counted_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    for _ in range(5):
        model[1][1].register_forward_hook(lambda module, given, output: None)
        model[1][1].register_full_backward_hook(lambda module, given, output: None)
        model.register_forward_pre_hook(lambda module, given: None)
    model[0].weight.register_hook(lambda gradient: gradient)
    logger = logging.getLogger("of this test")
    logger.handlers[:] = [logging.NullHandler() for _ in range(4)]
    found = counts(model)
    logger.handlers.clear()
    assert found["hooks:1.1"] == 10 and found["hooks:Sequential"] == 5 and found["hooks:0.weight"] == 1
    assert found["handlers:of this test"] == 4


def test_parameters_and_the_state_of_an_optimizer_are_counted_with_its_lists() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert counts(model, optimizer)["parameters:SGD"] == 3 and "state:SGD" not in counts(model, optimizer)
    optimizer.step()
    assert counts(model, optimizer)["state:SGD"] == 4  # two parameters with a buffer each
    optimizer.state[model.weight]["old"] = [torch.zeros(1)] * 30
    assert counts(model, optimizer)["state:SGD"] == 35
    # What a step replaces leaves its state behind.
    for _ in range(10):
        optimizer.state[nn.Parameter(torch.zeros(1))] = {"momentum_buffer": None}
    assert counts(model, optimizer)["state:SGD"] == 55


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process reads and writes")
def test_bytes_that_a_step_reads_and_writes_are_counted(tmp_path: Path) -> None:
    sizes = Sizes(LOOKS)
    (tmp_path / "log.txt").write_bytes(b"x" * 100_000)
    (tmp_path / "log.txt").read_bytes()
    found = sizes.counts()
    assert 100_000 <= found["written:"] < 200_000 and 100_000 <= found["read:"] < 200_000


def test_a_model_within_itself_and_odd_attributes_are_no_problem() -> None:
    model = nn.Sequential(nn.ReLU())
    model._modules["again"] = model
    model.__dict__["_forward_hooks"] = 7
    assert not [key for key in counts(model) if not key.startswith("handlers:")]


def test_steps_that_become_slower_are_looked_at_again_once_for_each_rise() -> None:
    slowing = Slowing()
    looked = [
        slowing.worth_a_look(ns) for ns in (30, 10, 11, 10, 11, 12, 13, 13, 14, 15, 15, 16, 10, 10, 0, 19)
    ]
    assert [index for index, yes in enumerate(looked) if yes] == [6, 11]


def trained(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, with gradients of about this size."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    (model(torch.ones(2, 64)).sum() * scale).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-19])
def test_squares_of_small_gradients_are_denormal_unless_the_processor_takes_them_as_zero(
    scale: float,
) -> None:
    _, optimizer = trained(scale)
    assert shares(LOOKS, [optimizer]) == ({} if scale == 1.0 else {"exp_avg_sq": pytest.approx(1.0)})
    if torch.set_flush_denormal(True):
        try:
            assert not shares(LOOKS, [trained(scale)[1]])
        finally:
            torch.set_flush_denormal(False)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_the_share_of_parameters_and_gradients(part: float) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).view(-1)[: round(part * parameter.numel())] = 1e-40
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
    assert shares(LOOKS, [optimizer]) == {"parameters": pytest.approx(part, abs=0.05)}
    # Zeros and other kinds of numbers are not counted.
    half = nn.Linear(8, 8).to(torch.bfloat16)
    assert not shares(LOOKS, [sgd(half.parameters()), sgd([torch.zeros(4)])])


@pytest.mark.parametrize(
    ("multiply", "root", "told"), [(1.0, 20.0, True), (30.0, 1.0, False), (1.0, 1.2, False)]
)
def test_they_count_where_the_processor_is_slow(
    monkeypatch: pytest.MonkeyPatch, multiply: float, root: float, told: bool
) -> None:
    assert all(times > 0 for times in slower())
    monkeypatch.setattr(slowing, "slower", lambda: (multiply, root))
    _, optimizer = trained(1e-20)
    found = denormals(LOOKS, [optimizer])
    assert found == ({"exp_avg_sq": (pytest.approx(1.0), 20.0)} if told else {})


def test_a_call_of_a_function_in_c_that_no_line_of_the_user_makes_is_left_out() -> None:
    code = "<method 'run_backward' of 'torch._C._EngineBase' objects>"
    entry = SimpleNamespace(code=code, callcount=1, totaltime=1.0, inlinetime=1.0, calls=None)
    called = Called([entry], lambda _: False, lambda _: False, {code: "backward"}, lambda _: "other", False)
    assert called.rows(1.0, [], False) == []
