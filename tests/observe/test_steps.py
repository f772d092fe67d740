"""Steps and items: where steps of several optimizers end, which are timed, and how many items are trained on."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import run
from tests.cli import program
from tests.tiers import few

from ndd_watch import clock, emit
from ndd_watch.clock import LAST, S
from ndd_watch.looks import Looks, augments
from ndd_watch.loops import Ends, Passes
from ndd_watch.mapped import HOLDER, MICRO, PAUSED
from ndd_watch.steps import untimed

EACH = "".join(map(chr, range(1000, 1300)))


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        # An iteration of one or several optimizers is a step.
        *[(turn * 60, 60) for turn in ("a", "ab", "abc", "aab", "abb", "aaaaab")],
        (EACH * 20, 20),
        # A second one joins later, ends, or steps rarely.
        *[("a" * 3000 + turn * 1000, 4000) for turn in ("ab", "ba", "aaaaab")],
        ("ab" * 50 + "b" * 50, 100),
        ("ab" * 50 + "a" * 50, 100),
        (("a" * 20 + "b") * 30, 600),
        # They take the place of others.
        *[("".join(name * each for name in "abcde"), 5 * each) for each in (1, 2, 20)],
        *[("a" * 500 + "b" * each, 500 + each) for each in (1, 2, 20)],
        *[("ab" * each + "cd" * each + "ef" * each, 3 * each) for each in (2, 20)],
        # Their rhythms are uneven: steps are those of one of them.
        *[
            (("d" * critics + "g") * 500, 500 if critics < 8 else 500 * critics)
            for critics in (5, 7, 9, 10, 50)
        ],
        ("".join("d" * (100 if turn < 25 else 5) + "g" for turn in range(600)), 25 * 100 + 575 * 5),
        *[
            ("".join("dg" + "x" * (turn % each == each - 1) for turn in range(640)), 640 // each)
            for each in (2, 5)
        ],
        *[("".join("dg" + "x" * (turn % each == 0) for turn in range(640)), 640) for each in (12, 16)],
        ("".join("x" * (turn % 12 == 0) + "m" for turn in range(640)), 640),
        ("".join("qr" + "a" * (turn % 2) for turn in range(60)), 30),
        ("".join("d" + "d" * (turn % 3 == 0) + "g" for turn in range(300)), 300),
        # They take turns, or train alone before they train together.
        *[(("a" * each + "b" * each) * 4, 8 * each) for each in (3, 7, 10, 25)],
        *[("a" * alone + "b" * alone + "ab" * 40, 2 * alone + 40) for alone in (10, 200)],
        *[(("a" * alone + "b" * alone) * 3 + "ab" * 50, 6 * alone + 50) for alone in (10, 200)],
    ],
    ids=lambda value: f"{value[:12]}…" if isinstance(value, str) else None,
)
def test_steps_of_several_optimizers(order: str, steps: int) -> None:
    ends = Ends()
    count = sum(sum(ends.stepped(ord(name))) for name in order)
    assert count + ends.finished() == steps


def test_a_pause_is_in_no_step_and_in_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process whose console disappears after three looks. Time passes only while it sleeps."""
    before, slept, window_ends = S[:], [], []
    monkeypatch.setattr(clock.phase_clock, "now", lambda: 1_000 + sum(slept))
    monkeypatch.setattr(emit, "time", SimpleNamespace(sleep=lambda _: slept.append(500)))
    monkeypatch.setattr(emit, "lives", lambda _: S[PAUSED] == 1 and len(slept) < 3)
    steps: Any = SimpleNamespace(end_window=lambda: window_ends.append(clock.phase_clock.now()))
    nothing: Any = None
    S[HOLDER] = 7
    try:
        emit.RequestHandler(steps, nothing, nothing, nothing)._pause(7)
        assert window_ends == [1_000] and S[LAST] == 2_500 and S[PAUSED] == 0
    finally:
        S[:] = before


