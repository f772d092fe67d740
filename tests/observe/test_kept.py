"""What a script keeps: graphs of earlier steps, containers that grow, and outputs that an evaluation collects."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import run
from tests.tiers import few
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ndd_watch import collecting, holders, profiler
from ndd_watch.clock import CHECKPOINT, EVALUATE, now
from ndd_watch.collecting import APART, EACH_NS, GROWN, Collecting
from ndd_watch.holders import Holders
from ndd_watch.looks import Looks, function_of, listed_numbers, python_objects, variables
from ndd_watch.mapped import Heap, in_use
from ndd_watch.profiler import Asides
from ndd_watch.slowing import RETAINED_STEPS, Garbage, KeptGraphs, Retained

STEPS = 60
# What is kept of steps: from the output and the loss of each.
Keeps = Callable[[Tensor, Tensor], object]


def summed() -> Keeps:
    """As `total += loss`."""
    total: list[Any] = [0.0]

    def keep(output: Tensor, loss: Tensor) -> None:
        total[0] += loss

    return keep


def listed(of: Callable[[Tensor, Tensor], object]) -> Keeps:
    kept: list[object] = []
    return lambda output, loss: kept.append(of(output, loss))


def recent() -> Keeps:
    """As truncated backpropagation through time, or losses that are summed up for a few steps."""
    kept: deque[Tensor] = deque(maxlen=5)
    return lambda output, loss: kept.append(loss)


@pytest.mark.parametrize(
    ("keep", "scale", "steps"),
    [
        (summed(), 1.0, STEPS),
        (summed(), 0.25, STEPS),
        (listed(lambda output, loss: output), 1.0, STEPS),
        (listed(lambda output, loss: None), 1.0, 0),
        (listed(lambda output, loss: loss.item()), 1.0, 0),
        (listed(lambda output, loss: output.detach()), 1.0, 0),
        (recent(), 1.0, 0),
    ],
    ids=["sum", "sum of scaled", "outputs", "nothing", "numbers", "detached", "a few"],
)
def test_from_how_many_steps_graphs_are_kept(keep: Keeps, scale: float, steps: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    graphs = KeptGraphs()
    for step in range(STEPS):
        output = model(torch.randn(3, 4))
        loss = output.pow(2).mean()
        scaled = loss * scale if scale != 1.0 else loss
        graphs.mark(scaled, step)
        scaled.backward()
        keep(output, loss)
    assert graphs.steps(STEPS) == steps


def test_a_part_that_all_steps_share_is_no_growth() -> None:
    model = nn.Linear(4, 4)
    shared = model(torch.randn(3, 4))
    head = nn.Linear(4, 1)
    graphs = KeptGraphs()
    for step in range(STEPS):
        loss = head(shared).sum()
        graphs.mark(loss, step)
        loss.backward(retain_graph=True)
    assert graphs.steps(STEPS) == 0


def test_marks_are_thinned_out_and_freed_with_their_graphs() -> None:
    model, graphs = nn.Linear(2, 1), KeptGraphs()
    losses = []
    for step in range(1200):
        losses.append(model(torch.ones(1, 2)).sum())
        graphs.mark(losses[-1], step)
    assert graphs.steps(1200) >= 1190 and len(graphs._marks) <= 512
    losses.clear()
    assert graphs.steps(1200) == 0 and not graphs._marks


@pytest.mark.parametrize("carries", [True, False])
def test_a_state_that_is_not_detached_leads_to_all_earlier_steps(carries: bool) -> None:
    model = nn.GRUCell(4, 4)
    graphs, state, found = KeptGraphs(), torch.zeros(3, 4), []
    for step in range(40):
        state = model(torch.randn(3, 4), state if carries else state.detach())
        loss = state.square().mean()
        graphs.wanted = True
        graphs.mark(loss, step)
        found.append(graphs.reached)
        loss.backward(retain_graph=True)
    assert found == (list(range(40)) if carries else [0] * 40)


def test_a_large_graph_is_not_followed_to_its_end() -> None:
    x = torch.zeros(3, requires_grad=True)
    graphs = KeptGraphs()
    for step in range(2):
        loss = x.sum()
        for _ in range(5000):
            loss = loss + x.sum()
        graphs.wanted = True
        graphs.mark(loss, step)
    assert graphs.reached == 0


LINE = ("train.py", 9)


def retained(
    losses: Callable[[Tensor, int], list[Tensor]],
    retains: Callable[[int], bool] = lambda step: True,
    steps: int = RETAINED_STEPS + 1,
) -> tuple[str, int] | None:
    """What is known after these steps. losses: of each step, from the output of the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    found = Retained()
    found.begin()
    for step in range(steps):
        for loss in losses(model(torch.randn(3, 4)), step):
            found.hear(loss, retains(step), LINE)
            loss.backward(retain_graph=True)
        found.step_ended()
    return found.where


