"""The anti-spoofing workload: exact sizes, the equal error rate, clips and their changes, and that it learns."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads import antispoof_data
from ndd_engine.workloads.antispoof import (
    REAL,
    SPOOF,
    AugmentedClips,
    SeResNet,
    SpeechClips,
    equal_error_rate,
    evaluation_notes,
    make_clips,
)
from ndd_engine.workloads.base import Workload, parameter_count
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import Settings

MakeConfig = Callable[..., Config]

GUIDE = ([64, 128, 256, 512], 16, 0.5)  # channels, reduction, dropout
TINY: dict[str, Any] = {
    "name": "antispoof", "blocks": [1, 1, 1, 1], "channels": [16, 16, 32, 64], "dropout": 0.0, "clips": 24,
}  # fmt: skip


def clips_of(workload: Workload) -> SpeechClips:
    assert isinstance(workload.train_data, SpeechClips)
    return workload.train_data


def test_parameters_of_the_guide() -> None:
    with torch.device("meta"):
        assert parameter_count(SeResNet([2, 2, 2, 2], *GUIDE)) == 11_981_251
        deep = parameter_count(SeResNet([3, 4, 6, 3], *GUIDE))
    assert deep == 22_159_555 and f"{deep / 1e6:.2f}" == "22.16"


def test_loss_weighs_clips_by_class(make_config: MakeConfig) -> None:
    workload = prepare(make_config({**TINY, "class_weights": [0.1, 0.9]}, micro=2, sequence=1600))
    logits, labels = torch.randn(6, 2, requires_grad=True), torch.tensor([0, 1, 1, 0, 0, 0])
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([0.1, 0.9]))
    assert torch.allclose(workload.loss(logits, (None, labels)), expected)
    assert workload.loss(logits.half(), (None, labels)).dtype == torch.float32


@pytest.mark.parametrize(
    ("real", "spoof", "expected"),
    [
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [3.0, 4.0], 100.0),
        ([1.0, 3.0], [2.0, 0.0], 50.0),
        ([1.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 2.0], 25.0),
        ([5.0, 5.0, 5.0], [5.0], 50.0),  # a model with the same output for every clip
        ([5.0, 6.0], [5.0, 4.0], 25.0),  # equal scores: midway between rejecting and accepting them
        ([7.0, 8.0, 9.0], [8.5], 66.667),  # the one spoofed clip is accepted until two of three are rejected
        ([0.0] * 9 + [1.0], [0.0] * 9 + [-1.0], 45.0),
    ],
)
def test_equal_error_rate(real: list[float], spoof: list[float], expected: float) -> None:
    scores = torch.tensor(real + spoof)
    labels = torch.tensor([REAL] * len(real) + [SPOOF] * len(spoof))
    rate = equal_error_rate(scores, labels)
    assert rate == pytest.approx(expected, abs=1e-3)
    shuffled = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    assert equal_error_rate(3 * scores[shuffled] - 1, labels[shuffled]) == rate
    mirrored = equal_error_rate(-scores, labels)
    assert mirrored is not None and rate is not None and mirrored == pytest.approx(100 - rate, abs=1e-3)


def test_metric_without_both_kinds_has_no_equal_error_rate(make_config: MakeConfig) -> None:
    workload = prepare(make_config(TINY, micro=2, sequence=1600))
    assert workload.better == "lower"
    logits = torch.tensor([[0.0, 2.0], [0.0, 1.0]], requires_grad=True)
    for labels, names in (([1, 1], ["loss"]), ([1, 0], ["eer_percent", "loss"])):
        metric = workload.metric()
        for score, label in zip(logits, labels, strict=True):
            batch = (torch.empty(1, 128, 11), torch.tensor([label]))
            metric.update(score[None], batch, workload.loss(score[None], batch))
        result = metric.result()
        assert list(result) == names and all(value == value for value in result.values())
    assert equal_error_rate(torch.tensor([float("nan"), 1.0]), torch.tensor([0, 1])) is None


def test_builtin_voices_repeat_and_evaluation_hears_others(make_config: MakeConfig) -> None:
    config = make_config({**TINY, "clips": 60}, micro=4, sequence=4800)
    first, again = (prepare(config) for _ in range(2))
    assert torch.equal(clips_of(first).samples, clips_of(again).samples)
    other = prepare(make_config({**TINY, "clips": 60}, seed=1, micro=4, sequence=4800))
    assert not torch.equal(clips_of(first).samples[:2000], clips_of(other).samples[:2000])
    recordings = antispoof_data.read(Settings.of(config)).recordings
    heard = [{r.speaker for r in recordings if r.held_out is part} for part in (False, True)]
    assert [len(voices) for voices in heard] == [2, 1] and not heard[0] & heard[1]
    assert sorted(clips_of(first).labels.tolist()) == [SPOOF] * 20 + [REAL] * 20


def test_short_recordings_are_repeated_and_long_ones_cut() -> None:
    short, long = (torch.arange(size, dtype=torch.int16) for size in (7, 5000))
    clips = SpeechClips.of([(long, REAL), (short, SPOOF)], 1600)
    waves = (clips.waves(torch.tensor([1, 0])) * 32768).round()
    assert torch.equal(waves[0], (torch.arange(1600) % 7).float())
    assert torch.equal(waves[1], torch.arange(1600).float())
    assert [int(clips[index][1]) for index in range(2)] == [REAL, SPOOF]
    for index in (-1, 2):
        with pytest.raises(IndexError):
            clips[index]


def test_an_evaluation_of_one_kind_is_told(make_config: MakeConfig) -> None:
    clips = SpeechClips.of([(torch.zeros(9, dtype=torch.int16), label) for label in (1, 1, 1, 1, 0)], 1600)
    config = make_config(TINY, micro=2, sequence=1600)
    short = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"batches": 2})})
    assert evaluation_notes(Settings.of(config), clips) == []
    assert "evaluate.batches" in evaluation_notes(Settings.of(short), clips)[0]


def test_gathered_batch_is_the_collated_batch(make_config: MakeConfig) -> None:
    clips = clips_of(prepare(make_config(TINY, micro=4, sequence=6000)))
    indices = torch.tensor([5, 0, 3, 5])
    collated = torch.utils.data.default_collate([clips[index] for index in indices.tolist()])
    gathered = clips.batch(indices)
    assert all(torch.equal(left, right) for left, right in zip(collated, gathered, strict=True))
    # As on a GPU, which transforms all at once.
    assert torch.allclose(clips.log_mel(clips.waves(indices)), collated[0], atol=1e-4)
    moved = pickle.loads(pickle.dumps(clips)).to(torch.device("cpu"))
    assert torch.equal(moved.batch(indices)[0], gathered[0])
    assert clips.nbytes >= 2 * len(clips.samples) and clips.samples.dtype == torch.int16


def test_augmentation_differs_by_epoch_and_item_and_repeats(make_config: MakeConfig) -> None:
    section = {**TINY, "augment": True}
    workload = prepare(make_config(section, micro=4, sequence=6000))
    data = workload.train_data
    assert workload.epochs_differ and isinstance(data, AugmentedClips)
    assert not hasattr(data, "batch")  # nothing that would be gathered or kept
    assert (
        isinstance(workload.eval_data, SpeechClips)
        and not prepare(make_config(TINY, micro=4, sequence=6000)).epochs_differ
    )
    items = len(data)
    plain = data.clips[3][0]
    changed = [data[3 + epoch * items] for epoch in range(3)]
    assert all(int(label) == int(data.clips.labels[3]) for _, label in changed)
    seen = [plain, *(spectrogram for spectrogram, _ in changed)]
    assert all(float((a - b).abs().mean()) > 0.05 for n, a in enumerate(seen) for b in seen[:n])
    torch.manual_seed(5)  # a resumed run has another global state
    again = prepare(make_config(section, micro=4, sequence=6000)).train_data
    assert torch.equal(again[3 + items][0], changed[1][0])
    other = prepare(make_config(section, seed=2, micro=4, sequence=6000)).train_data
    assert not torch.equal(other[3 + items][0], changed[1][0])
    order = Batches(data, make_config(section, micro=4, sequence=6000), None, True)
    epochs = [torch.cat([batch[1] for batch in order.epoch(epoch)]) for epoch in range(2)]
    assert all(len(labels) == items for labels in epochs)


def train(config: Config, workload: Workload) -> None:
    """All steps of the configuration, by the parts that a run is made of."""
    assert config.run.max_steps is not None
    stepper = Stepper(workload, config, torch.device("cpu"), config.run.max_steps)
    batches, clock = Batches(workload.train_data, config), PhaseClock()
    step, epoch = 0, 0
    iterator = batches.epoch(epoch)
    while step < config.run.max_steps:
        if stepper.step(iterator, clock, step) is None:
            epoch += 1
            iterator = batches.epoch(epoch)
            continue
        clock.end_step()
        step += 1


@torch.no_grad()
def error(workload: Workload, score: Callable[[Tensor], Tensor] | None = None) -> float:
    """The metric's headline in percent, of the model or of a score of the spectrograms in its place."""
    data = workload.eval_data
    assert isinstance(data, SpeechClips)
    workload.model.eval()
    metric = workload.metric()
    for indices in torch.arange(len(data)).split(32):
        batch = data.batch(indices)
        if score is None:
            output = workload.forward(workload.model, batch)
        else:
            value = score(batch[0])
            output = torch.stack((-value, value), dim=1)
        metric.update(output, batch, workload.loss(output, batch))
    workload.model.train()
    name, value = next(iter(metric.result().items()))
    assert name == "eer_percent"
    return value


