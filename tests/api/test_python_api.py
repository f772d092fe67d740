"""The public Python API: training, recorded runs, trials and predictions, as a script or a notebook uses them."""

from __future__ import annotations

import gc
import inspect
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import few
from tests.waiting import LIMIT_S, until
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ndd_engine
from ndd_engine import (
    Config,
    ConfigError,
    EndEvent,
    Event,
    NddError,
    Record,
    Result,
    RunEvent,
    Snapshot,
    UsageError,
    WindowEvent,
    find_bottlenecks,
    open_run,
    predict_memory,
    run_training,
    run_trial,
)

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
RUN: dict[str, Any] = {"threads": 1, "device": "cpu"}
TINY: dict[str, Any] = {
    "workload": {"name": "eeg", "samples": 400, "channels": 2, "hidden": [8]},
    "batch": {"sequence": 8, "micro": 16},
    "run": {**RUN, "max_steps": 20},
    "log": {"window_s": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_training(TINY, run="one", runs=tmp_path_factory.mktemp("api") / "runs")


def script(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


# The package


@pytest.mark.long
def test_the_package_and_the_names_that_need_no_torch_do_not_import_it(tmp_path: Path) -> None:
    code = (
        "import sys, ndd_engine\n"
        "assert not {'torch', 'pydantic', 'tomlkit'} & set(sys.modules)\n"
        "from ndd_engine import Config, ConfigError, Finding, Snapshot, WindowEvent, find_bottlenecks, open_run\n"
        "assert callable(find_bottlenecks) and callable(open_run)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = script(code, tmp_path)
    assert done.wait(LIMIT_S) == 0, done.communicate()[1]


def test_every_public_name_exists_and_is_documented_and_typed() -> None:
    assert not {module.name for module in pkgutil.iter_modules(ndd_engine.__path__)} & set(ndd_engine.__all__)
    for name in ("ndd_engine", "ndd_console", "ndd_profiles"):
        assert (Path(__import__(name).__path__[0]) / "py.typed").is_file()
    assert set(ndd_engine.__all__) <= set(dir(ndd_engine))
    for name in ndd_engine.__all__:
        assert inspect.getdoc(getattr(ndd_engine, name)), name
    for function in (run_training, open_run, run_trial, predict_memory):
        doc = inspect.getdoc(function) or ""
        assert "Raises:" in doc and "Example:" in doc
    with pytest.raises(AttributeError, match="trains"):
        _ = ndd_engine.trains


# run_training


@pytest.mark.long
def test_a_run_is_resumed_with_its_own_configuration_and_events_are_passed_on(tmp_path: Path) -> None:
    seen: list[tuple[float, Event]] = []
    first = run_training(TINY, run="one", runs=tmp_path, on_event=lambda t, event: seen.append((t, event)))
    assert isinstance(seen[-1][1], EndEvent)
    assert [event.type for _, event in seen] == [event.type for _, event in first.record]
    assert [t for t, _ in seen] == sorted(t for t, _ in seen)
    result = run_training(resume="one", sets={"run.max_steps": 30}, runs=tmp_path)
    assert (result.status, result.step) == ("done", 30)
    assert result.snapshot.run is not None and result.snapshot.run.resumed_step == 20
    assert result.record.config.batch.micro == 16
    again = run_training(resume=result.path, sets=["run.max_steps=35"], runs=tmp_path / "elsewhere")
    assert (again.path, again.step) == (result.path, 35)


@pytest.mark.long
def test_a_file_and_values_on_top(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('workload = { name = "eeg", samples = 400, channels = 2, hidden = [8] }\n')
    values = {"run.max_steps": 3, "run": RUN, "batch": {"sequence": 8, "micro": 32}}
    result = run_training(file, sets=values, runs=tmp_path / "runs")
    assert result.status == "done" and result.path.name == "eeg-001"
    assert (result.record.config.batch.micro, result.record.config.run.max_steps) == (32, 3)


def broken(folder: Path) -> dict[str, Any]:
    """A configuration of a model whose loss raises an error in line 5 of broken_api.py."""
    (folder / "broken_api.py").write_text(
        "import torch\n"
        "def factory(settings):\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(64, 3), torch.ones(64))\n"
        "    def loss(output, batch):\n"
        "        raise ValueError('no loss')\n"
        "    return dict(model=torch.nn.Linear(3, 1), train_data=data, loss=loss)\n"
    )
    return {"workload": {"name": "broken_api:factory", "path": [str(folder)]}, "run": {"epochs": 1}}


def test_a_broken_model_is_a_result_of_a_run_and_an_error_of_a_prediction(tmp_path: Path) -> None:
    result = run_training(broken(tmp_path), runs=tmp_path / "runs")
    assert result.status == "failed" and "no loss" in result.reason
    with pytest.raises(NddError, match=r"broken_api\.py:5"):
        predict_memory(broken(tmp_path))


@pytest.mark.long
@pytest.mark.promise
def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    threads, frozen = torch.get_num_threads(), gc.get_freeze_count()
    handler = signal.getsignal(signal.SIGINT)
    run_training(TINY, sets={"speed.deterministic": True}, runs=tmp_path)
    assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.long
@pytest.mark.parametrize("presses", few([1, 2], 1))
def test_ctrl_c_saves_a_checkpoint_and_raises_keyboard_interrupt(tmp_path: Path, presses: int) -> None:
    endless = {**TINY, "run": {**RUN, "epochs": 100_000}}
    code = f"from ndd_engine import run_training\nrun_training({endless!r}, run='one')\nprint('no')\n"
    process = script(code, tmp_path)
    events = tmp_path / "runs" / "one" / "events.jsonl"
    try:
        until(lambda: events.exists() and '"type":"window"' in events.read_text())
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert out == "" and "KeyboardInterrupt" in err.splitlines()[-1]
    record = open_run("one", runs=tmp_path / "runs")
    assert record.snapshot().status == "interrupted"
    if presses == 1:
        assert record.checkpoints


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"batch": {"micor": 3}}, ("batch.micor = 3", "did you mean micro?")),
        ({"batch": {"micro": object()}}, ("batch.micro", "allowed: a boolean, a number, a string")),
        ("gone.toml", ("gone.toml", "cannot be read")),
    ],
)
def test_a_wrong_configuration_names_the_key_and_the_allowed_values(
    tmp_path: Path, config: Any, words: tuple[str, ...]
) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: run_training(config, runs=tmp_path / "runs"),
        lambda: predict_memory(config),
    )
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "--set" not in str(caught.value)
    assert isinstance(caught.value, UsageError) and isinstance(caught.value, NddError)
    assert not (tmp_path / "runs").exists()


