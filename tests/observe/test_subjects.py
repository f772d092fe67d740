"""Ordinary training scripts under the observer: exact steps, phases that add up, the main bottleneck, the same losses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ndd_watch import FOLDER, SITE

SUBJECTS = Path(__file__).parent / "subjects"
STEP_PHASES = ("data_wait", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "other", "evaluate", "checkpoint")


@dataclass
class Ran:
    """What a subject printed, and the records of its processes."""

    status: int
    out: str
    errors: str
    records: dict[str, list[dict[str, Any]]]

    def word(self, name: str) -> str:
        words = self.out.split()
        return words[words.index(name) + 1]

    def of(self, kind: str, name: str | None = None) -> list[dict[str, Any]]:
        (lines,) = [self.records[name]] if name is not None else self.records.values()
        return [line for line in lines if line["type"] == kind]

    def phases(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for window in self.of("window"):
            for name, body in window["phases"].items():
                total[name] = total.get(name, 0) + body["host_ns"]
        return total


def run(folder: Path, *command: str, observed: bool = True, **environment: str) -> Ran:
    """Run `python *command` in the folder of the subjects."""
    records = folder / "records"
    more = {FOLDER: str(records), "PYTHONPATH": str(SITE), "NDD_WATCH_WINDOW_S": "0.2"} if observed else {}
    # The observer must not need our packages.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command], cwd=SUBJECTS, env={**inherited, **more, **environment}, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    found = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(records.glob("*.jsonl"))
    } if records.exists() else {}
    return Ran(done.returncode, done.stdout, done.stderr, found)


def missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def extra(name: str, package: str) -> Any:
    reason = f"{package} is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(missing(package), reason=reason))


# Subject -> phase that takes most of a step; None where several are close.
MAIN = {
    "plain": None, "no_loader": "data_wait", "generator": "other", "gan": None, "lbfgs": None, "by_hand": None,
    "accumulate": None, "scaled": None, "evaluates": "evaluate", "streaming": "data_wait", "endless": None,
    "nested": None, "saves": "checkpoint", "compiled_model": None, "compiled_function": None, "compiled_place": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *MAIN,
        extra("lightning_fit", "lightning"),
        extra("accelerate_fit", "accelerate"),
        extra("hf_trainer", "transformers"),
    ],
)
def test_steps_phases_and_losses(tmp_path: Path, name: str) -> None:
    ran = run(tmp_path, f"{name}.py")
    assert ran.status == 0, ran.errors
    steps = int(ran.word("STEPS"))
    (end,) = ran.of("end")
    assert abs(end["step"] - steps) <= (3 if name == "gan" else 0)
    assert sum(window["steps"] for window in ran.of("window")) == end["step"]
    for window in ran.of("window"):
        assert sum(body["host_ns"] for body in window["phases"].values()) == window["wall_ns"]
    phases = ran.phases()
    if (expected := MAIN.get(name)) is not None:
        assert max(phases, key=phases.__getitem__) == expected, phases
    if not name.startswith("compiled_function"):
        assert phases["forward"] > 0 and phases["backward"] > 0
    bare = run(tmp_path, f"{name}.py", observed=False)
    assert ran.word("LOSS") == bare.word("LOSS")
    if name.startswith("compiled"):
        assert (ran.word("GRAPHS"), ran.word("BREAKS")) == (bare.word("GRAPHS"), bare.word("BREAKS"))


def test_the_functions_that_make_batches_are_named(tmp_path: Path) -> None:
    (source,) = run(tmp_path, "no_loader.py").of("source")
    assert Path(source["file"]).name == "no_loader.py" and source["function"] == "get_batch" and source["timed"]


def test_a_generator_that_exists_is_named_and_profiled(tmp_path: Path) -> None:
    ran = run(tmp_path, "generator.py", NDD_WATCH_PROFILE_S="0.05")
    (source,) = ran.of("source")
    assert source["function"] == "batches" and not source["timed"]
    profiles = ran.of("profile")
    assert profiles
    for profile in profiles:
        functions = {name: (calls, own_ns) for _, _, name, calls, _, own_ns in profile["functions"]}
        # `busy` takes 4 ms, and is called by the generator only.
        assert functions["busy"][0] == 1 and functions["busy"][1] > 3e6


def test_micro_batches_and_skipped_updates_are_counted(tmp_path: Path) -> None:
    windows = run(tmp_path, "accumulate.py").of("window")
    assert sum(window["micro_steps"] for window in windows) == 4 * sum(window["steps"] for window in windows)
    assert run(tmp_path / "scaled", "scaled.py").of("window")[-1]["skipped_updates"] == 1


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    ran = run(tmp_path, "raises.py")
    assert ran.status == 1 and "ValueError: no more" in ran.errors and "_ndd_watch" not in ran.errors
    (end,) = ran.of("end")
    assert (end["step"], end["status"], end["reason"]) == (16, "failed", "ValueError: no more")


def test_a_script_that_does_not_train_leaves_no_record(tmp_path: Path) -> None:
    ran = run(tmp_path, "inference.py")
    assert ran.status == 0 and not ran.records and not (tmp_path / "records").exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
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
