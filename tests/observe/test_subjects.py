"""Ordinary training scripts under the observer: exact steps, phases that add up, the bottleneck, the same losses.

Those of frameworks: tests/extras/test_observed_frameworks.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from observed import run

pytestmark = pytest.mark.long

# Only Python 3.12 and later can time a generator.
GENERATOR = "data_wait" if sys.version_info >= (3, 12) else "other"
# Subject -> phase that takes most of a step; None where several are close.
MAIN = {
    "plain": None, "no_loader": "data_wait", "generator": GENERATOR, "gan": None, "lbfgs": None, "by_hand": None,
    "accumulate": None, "scaled": None, "evaluates": "evaluate", "streaming": "data_wait", "endless": None,
    "nested": None, "sharpens": None, "catches": None, "recurs": None, "ahead": None, "saves": "checkpoint",
    "compiled model": None, "compiled function": None, "compiled place": None,
}  # fmt: skip


# Every construct once; the rest runs with `make test-slow`.
QUICK = {"plain", "gan", "accumulate"}


@pytest.mark.parametrize(
    "name",
    [
        *(name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MAIN),
    ],
)
def test_steps_phases_and_losses(tmp_path: Path, name: str) -> None:
    script, *words = name.split()
    ran = run(tmp_path, f"{script}.py", *words)
    assert ran.status == 0, ran.errors
    steps = int(ran.word("STEPS"))
    (end,) = ran.of("end")
    assert abs(end["step"] - steps) <= (3 if name == "gan" else 0)
    assert sum(window["steps"] for window in ran.of("window")) == end["step"]
    for window in ran.of("window"):
        whole = [body["host_ns"] for name, body in window["phases"].items() if "/" not in name]
        assert sum(whole) == window["wall_ns"]
    phases = ran.phases()
    if (expected := MAIN.get(name)) is not None:
        assert max(phases, key=phases.__getitem__) == expected, phases
    if name != "compiled function":
        assert phases["forward"] > 0 and phases["backward"] > 0
    bare = run(tmp_path, f"{script}.py", *words, observed=False)
    assert ran.word("LOSS") == bare.word("LOSS")
    if script == "compiled":
        assert (ran.word("GRAPHS"), ran.word("BREAKS")) == (bare.word("GRAPHS"), bare.word("BREAKS"))


def test_the_functions_that_make_batches_are_named(tmp_path: Path) -> None:
    (source,) = run(tmp_path, "no_loader.py").of("source")
    assert (
        Path(source["file"]).name == "no_loader.py" and source["function"] == "get_batch" and source["timed"]
    )


@pytest.mark.parametrize("name", ["recurs", "ahead"])
def test_batches_are_made_in_the_step_before_and_a_state_is_no_batch(tmp_path: Path, name: str) -> None:
    (source,) = run(tmp_path, f"{name}.py").of("source")
    assert source["function"] == "get_batch" and source["timed"]


def test_a_generator_that_exists_is_named_and_profiled(tmp_path: Path) -> None:
    ran = run(tmp_path, "generator.py", NDD_WATCH_PROFILE_S="0.05")
    (source,) = ran.of("source")
    assert source["function"] == "batches" and source["timed"] == (sys.version_info >= (3, 12))
    profiles = ran.of("profile")
    assert profiles
    for profile in profiles:
        functions = {name: (calls, own_ns) for _, _, name, calls, _, own_ns, *_ in profile["functions"]}
        # `busy` takes 4 ms, and is called by the generator only.
        assert functions["busy"][0] == 1 and functions["busy"][1] > 3e6
        (phase,) = (item[7] for item in profile["functions"] if item[2] == "busy")
        assert phase == GENERATOR and profile["phases"][phase] > 3e6


def test_a_function_belongs_to_the_phase_in_which_it_is_called(tmp_path: Path) -> None:
    profiles = run(tmp_path, "streaming.py", NDD_WATCH_PROFILE_S="0.05").of("profile")
    assert profiles
    for profile in profiles:
        phases = {name: phase for _, _, name, *_, phase in profile["functions"]}
        assert phases["busy"] == "data_wait"


def test_micro_batches_and_skipped_updates_are_counted(tmp_path: Path) -> None:
    windows = run(tmp_path, "accumulate.py").of("window")
    assert sum(window["micro_steps"] for window in windows) == 4 * sum(window["steps"] for window in windows)
    assert run(tmp_path / "scaled", "scaled.py").of("window")[-1]["skipped_updates"] == 1


def test_a_backward_pass_within_another_one_is_no_micro_step(tmp_path: Path) -> None:
    windows = run(tmp_path, "recomputes.py").of("window")
    steps = sum(window["steps"] for window in windows)
    assert sum(window["timed_steps"] for window in windows) < steps  # some are timed as a whole
    assert sum(window["micro_steps"] for window in windows) == steps


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    ran = run(tmp_path, "raises.py")
    assert ran.status == 1 and "ValueError: no more" in ran.errors and "_ndd_watch" not in ran.errors
    (end,) = ran.of("end")
    assert (end["step"], end["status"], end["reason"]) == (16, "failed", "ValueError: no more")


def test_a_script_that_does_not_train_leaves_no_record(tmp_path: Path) -> None:
    ran = run(tmp_path, "inference.py")
    assert ran.status == 0 and not ran.records and not list((tmp_path / "records").iterdir())


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_each_rank_has_a_record(tmp_path: Path, name: str) -> None:
    ran = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"{name}.py")
    assert ran.status == 0, ran.errors
    assert list(ran.records) == ["rank-0", "rank-1"]
    for rank in ran.records:
        assert ran.of("end", rank)[0]["step"] == int(ran.word("STEPS"))
        assert ran.of("process", rank)[0]["ranks"] == 2


def test_processes_that_the_script_starts_are_observed(tmp_path: Path) -> None:
    ran = run(tmp_path, "spawn.py")
    assert ran.status == 0, ran.errors
    assert len(ran.records) == 2
    assert all(ran.of("end", name)[0]["step"] == int(ran.word("STEPS")) for name in ran.records)