def test_resume_takes_no_other_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="config"):
        run_training(TINY, resume="one", runs=tmp_path)
    with pytest.raises(UsageError, match="one"):
        run_training(resume="one", runs=tmp_path)


# open_run


def test_a_record_gives_events_configuration_and_checkpoints(trained: Result) -> None:
    assert (trained.status, trained.step, trained.path.name) == ("done", 20, "one")
    assert "20 steps" in trained.reason and isinstance(trained.snapshot, Snapshot) and trained.snapshot.final
    record = open_run("one", runs=trained.path.parent)
    assert isinstance(record, Record) and record.name == "one" and not record.live
    events = [event for _, event in record]
    assert isinstance(events[-1], EndEvent) and any(isinstance(event, RunEvent) for event in events)
    windows = [event for _, event in record.events(WindowEvent)]
    assert sum(window.steps for window in windows) == 20
    assert isinstance(record.config, Config) and record.config.workload.name == "eeg"
    (checkpoint,) = record.checkpoints[-1:]
    dcp_to_torch_save(checkpoint, trained.path / "whole.pt")
    assert torch.load(trained.path / "whole.pt", weights_only=True)["state"]["tree"]["step"] == 20
    assert record.snapshot().status == "done" and record.snapshot().step == 20
    assert list(record.follow(timeout=5)) == []
    assert open_run(trained.path).path == open_run(runs=trained.path.parent).path == trained.path


@pytest.mark.long
def test_a_live_run_is_followed(tmp_path: Path) -> None:
    opened = threading.Event()
    endless = {**TINY, "run": {**RUN, "epochs": 100_000, "max_steps": 1000}, "log": {"window_s": 0.05}}

    def work() -> None:
        run_training(endless, run="one", runs=tmp_path, on_event=lambda t, event: opened.set())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert opened.wait(LIMIT_S)
        record = open_run("one", runs=tmp_path)
        assert record.live
        seen = [event for _, event in record.follow(timeout=LIMIT_S)]
    finally:
        thread.join(100)
    assert isinstance(seen[-1], EndEvent) and any(isinstance(event, WindowEvent) for event in seen)
    assert not record.live and record.snapshot().step == 1000


def test_there_is_no_such_run(trained: Result, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one"):
        open_run("two", runs=trained.path.parent)
    with pytest.raises(UsageError):
        open_run(runs=tmp_path)


# find_bottlenecks, run_trial, predict_memory


def test_a_snapshot_is_diagnosed(trained: Result) -> None:
    found = find_bottlenecks(trained.snapshot)
    assert found and all(finding.title and finding.cause for finding in found)


@pytest.mark.long
def test_memory_and_step_time_are_predicted() -> None:
    stages: list[str] = []
    found = predict_memory(TINY, on_progress=stages.append)
    assert found.device == "cpu" and stages
    assert found.peak_bytes == pytest.approx(sum(found.parts.values()), rel=0.01)
    assert found.free_bytes is not None and found.total_bytes is not None
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.fits is True and found.nearest is None
    assert found.reliable is (found.reason == "")
    assert found.step_s > 0 and found.parameters > 0


# docs/python-api.md


@pytest.mark.long
def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    text = "\n".join(blocks)
    assert len(blocks) >= 8 and "budget=20" in text
    (tmp_path / "page.py").write_text(text.replace("budget=20", "budget=2"), encoding="utf-8")
    process = script("import page", tmp_path)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert out.startswith("done\n100\n") and "batch.micor" in out
    assert (tmp_path / "runs" / "first" / "events.jsonl").is_file()
