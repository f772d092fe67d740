"""Tuning a script: which changes are tried, and which ones are kept; the measurements are given."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import Bench, trial
from tests.records import run_event

from ndd_console.cli import script_tuning as cli
from ndd_engine.diagnose import Change, Finding
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script import trials
from ndd_engine.script.edits import Edit
from ndd_engine.script.script_tuning import candidates_for, tune_script
from ndd_engine.trial.outcome import TrialRequest
from ndd_engine.trial.tuning import Tuning, TuningState
from ndd_watch.changes import Place


def identity(tmp_path: Path, **changes: Any) -> RunEvent:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloader = DataLoader(data, batch_size=8)\n")
    config = {
        "script": {
            "command": ["python", "train.py"], "folder": str(tmp_path), "loader": [str(path), 2], "main": str(path),
        },
        "loader": {"workers": 0, "pin_memory": False, "prefetch": None, "persistent": False},
        "optimizer": {"implementation": "loop"},
    }  # fmt: skip
    body: dict[str, Any] = {
        "workload": "train.py", "config": config, "items_per_step": 8, "items_per_epoch": 0, "steps_per_epoch": 0,
        "epochs": 0, "total_steps": 0, "threads": 2,
    }  # fmt: skip
    return run_event(**{**body, **changes})


HERE = Place(gpu=False, cores=2, bf16=False)


def test_what_applies_to_a_script_on_a_cpu(tmp_path: Path) -> None:
    assert [one.name for one in candidates_for(identity(tmp_path), (), HERE)] == [
        "cache", "workers-1", "workers-2", "persistent", "prefetch-4", "threads-1", "fused",
        "flush-denormal", "compile",
    ]  # fmt: skip


GPU = replace(HERE, gpu=True)
READ_AHEAD = {"workers": 2, "prefetch": 2, "pin_memory": False}


@pytest.mark.parametrize(
    ("here", "loader", "convolutions", "tried"),
    [
        (GPU, READ_AHEAD, True, {"prefetch-4", "non-blocking", "channels-last"}),
        (GPU, {**READ_AHEAD, "workers": 0}, False, {"prefetch-4", "non-blocking"}),
        (HERE, READ_AHEAD, True, {"prefetch-4", "channels-last"}),
        (HERE, {}, False, {"prefetch-4"}),
    ],
)
def test_what_can_matter_only_sometimes_is_tried_then(
    tmp_path: Path, here: Place, loader: dict[str, Any], convolutions: bool, tried: set[str]
) -> None:
    run = identity(tmp_path)
    script = {**run.config["script"], **({"convolutions": True} if convolutions else {})}
    config = {**run.config, "script": script, "loader": {**run.config["loader"], **loader}}
    found = candidates_for(replace(run, config=config, device="cuda:0" if here.gpu else "cpu"), (), here)
    sets = {one.name: one.sets for one in found}
    assert sets.keys() & {"prefetch-4", "non-blocking", "channels-last"} == tried
    if here.gpu:  # a copy from memory that is not pinned waits anyway
        assert sets["non-blocking"] == ("loader.pin_memory=true", "loader.non_blocking=true")


@pytest.mark.parametrize(
    ("here", "attention", "tried"),
    [
        (HERE, "flash", ["math"]),
        (GPU, "flash", ["efficient", "cudnn"]),
        (GPU, "efficient", ["flash", "cudnn"]),
        (GPU, "", []),
    ],
)
def test_other_backends_are_tried_where_a_script_computes_attention(
    tmp_path: Path, here: Place, attention: str, tried: list[str]
) -> None:
    run = identity(tmp_path, device="cuda:0" if here.gpu else "cpu")
    run.config["script"].update({"attention": attention} if attention else {})
    found = [one for one in candidates_for(run, (), here) if one.name.startswith("attention")]
    assert [one.sets for one in found] == [(f"speed.attention={name}",) for name in tried]


def test_batches_are_loaded_further_ahead_once_there_are_workers(tmp_path: Path) -> None:
    bench = Bench({"loader.workers=2": trial("faster", 2.0)})
    tune(tmp_path, bench)
    assert bench.of("loader.prefetch=4").base.sets == ("loader.workers=2",)
    (tmp_path / "without").mkdir()
    bench = Bench({})
    state, _ = tune(tmp_path / "without", bench)
    (row,) = (row for row in state.rows if row.candidate.name == "prefetch-4")
    assert row.state == "skipped" and "needs workers" in row.reason


def test_what_the_diagnosis_proposes_is_tried_first(tmp_path: Path) -> None:
    findings = [
        Finding("gc", "", (), "likely", changes=(Change("", ("run.gc_every_steps=100",)),)),
        Finding("few-threads", "", (), "likely", changes=(Change("", ("run.threads=1",)),)),
        Finding("stepwise", "", (), "likely", changes=(Change("", ("workload.decoder=hoisted",)),)),
    ]
    names = [one.name for one in candidates_for(identity(tmp_path), findings, HERE)]
    assert names[:2] == ["run.gc_every_steps=100", "threads-1"] and names.count("threads-1") == 1
    assert not any("decoder" in name for name in names)


def tune(tmp_path: Path, bench: Bench) -> tuple[TuningState, Edit | None]:
    run, directory = identity(tmp_path), RunDir(tmp_path / "r")
    directory.path.mkdir()
    directory.command.write_text(json.dumps(run.config["script"]))
    tuning = Tuning(9.0, (), lambda _: None, threading.Event(), bench)
    return tune_script(directory, run, (), HERE, tuning)


def test_what_helps_is_kept_and_made_by_one_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As that of an edit which trained in a scratch copy.
    monkeypatch.setattr(trials, "digest", lambda edit: "")
    bench = Bench({"loader.workers=2": trial("faster", 2.0), "run.threads=1": trial("faster", 1.2)})
    state, edit = tune(tmp_path, bench)
    assert state.sets == ("loader.workers=2", "run.threads=1")
    # Each is measured on top of what is kept.
    assert bench.of("run.threads=1").base.sets == ("loader.workers=2",)
    assert edit is not None and "num_workers=2" in edit.after and "set_num_threads(1)" in edit.after
    # Persistent workers need workers, which the script has since then.
    assert bench.of("loader.persistent=true").base.sets == ("loader.workers=2",)


def test_an_edit_that_has_not_trained_is_described(tmp_path: Path) -> None:
    refused = trial("faster", 2.0, edit_refused="a scratch copy with it does not train")
    state, edit = tune(tmp_path, Bench({"loader.workers=2": refused, "all": refused}))
    assert state.sets == ("loader.workers=2",)
    assert edit is not None and edit.path is None and not edit.diff
    assert "num_workers=2" in edit.advice[0] and "does not train" in edit.advice[-1]


@pytest.mark.parametrize("dies", [False, True])
def test_each_result_is_recorded_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dies: bool
) -> None:
    run, directory = identity(tmp_path), RunDir(tmp_path / "r")
    directory.path.mkdir()
    directory.command.write_text(json.dumps(run.config["script"]))
    bench = Bench({"loader.workers=2": trial("faster", 2.0)})
    recorded: list[TrialEvent] = []

    def measured(request: TrialRequest, _seen: Any, _device: str, tell: Any, stop: Any) -> TrialEvent:
        if dies and len(bench.requests) == 2:
            raise RuntimeError("planted")
        return bench(request, tell, stop)

    monkeypatch.setattr(cli, "load_state", lambda _: SimpleNamespace(run=run, snapshot=lambda: None))
    monkeypatch.setattr(cli, "diagnose", lambda _: [])
    monkeypatch.setattr(cli, "run_script_trial", measured)
    monkeypatch.setattr(cli, "record", lambda _, event, tell: recorded.append(event))
    asked: Any = SimpleNamespace(budget=9.0, only=(), allow_side_effects=False, as_json=False)
    if dies:
        with pytest.raises(RuntimeError):
            cli.tune_script_run(asked, directory)
    else:
        assert cli.tune_script_run(asked, directory) == 0
        assert "num_workers=2" in capsys.readouterr().out
    assert [event.sets for event in recorded] == [list(request.sets) for request in bench.requests]
    assert len(recorded) == 2 if dies else len(recorded) > 2


def test_nothing_that_helps_is_no_edit(tmp_path: Path) -> None:
    state, edit = tune(tmp_path, Bench({}))
    assert not state.kept and edit is None
    (row,) = (row for row in state.rows if row.candidate.name == "persistent")
    assert row.state == "skipped" and "workers" in row.reason