def once(output: Tensor, step: int) -> list[Tensor]:
    return [output.square().mean()]


def test_graphs_that_no_later_pass_goes_through_are_retained_without_need() -> None:
    assert retained(once) == LINE
    # Micro-batches, or models of their own.
    assert retained(lambda output, step: [output.mean(), torch.ones(1, requires_grad=True).sum()]) == LINE
    assert retained(once, steps=RETAINED_STEPS - 1) is None


def test_a_graph_that_is_needed_again_or_cannot_be_judged_is_no_finding() -> None:
    assert retained(lambda output, step: [output.square().mean(), output.abs().mean()]) is None
    kept: list[Tensor] = []

    def of_an_earlier_step(output: Tensor, step: int) -> list[Tensor]:
        kept.append(output.square())
        return [kept[step // 2 * 2].mean()]

    assert retained(of_an_earlier_step) is None
    # Not retained in each step, without a backward pass, and too large.
    assert retained(once, lambda step: step != 5) is None
    assert retained(lambda output, step: []) is None

    def large(output: Tensor, step: int) -> list[Tensor]:
        for _ in range(11_000):
            output = output + 1
        return [output.sum()]

    assert retained(large, steps=3) is None


@pytest.mark.long
@pytest.mark.parametrize("word", few(["", "twice", "later", "grad", "creates", "some", "carries"], 1))
def test_retained_graphs_of_a_script(tmp_path: Path, word: str) -> None:
    ran = run(tmp_path, "retains.py", *word.split(), NDD_WATCH_PROFILE_S="0.05", NDD_WATCH_WINDOW_S="0.05")
    assert not ran.status, ran.errors
    assert not word or word == "carries" or ran.of("functions")
    told = [one["config"]["script"].get("retains") for one in ran.of("run")]
    assert bool(told[-1]) is (not word)
    if not word:
        assert told[-1][0].endswith("retains.py")


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


# Kind, name and owner of the place that has to be found, after what happens in each step.
Case = tuple[Callable[[int], object], str, str, str]


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
    tensor = torch.ones(50)
    return {
        "global": (lambda _: everything.append(tensor + 1), "global", "everything", ""),
        "attribute": (lambda i: meter.values.update({i: tensor + 1}), "attribute", "values", "Meter"),
        "within": (lambda _: meter.nested["recent"].append(tensor + 1), "attribute", "nested", "Meter"),
        "class": (lambda _: Meter.shared.append(tensor + 1), "class", "shared", "Meter"),
        "slot": (lambda i: slotted.kept.add(i), "attribute", "kept", "Slotted"),
        "cache": (table, "cache", "table", "table"),
        "default": (lambda _: remember(tensor + 1), "default", "seen", "remember"),
        "closure": (lambda _: keep(tensor + 1), "closure", "closed", "keep"),
        "hooks": (
            lambda _: model.register_forward_hook(lambda *_: None), "attribute", "_forward_hooks", "Linear"
        ),
        "optimizer": (
            lambda i: optimizer.state[model.weight].update({f"old{i}": tensor + 1}), "attribute", "state", "Adam"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(cases()))
def test_the_owner_of_what_grows_is_named(name: str) -> None:
    if name in ("global", "class", "cache", "default"):
        gc.unfreeze()  # they were there before the test, and what is frozen is in no look
    add, *place = cases()[name]
    found = grown(add)
    (holder, *_) = found["holders"]
    assert [holder["kind"], holder["name"], holder["owner"]] == place
    assert (holder["length"], holder["grown"], found["steps"]) == (51, 30, 30)


def keeps_in_a_variable() -> tuple[dict[str, Any], int]:
    """What was found, and how many more references there are. pytest's assertions in a function call `locals`."""
    kept: list[tuple[Tensor, int]] = []
    before = sys.getrefcount(kept)
    return grown(lambda step: kept.append((torch.ones(25_000), step))), sys.getrefcount(kept) - before


def test_a_local_variable_is_named_and_stays_as_it_was() -> None:
    found, more = keeps_in_a_variable()
    (holder, *_) = found["holders"]
    assert (holder["kind"], holder["name"], holder["owner"]) == ("local", "kept", "keeps_in_a_variable")
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


def refuses(*_: object) -> Any:
    raise AssertionError("code of the script was run")


class Odd(type):
    """A metaclass whose methods must not be called."""

    __hash__ = __eq__ = refuses


class Strange(metaclass=Odd):
    """So are those of its objects."""

    def __init__(self) -> None:
        object.__setattr__(self, "values", [])

    __getattribute__ = __len__ = refuses


class Counted(list[Tensor]):
    """A subclass may count its reads."""

    __len__ = refuses


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


def test_a_look_leaves_no_object_of_its_own() -> None:
    kept: list[Tensor] = []
    grown(lambda _: kept.append(torch.ones(50)))
    looks = Holders(Looks(torch), lambda code: code.co_filename == __file__)
    gc.collect()
    before = len(gc.get_objects())
    for step in range(6):
        assert looks.look(step, sys._getframe()) is not None
    with FakeTensorMode():  # a mode of the script would see it
        assert looks.look(6, sys._getframe()) is None
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_the_python_objects_of_a_dataset_are_found() -> None:
    class Lines:
        def __init__(self) -> None:
            self.few, self.lines = [1, 2], [{"text": "a"} for _ in range(20_000)]

    found = python_objects(torch.utils.data.Subset(Lines(), [0]))  # type: ignore[arg-type]
    assert found == ["lines", "list", 20_000, "dict"]
    assert python_objects(OrderedDict()) is None


class Evaluations:
    """Evaluations on a clock of their own, in which each batch takes EACH_NS, with the memory that they use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.t, self.used, self.apart = 0, 0, 0
        self.put: list[dict[str, Any]] = []
        monkeypatch.setattr(holders, "LOOK_NS", 10**10)
        monkeypatch.setattr(holders, "NAME_NS", 10**10)
        for module in (profiler, collecting):
            monkeypatch.setattr(module, "now", lambda: self.t)
        self.asides = Asides(lambda: False, lambda _: {}, lambda _: None)
        self.asides.collecting = Collecting(
            lambda: Holders(Looks(torch), lambda code: code.co_filename == __file__),
            lambda: self.used, self.put.append, self.left_out,
        )  # fmt: skip

    def left_out(self, work: Callable[[], None]) -> None:
        self.apart += 1
        work()

    def batch(self, grows: int) -> None:
        self.t += EACH_NS
        self.used += grows
        self.asides.goes_on()


def evaluate(
    runs: Evaluations, grows: int, batches: int = 40, phase: int = EVALUATE, keep: bool = True
) -> None:
    model = nn.Linear(2, 2)
    model.eval()
    outputs: list[Tensor] = []
    runs.asides.begins(phase)
    for _ in range(batches):
        out = model(torch.zeros(1, 2))
        if keep:
            outputs.append(out)
        runs.batch(grows)
    runs.asides.ends(phase)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    return Evaluations(monkeypatch)


def test_the_list_that_an_evaluation_collects_in_is_named(runs: Evaluations) -> None:
    evaluate(runs, GROWN // 2)
    (found,) = runs.put
    held = found["holders"][0]
    assert (held["kind"], held["name"], held["owner"]) == ("local", "outputs", "evaluate")
    assert held["graphs"] and found["gradients"] and found["inside"] == "evaluate" and found["steps"] >= APART
    assert found["grown_bytes"] >= GROWN
    # It is known now.
    looks = runs.apart
    evaluate(runs, GROWN)
    assert len(runs.put) == 1 and runs.apart == looks == 2


@pytest.mark.parametrize(
    ("grows", "batches", "phase"),
    [(0, 40, EVALUATE), (GROWN // 100, 40, EVALUATE), (GROWN, 6, EVALUATE), (GROWN, 40, CHECKPOINT)],
    ids=["flat", "little", "few batches", "a checkpoint"],
)
def test_an_evaluation_that_does_not_grow_is_left_alone(
    runs: Evaluations, grows: int, batches: int, phase: int
) -> None:
    evaluate(runs, grows, batches, phase)
    assert not runs.apart and not runs.put


def test_looks_in_vain_end(runs: Evaluations) -> None:
    for _ in range(8):
        evaluate(runs, GROWN // 2, keep=False)
    assert runs.apart <= 2 * collecting.ATTEMPTS


def test_memory_of_a_gpu_is_what_its_allocator_has_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 7})
    assert in_use(torch.device("cuda", 0)) == 7
    assert in_use(torch.device("cpu")) != 7 and in_use(None) != 7


def test_a_function_that_calls_the_method_eval_may_be_looked_at() -> None:
    def evaluates(model: nn.Module) -> dict[str, Any]:
        model.eval()
        return variables(sys._getframe())

    def sees_itself() -> dict[str, Any]:
        locals()
        return variables(sys._getframe())

    assert "model" in evaluates(nn.ReLU())
    if sys.version_info < (3, 13):
        assert sees_itself() == {}


def test_lists_are_known_again_in_the_tensor_that_is_made_of_them() -> None:
    looks = Looks(torch)
    for numbers in (
        torch.randn(16, 8),
        torch.arange(40).view(4, 10),
        torch.randn(3, 2, 20, dtype=torch.float64),
    ):
        listed = numbers.tolist()
        found = [*listed_numbers({"x": listed, "y": [1]})]
        assert looks.first_numbers(torch.tensor(listed)) in found
        for other in (numbers + 1, numbers[1:], torch.zeros_like(numbers)):
            assert looks.first_numbers(other.contiguous()) not in found
    # Too few or equal numbers tell nothing, and objects of other classes are not read.
    assert not [
        *listed_numbers(([0.0] * 8, [1.0, 2.0], [], [True, False, 2, 3, 4], [10**400, 1, 2, 3], "text"))
    ]


def test_a_function_is_found_by_its_code_also_behind_a_property_a_cache_or_a_decorator() -> None:
    def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*given: Any) -> Any:
            return function(*given)

        return inner

    def made() -> int:
        return 1

    def logged() -> int:
        return 2

    class Feed:
        newest = property(made)

    names: dict[str, Any] = {"Feed": Feed}
    assert function_of(made.__code__, names) is made
    assert function_of(made.__code__, {"made": functools.lru_cache(made)}) is made
    assert function_of(logged.__code__, names) is None
    wrapped, other = passed_on(made), passed_on(logged)
    code: Any = vars(type(wrapped))["__code__"].__get__(wrapped)
    assert function_of(code, {"made": wrapped, "again": wrapped}) is wrapped
    # One code for both: it is not known which of them makes the batches.
    assert function_of(code, {"made": wrapped, "logged": other}) is None


@pytest.mark.long
@pytest.mark.parametrize("fixed", few([False, True], 1))
def test_what_an_evaluation_collects_is_found_while_it_runs(tmp_path: Path, fixed: bool) -> None:
    ran = run(tmp_path, "evaluates.py", *["fixed"] * fixed)
    assert ran.status == 0, ran.errors
    looks = [look for look in ran.of("holders") if look["inside"] == "evaluate"]
    assert len(looks) == (not fixed)
    for look in looks:
        held = look["holders"][0]
        assert (held["kind"], held["name"], held["owner"]) == ("local", "outputs", "evaluate")
        assert held["bytes"] >= 0.5 * look["grown_bytes"] > 0
    ran.assert_closed()


def test_collections_after_the_last_step_are_none_of_the_training() -> None:
    garbage = Garbage()
    gc.disable()
    try:
        garbage.begin()
        gc.collect()
        gc.collect()
        ended = now()
        gc.collect()
        garbage.drop_after(ended)
        assert garbage.take()["gc_count"] == 2
    finally:
        garbage.end()
        gc.enable()


@pytest.mark.skipif(Heap().read()["heap_bytes"] is None, reason="the C library does not tell")
def test_memory_that_is_freed_between_pieces_that_are_kept_is_free_in_the_heap() -> None:
    large, small = [], []
    for _ in range(1000):  # 16 KB each, which come from the heap, and 64 bytes
        large.append(torch.ones(4096))
        small.append(torch.ones(1))
    full = Heap().read()
    large.clear()
    freed = Heap().read()
    fell, rose = ((freed[name] or 0) - (full[name] or 0) for name in ("heap_bytes", "heap_free_bytes"))
    assert fell < -12 << 20
    assert rose > 8 << 20
