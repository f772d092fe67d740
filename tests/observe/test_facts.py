"""What a script's process tells besides its steps: compilations, what is not finite, evaluations without `eval`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import run
from tests.tiers import few
from torch import Tensor, nn

from ndd_watch.apart import Compilations, guard
from ndd_watch.clock import S
from ndd_watch.finite import Finite, Origin
from ndd_watch.looks import Looks
from ndd_watch.mapped import SKIPPED


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "0/0: bins == 0          #   # recompile.py:13 in forward",
            "bins == 0 (recompile.py:13 in forward)",
        ),
        (
            "0/7: bins == 7   # if bins % 2:  # a/b/train.py:13 in forward",
            "bins == 7 (train.py:13 in forward)",
        ),
        (
            "0/0: len(x) == 3 # for y in x: # a/train.py:9 in forward (_dynamo/variables/iter.py:5 in call)",
            "len(x) == 3 (train.py:9 in forward)",
        ),
        (
            "0/1: (0.5 + n) == 1.5 # (_dynamo/passes/scalars.py:429 in _impl)",
            "(0.5 + n) == 1.5 (scalars.py:429 in _impl)",
        ),
        ("tensor 'x' size mismatch at index 0", "tensor 'x' size mismatch at index 0"),
    ],
)
def test_the_assumption_and_its_place_are_taken_from_the_reason(reason: str, told: str) -> None:
    assert guard(reason) == told


def record(**found: Any) -> SimpleNamespace:
    return SimpleNamespace(co_filename="/a/train.py", co_firstlineno=7, co_name="forward", **found)


def test_first_compilations_and_later_ones_are_marks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        record(compile_id="0/0", duration_us=1e6), record(compile_id="1/0", duration_us=2e6),
        record(compile_id="1/1", duration_us=5e5, recompile_reason="0/0: n == 1"),
        record(compile_id="1/2", fail_reason="recompile_limit reached"),
    ]  # fmt: skip
    utilities = SimpleNamespace(get_compilation_metrics=lambda: records)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utilities)
    compilations = Compilations()
    first, again = compilations.take()
    assert first == ("compile", "compiled 2 graphs in 3.0 s", {"seconds": 3.0, "graphs": 2})
    kind, text, data = again
    assert kind == "recompile" and "1 graph in 0.5 s: forward (train.py:7)" in text
    assert data == {
        "seconds": 0.5, "graphs": 1, "reason": "n == 1", "limit": True, "file": "/a/train.py", "line": 7,
        "function": "forward",
    }  # fmt: skip
    assert not compilations.take()


@pytest.mark.long
@pytest.mark.parametrize("words", few(["number", ""], 1))
def test_recompilations_are_told_with_their_reason_and_the_limit(tmp_path: Path, words: str) -> None:
    ran = run(tmp_path, "recompiles.py", *words.split())
    again = [mark["data"] for mark in ran.marks(kind="recompile")]
    assert [mark["data"]["graphs"] for mark in ran.marks(kind="compile")] == [1]
    assert sum(data["graphs"] for data in again) == (7 if words else 0)
    for last in again[-1:]:
        assert last["limit"] and "bins" in last["reason"]
        assert (Path(last["file"]).name, last["line"], last["function"]) == ("recompiles.py", 11, "forward")


NAN = float("nan")
mse = nn.functional.mse_loss


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.log(self.first(x).abs() * -1))
        return found


class Masked(nn.Module):
    """Attention to nothing but the first position, by a mask of -inf."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x + torch.zeros(8).index_fill(0, torch.arange(1, 8), -math.inf)
        return scores.softmax(-1).sum(-1, keepdim=True)


def plain(last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *([last] if last is not None else []), nn.Linear(8, 1))


def ratio(out: Tensor, target: Tensor) -> Tensor:
    return ((out - out) / (out - out)).mean() + target.mean()


def logarithm(out: Tensor, target: Tensor) -> Tensor:
    """-inf."""
    return (0.0 * (out - target).abs()).mean().log()


def with_column(x: Tensor) -> Tensor:
    return x.index_fill(1, torch.tensor([3]), NAN)


def with_item(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([5]), math.inf)


