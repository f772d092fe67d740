"""Reading records while they are written, torn or damaged, and turning them into events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine
from ndd_engine.record.events import (
    FunctionsEvent,
    MarkEvent,
    RunEvent,
    ScalarsEvent,
    StacksEvent,
    WindowEvent,
)
from ndd_engine.script.command import Command
from ndd_engine.script.facts import Facts
from ndd_engine.script.records import Records


def line(kind: str, **body: Any) -> dict[str, Any]:
    return {"v": 1, "type": kind, "t": 1.0, **body}


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    with path.open("a") as file:
        file.writelines((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)


def test_lines_arrive_once_and_the_leading_rank_comes_first(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert not list(records.new())
    write(tmp_path / "rank-1.jsonl", line("a"))
    write(tmp_path / "rank-0.jsonl", line("b"))
    assert [(name, one["type"]) for name, one in records.new()] == [("rank-0", "b"), ("rank-1", "a")]
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"v": 1, "type": "c"')
    assert not list(records.new())
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(', "t": 2}\n')
    assert [one["type"] for _, one in records.new()] == ["c"]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    records = Records(tmp_path)
    other = {"v": 2, "type": "a", "t": 1}
    write(tmp_path / "pid-7.jsonl", "{", "[" * 5000, "\x00", "7", json.dumps(other), line("good"))
    assert [one["type"] for _, one in records.new()] == ["good"]
    assert records.damaged == 5


@pytest.fixture(scope="module")
def machine() -> Machine:
    return detect("cpu", use_torch=False)


@pytest.fixture
def facts(machine: Machine) -> Facts:
    return Facts("train-001", Command(("python", "train.py"), Path("/there")), machine)


def window(step: int, **more: Any) -> dict[str, Any]:
    body = {
        "step": step, "steps": 10, "timed_steps": 10, "micro_steps": 20, "wall_ns": 10**9, "loss": 0.5, "lr": 0.1,
        "phases": {"forward": {"host_ns": 10**9, "p50_ns": 1, "p95_ns": 1, "max_ns": 1, "device_ns": None}},
        "step_p50_ns": 1, "step_p95_ns": 1, "step_max_ns": 1, "shape": [8, 3], "gc_ns": 0, "gc_count": 0,
        "gc_max_ns": 0, "skipped_updates": 0,
    }  # fmt: skip
    return line("window", **{**body, **more})


def test_a_run_with_what_was_seen_of_it(facts: Facts) -> None:
    told: list[Any] = []
    for one in (
        line("process", pid=7, host="h", python="3.9", torch="2.1", threads=2, ranks=None),
        line("model", device="cpu", optimizer="AdamW", parameters=99, implementation="loop"),
        line("loader", workers=0, pin_memory=False, prefetch=None, persistent=False, batch_size=8, items=64,
             dataset="Own", place=["/there/train.py", 41]),
        window(10), window(20, skipped_updates=1),
    ):  # fmt: skip
        told += facts.take(one)
    run, first, second, skipped = told
    assert isinstance(run, RunEvent) and (run.workload, run.parameters, run.items_per_step) == (
        "train.py",
        99,
        16,
    )
    assert run.config["loader"]["workers"] == 0 and run.config["optimizer"] == {"implementation": "loop"}
    assert isinstance(first, WindowEvent) and isinstance(second, WindowEvent)
    assert (first.items, first.last_loss, second.step) == (160, (10, 0.5), 20)
    assert isinstance(skipped, MarkEvent) and "skipped 1 update" in skipped.text
    assert RunEvent.from_dict(json.loads(run.to_json(1.0))) == run


def test_a_resumed_training_goes_on_with_the_steps_of_its_framework(facts: Facts) -> None:
    totals = {"framework": "transformers", "total_steps": 120, "epochs": 3}
    assert not list(facts.take(line("totals", done=0, earlier=100, **totals)))
    run, seen = facts.take(window(10))
    assert isinstance(run, RunEvent) and (run.resumed_step, run.total_steps) == (100, 120)
    assert isinstance(seen, WindowEvent) and seen.step == 110
    (mark,) = facts.take(line("evaluation", done=10, seconds=2.0, lower=False, metrics={"eval_loss": 1.0}))
    assert isinstance(mark, MarkEvent) and mark.step == 110
    assert mark.data == {"metrics": {"eval_loss": 1.0}, "better": "higher", "seconds": 2.0}
    # Another training of the process, from its begin: the steps never go back.
    (run,) = facts.take(line("totals", done=20, earlier=0, **totals))
    assert isinstance(run, RunEvent) and (run.resumed_step, run.total_steps) == (None, 240)
    (seen,) = facts.take(window(25, steps=15))
    assert isinstance(seen, WindowEvent) and seen.step == 125
    # The script's own calls of `observe()` count as it likes.
    (scalars,) = facts.take(line("scalars", step=7, values={"a": 1.0}))
    assert isinstance(scalars, ScalarsEvent) and scalars.step == 7


def test_stacks_profiles_sources_and_stalls(facts: Facts) -> None:
    (stacks,) = facts.take(line("stacks", step=3, looks=5, frames=[["other", "a.py", 3, "f", None, 4]]))
    assert isinstance(stacks, StacksEvent) and stacks.frames == [["other", "a.py", 3, "f", 4, 1]]
    functions = [["a.py", 1, "f", 2, 8, 7, "g", "other"]]
    (found,) = facts.take(line("profile", step=3, ns=9, functions=functions, phases={"other": 8}))
    assert isinstance(found, FunctionsEvent) and found.functions == functions and found.phases == {"other": 8}
    (source,) = facts.take(line("source", file="a.py", line=3, function="\x1b[31mf", timed=False))
    assert isinstance(source, MarkEvent) and "\x1b" not in source.text and "cannot be timed" in source.text
    (stall,) = facts.take(line("stalled", step=3, seconds=12.0, phase="data_wait", place=["a.py", 7, "g"]))
    assert isinstance(stall, MarkEvent) and stall.kind == "warning" and "a.py:7 in g" in stall.text


@pytest.mark.parametrize("bad", [line("window"), window("x"), line("stacks", step=1, looks=1, frames=[[1]])])  # type: ignore[arg-type]
def test_lines_of_another_format_raise_what_the_run_catches(facts: Facts, bad: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        list(facts.take(bad))
