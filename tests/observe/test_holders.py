"""What holds growing memory: two looks at the process name the container and who refers to it."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ndd_watch import holders
from ndd_watch.holders import Holders
from ndd_watch.looks import Looks, python_objects

everything: list[Tensor] = []


class Meter:
    """Keeps in an attribute of each object, of the class, and in a slot."""

    shared: list[Tensor] = []  # noqa: RUF012 - that is what is kept

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.nested: dict[str, deque[Tensor]] = {"recent": deque()}


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: set[int] = set()


@functools.cache
def table(step: int) -> Tensor:
    return torch.ones(50) * step


def remember(value: Tensor, seen: list[Tensor] = []) -> None:  # noqa: B006 - that is what is kept
    seen.append(value)


def keeper() -> Callable[[Tensor], None]:
    closed: list[Tensor] = []

    def keep(value: Tensor) -> None:
        closed.append(value)

    return keep


@dataclass
class Case:
    """add: what happens in each step. kind, name, owner: of the place that has to be found."""

    add: Callable[[int], object]
    kind: str
    name: str
    owner: str
    things: list[object] = field(default_factory=list)


@pytest.fixture(autouse=True)
def _long_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests has far more objects than a training: a look at them takes longer."""
    monkeypatch.setattr(holders, "LOOK_NS", 10**10)
    monkeypatch.setattr(holders, "NAME_NS", 10**10)


def grown(add: Callable[[int], object]) -> dict[str, Any]:
    """What the second look tells."""
    # As little as possible is alive beside the case, so that the looks are quick.
    looks = Holders(Looks(torch), lambda code: code.co_filename == __file__)
    found: dict[str, Any] | None = None
    for step in range(60):
        add(step)
        if step in (20, 50):
            found = looks.look(step, sys._getframe())
    assert found is not None
    return found