@pytest.mark.parametrize("tasks", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_where_each_batch_has_one_of_several_optimizers_each_batch_is_a_step(tasks: int, seed: int) -> None:
    ends = Ends()
    order = random.Random(seed).choices(range(1, tasks + 1), k=1000)
    assert sum(sum(ends.stepped(key)) for key in order) == pytest.approx(1000, rel=0.03)


@pytest.mark.parametrize("every", [1, 2, 3, 7, 21, 64, 500])
def test_one_of_so_many_steps_is_timed_by_phase_at_irregular_distances(every: int) -> None:
    timed, number = [], untimed(0, every)
    while number < 100 * every:
        timed.append(number)
        number += 1 + untimed(number + 1, every)
    assert len(timed) == pytest.approx(100, abs=3)
    gaps = {after - before for before, after in itertools.pairwise(timed)}
    assert max(gaps) <= 3 * every
    if every > 3:  # no place in the turn of four or eight workers is left out
        for workers in (4, 8):
            counts = [sum(number % workers == worker for number in timed) for worker in range(workers)]
            assert min(counts) >= 0.6 * len(timed) / workers


def test_a_rank_that_times_fewer_steps_times_some_of_the_others() -> None:
    many, few = ({n for n in range(2000) if not untimed(n, every)} for every in (3, 20))
    assert few < many


def settings(items: int | None, drop_last: bool = False, size: int = 32) -> dict[str, Any]:
    return {"batch_size": size, "items": items, "drop_last": drop_last}


@pytest.fixture
def passes() -> Any:
    before, S[MICRO] = S[MICRO], 0
    yield Passes(lambda code: False, Looks(torch))
    S[MICRO] = before


@pytest.mark.parametrize(
    ("items", "drop_last", "batches", "lacked"),
    [(732, False, 23, 4), (736, False, 23, 0), (732, True, 22, 0), (732, False, 10, 0), (None, False, 23, 0)],
)
def test_the_last_batch_of_a_whole_pass_is_smaller(
    passes: Passes, items: int | None, drop_last: bool, batches: int, lacked: int
) -> None:
    found = 0
    for _ in range(3):
        passes.began(sys._getframe())
        passes.reads_loader(settings(items, drop_last))
        for _ in range(batches):
            S[MICRO] += 1
            found += passes.lacked(32)
    assert found == 3 * lacked
    # Two views of each item.
    passes.began(sys._getframe())
    S[MICRO] += batches
    assert passes.lacked(64) == 2 * lacked


def test_a_last_batch_that_was_looked_at_is_not_the_usual_one(passes: Passes) -> None:
    passes.reads_loader(settings(732))
    assert [passes.full(*given) for given in ((28, 0), (32, 0), (56, 64), (7, 0))] == [32, 32, 64, 7]
    passes.reads_loader(settings(None))  # not known at this moment
    assert passes.full(28, 0) == 32


def test_batches_of_unknown_sizes_are_counted_as_they_are_read(passes: Passes) -> None:
    passes.reads_loader({**settings(None), "uneven": True})
    for size in (4, 9, 2, 7):
        passes.count((torch.zeros(size, 3), torch.zeros(size)))
    # One was read before the training was observed, and one is read ahead.
    assert passes.counted(3, 9) == 15
    passes.count(torch.zeros(5, 3))
    assert passes.counted(2, None) == 12
    # So the batch that was counted last is trained now.
    passes.count(torch.zeros(9, 3))
    assert passes.counted(1, 5) == 9
    assert passes.counted(1, 9) == 7  # a usual one
    # The model gets something else.
    passes.count(torch.zeros(5, 3))
    assert passes.counted(1, 3) is None
    # Another loader whose sizes are known.
    passes.reads_loader({**settings(732), "uneven": False})
    passes.count(torch.zeros(5, 3))
    assert passes.counted(1, 5) is None


class Thing:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class RandomCrop:
    pass


class Normalize:
    pass


class Draws:
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), index


class Repeats:
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, generator=torch.Generator().manual_seed(index)), index


def turned(image: Any) -> Any:
    return image * random.uniform(0, 1)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (
            Thing(dataset=Thing(transform=Thing(transform=Thing(transforms=[Normalize(), RandomCrop()]))), indices=[1]),
            "RandomCrop",
        ),
        (Thing(transform=Normalize(), generator=RandomCrop()), ""),
        (object(), ""),
        (Thing(transform=turned), "turned"),
        (Thing(dataset=Thing(transform=lambda image: image / 2)), ""),
        (Draws(), "Draws.__getitem__"),
        (Thing(dataset=Draws()), "Draws.__getitem__"),
        (Repeats(), ""),
    ],
)  # fmt: skip
def test_transforms_of_a_dataset_that_draw_at_random_are_found_and_others_not(
    dataset: object, name: str
) -> None:
    assert augments(dataset) == name