def damaged(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[1].bias.fill_(NAN)  # type: ignore[index, union-attr, operator]
    return model


@pytest.mark.parametrize(
    ("model", "of_x", "of_y", "loss", "right"),
    [
        (plain, with_column, None, mse, {"what": "input", "axis": "column", "at": [3], "size": 8}),
        (plain, with_item, None, nn.MSELoss(), {"what": "input", "axis": "item", "at": [5], "infinite": True}),
        (plain, None, with_item, mse, {"what": "input", "name": "y", "axis": "item"}),
        (lambda: plain(Divides()), None, None, mse, {"what": "output", "name": "1", "kind": "Divides"}),
        (Between, None, None, mse, {"what": "before", "name": "last", "function": "forward"}),
        (plain, None, None, ratio, {"what": "function", "name": "ratio"}),
        (plain, None, None, logarithm, {"what": "loss", "infinite": True}),
        (lambda: damaged(plain()), None, None, mse, {"what": "parameter", "name": "1.bias", "of": 4}),
        (lambda: damaged(plain()), with_column, None, mse, {"what": "input"}),
        (lambda: nn.Sequential(Masked(), nn.Linear(1, 1)), None, None, ratio, {"what": "function", "name": "ratio"}),
        (plain, None, None, mse, {}),
    ],
)  # fmt: skip
def test_the_first_thing_that_is_not_finite_is_named(
    model: Callable[[], nn.Module], of_x: Any, of_y: Any, loss: Any, right: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    made = model()
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    x, y = (of_x or (lambda one: one))(x), (of_y or (lambda one: one))(y)
    before = torch.random.get_rng_state()
    found = Origin(torch, Looks(torch)).of(made, (x, y), lambda: loss(made(x), y))
    assert {name: found.get(name) for name in right} == right
    assert bool(found) == bool(right)
    assert torch.equal(before, torch.random.get_rng_state())


def test_values_that_have_grown_without_a_bound_are_told_with_their_magnitude() -> None:
    model = plain()
    with torch.no_grad():
        model[0].weight.fill_(1e30)  # type: ignore[index, union-attr, operator]
    x = torch.full((4, 8), 1e12)
    found = Origin(torch, Looks(torch)).of(model, (x,), lambda: model(x).sum())
    assert found["what"] == "output" and found["name"] == "0" and found["largest"] == pytest.approx(1e30)


def skips(*rows: tuple[int, int]) -> tuple[int, bool, int | None]:
    """(skipped updates that count, whether a closer look is due, since when) of (skipped, made) updates in turn."""
    finite, asked = Finite(), []
    finite.suspicious = lambda looks: asked.append(looks > 0)
    before, done = S[SKIPPED], 0
    for skipped, made in rows:
        for one in [True] * skipped + [False] * made:
            finite.updated(one, done)
            done += 1
    count, S[SKIPPED] = S[SKIPPED] - before, before
    return int(count), bool(asked), finite.since


def test_a_scaler_that_looks_for_its_scale_is_not_suspicious() -> None:
    assert skips((5, 100)) == (0, False, None)
    # It doubles its scale every 2,000 steps, and takes that back.
    assert skips((3, 2000), *[(1, 2000)] * 20) == (20, False, None)
    assert skips((5, 495), (40, 0)) == (40, True, 500)
    assert skips((3, 100), *[(1, 9)] * 30) == (30, True, None)
    # It never finds one.
    assert skips((60, 0)) == (60, True, 0)


def test_losses_that_are_not_finite_begin_with_the_first_one() -> None:
    finite = Finite()
    for step, loss in enumerate([2.0, 1.0, 50.0, NAN, math.inf]):
        assert finite.read(step, loss) == math.isfinite(loss)
    assert finite.loss == ("infinite", 3, 2, 50.0, 1.0)
    assert finite.read(5, 1.0) and finite.loss is None


BROKEN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
for step in range(300):
    x = torch.randn(32, 8)
    if step >= BEGIN:
        x[:, 3] = float("nan")
    loss = model(x).square().mean() * 1e4
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step < BEGIN:
        print(float(loss))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.budget(30)
def test_skipped_updates_are_told_with_their_first_step_and_what_was_not_finite(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BROKEN.replace("BEGIN", "100"))
    ran = run(tmp_path, str(script))
    windows = ran.of("window")
    assert ran.total("skipped") == 200
    assert {window["skipping_since"] for window in windows} <= {None, 0, 100}
    assert next(window["first_skipped"] for window in windows if window["skipped"]) == 100
    (found,) = ran.of("not_finite")
    assert (found["what"], found["name"], found["axis"], found["at"]) == ("input", "x", "column", [3])
    assert found["line"] == 12 and found["step"] > 100
    assert ran.out == run(tmp_path / "bare", str(script), observed=False, read=False).out
    # The scale was too large at first.
    script.write_text(BROKEN.replace("BEGIN", "1000"))
    well = run(tmp_path / "well", str(script))
    assert not well.total("skipped") and not well.of("not_finite")
    assert well.of("window")[-1]["loss_scale"] < 2.0**127


LEAVES_OUT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(1600, 8)
if sys.argv[1] == "damaged":
    x[::16, 3] = float("nan")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(4):
    for number, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=8)):
        loss = model(batch).square().mean()
        if not torch.isfinite(loss) or (sys.argv[1] == "easy" and number % 2):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["damaged", "easy"])
