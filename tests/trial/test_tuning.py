"""Tuning of own runs and of scripts: what it tries, on top of what, what it keeps, and what it writes.

The measurements are given.
"""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import Bench, machine, trial
from tests.records import run_event

from ndd_console.cli import script_tuning as cli
from ndd_engine.config import read
from ndd_engine.diagnose import Change, Finding
from ndd_engine.errors import ConfigError, NddError, UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script import trials
from ndd_engine.script.edits import Edit
from ndd_engine.script.script_tuning import candidates_for, tune_script
from ndd_engine.trial.campaign import Campaign
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.tuning import Tuning, TuningRow, TuningState, place_of, run_tuning, trained, unconfirmed
from ndd_watch.changes import Conditions, candidates, needs_losses

NDD = ("batch.micro=64", "loader.fetch=item")


def tune(bench: Bench, *sets: str, workload: str = "eeg", **options: Any) -> TuningState:
    options.setdefault("machine", machine())
    return run_tuning(Base("a test", None, workload, sets or NDD), 5.0, measure=bench, **options)


def row(state: TuningState, name: str) -> TuningRow:
    return next(item for item in state.rows if item.candidate.name == name)


def kept(state: TuningState) -> list[str]:
    return [item.candidate.name for item in state.kept]


def is_so(state: TuningState, name: str, what: str, *words: str) -> bool:
    """Whether the state of a row is this, and its reason has these words."""
    found = row(state, name)
    return found.state == what and all(word in found.reason for word in words)


# What is kept, and on top of what.


def test_what_gains_is_kept_and_the_next_is_measured_on_top_of_it() -> None:
    bench = Bench({"loader.fetch=auto": trial("faster", 3.0), "run.threads=1": trial("faster", 1.2)})
    state = tune(bench)
    assert kept(state) == ["gather", "threads-1"]
    assert bench.of("loader.workers=1").base.sets == ("loader.fetch=auto",)
    assert bench.of("speed.compile=default").base.sets == ("loader.fetch=auto", "run.threads=1")
    assert is_so(state, "workers-1", "dropped", "no difference")


def test_the_ratio_to_the_start_is_measured_and_not_multiplied() -> None:
    results = {"loader.fetch=auto": trial("faster", 3.0), "run.threads=1": trial("faster", 2.0)}
    bench = Bench({**results, "all": trial("faster", 3.5)})
    state = tune(bench)
    against_start = [request for request in bench.requests if request.base.name == "the baseline"]
    assert [request.sets for request in against_start] == [
        ("loader.fetch=auto",), ("loader.fetch=auto", "run.threads=1"),
    ]  # fmt: skip
    assert all(request.base.sets == () for request in against_start)
    assert state.final is not None and state.final.ratio == 3.5
    assert "3.50x" in state.text and "3.43 to 3.57" in state.text


def test_a_kept_setting_that_the_final_comparison_does_not_confirm_is_dropped() -> None:
    state = tune(Bench({"loader.fetch=auto": trial("faster", 1.05), "all": trial("no difference", 1.004)}))
    assert is_so(state, "gather", "dropped", "1.00x") and state.kept == ()
    assert written(state).loader.fetch == "item" and "unchanged" in state.text


def test_what_a_later_setting_adds_has_to_show_in_the_total() -> None:
    totals = iter([trial("faster", 3.0), trial("faster", 3.01), trial("faster", 3.0)])

    class Totals(Bench):
        def __call__(self, request: Any, tell: Any, stop: Any) -> Any:
            return (
                next(totals) if request.base.name == "the baseline" else super().__call__(request, tell, stop)
            )

    results = {"loader.fetch=auto": trial("faster", 3.0), "run.threads=1": trial("faster", 1.05)}
    bench = Totals(results)
    state = tune(bench)
    assert kept(state) == ["gather"]
    assert is_so(state, "threads-1", "dropped", "not confirmed")
    assert bench.of("speed.compile=default").base.sets == ("loader.fetch=auto",)  # without what was dropped
    assert state.final is not None and state.final.ratio == 3.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (trial("faster", loss="differs", loss_text="at step 3"), "at step 3"),
        (trial("faster", in_effect=False, not_in_effect="no GPU"), "no GPU"),
        (trial("slower"), "slower"),
        (trial("inconclusive"), "inconclusive"),
        (trial("out of memory", None, text="no room"), "no room"),
        (trial("failed", None, text="no compiler"), "no compiler"),
    ],
)
def test_what_does_not_measurably_help_or_changes_the_training_is_dropped(result: Any, reason: str) -> None:
    state = tune(Bench({"loader.fetch=auto": result}))
    assert is_so(state, "gather", "dropped", reason)
    assert state.kept == () and state.final is None and "unchanged" in state.text


