"""A resumed run equals an uninterrupted one, and refuses changes of model or data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.states import equal
from train_help import EVERY_STEP, NDD, Result, Trainer, stop_at, training_state

from ndd_engine.errors import EXIT_USAGE, UsageError
from ndd_engine.record.rundir import RunDir

# Dropout draws random numbers, accumulation moves the place in the data, epochs end within the run.
HARD = (
    "workload.dropout=0.2",
    "batch.accumulation=2",
    "clip.max_norm=0.5",
    "schedule.kind=cosine",
    "schedule.warmup_steps=7",
)
VARIANTS = {
    "chartext": ("workload.name=chartext",),
    "fp16": ("workload.name=chartext", "precision.amp=fp16", "optimizer.lr=0.01"),
    "diffusion": ("workload.name=chartext", "workload.objective=diffusion", "precision.amp=bf16"),
    "recurrent": ("workload.name=eeg", "workload.model=lstm", "optimizer.name=sgd", "optimizer.momentum=0.9"),
}

# In `make test`; the others take twice as long.
PROMISED = {"chartext", "recurrent"}


def sets_of(trainer: Trainer, variant: str) -> tuple[str, ...]:
    base = trainer.ndd if "workload.name=eeg" in VARIANTS[variant] else trainer.chartext
    return (
        *base,
        *EVERY_STEP,
        *HARD,
        *VARIANTS[variant],
        "run.epochs=4",
        "checkpoint.every_epochs=0",
        "checkpoint.keep=100",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.promise if name in PROMISED else ()) for name in VARIANTS],
)
def test_stopped_and_resumed_equals_uninterrupted(trainer: Trainer, variant: str) -> None:
    sets = sets_of(trainer, variant)
    whole = trainer.train(*sets)
    total = whole.identity.total_steps
    per_epoch = whole.identity.steps_per_epoch
    assert total == 4 * per_epoch > 30
    # Once in the middle of an epoch and, further on, wherever the stop is heard.
    parts = trainer.train(*sets, steer=stop_at(per_epoch + 3))
    assert parts.end.status == "stopped" and 0 < parts.end.step < total
    parts = trainer.train(resume=parts, steer=stop_at(3 * per_epoch))
    parts = trainer.train(resume=parts) if parts.end.status == "stopped" else parts
    assert parts.end.status == "done"
    assert parts.losses == whole.losses
    assert len(whole.losses) == total
    assert equal(training_state(parts.state(total)), training_state(whole.state(total)))
    evaluations = {each.step: each.metrics for each in whole.snapshot.evaluations}
    assert {each.step: each.metrics for each in parts.snapshot.evaluations} == evaluations


def test_a_checkpoint_between_two_epochs_goes_on_with_the_next(trainer: Trainer) -> None:
    sets = (*trainer.ndd, *EVERY_STEP, "run.epochs=2", "workload.dropout=0.2", "checkpoint.keep=9")
    whole = trainer.train(*sets)
    again = trainer.train("checkpoint.keep=9", resume=whole, from_step=22)
    assert again.end.status == "done"
    # `losses` compares the steps that were done twice.
    assert again.losses == whole.losses
    assert again.identity.resumed_step == 22
    assert again.identity.resumed_from == "step-00000022"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of 20 steps that can be continued to 44, with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("finished")
    first = Trainer(folder, folder).train(
        *NDD, *EVERY_STEP, "run.epochs=2", "run.max_steps=20", "workload.dropout=0.0", "checkpoint.every_steps=10",
        "checkpoint.every_epochs=0", "evaluate.every_epochs=0",
    )  # fmt: skip
    assert first.checkpoints == [10, 20]
    return first


@pytest.fixture
def stopped(finished: Result, trainer: Trainer) -> Result:
    """A copy of that run."""
    copy = RunDir(trainer.root / finished.directory.name)
    shutil.copytree(finished.directory.path, copy.path)
    return Result(copy)


def test_a_run_killed_after_its_last_checkpoint_ends_as_done(trainer: Trainer, stopped: Result) -> None:
    # The last line of the record is the end, which a killed run does not write.
    *lines, end = stopped.directory.events.read_bytes().splitlines(keepends=True)
    assert b'"end"' in end
    stopped.directory.events.write_bytes(b"".join(lines))
    again = trainer.train(resume=stopped)
    assert (again.end.status, again.end.step, again.end.exit_status) == ("done", 20, 0), again.end.reason
    assert again.snapshot.status == "done" and again.snapshot.step == 20
    assert again.losses == stopped.losses


def test_a_finished_run_may_go_further(trainer: Trainer, stopped: Result) -> None:
    again = trainer.train("run.max_steps=30", resume=stopped)
    assert (again.end.status, again.end.step) == ("done", 30)
    assert sorted(again.losses) == list(range(1, 31))
    snapshot = again.snapshot
    assert (snapshot.status, snapshot.step, snapshot.items) == ("done", 30, 30 * 16)
    assert [x for x, _ in snapshot.loss_trend] == list(range(1, 31))


@pytest.mark.parametrize(
    "change", ["batch.micro=8", "batch.accumulation=3", "run.seed=5", "workload.samples=500"]
)
def test_what_would_change_the_order_of_the_data_is_refused(
    trainer: Trainer, stopped: Result, change: str
) -> None:
    before = stopped.directory.events.read_bytes()
    with pytest.raises(UsageError, match=rf"{change.partition('=')[0]}.* was .*, now ") as caught:
        trainer.open(change, "run.max_steps=30", resume=stopped)
    assert caught.value.exit_status == EXIT_USAGE
    assert stopped.directory.events.read_bytes() == before
    assert stopped.directory.live_owner() is None


def test_another_workload_is_refused(trainer: Trainer, stopped: Result) -> None:
    stopped.directory.config.write_text(
        '[workload]\nname = "chartext"\nsize = "tiny"\n[run]\nmax_steps = 30\n'
    )
    with pytest.raises(UsageError, match=r"workload\.name"):
        trainer.open(resume=stopped)


@pytest.mark.parametrize("change", ["workload.hidden=[9]", "workload.model=lstm", "optimizer.name=sgd"])
def test_another_model_or_data_is_refused_before_the_record_is_touched(
    trainer: Trainer, stopped: Result, change: str
) -> None:
    events = stopped.directory.events.read_bytes()
    with pytest.raises(UsageError, match=rf"{change.partition('=')[0]} was .*, now "):
        trainer.train(change, "run.max_steps=30", resume=stopped)
    assert stopped.directory.events.read_bytes() == events
    # The checkpoints are as good as before.
    healed = trainer.train("run.max_steps=30", resume=stopped)
    assert healed.end.status == "done", healed.end.reason


@pytest.mark.long
def test_data_that_was_replaced_is_a_usage_error(trainer: Trainer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 2000)
    sets = (
        "workload.name=chartext",
        "workload.size=tiny",
        f"workload.data={text}",
        "checkpoint.every_steps=10",
    )
    first = trainer.train(*sets, "run.max_steps=10")
    text.write_text("hgfedcba" * 2000)
    again = trainer.train("run.max_steps=20", resume=first)
    assert (again.end.status, again.end.exit_status) == ("failed", EXIT_USAGE)


def test_a_resume_from_another_folder_finds_its_data(
    trainer: Trainer, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(text_file.read_text())
    first = trainer.train(*trainer.chartext, "workload.data=mine.txt", "run.max_steps=3")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    again = trainer.train("run.max_steps=6", resume=first)
    assert (again.end.status, again.end.step) == ("done", 6)


def test_changed_settings_of_the_optimizer_take_effect(trainer: Trainer, stopped: Result) -> None:
    again = trainer.train(
        "run.max_steps=30",
        "optimizer.lr=0.5",
        "optimizer.weight_decay=0.25",
        "optimizer.betas=[0.5,0.6]",
        resume=stopped,
    )
    for group, decay in zip(again.state(30)["optimizer"]["param_groups"], (0.25, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.5, decay, (0.5, 0.6))
    assert [window.lr for window in again.windows if window.steps][-1] == 0.5


def test_a_damaged_checkpoint_is_told_and_the_one_before_works(trainer: Trainer, stopped: Result) -> None:
    path = stopped.directory.checkpoints / "step-00000020" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)
    failed = trainer.train("run.max_steps=30", resume=stopped)
    assert (failed.end.status, failed.end.exit_status) == ("failed", 1)
    assert "step-00000020" in failed.end.reason and "--from-step 10" in failed.end.reason
    again = trainer.train("run.max_steps=30", resume=stopped, from_step=10)
    assert (again.end.status, again.end.step) == ("done", 30)
    assert sorted(again.losses) == list(range(1, 31))


def test_another_number_of_threads_is_a_warning(trainer: Trainer, stopped: Result) -> None:
    again = trainer.train("run.max_steps=22", "run.threads=2", resume=stopped)
    assert len(again.marks("warning")) == 1
    assert again.end.status == "done"


def test_the_record_of_a_moved_run_goes_on(trainer: Trainer, stopped: Result, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    stopped.directory.path.rename(moved)
    again = trainer.train("run.max_steps=24", resume=Result(type(stopped.directory)(moved)))
    assert (again.end.status, again.directory.name) == ("done", "renamed")
