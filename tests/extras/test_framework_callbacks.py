"""The callbacks for Lightning and for Hugging Face's Trainer, in scripts that use the real packages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.events import EndEvent, MarkEvent, RunEvent, ScalarsEvent, WindowEvent, parse
from tests.waiting import LIMIT_S

from .test_extras import need

SUBJECTS = Path(__file__).parents[1] / "observe" / "subjects"
# Package -> (its subject, the text that is changed, what it becomes); the scripts train for three epochs of 6 steps.
SCRIPTS = {
    "lightning": (
        "lightning_fit.py",
        "    max_epochs=3,",
        "    max_epochs=3,\n    callbacks=[NddCallback('it')],",
    ),
    "transformers": (
        "hf_trainer.py",
        "eval_dataset=Items(64))",
        "eval_dataset=Items(64), callbacks=[NddCallback('it')])",
    ),
}
# After the subject: an error in the training that the script catches, a copy of the callback, and another training.
AGAIN = {
    "lightning": """
import pickle
class Broken(Module):
    def on_train_batch_start(self, batch, index):
        if index == 3:
            raise ValueError("planted")
def again(module, *callbacks):
    one = lightning.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, barebones=False, callbacks=[*callbacks])
    one.fit(module, DataLoader(data(), batch_size=16))
""",
    "transformers": """
import pickle
class Broken(Model):
    def forward(self, x, labels=None):
        if getattr(self, "calls", 0) == 3:
            raise ValueError("planted")
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, labels)
Module = Model
def again(module, *callbacks):
    arguments = TrainingArguments(output_dir="out", max_steps=4, per_device_train_batch_size=16, use_cpu=True,
                                  report_to=[], save_strategy="no", disable_tqdm=True)
    Trainer(model=module, args=arguments, train_dataset=Items(256), callbacks=[*callbacks]).train()
""",
}
CALLS = """
callback = NddCallback("again")
copied = pickle.loads(pickle.dumps(callback))
try:
    again(Broken(), callback)
except ValueError:
    print("CAUGHT")
again(Module(), callback)
pickle.dumps(callback)
again(Module(), copied)
"""
# A second process continues from the checkpoint of the first one, which was saved after 6 of 18 steps.
RESUMED = """
import sys
from hf_trainer import *
from ndd_engine.callbacks.transformers import NddCallback
epochs = int(sys.argv[1])
arguments = TrainingArguments(output_dir="out", num_train_epochs=epochs, per_device_train_batch_size=16,
                              gradient_accumulation_steps=3, use_cpu=True, report_to=[], save_strategy="epoch",
                              disable_tqdm=True, lr_scheduler_type="constant", eval_strategy="epoch")
trainer = Trainer(model=Model(), args=arguments, train_dataset=Items(256), eval_dataset=Items(64),
                  callbacks=[NddCallback("it")] if epochs > 1 else [])
trainer.train(resume_from_checkpoint=epochs > 1)
report(trainer.state.global_step, 0)
"""

# Importing these packages takes minutes on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def python(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(SUBJECTS), "NDD_WATCH_WINDOW_S": "0.1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(package: str, callback: bool) -> str:
    name, before, after = SCRIPTS[package]
    text = (SUBJECTS / name).read_text()
    assert before in text
    imported = f"from ndd_engine.callbacks.{package} import NddCallback\n"
    return imported + text.replace(before, after) if callback else text


def words(text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith("STEPS")).split()


def ended(path: Path) -> list[Any]:
    """The events of a run, once its follower has ended it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = [item[1] for item in map(parse, path.read_bytes().splitlines()) if item is not None]
        if isinstance(found[-1], EndEvent) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def steps(found: list[Any]) -> int:
    return sum(event.steps for event in found if isinstance(event, WindowEvent))


@pytest.mark.parametrize("package", list(SCRIPTS))
def test_the_callback_records_what_the_framework_knows(tmp_path: Path, package: str) -> None:
    need(package)
    (tmp_path / "train.py").write_text(script(package, callback=True))
    (tmp_path / "bare.py").write_text(script(package, callback=False))
    assert words(python(tmp_path, "train.py")) == words(python(tmp_path, "bare.py"))
    found = ended(tmp_path / "runs" / "it" / "events.jsonl")
    run = [event for event in found if isinstance(event, RunEvent)][-1]
    assert (run.total_steps, run.epochs) == (18, 3)
    assert steps(found) == 18 and (found[-1].status, found[-1].step) == ("done", 18)
    evaluations = [event for event in found if isinstance(event, MarkEvent) and event.kind == "evaluation"]
    best, loss = {"lightning": ("val_loss", "train_loss"), "transformers": ("eval_loss", "loss")}[package]
    assert [(event.step, next(iter(event.data["metrics"]))) for event in evaluations] == [
        (6, best), (12, best), (18, best)
    ]  # fmt: skip
    logged = [event.step for event in found if isinstance(event, ScalarsEvent) and loss in event.values]
    assert logged == [5, 10, 15]


@pytest.mark.parametrize("package", list(SCRIPTS))
def test_a_training_that_failed_and_copies_of_the_callback(tmp_path: Path, package: str) -> None:
    need(package)
    main = f"if __name__ == '__main__':\n{CALLS.replace(chr(10), chr(10) + '    ')}"
    (tmp_path / "train.py").write_text(script(package, callback=True) + AGAIN[package] + main)
    assert "CAUGHT" in python(tmp_path, "train.py")
    runs = {path.parent.name: ended(path) for path in tmp_path.glob("runs/*/events.jsonl")}
    # The copy wanted the name of the first one.
    assert {name: steps(found) for name, found in runs.items()} == {"it": 18, "again": 3, "again-2": 4}
    if package == "lightning":  # Hugging Face's Trainer has no hook for an error
        assert runs["again"][-1].status == "failed" and "planted" in runs["again"][-1].reason


def test_a_resumed_training_goes_on_counting(tmp_path: Path) -> None:
    need("transformers")
    (tmp_path / "train.py").write_text(RESUMED)
    python(tmp_path, "train.py", "1")
    assert words(python(tmp_path, "train.py", "3"))[1] == "18"
    found = ended(tmp_path / "runs" / "it" / "events.jsonl")
    run = next(event for event in found if isinstance(event, RunEvent))
    assert (run.resumed_step, run.total_steps, run.epochs) == (6, 18, 3)
    windows = [event for event in found if isinstance(event, WindowEvent)]
    assert steps(found) == 12 and (windows[-1].step, windows[-1].epoch) == (18, 2)
    marks = [event.step for event in found if isinstance(event, MarkEvent) and event.kind == "evaluation"]
    assert marks == [12, 18] and found[-1].step == 18
