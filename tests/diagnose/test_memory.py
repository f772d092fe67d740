"""Growing memory with what holds it, loader workers and evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted_runs import GIB, MB, Planted, beside, cores, evaluating, healthy, of_workers, script

from ndd_engine.diagnose.memory_rules import steady_growth, wants_look
from ndd_engine.record.events import Event, Holder, HoldersEvent, SampleEvent, WindowEvent

# Of 20 steps a window: 2 MiB a step.
GROWS = [(400 + 40 * n) * MB for n in range(12)]
# 10 KiB a step.
CREEPS = [400 * MB + 200 * 1024 * n for n in range(24)]
HISTORY = Holder(
    "list", 500, 200, 200 * 2 * MB, "tensor 512 x 1024", False, "local", "history", "train", "/home/me/train.py", 10,
    at=("/home/me/train.py", 31),
)  # fmt: skip


def looked(holder: Holder | None, steps: int = 200, step: int = 240) -> HoldersEvent:
    return HoldersEvent(step, steps, 90_000_000, [holder] if holder is not None else [])


def run(used: list[int], *looks: HoldersEvent, **more: Any) -> Planted:
    """Looks come before the last window but one."""
    body = {"host": cores(1.9, 1.9), "used": used, "windows": len(used), "after": {len(used) - 2: looks}}
    return Planted(**{**body, **more})


def test_the_holder_of_growing_memory_is_named_with_the_line_where_it_grows() -> None:
    found = run(GROWS, looked(HISTORY)).verdict()
    assert found.cause == "leak" and found.confidence == "certain"
    assert all(part in found.title for part in (" 2.0 MiB per step", "`history`", "`train`"))
    assert found.changes[0].where == "train.py:31"
    told = " ".join(item.text for item in found.evidence)
    assert "1 more" in told and "tensor 512 x 1024" in told and "train.py:10" in told


@pytest.mark.parametrize(
    ("changes", "title", "cure"),
    [
        ({"kind": "attribute", "owner": "Meter", "name": "values"}, "held by list `Meter.values`", "deque"),
        ({"kind": "global"}, "held by list `history` in train.py", "deque"),
        ({"kind": "cache", "name": "table", "owner": "table"}, "held by the cache of `table`", "maxsize"),
        ({"kind": "attribute", "name": "_forward_hooks", "owner": "Linear"}, "forward hooks of Linear", "remove()"),
        ({"kind": "attribute", "name": "figs", "owner": "Gcf"}, "open figures of matplotlib", "plt.close"),
        ({"graphs": True}, "held by list `history`", "loss.item()"),
        ({"kind": "", "name": "", "owner": "", "file": "", "at": None}, "held by a list of tensor", "deque"),
        ({"name": "a\x1b[2Jb"}, "held by list `a\\x1b[2Jb`", "deque"),
    ],
)  # fmt: skip
def test_each_holder_has_its_name_and_its_cure(changes: dict[str, Any], title: str, cure: str) -> None:
    found = run(GROWS, looked(replace(HISTORY, **changes))).verdict()
    assert title in found.title
    assert cure in found.changes[0].text


@pytest.mark.parametrize(
    ("used", "looks", "leak"),
    [
        # A small growth is found only with its holder, unless that is far too small to be the reason.
        (CREEPS, [looked(replace(HISTORY, bytes=200 * 10 * 1024), step=400)], True),
        (CREEPS, [looked(replace(HISTORY, bytes=200 * 100), step=400)], False),
        (CREEPS, [], False),
        # A buffer that ends growing and fits; and one of 10,000 elements of 2 MiB, more than is free.
        (GROWS, [looked(replace(HISTORY, type="deque", limit=1000))], False),
        (GROWS, [looked(replace(HISTORY, type="deque", limit=10_000))], True),
        # The end of a process hides no leak.
        ([*GROWS, 100 * MB], [looked(HISTORY)], True),
    ],
)
def test_a_holder_decides_whether_growth_is_a_leak(
    used: list[int], looks: list[HoldersEvent], leak: bool
) -> None:
    assert ("leak" in run(used, *looks).causes()) == leak


def test_without_a_holder_the_live_tensors_that_take_most_are_told() -> None:
    shapes = [("512 x 1024 float32", 240, 480 * MB), ("8 float32", 2, 64)]
    found = run(GROWS, replace(looked(None), tensors=shapes)).verdict()
    told = " ".join(item.text for item in found.evidence)
    assert "240 tensors of 512 x 1024 float32 (480 MiB)" in told and "2 tensors of 8 float32 (64 B)" in told
    # What a look has found is not blamed for much more.
    small = run(GROWS, looked(replace(HISTORY, bytes=200 * 1000))).verdict()
    assert small.cause == "leak" and "held by" not in small.title
    # With a holder, it says what is kept.
    held = run(GROWS, replace(looked(HISTORY), tensors=shapes)).verdict()
    assert not any("live tensors" in item.text for item in held.evidence)


def test_graphs_are_not_weighed_and_belong_to_what_holds_them() -> None:
    """A list of losses is small; the graph of each loss is not."""
    losses = replace(HISTORY, bytes=200 * 76, graphs=True)

    def title(kept_steps: int, holder: Holder = losses) -> str:
        return run(GROWS, looked(holder), window={"kept_steps": kept_steps}).named("leak").title

    assert "`history`" in title(240)
    assert "history" not in title(240, replace(losses, graphs=False))
    assert "history" not in title(0)


def test_two_looks_are_asked_for_when_memory_grows() -> None:
    assert wants_look(run(GROWS).state().snapshot())
    assert not wants_look(run([400 * MB] * 12).state().snapshot())
    # The second look comes some seconds after the first: steps take 20 ms.
    first = looked(None, steps=0, step=230)
    assert not wants_look(run(GROWS, first).state().snapshot())
    assert wants_look(run(GROWS, replace(first, step=20)).state().snapshot())
    # After both, nothing more.
    assert not wants_look(run(GROWS, looked(HISTORY)).state().snapshot())
    assert not wants_look(run(GROWS, looked(None)).state().snapshot())
    # Where they have named nothing, later again.
    assert wants_look(run(GROWS, looked(None, step=50)).state().snapshot())


def test_the_host_memory_of_a_run_on_a_gpu_is_judged_as_well() -> None:
    samples = {n: [SampleEvent(None, {**cores(1.9, 1.9), "rss_bytes": used})] for n, used in enumerate(GROWS)}
    leak = Planted(device={"forward": 7.0, "backward": 11.5}, after=samples).named("leak")
    assert leak.title.startswith("host memory") and " 2.0 MiB per step" in leak.title


def test_copies_of_workers_name_the_objects_of_the_dataset() -> None:
    facts = {"objects": ["lines", "list", 2_000_000, "dict"], "dataset": "Lines", "loader": ["train.py", 26]}
    memory = of_workers([(100, 1500), (250, 1350), (330, 1270), (370, 1230)])
    found = script(facts, {"workers": 2}, host=cores(1.9, 1.9), after=memory).verdict()
    assert all(
        part in found.title for part in ("2 loader workers", "270 MiB more", "60 steps", "Python objects")
    )
    told = " ".join(item.text for item in found.evidence)
    assert "list `Lines.lines` of 2,000,000 dict" in told and "1.2 GiB more" in told
    assert found.changes[0].where == "train.py:26"
    # New workers of each epoch are no growth.
    again = of_workers([(20 + 10 * (n % 2), 600) for n in range(12)])
    assert "worker-memory" not in Planted(host=cores(1.9, 1.9), after=again).causes()


@pytest.mark.parametrize(
    ("changes", "title", "advice"),
    [
        ({}, ", held by list `outputs` in `evaluate`", "instead of keeping all outputs"),
        ({"graphs": True, "bytes": 1000}, ", held by list `outputs` in `evaluate`", "torch.no_grad(): what"),
        ({"kind": "attribute", "owner": "Metric"}, ", held by list `Metric.outputs`", "all outputs"),
        ({"bytes": 10 * MB}, "", "instead of keeping all outputs"),  # something else holds it
    ],
)
def test_what_an_evaluation_collects_in_is_named(changes: dict[str, Any], title: str, advice: str) -> None:
    usual = {"name": "outputs", "owner": "evaluate", "bytes": 80 * MB, "length": 60, "grown": 20}
    look = within(replace(HISTORY, **{**usual, **changes}))
    found = Planted(host=cores(1.9, 1.9), after={6: [look, *evaluating(1300)]}).verdict()
    assert " 900 MiB more" in found.title and found.title.endswith(f" training{title}")
    assert advice in found.changes[0].text
    told = " ".join(item.text for item in found.evidence)
    assert "at most 400 MiB in training" in told
    if title:
        assert found.changes[0].where == "train.py:31"
        assert " 8.0 MiB" in told and "1 more" in told


def within(holder: Holder | None, **more: Any) -> HoldersEvent:
    """A look within an evaluation that takes 160 MiB."""
    return replace(looked(holder, steps=20), inside="evaluate", grown_bytes=160 * MB, **more)


def test_an_evaluation_may_keep_graphs_outside_of_containers_and_says_nothing_of_training() -> None:
    for gradients in (True, False):
        looks = [within(None, gradients=gradients), *evaluating(1300)]
        found = Planted(host=cores(1.9, 1.9), after={6: looks}).verdict()
        assert found.title.endswith(" autograd on") is gradients
        assert found.changes[0].text.startswith("evaluate under torch") is gradients
    found = run(GROWS, within(HISTORY)).verdict()
    assert found.cause == "leak" and "held by" not in found.title
    assert "evaluation-memory" not in run([400 * MB] * 12, within(HISTORY)).causes()


def test_the_peak_of_an_evaluation_may_become_known_after_it() -> None:
    high = cores(1.9, 1.9, rss_peak_bytes=2 * GIB)
    assert (
        not Planted(host=high, after={6: evaluating(400)}).snapshot().aside_bytes
    )  # it was that high before
    looks = [*evaluating(400), SampleEvent(None, high)]
    later = Planted(host=cores(1.9, 1.9), after={6: looks}).snapshot()
    assert later.aside_bytes == {"evaluate": (2 * GIB - 400 * MB, 400 * MB)}


# Growth.


# Megabytes, one value each 100 steps, and whether they grow by 10 of these.
SERIES = {
    "steadily": ([400 + 10 * n for n in range(20)], True),
    "with noise": ([400 + 10 * n + 3 * (-1) ** n for n in range(40)], True),
    "in stairs": ([400 + 30 * (n // 3) for n in range(60)], True),
    "flat": ([400.0] * 40, False),
    "noise": ([400 + 15 * (-1) ** n for n in range(40)], False),
    "levels off": ([400 + min(15 * n, 300) for n in range(40)], False),
    "a jump": ([400 + (300 if n > 25 else 0) for n in range(40)], False),
    "up and down": ([400 + 10 * (n % 20) for n in range(40)], False),
    "shrinks": ([800 - 10 * n for n in range(40)], False),
    "a little": ([400 + 0.1 * n for n in range(40)], False),
    "too few": ([400, 440, 480, 520], False),
}


@pytest.mark.parametrize("name", SERIES)
def test_only_steady_growth_is_a_leak(name: str) -> None:
    values, grows = SERIES[name]
    found = steady_growth(tuple((100 * n + 100, value * MB) for n, value in enumerate(values)))
    assert (found is not None) == grows
    assert found is None or found[0] == pytest.approx(10 * MB / 100, rel=0.15)


def test_a_leak_says_when_memory_is_full_and_whether_this_run_gets_there() -> None:
    # 20 MiB in 20 steps, and 16 GiB free.
    leak = run([(400 + 20 * n) * MB for n in range(12)])
    found = leak.verdict()
    assert "1.0 MiB per step" in found.title and found.leave == ""
    assert "16,384 steps" in " ".join(item.text for item in found.evidence)
    assert replace(leak, run={"total_steps": 1000}).verdict().leave


def heaps(used: list[int], free: list[int]) -> dict[int, list[WindowEvent]]:
    """After each window of 20 steps, the bytes of the heap."""
    empty = beside("other", 1e-6)
    return {
        n: [replace(empty, step=20 * n + 20, heap_bytes=each, heap_free_bytes=unused)]
        for n, (each, unused) in enumerate(zip(used, free, strict=True))
    }


FLAT = [100 * MB] * 12


@pytest.mark.parametrize(
    ("heap", "free", "causes"),
    [
        (FLAT, [40 * n * MB for n in range(12)], {"fragmentation"}),
        (FLAT, [10 * n * MB for n in range(12)], {"leak"}),  # the rest is in use, elsewhere
        (FLAT, [0] * 12, {"leak"}),
        ([100 * MB + 10 * n * MB for n in range(12)], [30 * n * MB for n in range(12)], {"leak"}),
    ],
)
def test_growth_that_is_free_in_the_heap_is_no_leak(
    heap: list[int], free: list[int], causes: set[str]
) -> None:
    found = script(used=GROWS, host=cores(1.9, 1.9), after=heaps(heap, free))
    assert {"leak", "fragmentation"} & set(found.causes()) == causes
    # Something of the script costs time: that is told before what may end by itself.
    slow = replace(found, phases=healthy(data_wait=8.0)).causes()
    assert (slow[0] == "leak") == (causes == {"leak"})


def test_what_was_freed_may_stay_with_the_c_library_without_a_finding() -> None:
    """The innocent twin: batches become larger for a while, and memory stays where the largest left it."""
    levels = [(400 + min(80 * n, 320)) * MB for n in range(12)]
    free = [each - 400 * MB for each in levels]
    causes = script(used=levels, host=cores(1.9, 1.9), after=heaps([100 * MB] * 12, free)).causes()
    assert not {"leak", "fragmentation"} & set(causes)


@pytest.mark.parametrize("each", [10_000, 1_000])
def test_a_small_growth_of_what_is_in_use_is_named_with_its_holder_although_resident_memory_grows_by_more(
    each: int,
) -> None:
    """200 steps that keep 10 KB each, between tensors that are freed; in the innocent twin 1 KB."""
    used = [100 * MB + 10 * n * each for n in range(20)]
    free = [10 * n * 12 * each for n in range(20)]
    after: dict[int, list[Event]] = {
        n: [replace(one, step=10 * n + 10) for one in ones] for n, ones in heaps(used, free).items()
    }
    after[18].append(looked(replace(HISTORY, bytes=100 * each, grown=100), steps=100, step=190))
    resident = [400 * MB + 10 * n * 13 * each for n in range(20)]
    found = script(steps=10, windows=20, used=resident, host=cores(1.9, 1.9), after=after)
    assert ("leak" in found.causes()) == (each == 10_000)
    if each == 10_000:
        assert "`history`" in found.named("leak").title


@pytest.mark.parametrize(("kept", "found"), [(15, True), (40, False)])
def test_memory_that_is_kept_for_an_epoch_and_then_released(kept: int, found: bool) -> None:
    """With the innocent twin: it grows while a cache is filled, once, and stays. Resident memory stays in both."""
    empty = beside("other", 1e-6)
    windows = {
        n: [
            replace(
                empty, step=20 * n + 20, heap_bytes=(400 + 40 * (n % kept if kept < 40 else min(n, 8))) * MB
            )
        ]
        for n in range(40)
    }
    run = script(windows=40, after=windows, used=[GIB] * 40, host=cores(1.9, 1.9))
    assert ("leak" in run.causes()) == found
    if found:
        leak = run.named("leak")
        assert "2.0 MiB per step" in leak.title
        assert "full" not in " ".join(item.text for item in leak.evidence)


def test_kept_graphs_explain_memory_that_rises_once_and_stays() -> None:
    # From the second point on; the first one is taken while torch still starts.
    rise = [200 * MB, *(400 * MB + min(index, 4) * 200 * MB for index in range(11))]
    kept = {"host": cores(1.9, 1.9), "window": {"kept_steps": 400}}
    found = script(used=rise, **kept).named("leak")
    assert "2.0 MiB per step" in found.title and "400" in found.title
    # What is kept is small, or nothing is kept: data that was read into memory once.
    assert "leak" not in script(used=[400 * MB] * 12, **kept).causes()
    assert "leak" not in script(used=rise, host=cores(1.9, 1.9)).causes()
