"""The workloads learn, do so repeatably, and reach the losses they reached when they were written."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_help import evaluate, train

from ndd_engine.config.schema import Config
from ndd_engine.workloads.factory_data import prepare

MakeConfig = Callable[..., Config]

TINY_TEXT: dict[str, Any] = {"name": "chartext", "layers": 2, "heads": 2, "width": 32, "dropout": 0.0}
TINY_EEG: dict[str, Any] = {"name": "eeg", "samples": 6000, "channels": 4}


def unigram_entropy(text: str) -> float:
    """Bits a character takes when only the frequency of characters is known."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def test_next_character_beats_the_unigram_entropy(
    make_config: MakeConfig, text_file: Path, sentences: str
) -> None:
    torch.manual_seed(1)
    workload = prepare(make_config({**TINY_TEXT, "data": str(text_file)}, micro=16, sequence=32))
    before = evaluate(workload)["bits_per_char"]
    train(workload, 150, 1e-2, 16)
    assert evaluate(workload)["bits_per_char"] < unigram_entropy(sentences) - 1.5 < before


@pytest.mark.long
def test_diffusion_beats_the_unigram_entropy(make_config: MakeConfig, tmp_path: Path) -> None:
    """On lines of one repeated letter, where every neighbour tells.

    On sentences a model of this size stays at the unigram entropy for the first thousand steps, until it
    finds out which neighbours matter.
    """
    draw = random.Random(7)
    text = "".join(draw.choices("abcdefghijklmnop")[0] * 15 + "\n" for _ in range(2400))
    path = tmp_path / "lines.txt"
    path.write_text(text)
    torch.manual_seed(1)
    section = {**TINY_TEXT, "data": str(path), "objective": "diffusion"}
    workload = prepare(make_config(section, micro=16, sequence=16))
    before = evaluate(workload)["bits_per_char"]
    train(workload, 150, 3e-3, 16)
    after = evaluate(workload)["bits_per_char"]
    # A line's letter takes 4 bits, so its 16 characters take 0.25 each: no honest bound is much below that.
    assert 0.2 < after < unigram_entropy(text) - 2.5 < before


def test_forecast_beats_the_last_sample_and_the_mean(make_config: MakeConfig) -> None:
    """On the builtin data, whose rhythms can be extrapolated and whose noise averages out over a window."""
    torch.manual_seed(1)
    workload = prepare(make_config({**TINY_EEG, "samples": 20_000}, micro=256, sequence=64))
    last = evaluate(workload, lambda batch: batch[0][:, -1:])
    mean = evaluate(workload, lambda batch: torch.zeros_like(batch[1]))
    train(workload, 210, 0.01, 256)
    learned = evaluate(workload)
    assert learned["rmse"] < 0.95 * last["rmse"] < mean["rmse"]
    assert learned["auroc"] > max(last["auroc"], mean["auroc"])


@pytest.mark.long
def test_shakespeare_beats_the_frequency_of_its_characters(make_config: MakeConfig, real_data: Path) -> None:
    path = real_data / "text" / "tinyshakespeare.txt"
    section = {
        "name": "chartext", "data": str(path), "layers": 2, "heads": 2, "width": 64, "dropout": 0.0,
        "max_characters": 200_000,
    }  # fmt: skip
    config = make_config(section, micro=32, sequence=64)
    torch.manual_seed(config.run.seed)
    workload = prepare(config)
    train(workload, 150, 3e-3, 32)
    baseline = unigram_entropy(path.read_text("utf-8")[:200_000])
    assert evaluate(workload)["bits_per_char"] < baseline - 0.8


@pytest.mark.long
def test_real_recording_beats_the_mean(make_config: MakeConfig, real_data: Path) -> None:
    """Only the mean: real EEG drifts slowly, and repeating the last sample beats a short training."""
    torch.manual_seed(1)
    section = {"name": "eeg", "data": str(real_data / "eeg" / "eye-state.arff")}
    workload = prepare(make_config(section, micro=256, sequence=32))
    mean = evaluate(workload, lambda batch: torch.zeros_like(batch[1]))
    train(workload, 150, 0.01, 256)
    assert evaluate(workload)["rmse"] < 0.8 * mean["rmse"]