def test_a_lower_precision_with_close_losses_is_kept_and_reported() -> None:
    bench = Bench({"precision.amp=bf16": trial("faster", loss="close")})
    state = tune(bench, *NDD, "precision.amp=off", machine=machine(gpu=True))
    assert is_so(state, "bf16", "kept", "losses close") and is_so(state, "fp16", "skipped", "bf16 was kept")


@pytest.mark.parametrize(("steps", "state"), [(500, "dropped"), (5000, "kept")])
def test_compiling_that_never_breaks_even_in_this_run_is_dropped(steps: int, state: str) -> None:
    bench = Bench({"speed.compile=default": trial("faster", break_even_steps=900)})
    assert is_so(tune(bench, *NDD, f"run.max_steps={steps}"), "compile", state, "900 steps")


# Which candidates there are.


OF_A_GPU = {
    "device": "loader.placement=device", "pin-memory": "loader.pin_memory=true", "cuda-graph": "speed.cuda_graph=true",
    "reduce-overhead": "speed.compile=reduce-overhead",
}  # fmt: skip


@pytest.mark.parametrize("gpu", [False, True])
def test_what_needs_a_gpu_is_tried_where_there_is_one(gpu: bool) -> None:
    bench = Bench({})
    state = tune(bench, machine=machine(cores=16, gpu=gpu))
    measured = {item for request in bench.requests for item in request.sets}
    for name, setting in OF_A_GPU.items():
        assert (setting in measured) == gpu
        assert gpu or is_so(state, name, "skipped", "no CUDA GPU")


def test_workers_never_outnumber_the_cores_and_end_when_two_did_not_help() -> None:
    bench = Bench({})
    state = tune(bench, machine=machine(cores=3.5))
    tried = [item.candidate.name for item in state.rows if item.candidate.group == "workers"]
    assert tried == ["workers-1", "workers-2"]
    state = tune(bench, machine=machine(cores=16))
    assert is_so(state, "workers-2", "dropped") and is_so(state, "workers-4", "skipped", "not help")
    found = tune(Bench({"loader.workers=2": trial(), "loader.workers=4": trial()}), machine=machine(cores=16))
    assert is_so(found, "workers-4", "kept") and is_so(found, "workers-8", "dropped")


@pytest.mark.parametrize(
    ("workload", "gpu", "sets", "tried"),
    [
        ("chartext", False, (), ["math"]),
        ("chartext", False, ("speed.attention=math",), ["auto"]),
        ("finetune", True, (), ["flash", "efficient", "cudnn"]),
        ("finetune", True, ("speed.attention=flash",), ["auto", "efficient", "cudnn"]),
        ("package.module:factory", False, ("run.epochs=1",), ["math"]),
        ("eeg", True, (), []),
    ],
)
def test_other_backends_of_attention_are_tried(
    workload: str, gpu: bool, sets: tuple[str, ...], tried: list[str]
) -> None:
    here = Conditions(gpu=gpu, cores=2, capability=(9, 0))
    draft = read(None, sets, workload)
    found = candidates(trained(here, draft.resolve(), draft.model))
    names = [one.sets for one in found if one.name.startswith("attention") and not one.missing]
    assert names == [(f"speed.attention={name}",) for name in tried]


def test_no_other_backend_is_tried_where_the_model_has_no_attention() -> None:
    missing = trial("no difference", in_effect=False, not_in_effect="this model calls no attention")
    bench = Bench({"speed.attention=flash": missing})
    state = tune(bench, "run.seed=1", workload="finetune", machine=machine(gpu=True))
    assert is_so(state, "attention-flash", "dropped")
    assert is_so(state, "attention-cudnn", "skipped", "not in effect")


def test_batches_are_loaded_further_ahead_where_workers_were_kept() -> None:
    bench = Bench({"loader.workers=1": trial("faster", 2.0)})
    tune(bench, *NDD, machine=machine(cores=1))
    assert bench.of("loader.prefetch=4").base.sets == ("loader.workers=1",)
    assert is_so(tune(Bench({})), "prefetch-4", "skipped", "needs workers")


