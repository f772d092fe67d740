"""The EEG workload: exact sizes, windows, made-up and read recordings, its metric."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ndd_engine.config.schema import Config
from ndd_engine.workloads.eeg import (
    SEIZURE,
    SampleWindows,
    area_under_roc,
    clip_outliers,
    synthetic,
)
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import SeriesLayout, facts


def test_windows_of_stride_one() -> None:
    signal = torch.arange(20.0).reshape(10, 2)
    windows = SampleWindows(signal, 4, torch.arange(10))
    assert len(windows) == 10 - 4
    given, target, label = windows[5]
    assert torch.equal(given, signal[5:9]) and torch.equal(target, signal[9:10]) and int(label) == 9
    assert len(SampleWindows(signal, 4)[0]) == 2
    with pytest.raises(IndexError):
        windows[6]
    assert torch.equal(pickle.loads(pickle.dumps(windows))[2][0], windows[2][0])


def test_builtin_signal_is_seeded_and_its_seizure_is_in_the_evaluation_part() -> None:
    parts = SeriesLayout(1800, 200, 64, 1, 1, "sample", "recording")
    signal, labels = synthetic(parts, 3, 256.0, seed=5)
    again, _ = synthetic(parts, 4, 256.0, seed=5)
    assert signal.shape == (2000, 3) and torch.equal(signal, again[:, :3])
    assert not torch.equal(signal, synthetic(parts, 3, 256.0, seed=6)[0])
    inside = labels.nonzero().flatten()
    assert (int(inside[0]), int(inside[-1]) + 1) == tuple(1800 + int(share * 200) for share in SEIZURE)


def test_prepared_builtin(make_config: Callable[..., Config]) -> None:
    config = make_config({"name": "eeg", "samples": 4000, "channels": 5}, micro=64, sequence=16)
    workload, known = prepare(config), facts(config)
    assert (known.train_items, known.eval_items) == (3600 - 16, 400 - 16)
    assert (len(workload.train_data), len(workload.eval_data)) == (3584, 384)  # type: ignore[arg-type]
    assert (workload.item, workload.token, workload.tokens_per_item) == ("window", "sample", 16)
    train = workload.train_data.signal  # type: ignore[attr-defined]
    assert train.dtype == torch.float32
    assert torch.allclose(train.mean(0), torch.zeros(5), atol=1e-5) and torch.allclose(
        train.std(0), torch.ones(5), atol=1e-3
    )
    given, target = workload.train_data[0]
    assert given.shape == (16, 5) and target.shape == (1, 5)
    batch = torch.utils.data.default_collate([workload.eval_data[index] for index in range(384)])
    workload.model.eval()
    output = workload.forward(workload.model, batch)
    metric = workload.metric()
    metric.update(output, batch, workload.loss(output, batch))
    assert list(metric.result()) == ["rmse", "auroc", "loss"]


def test_outliers_are_clipped_by_the_training_part() -> None:
    signal = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    signal[100, 0], signal[450, 0] = 1e6, -1e6
    clipped, count, channels = clip_outliers(signal, 400)
    assert (count, channels) == (2, 1)
    assert float(clipped.abs().max()) < 25
    assert torch.equal(clipped[:, 1], signal[:, 1])


def test_area_under_roc() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert area_under_roc(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels) == 1.0
    assert area_under_roc(torch.tensor([0.4, 0.3, 0.2, 0.1]), labels) == 0.0
    assert area_under_roc(torch.zeros(4), labels) == 0.5
    assert area_under_roc(torch.tensor([0.1, 0.3, 0.3, 0.4]), labels) == 0.875
    assert area_under_roc(torch.zeros(4), torch.ones(4)) is None
    generator = torch.Generator().manual_seed(0)
    scores, marks = (torch.randint(0, high, (200,), generator=generator) for high in (20, 2))
    high, low = scores[marks == 1][:, None], scores[marks == 0]
    pairs = ((high > low).double() + 0.5 * (high == low).double()).mean()
    assert area_under_roc(scores.float(), marks) == pytest.approx(float(pairs))


ARFF = """% a comment
@RELATION eeg
@attribute 'left ear' NUMERIC
@ATTRIBUTE O2 real
@attribute note string
@ATTRIBUTE eyeDetection {0,1}

@DATA
"""


def test_arff_with_quotes_comments_and_label(make_config: Callable[..., Config], tmp_path: Path) -> None:
    path = tmp_path / "r.arff"
    rows = "".join(f"{k % 7},{-k % 5}.5,'a, b',{int(k > 190)}\n" for k in range(200))
    path.write_text(ARFF + "% more\n" + rows.replace("\n", "\r\n"))
    workload = prepare(make_config({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert workload.train_data[0][0].shape == (4, 2)
    assert (len(workload.train_data), len(workload.eval_data)) == (176, 16)  # type: ignore[arg-type]
    assert ": note." in workload.notes()[0]  # the ignored column
    assert [int(workload.eval_data[k][2]) for k in (0, 6, 7, 15)] == [0, 0, 1, 1]


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_with_and_without_header(
    make_config: Callable[..., Config], tmp_path: Path, header: bool, delimiter: str
) -> None:
    path = tmp_path / "r.csv"
    lines = [delimiter.join(("", "time", "Fz", "Cz", "Label"))] if header else []
    for k in range(200):
        cells = [str(k), f"12:{k}", f"{k % 7}", f"{k % 5}e-1", "seizure" if k > 190 else "rest"]
        lines.append(delimiter.join(cells if header else cells[2:4]))
    path.write_text("\n".join(lines))
    workload = prepare(make_config({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert workload.train_data[0][0].shape == (4, 2)
    assert len(workload.eval_data[0]) == (3 if header else 2)
    if header:
        assert "(unnamed), time" in workload.notes()[0]
        assert int(workload.eval_data[15][2]) == 1


def test_label_of_one_class_in_the_evaluation_part_is_told(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    path = tmp_path / "r.csv"
    path.write_text("a,y\n" + "".join(f"{k % 7},{int(k < 20)}\n" for k in range(200)))
    workload = prepare(make_config({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert "auroc" in workload.notes()[0]
    assert len(workload.eval_data[0]) == 2
