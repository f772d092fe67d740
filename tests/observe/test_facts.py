"""What a script's process tells besides its phases: first batches of epochs, compilations, garbage collections."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from observed import run
from tests.cli import program
from tests.tiers import few

from ndd_watch.mapped import FIRST_BATCH

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(("form", "least_s"), [("anew", 7 * 0.2), ("kept", 0.0)])
def test_first_batches_of_later_epochs_have_their_own_time(tmp_path: Path, form: str, least_s: float) -> None:
    ran = run(tmp_path, "epochs.py", form)
    first = (phases := ran.phases()).pop(FIRST_BATCH, 0)
    assert least_s * 1e9 <= first <= phases["data_wait"]
    assert sum(window["steps"] for window in ran.of("window")) == int(ran.word("STEPS"))
    assert sum(phases.values()) == sum(window["wall_ns"] for window in ran.of("window"))


def test_recompilations_are_told_with_their_reason_and_the_limit(tmp_path: Path) -> None:
    ran = run(tmp_path, "recompiles.py", "number")
    again = [mark["data"] for mark in ran.marks(kind="recompile")]
    assert [mark["data"]["graphs"] for mark in ran.marks(kind="compile")] == [1]
    assert sum(data["graphs"] for data in again) == 7
    last = again[-1]
    assert last["limit"] and "bins" in last["reason"]
    assert (Path(last["file"]).name, last["line"], last["function"]) == ("recompiles.py", 11, "forward")
    steady = run(tmp_path / "steady", "recompiles.py")
    assert len(steady.marks(kind="compile")) == 1 and not steady.marks(kind="recompile")


@pytest.mark.slow
@pytest.mark.budget(30)
def test_garbage_collections_that_the_script_asks_for_are_told_with_their_line(tmp_path: Path) -> None:
    ran = run(tmp_path, "collects.py", "each")
    waits = [wait for line in ran.of("functions") for wait in line["waits"]]
    # A slow machine profiles more than one step.
    assert {(Path(wait[0]).name, wait[3], wait[4]) for wait in waits} == {("collects.py", "collect", 1)}
    assert not [line for line in run(tmp_path / "not", "collects.py").of("functions") if line["waits"]]


@pytest.mark.parametrize(("steps", "more"), few([(20, 60), (0, 60), (20, 0)], 1))
def test_backward_passes_that_no_step_has_are_told(tmp_path: Path, steps: int, more: int) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        f"for step in range({steps + more}):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).square().mean().backward()\n"
        f"    if step < {steps}:\n"
        "        optimizer.step()\n"
        "    else:\n"
        "        with torch.no_grad():\n"
        "            for parameter in model.parameters():\n"
        "                parameter -= 0.01 * parameter.grad\n"
    )
    done = program.run("run", "--headless", "--", sys.executable, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("backward")] or [""]
    # Where the optimizer never steps, each update by hand is a step.
    assert (str(more) in told) == bool(more and steps)
    assert f"{steps or more} optimizer steps" in done.stderr


BROKEN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
for step in range(400):
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
@pytest.mark.budget(30)
def test_skipped_updates_are_told_with_their_first_step_and_what_was_not_finite(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BROKEN.replace("BEGIN", "100"))
    ran = run(tmp_path, str(tmp_path / "train.py"))
    assert sum(window["skipped"] for window in ran.of("window")) == 300
    assert {window["skipping_since"] for window in ran.of("window")} <= {None, 0, 100}
    assert next(window["first_skipped"] for window in ran.of("window") if window["skipped"]) == 100
    (found,) = ran.of("not_finite")
    assert (found["what"], found["name"], found["axis"], found["at"]) == ("input", "x", "column", [3])
    assert found["line"] == 12 and found["step"] > 100
    assert ran.out == run(tmp_path / "bare", str(tmp_path / "train.py"), observed=False, read=False).out
    (tmp_path / "train.py").write_text(BROKEN.replace("BEGIN", "1000"))
    well = run(tmp_path / "well", str(tmp_path / "train.py"))
    # The scale was too large at first.
    assert not any(window["skipped"] for window in well.of("window")) and not well.of("not_finite")
    assert well.of("window")[-1]["loss_scale"] < 2.0**127


ITEMS = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
kind, count = sys.argv[1], 0
make, judge = nn.Linear(8, 8), nn.Linear(8, 1)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (make, judge)]
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 2)
    def forward(self, state):
        return self.inner(state)
policy = Policy()
if kind == "state":
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in range(40):
        loss = sum(policy(torch.randn(8)).sum() for _ in range(3))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.02)
elif kind == "rollout":
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in range(40):
        with torch.no_grad():
            for _ in range(3): policy(torch.randn(1, 8))
        loss = policy(torch.randn(32, 8)).sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        count += 32
        time.sleep(0.02)
else:
    for epoch in range(12):
        for (x,) in DataLoader(TensorDataset(torch.randn(76, 8)), batch_size=32, shuffle=kind == "shuffled"):
            optimizers[1].zero_grad(); judge(x).sum().backward(); optimizers[1].step()
            optimizers[0].zero_grad(); judge(make(x)).sum().backward(); optimizers[0].step()
            count += len(x)
            time.sleep(0.02)
print("ITEMS", count)
"""