def test_more_workers_are_tried_before_fewer_and_none_at_all() -> None:
    state = tune(Bench({}), *NDD, "loader.workers=4", machine=machine(cores=16))
    order = [item.candidate.name for item in state.rows if item.candidate.name.startswith("workers")]
    assert order == ["workers-8", "workers-16", "workers-4", "workers-2", "workers-1", "workers-0"]
    assert is_so(state, "workers-2", "skipped") and is_so(state, "workers-0", "dropped")


@pytest.mark.parametrize(
    ("setting", "stays", "refused"),
    [
        ("loader.placement=device", "device", "workers-2"),  # it takes no workers
        ("speed.compile=reduce-overhead", "reduce-overhead", "cuda-graph"),  # a second kind of CUDA graphs
    ],
)
def test_what_does_not_go_with_what_was_kept_is_skipped(setting: str, stays: str, refused: str) -> None:
    state = tune(Bench({setting: trial()}), machine=machine(cores=4, gpu=True))
    assert is_so(state, stays, "kept")
    assert is_so(state, refused, "skipped") and row(state, refused).reason


def test_what_is_set_already_is_not_tried() -> None:
    bench = Bench({})
    state = tune(bench, *NDD, "loader.workers=1", "speed.compile=default")
    assert row(state, "workers-1").reason == row(state, "compile").reason == "already set"


def test_larger_micro_batches_keep_the_effective_batch_and_end_when_memory_runs_out() -> None:
    results = {"batch.micro=2": trial(), "batch.micro=4": trial("out of memory", None)}
    bench = Bench(results)
    one = ("batch.micro=1", "batch.accumulation=8", "workload.model=gru", "workload.hidden=[8]")
    state = tune(bench, *one)
    assert bench.of("batch.micro=2").sets == ("batch.micro=2", "batch.accumulation=4")
    assert row(state, "micro-8").state == "skipped"
    config = written(state)
    assert (config.batch.micro, config.batch.accumulation, config.batch.items) == (2, 4, 8)


