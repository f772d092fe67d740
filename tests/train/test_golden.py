"""Losses on the CPU: the first steps of each workload as recorded, and those of public training codes in plain loops.

A change that moves the recorded ones changes what is computed. `python tests/train/test_golden.py` records them again;
explain the change in the commit. The tolerance is for other CPUs and versions of torch, which round differently.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ports
import pytest
import torch
from tests.tiers import few
from torch.utils.data import TensorDataset
from train_help import EVERY_STEP, QUIET, Trainer, resumed

from ndd_engine.train.data.item_sources import EpochBatches

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 8
FIXED = ("run.seed=11", "run.threads=1", "run.preset=reproducible", "run.device=cpu")
COMMON = (*EVERY_STEP, *QUIET, *FIXED)
# {text}, {pairs}, {speech}: generated, since the built-in texts depend on the Python version, and Griffin-Lim copies on
# how the FFT of a CPU rounds.
# First one case of each workload.
CASES: dict[str, tuple[str, ...]] = {
    "antispoof": ("workload.name=antispoof", "workload.size=tiny", "workload.data={speech}", "batch.micro=8",
                  "optimizer.lr=3e-4", "schedule.kind=constant"),
    "chartext": ("workload.name=chartext", "workload.size=tiny", "workload.dropout=0.1", "workload.data={text}"),
    "finetune": ("workload.name=finetune", "workload.size=tiny", "workload.document_chars=1500", "workload.data={text}",
                 "workload.examples=10", "workload.vocabulary=300"),
    "eeg": ("workload.name=eeg",),
    "summarise": ("workload.name=summarise", "workload.size=tiny", "workload.data={pairs}", "batch.effective=4"),
    "chartext-diffusion": ("workload.name=chartext", "workload.size=tiny", "workload.objective=diffusion",
                           "workload.data={text}"),
    "ndd-lstm": ("workload.name=eeg", "workload.size=lstm"),
    "summarise-stepwise": ("workload.name=summarise", "workload.size=tiny", "workload.data={pairs}",
                           "batch.effective=4", "workload.decoder=stepwise"),
}  # fmt: skip


def made_data(folder: Path) -> dict[str, Path]:
    """A text of 40,000 characters, 120 pairs of words and 48 recordings; the same on every machine."""
    draw = random.Random(5)  # random() is stable across versions of Python
    words = [
        "".join(chr(97 + int(draw.random() * 26)) for _ in range(2 + int(draw.random() * 7)))
        for _ in range(400)
    ]

    def sentence(length: int) -> str:
        return " ".join(words[int(len(words) * draw.random() ** 2)] for _ in range(length))

    text, pairs = folder / "golden.txt", folder / "golden.jsonl"
    text.write_text("\n".join(sentence(12) + "." for _ in range(600)), encoding="utf-8")
    sources = [sentence(60) for _ in range(120)]
    lines = [json.dumps({"source": source, "summary": " ".join(source.split()[:9])}) for source in sources]
    pairs.write_text("\n".join(lines) + "\n", encoding="utf-8")
    speech = folder / "speech"
    for number in range(48):
        kind = "spoof" if number % 2 else "bonafide"
        (speech / kind).mkdir(parents=True, exist_ok=True)
        with wave.open(str(speech / kind / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(recording(draw, 40 + int(draw.random() * 120), 3_000 if number % 2 else 9_000))
    return {"text": text, "pairs": pairs, "speech": speech}


def recording(draw: random.Random, period: int, hiss: int) -> bytes:
    """1.5 s of a sawtooth with noise, computed in integers."""
    values = (
        at % period * 16_000 // period - 8_000 + int(draw.random() * hiss) - hiss // 2 for at in range(24_000)
    )
    return b"".join(struct.pack("<h", value) for value in values)


def losses(trainer: Trainer, case: str) -> list[float]:
    trainer.root.mkdir(parents=True, exist_ok=True)
    made = made_data(trainer.root)
    sets = (*(item.format(**made) for item in CASES[case]), *COMMON)
    return [loss for _, loss in sorted(resumed(trainer, sets, 3, STEPS).losses.items())]


@pytest.mark.long
@pytest.mark.parametrize("case", few([*CASES], 5))
def test_the_first_losses_are_as_recorded_and_a_resumed_run_has_them_too(trainer: Trainer, case: str) -> None:
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[case]
    assert len(expected) == STEPS
    assert losses(trainer, case) == pytest.approx(expected, rel=2e-4)


# Public training codes as factories

SEED = 7
# factory -> settings, items of a batch, data, training items of it, plain loop
PORTS: dict[str, tuple[tuple[str, ...], int, TensorDataset, int, Callable[[Any], list[float]]]] = {
    "gpt": (("clip.max_norm=1.0", "batch.sequence=12"), 4, ports.text(96, 12), 96, ports.gpt_loop),
    "recurrent": (("batch.sequence=6",), 4, ports.text(40, 6), 40, ports.recurrent_loop),
    "recurrent_torch": (("clip.max_norm=0.25", "batch.sequence=6"), 4, ports.text(40, 6), 40, ports.recurrent_loop),
    "gan": ((), 8, ports.circle(), 108, ports.gan_loop),
}  # fmt: skip


def settings(port: str) -> tuple[str, ...]:
    sets, micro, *_ = PORTS[port]
    path = f'workload.path=["{Path(__file__).parent}"]'
    fixed = (f"run.seed={SEED}", "run.threads=1", f"batch.micro={micro}")
    return (f"workload.name=ports:{port}", path, *fixed, *EVERY_STEP, *sets)


def batches(port: str) -> Iterator[Any]:
    """The batches of a run: its order depends only on the seed and the epoch."""
    _, micro, data, items, _ = PORTS[port]
    order = EpochBatches(items, micro, SEED)
    epoch = 0
    while True:
        order.set(epoch)
        for indices in order:
            yield [tensor[indices] for tensor in data.tensors]
        epoch += 1


@pytest.mark.parametrize("port", PORTS)
def test_the_losses_are_those_of_the_plain_loop(trainer: Trainer, port: str) -> None:
    result = trainer.train(*settings(port), f"run.max_steps={ports.STEPS}")
    torch.manual_seed(SEED)
    expected = PORTS[port][-1](batches(port))
    assert [loss for _, loss in sorted(result.losses.items())] == pytest.approx(expected, rel=2e-6)
    # The rate went down, in the recurrent ones with the evaluations.
    if port == "recurrent":
        assert result.state(ports.STEPS)["stateful"]["annealing"]["lr"] < ports.FAST
        assert set(result.rates) == {0.0}  # it has no optimizer of torch
    elif port == "recurrent_torch":
        assert result.rates[0] == ports.FAST > result.rates[-1]


def test_a_step_of_ones_own_is_timed_and_its_average_of_the_weights_is_saved(trainer: Trainer) -> None:
    result = trainer.train(*settings("gan"), "run.max_steps=12")
    seen = {name for window in result.windows if window.steps for name in window.phases}
    assert {"data_wait", "forward", "loss", "backward", "optimizer", "zero_grad"} <= seen
    assert set(dict(result.snapshot.scalars)) == {"critic", "generator"}
    last = result.marks("evaluation")[-1].data["metrics"]
    assert set(last) == {"loss", "real"} and 0 < last["real"] < 1
    model = result.state(12)["model"]
    assert int(model["average.n_averaged"]) == 12  # the test step left no trace
    assert not torch.equal(model["average.module.0.weight"], model["generator.0.weight"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        maker = Trainer(Path(folder) / "runs", Path(folder))
        chosen = sys.argv[1:] or list(CASES)
        kept = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
        found = {**kept, **{case: losses(maker, case) for case in chosen}}
        GOLDEN.write_text(json.dumps({case: found[case] for case in CASES if case in found}, indent=1) + "\n")