def either_way(workload: Workload, score: Callable[[Tensor], Tensor]) -> float:
    """The error of a threshold that may reject what is above it or what is below it."""
    rate = error(workload, score)
    return min(rate, 100 - rate)


def level_above_4_khz(spectrograms: Tensor) -> Tensor:
    return spectrograms[:, 97:].mean(dim=(1, 2))


def learning_config(steps: int, sequence: int, **section: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"max_steps": steps},
            "workload": {**TINY, "dropout": 0.1, **section},
            "batch": {"micro": 16, "sequence": sequence},
            "precision": {"amp": "off"},
            "optimizer": {"name": "adam", "lr": 3e-3, "weight_decay": 1e-4},
            "schedule": {"kind": "cosine", "min_lr": 1e-5},
            "clip": {"max_norm": 5.0},
        }
    )


@pytest.mark.long
def test_learns_to_tell_copies_of_voices_it_never_heard() -> None:
    config = learning_config(160, 9_600, clips=240)
    torch.manual_seed(1)
    workload = prepare(config)
    assert error(workload) > 40
    # Nothing as simple as loudness tells a copy: what is learned is the harm to the harmonics.
    assert either_way(workload, level_above_4_khz) > 40
    train(config, workload)
    assert error(workload) < 30


def test_files_that_vanish_are_told(make_config: MakeConfig, tmp_path: Path) -> None:
    settings = Settings.of(make_config({**TINY, "clips": 8}, micro=2, sequence=1600))
    made = antispoof_data.read(settings)
    gone = antispoof_data.Recording(tmp_path / "gone.wav", 0, "gone", True, False, 16_000, 1.0)
    data = antispoof_data.SpeechData((gone, *made.recordings), True, 1600, None)
    with pytest.raises(ConfigError, match=r"gone\.wav"):
        make_clips(data, settings)