def cases() -> dict[str, Case]:
    meter, slotted, keep = Meter(), Slotted(), keeper()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    first = next(model.parameters())
    tensor = torch.ones(50)
    return {
        "global": Case(lambda _: everything.append(tensor + 1), "global", "everything", ""),
        "attribute": Case(lambda i: meter.values.update({i: tensor + 1}), "attribute", "values", "Meter"),
        "within": Case(lambda _: meter.nested["recent"].append(tensor + 1), "attribute", "nested", "Meter"),
        "class": Case(lambda _: Meter.shared.append(tensor + 1), "class", "shared", "Meter"),
        "slot": Case(lambda i: slotted.kept.add(i), "attribute", "kept", "Slotted"),
        "cache": Case(table, "cache", "table", "table"),
        "default": Case(lambda _: remember(tensor + 1), "default", "seen", "remember"),
        "closure": Case(lambda _: keep(tensor + 1), "closure", "closed", "keep"),
        "hooks": Case(
            lambda _: model.register_forward_hook(lambda *_: None), "attribute", "_forward_hooks", "Linear"
        ),
        "optimizer": Case(
            lambda i: optimizer.state[first].update({f"old{i}": tensor + 1}), "attribute", "state", "Adam"
        ),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_the_owner_of_what_grows_is_named(name: str) -> None:
    if name in ("global", "class", "cache", "default"):
        gc.unfreeze()  # they were there before the test, and what is frozen is in no look
    case = cases()[name]
    found = grown(case.add)
    (holder, *_) = found["holders"]
    assert (holder["kind"], holder["name"], holder["owner"]) == (case.kind, case.name, case.owner)
    assert (holder["length"], holder["grown"]) == (51, 30)
    assert found["steps"] == 30


def keeps_in_a_variable() -> tuple[dict[str, Any], int]:
    """What was found, and how many more references there are. pytest's assertions in a function call `locals`."""
    kept: list[tuple[Tensor, int]] = []
    before = sys.getrefcount(kept)
    return grown(lambda step: kept.append((torch.ones(25_000), step))), sys.getrefcount(kept) - before


def test_a_local_variable_is_named_and_stays_as_it_was() -> None:
    found, more = keeps_in_a_variable()
    (holder, *_) = found["holders"]
    assert (holder["kind"], holder["name"]) == ("local", "kept")
    assert holder["owner"] == "keeps_in_a_variable"
    assert holder["holds"] == "tuple of tensor 25000"
    assert holder["bytes"] == pytest.approx(30 * 100_000, rel=0.1)
    # Nothing is kept alive by what the look has read.
    assert more == 0


def test_a_tensor_that_becomes_longer_is_named() -> None:
    joined = torch.zeros(1, 20_000)

    def add(_step: int) -> None:
        nonlocal joined
        joined = torch.cat([joined, torch.zeros(1, 20_000)])

    (holder, *_) = grown(add)["holders"]
    assert (holder["type"], holder["name"], holder["grown"]) == ("tensor", "joined", 30)
    assert holder["bytes"] == pytest.approx(30 * 80_000)


def test_a_bounded_deque_has_its_limit_and_a_full_one_is_not_found() -> None:
    recent: deque[Tensor] = deque(maxlen=1000)
    (holder, *_) = grown(lambda _: recent.append(torch.ones(50)))["holders"]
    assert (holder["name"], holder["limit"]) == ("recent", 1000)
    full: deque[Tensor] = deque(maxlen=10)
    assert not [
        one for one in grown(lambda _: full.append(torch.ones(50)))["holders"] if one["name"] == "full"
    ]


def test_a_view_weighs_as_much_as_the_storage_that_it_keeps() -> None:
    views: list[Tensor] = []
    (holder, *_) = grown(lambda _: views.append(torch.ones(25_000)[:1]))["holders"]
    assert holder["holds"] == "tensor 1" and holder["bytes"] == pytest.approx(30 * 100_000, rel=0.1)


class Odd(type):
    """A metaclass whose methods must not be called."""

    def __hash__(cls) -> int:
        raise AssertionError("code of the script was run")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("code of the script was run")


class Strange(metaclass=Odd):
    """So are those of its objects."""

    def __init__(self) -> None:
        object.__setattr__(self, "values", [])

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("code of the script was run")

    def __len__(self) -> int:
        raise AssertionError("code of the script was run")


class Counted(list[Tensor]):
    """A subclass may count its reads."""

    def __len__(self) -> int:
        raise AssertionError("code of the script was run")


def test_no_code_of_the_script_is_run() -> None:
    strange, counted = Strange(), Counted()
    values = object.__getattribute__(strange, "values")

    def add(step: int) -> None:
        values.append((strange, torch.ones(50), step))
        counted.append(torch.ones(50))

    found = grown(add)
    assert [one["name"] for one in found["holders"]][:1] == ["values"]


def test_a_list_that_contains_itself_is_described() -> None:
    kept: list[list[Any]] = []

    def add(step: int) -> None:
        around: list[Any] = []
        around.append(around)
        kept.append(around)

    first = grown(add)["holders"][0]
    assert first["name"] == "kept" and first["holds"].startswith("list of list of")
    for around in kept:
        around.clear()


def test_no_look_where_a_mode_would_see_it() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    looks = Holders(Looks(torch), lambda _: True)
    with FakeTensorMode():
        assert looks.look(1, sys._getframe()) is None


def test_a_look_leaves_no_object_of_its_own() -> None:
    kept: list[Tensor] = []
    grown(lambda _: kept.append(torch.ones(50)))
    looks = Holders(Looks(torch), lambda code: code.co_filename == __file__)
    before = gc.collect() * 0 + len(gc.get_objects())
    for step in range(6):
        assert looks.look(step, sys._getframe()) is not None
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_the_python_objects_of_a_dataset_are_found() -> None:
    class Lines:
        def __init__(self) -> None:
            self.few, self.lines = [1, 2], [{"text": "a"} for _ in range(20_000)]

    found = python_objects(torch.utils.data.Subset(Lines(), [0]))  # type: ignore[arg-type]
    assert found == ["lines", "list", 20_000, "dict"]
    assert python_objects(OrderedDict()) is None
