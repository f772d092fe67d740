"""Ordinary training scripts under the observer: exact steps, phases that add up, the bottleneck, the same losses.

More kinds of scripts, and whether they notice: tests/same. Of frameworks: tests/extras/test_observed_frameworks.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from observed import SUBJECTS, Ran, run, versions
from tests.tiers import few

pytestmark = pytest.mark.long

# Subject -> the lowest torch that has what it uses.
NEEDS = {"accumulate": (2, 3), "compiled place": (2, 2)}
# Only Python 3.12 and later can time a generator.
GENERATOR = "generator"
# Subject -> the phases that take most of its steps, which `steps_phases_and_losses` or `main_phase` checks.
MAIN: dict[str, tuple[str, ...]] = {
    "plain": ("backward",), "saves": ("evaluate", "checkpoint"), "accumulate": ("backward",), "lbfgs": ("optimizer",),
    "recurs": ("backward",), "ahead": ("backward",), "no_loader": ("data_wait",), "generator": (GENERATOR,),
    "compiled model": ("backward",), "compiled function": ("backward",), "compiled place": ("backward",),
}  # fmt: skip
OTHERS: dict[str, tuple[str, ...]] = {
    "carries": ("backward",), "collects each": ("other",), "embeds 300000": ("optimizer",),
    "epochs anew": ("data_wait",), "feeds made": ("data_wait",),
}  # fmt: skip
# What needs a GPU or a package; and subjects whose steps take so little that no phase takes most of them.
ELSEWHERE = {
    "accelerate_fit", "captured", "common", "evaluates", "fake_gpu", "hf_trainer", "lightning_fit", "locks", "on_gpu",
    "recompiles", "recomputes", "retains",
}  # fmt: skip


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
    named = {name.split()[0] for name in (*MAIN, *OTHERS)}
    assert {path.stem for path in SUBJECTS.glob("*.py")} == named | ELSEWHERE


@pytest.mark.parametrize("name", few([*OTHERS], 1))
def test_the_main_phase(tmp_path: Path, name: str) -> None:
    script, *words = name.split()
    ran = run(tmp_path, f"{script}.py", *words)
    assert ran.status == 0, ran.errors
    assert main_phases(ran, len(OTHERS[name])) == {*map(phase_of, OTHERS[name])}


@pytest.mark.parametrize("name", few([*MAIN], 2))
def test_steps_phases_and_losses(tmp_path: Path, name: str) -> None:
    script, *words = name.split()
    if versions()[1] < NEEDS.get(name, (0, 0)):
        pytest.skip(f"needs torch {'.'.join(map(str, NEEDS[name]))}")
    ran = run(tmp_path, f"{script}.py", *words)
    assert ran.status == 0, ran.errors
    steps = int(ran.word("STEPS"))
    (end,) = ran.of("end")
    windows = ran.of("window")
    assert sum(window["steps"] for window in windows) == end["step"] == steps
    for window in windows:
        whole = [body["host_ns"] for name, body in window["phases"].items() if "/" not in name]
        assert sum(whole) == window["wall_ns"]
    phases = ran.phases()
    assert main_phases(ran, len(MAIN[name])) == {*map(phase_of, MAIN[name])}
    if name != "compiled function":
        assert phases["forward"] > 0 and phases["backward"] > 0
    bare = run(tmp_path, f"{script}.py", *words, observed=False)
    assert ran.word("LOSS") == bare.word("LOSS")
    # The compiler of torch 2.1 takes no object of ours for a constant: docs/noticeable.md tells.
    if script == "compiled" and versions()[1] > (2, 1):
        assert (ran.word("GRAPHS"), ran.word("BREAKS")) == (bare.word("GRAPHS"), bare.word("BREAKS"))
    if name == "accumulate":
        assert sum(window["micro_steps"] for window in windows) == 4 * steps
        assert sum(window.get("skipped", 0) for window in windows) == 1
    if name in ("recurs", "ahead"):  # a state that is carried on is no batch
        (source,) = ran.marks("batches are made by")
        assert source["data"]["function"] == "get_batch" and source["data"]["timed"]


@pytest.mark.parametrize(
    ("name", "function", "phase"),
    few(
        [
            ("no_loader", "get_batch", "data_wait"),
            ("generator", "batches", GENERATOR),
            *(("feeds", method, "data_wait") for method in ("get", "__next__", "made")),
        ],
        2,
    ),
)
def test_what_makes_batches_is_named_and_profiled(
    tmp_path: Path, name: str, function: str, phase: str
) -> None:
    if function == "get" and versions()[0] < (3, 11):
        pytest.skip("a method in a class within a class is not found before Python 3.11")
    phase = phase_of(phase)
    ran = run(tmp_path, f"{name}.py", function, NDD_WATCH_PROFILE_S="0.05")
    source = ran.marks("batches are made by")[0]["data"]
    assert (Path(source["file"]).name, source["function"]) == (f"{name}.py", function)
    assert source["timed"] == (phase == "data_wait")
    profiles = ran.of("functions")
    assert profiles
    for profile in profiles:
        # It takes 4 ms, and is called once in a step.
        (busy,) = (item for item in profile["functions"] if item[2] == "busy")
        assert busy[3] == 1 and busy[5] > 3e6 and busy[7] == phase
        assert profile["phases"][phase] > 3e6


@pytest.mark.slow
def test_a_backward_pass_within_another_one_is_no_micro_step(tmp_path: Path) -> None:
    windows = run(tmp_path, "recomputes.py").of("window")
    steps = sum(window["steps"] for window in windows)
    assert sum(window["timed_steps"] for window in windows) < steps  # some are timed as a whole
    assert sum(window["micro_steps"] for window in windows) == steps


LOADERS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(40, 8))

def main():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for context in ("fork", "spawn", "forkserver"):
        for (x,) in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context):
            loss = model(x).sum()
            if "trains" in sys.argv:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("words", "steps"), few([(("trains",), [30]), ((), [])], 1))
def test_only_processes_that_train_have_a_record(
    tmp_path: Path, words: tuple[str, ...], steps: list[int]
) -> None:
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    ran = run(tmp_path, str(script), *words)
    assert ran.status == 0, ran.errors
    assert [ran.of("end", name)[0]["step"] for name in ran.records] == steps
    assert bool(list((tmp_path / "records").iterdir())) == bool(steps)


@pytest.mark.parametrize("words", [(), ("fixed",)])
def test_what_an_evaluation_collects_is_found_while_it_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = run(tmp_path, "evaluates.py", *words)
    assert ran.status == 0, ran.errors
    looks = [look for look in ran.of("holders") if look["inside"] == "evaluate"]
    if words:
        assert not looks
        return
    (look,) = looks
    held = look["holders"][0]
    assert (held["kind"], held["name"], held["owner"]) == ("local", "outputs", "evaluate")
    assert held["bytes"] >= 0.5 * look["grown_bytes"] > 0
    for window in ran.of("window"):
        whole = [body["host_ns"] for name, body in window["phases"].items() if "/" not in name]
        assert sum(whole) == window["wall_ns"]


@pytest.mark.slow
def test_steps_by_hand_are_counted_and_the_graph_that_they_carry_is_seen(tmp_path: Path) -> None:
    ran = run(tmp_path, "carries.py")
    assert ran.status == 0, ran.errors
    (end,) = ran.of("end")
    assert end["step"] == int(ran.word("STEPS"))
    looked = ran.of("functions")
    assert looked and looked[-1]["sizes"]["graph:"] >= 3
    carries = ran.of("run")[-1]["config"]["script"]["carries"]
    assert carries[0].endswith("carries.py")