@pytest.mark.parametrize("kind", few(["shuffled", "in order", "rollout", "state"], 1))
def test_as_many_items_as_the_script_trains_on(tmp_path: Path, kind: str) -> None:
    """The last batch of a pass is smaller; a rollout has batches of its own; one state is no batch."""
    (tmp_path / "train.py").write_text(ITEMS)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    assert sum(window["items"] for window in ran.of("window")) == int(ran.word("ITEMS")), ran.errors


LEAVES_OUT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
kind, model = sys.argv[1], nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader, losses = DataLoader(TensorDataset(torch.randn(80 * 4, 8)), batch_size=4), []
for epoch in range(6):
    for step, (x,) in enumerate(loader):
        if kind == "broken" and epoch == 1 and step == 20:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
        loss = model(x).square().mean()
        if kind == "summed":
            losses.append(loss)
            if len(losses) < 10:
                continue
            loss, losses = sum(losses), []
        if not torch.isfinite(loss) or (kind == "some" and step % 3):
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for (x,) in loader:
            model(x)
"""


@pytest.mark.parametrize("kind", few(["broken", "summed", "some", "whole"], 1))
def test_a_loop_that_never_trains_again_is_told(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(LEAVES_OUT)
    done = program.run("run", "--headless", "--", sys.executable, "train.py", kind, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("nothing is trained")]
    assert bool(told) == (kind == "broken"), done.stderr
    if told:  # four passes, and what was heard of the one in which it began
        batches = int(told[0].split("at least ")[1].split()[0])
        assert "since step 100" in told[0] and 310 <= batches <= 380


CLOSURE = """
import time, torch
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)
model, x = Net(8, 1), torch.randn(32, 8)
optimizer, calls = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3), 0
def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss
for step in range(15):
    optimizer.step(closure)
print("CALLS", calls)
"""


@pytest.mark.slow
def test_the_model_that_a_closure_calls_is_forward(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLOSURE)
    ran = run(tmp_path, str(tmp_path / "train.py"))
    # All but the call before the first backward pass.
    assert ran.phases()["forward"] >= (int(ran.word("CALLS")) - 1) * 0.02e9
    assert sum(window["items"] for window in ran.of("window")) == 15 * 32


UNEVEN = """
import random, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
kind, count = sys.argv[1], 0
data = TensorDataset(torch.randn(150, 8))
class Batches(Sampler):
    def __init__(self): pass
    def __iter__(self):
        left = list(range(150))
        while left:
            size = random.randint(1, 9)
            yield left[:size]
            left = left[size:]
class Stream(IterableDataset):
    def __iter__(self):
        yield from data
