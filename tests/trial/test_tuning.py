"""Tuning: what it tries, on top of what, what it keeps, and what it writes."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from measured import Bench, machine, trial

from ndd_engine.config import read
from ndd_engine.errors import ConfigError, NddError, UsageError
from ndd_engine.trial.outcome import Base
from ndd_engine.trial.tuning import TuningRow, TuningState, place_of, run_tuning, trained
from ndd_watch.changes import Place, candidates

NDD = ("batch.micro=64", "loader.fetch=item")
SUMMARISE = (
    "workload.size=tiny", "workload.decoder=stepwise", "batch.micro=1", "batch.accumulation=8", "run.seed=7",
)  # fmt: skip


def tune(bench: Bench, *sets: str, workload: str = "eeg", **options: Any) -> TuningState:
    options.setdefault("machine", machine())
    return run_tuning(Base("a test", None, workload, sets or NDD), 5.0, measure=bench, **options)


def row(state: TuningState, name: str) -> TuningRow:
    return next(item for item in state.rows if item.candidate.name == name)


# What is kept, and on top of what.


def test_what_gains_is_kept_and_the_next_is_measured_on_top_of_it() -> None:
    bench = Bench({"loader.fetch=auto": trial("faster", 3.0), "run.threads=1": trial("faster", 1.2)})
    state = tune(bench)
    assert [item.candidate.name for item in state.kept] == ["gather", "threads-1"]
    assert bench.of("loader.workers=1").base.sets == ("loader.fetch=auto",)
    assert bench.of("speed.compile=default").base.sets == ("loader.fetch=auto", "run.threads=1")
    assert row(state, "workers-1").state == "dropped" and row(state, "workers-1").reason == "no difference"


def test_the_ratio_to_the_start_is_measured_and_not_multiplied() -> None:
    bench = Bench(
        {
            "loader.fetch=auto": trial("faster", 3.0),
            "run.threads=1": trial("faster", 2.0),
            "all": trial("faster", 3.5),
        }
    )
    state = tune(bench)
    against_start = [request for request in bench.requests if request.base.name == "the baseline"]
    assert [request.sets for request in against_start] == [
        ("loader.fetch=auto",), ("loader.fetch=auto", "run.threads=1"),
    ]  # fmt: skip
    assert all(request.base.sets == () for request in against_start)
    assert state.final is not None and state.final.ratio == 3.5
    assert "3.5x" in state.text and "3.43 to 3.57" in state.text


def test_a_kept_setting_that_the_final_comparison_does_not_confirm_is_dropped() -> None:
    state = tune(Bench({"loader.fetch=auto": trial("faster", 1.05), "all": trial("no difference", 1.004)}))
    assert row(state, "gather").state == "dropped" and state.kept == ()
    assert "1.00x" in row(state, "gather").reason
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
    assert [item.candidate.name for item in state.kept] == ["gather"]
    assert "not confirmed" in row(state, "threads-1").reason
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
    assert row(state, "gather").state == "dropped"
    assert reason in row(state, "gather").reason
    assert state.kept == () and state.final is None and "unchanged" in state.text


def test_a_lower_precision_with_close_losses_is_kept_and_reported() -> None:
    bench = Bench({"precision.amp=bf16": trial("faster", loss="close")})
    state = tune(bench, *NDD, "precision.amp=off", machine=machine(gpu=True))
    assert row(state, "bf16").state == "kept"
    assert "losses close" in row(state, "bf16").reason
    assert row(state, "fp16").state == "skipped" and "bf16 was kept" in row(state, "fp16").reason


@pytest.mark.parametrize(("steps", "state"), [(500, "dropped"), (5000, "kept")])
def test_compiling_that_never_breaks_even_in_this_run_is_dropped(steps: int, state: str) -> None:
    bench = Bench({"speed.compile=default": trial("faster", break_even_steps=900)})
    found = row(tune(bench, *NDD, f"run.max_steps={steps}"), "compile")
    assert found.state == state and "900 steps" in found.reason


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
        assert gpu or (row(state, name).state, row(state, name).reason) == ("skipped", "no CUDA GPU")


def test_workers_never_outnumber_the_cores_and_end_when_two_did_not_help() -> None:
    bench = Bench({})
    state = tune(bench, machine=machine(cores=3.5))
    assert [item.candidate.name for item in state.rows if item.candidate.group == "workers"] == [
        "workers-1",
        "workers-2",
    ]
    state = tune(bench, machine=machine(cores=16))
    assert row(state, "workers-2").state == "dropped"
    assert row(state, "workers-4").state == "skipped" and "did not help" in row(state, "workers-4").reason
    found = tune(Bench({"loader.workers=2": trial(), "loader.workers=4": trial()}), machine=machine(cores=16))
    assert row(found, "workers-4").state == "kept" and row(found, "workers-8").state == "dropped"


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
    here = Place(gpu=gpu, cores=2, capability=(9, 0))
    found = candidates(trained(here, read(None, sets, workload).resolve()))
    names = [one.sets for one in found if one.name.startswith("attention") and not one.missing]
    assert names == [(f"speed.attention={name}",) for name in tried]


def test_no_other_backend_is_tried_where_the_model_has_no_attention() -> None:
    missing = trial("no difference", in_effect=False, not_in_effect="this model calls no attention")
    bench = Bench({"speed.attention=flash": missing})
    state = tune(bench, "run.seed=1", workload="finetune", machine=machine(gpu=True))
    assert row(state, "attention-flash").state == "dropped"
    assert row(state, "attention-cudnn").state == "skipped"
    assert "not in effect" in row(state, "attention-cudnn").reason


def test_batches_are_loaded_further_ahead_where_workers_were_kept() -> None:
    bench = Bench({"loader.workers=1": trial("faster", 2.0)})
    tune(bench, *NDD, machine=machine(cores=1))
    assert bench.of("loader.prefetch=4").base.sets == ("loader.workers=1",)
    found = row(tune(Bench({})), "prefetch-4")
    assert found.state == "skipped" and "needs workers" in found.reason


def test_more_workers_are_tried_before_fewer_and_none_at_all() -> None:
    state = tune(Bench({}), *NDD, "loader.workers=4", machine=machine(cores=16))
    order = [item.candidate.name for item in state.rows if item.candidate.name.startswith("workers")]
    assert order == ["workers-8", "workers-16", "workers-4", "workers-2", "workers-1", "workers-0"]
    assert row(state, "workers-2").state == "skipped" and row(state, "workers-0").state == "dropped"


@pytest.mark.parametrize(
    ("setting", "kept", "refused"),
    [
        ("loader.placement=device", "device", "workers-2"),  # it takes no workers
        ("speed.compile=reduce-overhead", "reduce-overhead", "cuda-graph"),  # a second kind of CUDA graphs
    ],
)
def test_what_does_not_go_with_what_was_kept_is_skipped(setting: str, kept: str, refused: str) -> None:
    state = tune(Bench({setting: trial()}), machine=machine(cores=4, gpu=True))
    assert row(state, kept).state == "kept"
    assert row(state, refused).state == "skipped" and row(state, refused).reason


def test_what_is_set_already_is_not_tried() -> None:
    bench = Bench({})
    state = tune(bench, *NDD, "loader.workers=1", "speed.compile=default")
    assert row(state, "workers-1").reason == row(state, "compile").reason == "already set"


@pytest.mark.long
def test_larger_micro_batches_keep_the_effective_batch_and_end_when_memory_runs_out() -> None:
    results = {"batch.micro=2": trial(), "batch.micro=4": trial("out of memory", None)}
    bench = Bench(results)
    state = tune(bench, *SUMMARISE, workload="summarise")
    assert bench.of("batch.micro=2").sets == ("batch.micro=2", "batch.accumulation=4")
    assert row(state, "micro-8").state == "skipped"
    config = written(state)
    assert (config.batch.micro, config.batch.accumulation, config.batch.items) == (2, 4, 8)


@pytest.mark.parametrize("workload", ["antispoof", "chartext", "finetune", "eeg", "summarise"])
def test_every_candidate_is_the_same_training(workload: str) -> None:
    plain = ("precision.amp=off", "precision.tf32=false")
    config = read(None, plain, workload).resolve()
    for candidate in candidates(trained(Place(gpu=True, cores=16, capability=(9, 0)), config)):
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
    (bf16,) = (
        item for item in candidates(trained(place, read(workload="eeg").resolve())) if item.name == "bf16"
    )
    assert bool(bf16.missing) is (has is False)


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
    assert [item.candidate.name for item in state.kept] == ["gather"]
    assert row(state, "workers-1").state == row(state, "compile").state == "skipped"
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
    assert state.stopped and [item.candidate.name for item in state.kept] == ["gather"]
    assert row(state, "threads-1").state == "skipped"
    assert "not confirmed" in row(state, "threads-1").reason
    assert "kept by tune: 3x" in state.toml and state.toml.count("kept by tune") == 1


def test_a_change_of_the_arithmetic_is_not_kept_without_its_losses() -> None:
    unknown = {"loss": "not comparable", "loss_text": "no loss was recorded"}
    results = {
        "loader.fetch=auto": trial(sets=["loader.fetch=auto"], **unknown),
        "run.threads=1": trial(sets=["run.threads=1"], **unknown),
    }
    state = tune(Bench(results))
    assert [item.candidate.name for item in state.kept] == ["gather"]
    assert "no loss was recorded" in row(state, "threads-1").reason


def test_what_is_kept_under_load_is_told_to_be() -> None:
    busy = trial("faster", load="other processes used 1.6 of 2 cores")
    assert busy.load in row(tune(Bench({"loader.fetch=auto": busy})), "gather").reason


def test_a_failure_after_something_was_measured_keeps_it() -> None:
    bench = Bench({"loader.fetch=auto": trial(), "loader.workers=1": NddError("disk full")})
    state = tune(bench)
    assert state.stopped and "disk full" in state.text
    assert [item.candidate.name for item in state.kept] == ["gather"]
    with pytest.raises(NddError, match="disk full"):
        tune(Bench({"loader.fetch=auto": NddError("disk full")}))