def test_batches_that_a_loop_leaves_out_are_told_and_what_is_not_finite_in_them(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "train.py").write_text(LEAVES_OUT)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind, NDD_WATCH_SHARE="0")  # each step is timed by phase
    assert ran.status == 0 and sum(window["steps"] for window in ran.of("window")) == 400
    # Those of a closer look are not counted.
    assert 100 <= ran.total("left_out") <= 400
    told = [(found["what"], found["name"], found["at"]) for found in ran.of("not_finite") if "what" in found]
    assert told == ([("input", "batch", [3])] if kind == "damaged" else [])


FORGETS_EVAL = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
kind = sys.argv[1]
class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)
model = Net(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
train, valid = (DataLoader(TensorDataset(torch.randn(count * 4, 8)), batch_size=4) for count in (40, 80))
def evaluate():
    with torch.no_grad():
        return sum(float(model(x).mean()) for (x,) in valid)
more = iter(valid)
for epoch in range(4):
    for (x,) in train:
        if kind == "labels":  # part of each step
            with torch.no_grad():
                model(x)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if kind == "evaluates":
        evaluate()
print("STEPS 160")
"""


IN_ITS_PLACE = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
reused = 0
for epoch in range(4):
    batches = iter(DataLoader(data, 4))
    for x, y in batches:
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    place, others = id(batches), []
    del batches
    model.eval()
    held_out = DataLoader(data, 8)
    for _ in range(500):
        others.append(iter(held_out))
        if id(others[-1]) == place:
            reused += 1
            break
    for x, y in others[-1]:
        time.sleep(0.02)
        model(x)
    model.train()
print("REUSED", reused)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "kind", "steps", "least_s"),
    few(
        [
            (FORGETS_EVAL, "evaluates", 160, 4 * 80 * 0.002),
            (IN_ITS_PLACE, "", 64, 4 * 8 * 0.02),
            (FORGETS_EVAL, "labels", 160, 0.0),
        ],
        2,
    ),
    ids=["without eval", "an iterator in the place of that of the training", "labels of a teacher"],
)
def test_a_pass_over_data_without_gradients_is_an_evaluation(
    tmp_path: Path, script: str, kind: str, steps: int, least_s: float
) -> None:
    (tmp_path / "train.py").write_text(script)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    phases = ran.phases()
    assert ran.total("steps") == steps
    if kind == "labels":  # part of each step
        assert not phases.get("evaluate")
        assert phases["forward"] >= 2 * 150 * 0.002e9
    else:
        assert phases["evaluate"] >= least_s * 1e9 and phases["evaluate"] > phases["forward"]
    if script is IN_ITS_PLACE:
        assert int(ran.word("REUSED"))


SLOW_STEPS = """
import time, torch
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)
model = Net(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_model_is_named_where_each_step_is_a_window(tmp_path: Path) -> None:
    ran = run(tmp_path, "-c", SLOW_STEPS, NDD_WATCH_WINDOW_S="0.01")
    assert [event["model"] for event in ran.of("run")][-1] == "Net"