loader = {
    "batches": lambda: DataLoader(data, batch_sampler=Batches()),
    "stream": lambda: DataLoader(Stream(), batch_size=16),
    "ranks": lambda: DataLoader(data, batch_size=8, sampler=DistributedSampler(data, 2, 0)),
    "own": lambda: DataLoader(data, batch_size=16, sampler=type("Own", (Sampler,), {
        "__init__": lambda self: None, "__iter__": lambda self: (i for i in range(150)),
        "__len__": lambda self: 150})()),
    "even": lambda: DataLoader(data, batch_size=16),
}[kind]()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(4):
    for (x,) in loader:
        model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
        count += len(x)
        time.sleep(0.01)
    model.eval()
    with torch.no_grad():
        for (x,) in DataLoader(data, batch_sampler=Batches()):
            model(x)
    model.train()
print("ITEMS", count)
"""


@pytest.mark.parametrize("kind", few(["batches", "stream", "ranks", "own", "even"], 1))
def test_items_of_batches_whose_sizes_only_the_script_knows(tmp_path: Path, kind: str) -> None:
    """Samplers of the script, streams, and the share of a rank; those of an evaluation are not counted."""
    (tmp_path / "train.py").write_text(UNEVEN)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    told = sum(window["items"] for window in ran.of("window"))
    # The first batches are read before the training is observed: theirs is the middle one.
    assert abs(told - int(ran.word("ITEMS"))) <= (10 if kind == "batches" else 0), ran.errors


SEVERAL = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
kind, count = sys.argv[1], 0
make, judge = nn.Linear(8, 8), nn.Linear(8, 1)
makes, judges = (torch.optim.SGD(one.parameters(), lr=1e-3) for one in (make, judge))
for epoch in range(4):
    for index, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(312, 8)), batch_size=16)):
        judges.zero_grad(); judge(x).sum().backward(); judge(make(x).detach()).sum().backward(); judges.step()
        count += len(x)
        if kind == "each" or index % 5 == 0:
            makes.zero_grad(); judge(make(x)).sum().backward(); makes.step()
        time.sleep(0.01)
print("ITEMS", count)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["each", "rarely"])
def test_items_of_several_optimizers_are_those_that_were_read(tmp_path: Path, kind: str) -> None:
    """One that steps five times for a step takes five batches; two backward passes on a batch are one."""
    (tmp_path / "train.py").write_text(SEVERAL)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    told, items = sum(window["items"] for window in ran.of("window")), int(ran.word("ITEMS"))
    assert told == items if kind == "each" else abs(told - items) <= 4 * 16, (told, ran.errors)


AFTERWARDS = """
import time, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(30):
    time.sleep(0.01)
    model(torch.randn(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
time.sleep(2)
"""


@pytest.mark.slow
def test_what_a_script_does_after_its_training_is_no_part_of_the_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AFTERWARDS)
    ran = run(tmp_path, str(tmp_path / "train.py"))
    assert sum(window["wall_ns"] for window in ran.of("window")) < 2e9
    for window in ran.of("window"):
        assert (
            sum(phase["host_ns"] for name, phase in window["phases"].items() if "/" not in name)
            == window["wall_ns"]
        )


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


@pytest.mark.parametrize("kind", ["evaluates", "labels"])
def test_a_pass_over_data_without_gradients_is_an_evaluation_also_without_eval(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "train.py").write_text(FORGETS_EVAL)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    phases = ran.phases()
    if kind == "evaluates":  # of 4 x 80 batches and 4 x 40 steps
        assert phases["evaluate"] >= 4 * 80 * 0.002e9
        assert phases["forward"] < phases["evaluate"]
    else:
        assert not phases.get("evaluate")
        assert phases["forward"] >= 2 * 150 * 0.002e9
    assert sum(window["steps"] for window in ran.of("window")) == 160


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


def test_an_iterator_in_the_place_of_that_of_the_training_is_part_of_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_ITS_PLACE)
    ran = run(tmp_path, str(tmp_path / "train.py"))
    assert int(ran.word("REUSED"))
    assert ran.phases()["evaluate"] >= 4 * 8 * 0.02e9
    assert sum(window["steps"] for window in ran.of("window")) == 64