# How a script makes its batches, and how it trains on them. Each waits, so that there are several windows.
ITEMS = """
import random, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
kind, count, data = sys.argv[1], 0, TensorDataset(torch.randn(150, 8))
make, judge = nn.Linear(8, 8), nn.Linear(8, 1)
makes, judges = (torch.optim.SGD(one.parameters(), lr=1e-3) for one in (make, judge))
class Batches(Sampler):
    def __init__(self): pass
    def __iter__(self):
        left = list(range(150))
        while left:
            size = random.randint(1, 9)
            yield left[:size]
            left = left[size:]
class Order(Batches):
    def __iter__(self): return iter(range(150))
    def __len__(self): return 150
class Stream(IterableDataset):
    def __iter__(self): yield from data
def random_sizes(): return DataLoader(data, batch_sampler=Batches())
def trains(x):
    judges.zero_grad(); judge(x).sum().backward(); judges.step()
def both(x, index=0):
    trains(x)
    if index % 5 == 0:
        makes.zero_grad(); judge(make(x)).sum().backward(); makes.step()
def passes(loader, train):
    for index, (x,) in enumerate(loader):
        train(*(x, index)[:1 + (kind == "rarely")])
        yield len(x)
        time.sleep(0.01)
if kind in ("state", "rollout", "by hand"):
    for step in range(40):
        if kind == "by hand":
            judges.zero_grad(); judge(torch.randn(32, 8)).sum().backward()
            with torch.no_grad():
                for one in judge.parameters(): one -= 1e-3 * one.grad
            count += 32
        elif kind == "state":
            judges.zero_grad(); sum(judge(torch.randn(8)).sum() for _ in range(3)).backward(); judges.step()
        else:
            with torch.no_grad():
                for _ in range(3): judge(torch.randn(1, 8))
            trains(torch.randn(32, 8))
            count += 32
        time.sleep(0.02)
else:
    loader, train = {
        "shuffled": lambda: (DataLoader(data, batch_size=32, shuffle=True), both),
        "in order": lambda: (DataLoader(data, batch_size=32), both),
        "rarely": lambda: (DataLoader(data, batch_size=16), both),
        "batches": lambda: (random_sizes(), trains),
        "stream": lambda: (DataLoader(Stream(), batch_size=16), trains),
        "ranks": lambda: (DataLoader(data, batch_size=8, sampler=DistributedSampler(data, 2, 0)), trains),
        "own": lambda: (DataLoader(data, batch_size=16, sampler=Order()), trains),
        "even": lambda: (DataLoader(data, batch_size=16), trains),
    }[kind]()
    for epoch in range(6):
        count += sum(passes(loader, train))
        judge.eval()
        with torch.no_grad():
            for (x,) in random_sizes(): judge(x)
        judge.train()
print("ITEMS", count)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "off"),
    few(
        [
            ("shuffled", 0), ("batches", 10), ("in order", 0), ("rollout", 0), ("state", 0), ("stream", 0),
            ("ranks", 0), ("own", 0), ("even", 0), ("by hand", 0), ("rarely", 96),
        ],
        2,
    ),
)  # fmt: skip
def test_as_many_items_as_the_script_trains_on(tmp_path: Path, kind: str, off: int) -> None:
    """The last batch of a pass is smaller; two backward passes on a batch are one; one state is no batch; by hand.

    Samplers of the script, streams, the share of a rank, and an optimizer that steps five times for a step. off: where
    the first batches are read before the training is observed, theirs is the usual size.
    """
    (tmp_path / "train.py").write_text(ITEMS)
    ran = run(tmp_path, str(tmp_path / "train.py"), kind)
    assert abs(ran.total("items") - int(ran.word("ITEMS"))) <= off, ran.errors


BY_HAND = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(80):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    if step < 20:
        optimizer.step()
        continue
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
"""


@pytest.mark.long
def test_backward_passes_that_no_step_has_are_told(tmp_path: Path) -> None:
    """Where no optimizer ever steps, each update by hand is a step: see tests/same."""
    (tmp_path / "train.py").write_text(BY_HAND)
    done = program.run("run", "--headless", "--", sys.executable, "train.py", folder=tmp_path)
    assert done.returncode == 0 and "20 optimizer steps" in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("backward")]
    assert "60" in told


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


@pytest.mark.long
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


WITHOUT_OPTIMIZER = """
import torch
weight = torch.zeros(8, 1, requires_grad=True)
for step in range(100):
    loss = (torch.randn(4, 8) @ weight - 1).square().mean()
    {gradient}
    with torch.no_grad():
        weight -= 0.1 * gradient
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "gradient",
    [
        "(gradient,) = torch.autograd.grad(loss, [weight])",
        "weight.grad = None; loss.backward(); gradient = weight.grad",
    ],
)
def test_each_step_without_an_optimizer_has_one_micro_step(tmp_path: Path, gradient: str) -> None:
    ran = run(tmp_path, "-c", WITHOUT_OPTIMIZER.format(gradient=gradient))
    assert ran.status == 0, ran.errors
    assert ran.total("steps") == ran.total("micro_steps") == 100
