"""Ordinary training scripts under the observer: exact steps, phases that add up, the bottleneck, the same losses.

More kinds of scripts, and whether they notice: tests/same. Of frameworks: tests/extras/test_observed_frameworks.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from observed import SUBJECTS, Ran, run, versions
from tests.tiers import few

from ndd_watch.mapped import FIRST_BATCH

pytestmark = pytest.mark.long

# Subject -> the lowest torch that has what it uses.
NEEDS = {"accumulate": (2, 3), "compiled place": (2, 2)}
# Only Python 3.12 and later can time a generator.
GENERATOR = "generator"
# Subject -> the phases that take most of its steps. The first three are in `make test-all`.
MAIN: dict[str, tuple[str, ...]] = {
    "plain": ("backward",), "batches get_batch": ("data_wait",), "saves": ("evaluate", "checkpoint"),
    "accumulate": ("backward",), "lbfgs": ("forward",), "recurs": ("backward",), "carries": ("backward",),
    "compiled model": ("backward",), "compiled function": ("backward",), "compiled place": ("backward",),
    "collects each": ("other",), "embeds 300000": ("optimizer",), "epochs anew": ("data_wait",),
    "batches batches": (GENERATOR,), "batches get": ("data_wait",), "batches __next__": ("data_wait",),
    "batches made": ("data_wait",), "batches wrapped": ("data_wait",), "batches newest": ("data_wait",),
    "batches cached": ("data_wait",), "batches listed": ("data_wait",), "batches ahead": ("backward",),
    "evaluates": ("evaluate",), "retains wide": ("backward",), "recompiles": ("other",),
    "recompiles number": ("other",), "recomputes 160": ("backward",), "locks 2": ("other",),
    "stored slices": ("evaluate",),
}  # fmt: skip
# What needs a GPU or a package.
ELSEWHERE = {"accelerate_fit", "captured", "common", "fake_gpu", "hf_trainer", "lightning_fit", "on_gpu"}  # fmt: skip


def phase_of(name: str) -> str:
    """The phase that a table names."""
    return ("data_wait" if versions()[0] >= (3, 12) else "other") if name == GENERATOR else name


def main_phases(ran: Ran, count: int) -> set[str]:
    """Those that take most, of the windows in which steps were timed; prints their shares."""
    spent: Counter[str] = Counter()
    for window in ran.of("window"):
        if window["timed_steps"]:
            spent.update(
                {name: body["host_ns"] for name, body in window["phases"].items() if "/" not in name}
            )
    print({name: f"{ns / spent.total():.0%}" for name, ns in spent.most_common()})
    return {name for name, _ in spent.most_common(count)}


def test_every_subject_has_a_main_phase_or_a_reason() -> None:
    assert {path.stem for path in SUBJECTS.glob("*.py")} == {name.split()[0] for name in MAIN} | ELSEWHERE


@pytest.mark.parametrize("name", few([*MAIN], 3))
def test_steps_phases_and_losses(tmp_path: Path, name: str) -> None:
    script, *words = name.split()
    if versions()[1] < NEEDS.get(name, (0, 0)):
        pytest.skip(f"needs torch {'.'.join(map(str, NEEDS[name]))}")
    if name == "batches get" and versions()[0] < (3, 11):
        pytest.skip("a method in a class within a class is not found before Python 3.11")
    # What makes batches is seen in profiled steps.
    more = {"NDD_WATCH_PROFILE_S": "0.05"} if script == "batches" else {}
    ran = run(tmp_path, f"{script}.py", *words, **more)
    assert ran.status == 0, ran.errors
    steps = int(ran.word("STEPS"))
    (end,) = ran.of("end")
    assert ran.total("steps") == end["step"] == steps
    ran.assert_closed()
    phases = ran.phases()
    main = {*map(phase_of, MAIN[name])}
    assert main_phases(ran, len(main)) == main
    if name not in ("compiled function", "recompiles"):  # modules within a compiled function are not heard
        assert phases["forward"] > 0 and phases["backward"] > 0
    bare = run(tmp_path, f"{script}.py", *words, observed=False)
    # The compiler of torch 2.1 takes no object of ours for a constant: docs/noticeable.md tells.
    if script == "compiled" and versions()[1] <= (2, 1):
        assert ran.word("LOSS") == bare.word("LOSS")
    else:
        assert ran.out == bare.out
    if name == "accumulate":
        assert (ran.total("micro_steps"), ran.total("skipped")) == (4 * steps, 1)
    if name == "lbfgs":  # all but the call before the first backward pass
        assert phases["forward"] >= (int(ran.word("CALLS")) - 1) * 0.02e9 and ran.total("items") == 15 * 32
        assert phases["other"] < 2e9  # what the script does afterwards is no part of its steps
    if name == "saves":  # what follows the last step is no part of the training
        assert (ran.total("evaluations"), ran.total("checkpoints")) == (7, 7)
        seen = {window["grad_norm"] for window in ran.of("window")} - {None}
        assert seen and seen <= {*map(float, ran.word("NORMS").split(","))}
    # Only rows of whole numbers, which are all of one length, have tokens.
    assert ran.total("tokens") == (5 * ran.total("items") if script == "embeds" else 0)
    if name == "carries":  # the graph that is carried on
        assert ran.of("functions")[-1]["sizes"]["graph:"] >= 3
        assert ran.of("run")[-1]["config"]["script"]["carries"][0].endswith("carries.py")
    # Loader workers that begin with each epoch prepare for 0.2 s.
    assert phases.get(FIRST_BATCH, 0) >= (7 * 0.2e9 if name == "epochs anew" else 0)
    # A slow machine profiles more than one step.
    waits = [wait for profile in ran.of("functions") for wait in profile["waits"]]
    collects = {("collects.py", "collect", 1)} if name == "collects each" else set()
    assert {(Path(wait[0]).name, wait[3], wait[4]) for wait in waits} == collects
    if script in ("batches", "recurs"):  # a state that is carried on is no batch
        made_by = {"ahead": "get_batch", "wrapped": "inner"}
        check_source(ran, script, made_by.get(words[0], words[0]) if words else "get_batch", *main)


def check_source(ran: Ran, script: str, function: str, phase: str) -> None:
    """What makes the batches is named, and timed where it can be; phase: the main one."""
    (source,) = [mark["data"] for mark in ran.marks("batches are made by")]
    assert (Path(source["file"]).name, source["function"]) == (f"{script}.py", function)
    assert source["timed"] == (phase != "other")
    profiles = ran.of("functions")
    assert profiles or script == "recurs"
    for profile in profiles if phase in ("data_wait", "other") else ():
        # It takes 4 ms, and is called once in a step.
        (busy,) = (item for item in profile["functions"] if item[2] == "busy")
        assert busy[3] == 1 and busy[5] > 3e6 and busy[7] == phase
        assert profile["phases"][phase] > 3e6


@pytest.mark.slow
def test_a_backward_pass_within_another_one_is_no_micro_step(tmp_path: Path) -> None:
    ran = run(tmp_path, "recomputes.py")
    assert ran.total("timed_steps") < ran.total("steps")  # some are timed as a whole
    assert ran.total("micro_steps") == ran.total("steps")


@pytest.mark.parametrize(
    ("kind", "evaluations"),
    few(
        [
            # Of 12, the first is not known yet, and the last is no part of the training.
            ("slices", 10), ("rollout", 0), ("teaches", 0), ("inference", 10), ("whole", 10), ("rollout_in_place", 0),
            ("rollout_elsewhere", 0), ("answers", 0), ("noisy", 0), ("chosen", 1),
        ],
        3,
    ),
)  # fmt: skip
def test_calls_that_go_through_stored_data_without_gradients_are_an_evaluation(
    tmp_path: Path, kind: str, evaluations: int
) -> None:
    ran = run(tmp_path, "stored.py", kind, NDD_WATCH_SHARE="0")  # all steps are timed by phase
    assert ran.status == 0, ran.errors
    assert ran.total("steps") == 60
    assert ran.total("evaluations") == evaluations
    assert (ran.phases().get("evaluate", 0) > 0) == (evaluations > 0)
    ran.assert_closed()
    assert ran.out == run(tmp_path, "stored.py", kind, observed=False).out