def test_a_file_says_what_a_model_of_ones_own_has(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = '[workload]\nname = "mine:factory"\n[run]\nepochs = 1\n[tuning]\nmodel = ["{}"]\n'

    def missing(has: str) -> set[str]:
        file.write_text(text.format(has))
        draft = read(file)
        found = candidates(
            trained(Conditions(gpu=True, cores=2, capability=(9, 0)), draft.resolve(), draft.model)
        )
        return {one.name for one in found if one.missing} & {"attention", "channels-last", "cache"}

    assert missing("convolutions") == {"attention"} and missing("attention") == {"channels-last"}
    assert missing("in memory") == {"attention", "channels-last", "cache"}
    with pytest.raises(ConfigError, match="unrolled"):
        missing("recurrent")


@pytest.mark.parametrize("workload", ["antispoof", "chartext", "finetune", "eeg", "summarise"])
def test_every_candidate_is_the_same_training(workload: str) -> None:
    plain = ("precision.amp=off", "precision.tf32=false")
    draft = read(None, plain, workload)
    config, here = draft.resolve(), Conditions(gpu=True, cores=16, capability=(9, 0))
    for candidate in candidates(trained(here, config, draft.model)):
        try:
            changed = read(None, (*plain, *candidate.sets), workload).resolve()
        except ConfigError:
            continue
        assert changed.batch.items == config.batch.items
        assert changed.batch.sequence == config.batch.sequence
        assert changed.optimizer.lr == config.optimizer.lr
        before, after = (item.workload.model_dump() for item in (config, changed))
        assert before | {"decoder": None} == after | {"decoder": None}


@pytest.mark.parametrize(
    ("text", "has"),
    [("flags\t: fpu avx2\n", False), ("flags\t: fpu amx_bf16\n", True), ("Features: neon\n", None)],
)
def test_a_cpu_without_bf16_does_not_try_it(tmp_path: Path, text: str, has: bool | None) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text(text)
    place = place_of(machine(), flags)
    assert place.bf16 is has
    found = {
        item.name: item for item in candidates(trained(place, read(workload="eeg").resolve(), frozenset()))
    }
    assert bool(found["bf16"].missing) is (has is False)


def test_only_names_candidates_or_groups() -> None:
    bench = Bench({})
    tune(bench, only=["workers", "compile"])
    measured = [request.sets for request in bench.requests]
    assert measured == [("loader.workers=1",), ("loader.workers=2",), ("speed.compile=default",)]
    with pytest.raises(UsageError, match="nonsense"):
        tune(bench, only=["nonsense"])


# What is written.


def written(state: TuningState) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.toml"
        path.write_text(state.toml)
        return read(path).resolve()


def test_the_resulting_configuration_loads_and_says_why() -> None:
    results = {"loader.fetch=auto": trial("faster", 3.0), "speed.compile=default": trial("slower", 0.5)}
    state = tune(Bench(results), *NDD, "optimizer.lr=0.002")
    config = written(state)
    assert (config.loader.fetch, config.speed.compile) == ("auto", "off")
    assert (config.batch.micro, config.optimizer.lr) == (64, 0.002)
    lines = {line.partition(" ")[0]: line for line in state.toml.splitlines()}
    assert "2.94 to 3.06" in lines["fetch"] and "0.49 to 0.51" in lines["compile"]


def test_every_trial_begins_from_the_same_written_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[workload]\nname = "eeg"\n[batch]\nmicro = 32\n')
    bench = Bench({}, after=lambda request: seen.append(read(request.base.config).resolve().batch.micro))
    seen: list[int] = []
    run_tuning(Base("mine", file, None, ("run.seed=3",)), 5.0, measure=bench, machine=machine())
    assert seen and set(seen) == {32}


# How it ends.


def test_stopped_it_gives_what_was_measured_so_far() -> None:
    stop = threading.Event()
    results = {"loader.fetch=auto": trial("faster", 3.0)}

    def after(request: Any) -> None:
        if "loader.workers=1" in request.sets:
            stop.set()

    bench = Bench(results, after)
    state = tune(bench, stop=stop)
    assert state.done and state.stopped
    assert kept(state) == ["gather"]
    assert is_so(state, "workers-1", "skipped") and is_so(state, "compile", "skipped")
    assert "loader.workers=2" not in [item for request in bench.requests for item in request.sets]
    assert written(state).loader.fetch == "auto"


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_not_confirmed_is_not_in_the_result(failed: bool) -> None:
    """It is stopped, or fails, during the last confirmation: "kept by tune" would be written without one."""
    stop = threading.Event()

    def after(request: Any) -> None:
        if request.base.name == "the baseline" and "run.threads=1" in request.sets:
            if failed:
                raise NddError("disk full")
            stop.set()

    results = {"loader.fetch=auto": trial("faster", 3.0), "run.threads=1": trial("faster", 1.2)}
    state = tune(Bench(results, after), stop=stop)
    assert state.stopped and kept(state) == ["gather"]
    assert is_so(state, "threads-1", "skipped", "not confirmed")
    assert state.toml.count(": 3.00x") == 1


def test_a_change_of_the_arithmetic_is_not_kept_without_its_losses() -> None:
    unknown = {"loss": "not comparable", "loss_text": "no loss was recorded"}
    results = {item: trial(sets=[item], **unknown) for item in ("loader.fetch=auto", "run.threads=1")}
    state = tune(Bench(results))
    assert kept(state) == ["gather"] and is_so(state, "threads-1", "dropped", "no loss")
    # Nor one of which nothing is known.
    assert needs_losses(["loader.fetch", "workload.mine"]) and not needs_losses(["loader.fetch"])


def test_what_is_kept_under_load_is_told_to_be() -> None:
    busy = trial("faster", load="other processes used 1.6 of 2 cores")
    assert is_so(tune(Bench({"loader.fetch=auto": busy})), "gather", "kept", busy.load)


def test_a_failure_after_something_was_measured_keeps_it() -> None:
    bench = Bench({"loader.fetch=auto": trial(), "loader.workers=1": NddError("disk full")})
    state = tune(bench)
    assert state.stopped and "disk full" in state.text
    assert kept(state) == ["gather"]
    with pytest.raises(NddError, match="disk full"):
        tune(Bench({"loader.fetch=auto": NddError("disk full")}))


# Scripts.


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


HERE = Conditions(gpu=False, cores=2, bf16=False)


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
    tmp_path: Path, here: Conditions, loader: dict[str, Any], convolutions: bool, tried: set[str]
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
    tmp_path: Path, here: Conditions, attention: str, tried: list[str]
) -> None:
    run = identity(tmp_path, device="cuda:0" if here.gpu else "cpu")
    run.config["script"].update({"attention": attention} if attention else {})
    found = [one for one in candidates_for(run, (), here) if one.name.startswith("attention")]
    assert [one.sets for one in found] == [(f"speed.attention={name}",) for name in tried]


def test_what_the_diagnosis_proposes_is_tried_first(tmp_path: Path) -> None:
    findings = [
        Finding("gc", "", (), "likely", changes=(Change("", ("run.gc_every_steps=100",)),)),
        Finding("few-threads", "", (), "likely", changes=(Change("", ("run.threads=1",)),)),
        Finding("stepwise", "", (), "likely", changes=(Change("", ("workload.decoder=hoisted",)),)),
    ]
    names = [one.name for one in candidates_for(identity(tmp_path), findings, HERE)]
    assert names[:2] == ["run.gc_every_steps=100", "threads-1"] and names.count("threads-1") == 1
    assert not any("decoder" in name for name in names)


def of_script(folder: Path) -> tuple[RunDir, RunEvent]:
    """A recorded run of a script."""
    folder.mkdir(exist_ok=True)
    run, directory = identity(folder), RunDir(folder / "r")
    directory.path.mkdir()
    directory.command.write_text(json.dumps(run.config["script"]))
    return directory, run


def tuned(folder: Path, bench: Bench) -> tuple[TuningState, Edit | None]:
    tuning = Tuning(Campaign(TuningState(), lambda _: None, threading.Event(), 9.0, bench))
    return tune_script(*of_script(folder), (), HERE, tuning)


def test_what_helps_is_kept_and_made_by_one_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As that of an edit which trained in a scratch copy.
    monkeypatch.setattr(trials, "digest", lambda edit: "")
    bench = Bench({"loader.workers=2": trial("faster", 2.0), "run.threads=1": trial("faster", 1.2)})
    state, edit = tuned(tmp_path, bench)
    assert state.sets == ("loader.workers=2", "run.threads=1")
    # Each is measured on top of what is kept.
    assert bench.of("run.threads=1").base.sets == ("loader.workers=2",)
    assert edit is not None and "num_workers=2" in edit.after and "set_num_threads(1)" in edit.after
    # These need workers, which the script has since then.
    for item in ("loader.persistent=true", "loader.prefetch=4"):
        assert bench.of(item).base.sets == ("loader.workers=2",)


def test_an_edit_counts_that_trained_in_any_trial_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "digest", lambda edit: "trained")
    first, total = trial("faster", 2.0, edit="trained"), trial("faster", 2.0, edit_refused="")
    state, edit = tuned(tmp_path, Bench({"loader.workers=2": first, "all": total}))
    assert state.sets == ("loader.workers=2",) and edit is not None and "num_workers=2" in edit.after
    (tmp_path / "again").mkdir()
    _, edit = tuned(tmp_path / "again", Bench({"loader.workers=2": total, "all": total}))
    assert edit is not None and edit.path is None and "not trained" in edit.advice[-1]


def test_an_inconclusive_total_confirms_nothing(tmp_path: Path) -> None:
    # A single pair is a verdict only far from 1, although its interval is above 1.
    total = trial("inconclusive", 1.58, low=1.04, high=2.42, pairs=1, df=5.0)
    state, edit = tuned(tmp_path, Bench({"loader.workers=2": trial("faster", 1.6), "all": total}))
    assert not state.kept and edit is None
    assert is_so(state, "workers-2", "dropped", "inconclusive", "1.04")
    # So is what it adds to an earlier result, if that comes from one process.
    before, after = trial("faster", 1.5, pairs=0), trial("faster", 1.8, low=1.7, high=1.9, pairs=1, df=5.0)
    assert "not confirmed" in unconfirmed(after, before)
    assert not unconfirmed(replace(after, pairs=4), before)


def test_an_edit_that_has_not_trained_is_described(tmp_path: Path) -> None:
    refused = trial("faster", 2.0, edit_refused="a scratch copy with it does not train")
    state, edit = tuned(tmp_path, Bench({"loader.workers=2": refused, "all": refused}))
    assert state.sets == ("loader.workers=2",)
    assert edit is not None and edit.path is None and not edit.diff
    assert "num_workers=2" in edit.advice[0] and "not train" in edit.advice[-1]


@pytest.mark.parametrize("dies", [False, True])
def test_each_result_is_recorded_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dies: bool
) -> None:
    directory, run = of_script(tmp_path)
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
            cli.tune_script_run(asked, directory, lambda _: None)
    else:
        assert cli.tune_script_run(asked, directory, lambda _: None) == 0
        assert "num_workers=2" in capsys.readouterr().out
    assert [event.sets for event in recorded] == [list(request.sets) for request in bench.requests]
    assert len(recorded) == 2 if dies else len(recorded) > 2


def test_nothing_that_helps_is_no_edit(tmp_path: Path) -> None:
    state, edit = tuned(tmp_path, Bench({}))
    assert not state.kept and edit is None
    for name in ("persistent", "prefetch-4"):
        assert is_so(state, name, "skipped", "workers")
