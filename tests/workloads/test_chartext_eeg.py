"""The workloads of characters and of signals: their sizes, segments and metrics, and every mistake in their files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from workload_help import configured, told

from ndd_engine.config import read
from ndd_engine.workloads import SeriesLayout, chartext
from ndd_engine.workloads.chartext import (
    Diffused,
    NextCharacterModel,
    ScoreModel,
    Size,
    TextSegments,
    absorb,
    score_entropy,
)
from ndd_engine.workloads.eeg import (
    SEIZURE,
    SignalSegments,
    area_under_roc,
    clip_outliers,
    synthetic,
)
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts, problems


def test_next_character_model_sees_only_the_past_and_diffusion_sees_all() -> None:
    torch.manual_seed(0)
    indices = torch.randint(0, 11, (1, 16))
    changed = indices.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    causal = NextCharacterModel(Size(11, 16, 2, 2, 32, 0.0))
    difference = (causal(indices) - causal(changed)).abs().sum(-1)[0]
    assert not difference[:10].any() and difference[10:].all()
    score = ScoreModel(Size(11, 16, 2, 2, 32, 0.0))
    for parameter in score.parameters():  # away from the start, where every block is the identity
        torch.nn.init.normal_(parameter, std=0.1)
    noise = torch.tensor([1.0])
    assert (score(indices, noise) - score(changed, noise)).abs().sum(-1)[0].all()


def test_score_entropy_is_the_published_formula() -> None:
    """Compared with SEDD's absorbing score entropy, written as in the paper with its log-linear noise."""
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(0, 5, (8, 12), generator=generator)
    noisy, noise, weight = absorb(clean, 5, generator)
    log_ratio = torch.randn(8, 12, 5, generator=generator)
    esigm1 = torch.expm1(noise.double())
    log_score = log_ratio.double() - esigm1.log()[:, None, None]
    ratio = (1 / esigm1)[:, None]
    own = log_score.gather(-1, clean.unsqueeze(-1)).squeeze(-1)
    entropy = log_score.exp().sum(-1) - ratio * own + ratio * (ratio.log() - 1)
    chance = -torch.expm1(-noise.double())
    rate = (1 - chartext.NOISE_EPS) / (1 - chance)  # time derivative of the total noise
    expected = (torch.where(noisy == 5, entropy, 0.0) * rate[:, None]).mean()
    assert float(score_entropy(Diffused(log_ratio, weight), clean)) == pytest.approx(
        float(expected), rel=1e-4
    )


def test_windows_shift_by_one_and_have_room_for_the_target() -> None:
    codes = torch.arange(20)
    segments = TextSegments(codes, 4, 4)
    assert len(segments) == 4  # the fifth would have no target for its last character
    given, target = segments[3]
    assert given.tolist() == [12, 13, 14, 15] and target.tolist() == [13, 14, 15, 16]
    assert len(TextSegments(codes, 4, 1)) == 16
    assert [list(item) for item in TextSegments(codes, 4, 8, shifted=False)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    with pytest.raises(IndexError):
        segments[4]
    copy = pickle.loads(pickle.dumps(segments))
    assert torch.equal(copy[1][1], segments[1][1])


def test_builtin_and_stdlib_texts() -> None:
    builtin = facts(configured({"name": "chartext"}, micro=8, sequence=128))
    assert builtin.train_items > 2_000 and "characters" in builtin.text
    library = facts(configured({"name": "chartext", "data": "stdlib"}, micro=8, sequence=128))
    assert library.train_items > 5 * builtin.train_items


# Signals.


def test_windows_of_stride_one() -> None:
    signal = torch.arange(20.0).reshape(10, 2)
    segments = SignalSegments(signal, 4, torch.arange(10))
    assert len(segments) == 10 - 4
    given, target, label = segments[5]
    assert torch.equal(given, signal[5:9]) and torch.equal(target, signal[9:10]) and int(label) == 9
    assert len(SignalSegments(signal, 4)[0]) == 2
    with pytest.raises(IndexError):
        segments[6]
    assert torch.equal(pickle.loads(pickle.dumps(segments))[2][0], segments[2][0])


def test_builtin_signal_is_seeded_and_its_seizure_is_in_the_evaluation_part() -> None:
    parts = SeriesLayout(1800, 200, 64, 1, 1, "sample", "recording")
    signal, labels = synthetic(parts, 3, 256.0, seed=5)
    again, _ = synthetic(parts, 4, 256.0, seed=5)
    assert signal.shape == (2000, 3) and torch.equal(signal, again[:, :3])
    assert not torch.equal(signal, synthetic(parts, 3, 256.0, seed=6)[0])
    inside = labels.nonzero().flatten()
    assert (int(inside[0]), int(inside[-1]) + 1) == tuple(1800 + int(share * 200) for share in SEIZURE)


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


def test_arff_with_quotes_comments_and_label(tmp_path: Path) -> None:
    path = tmp_path / "r.arff"
    rows = "".join(f"{k % 7},{-k % 5}.5,'a, b',{int(k > 190)}\n" for k in range(200))
    path.write_text(ARFF + "% more\n" + rows.replace("\n", "\r\n"))
    workload = prepare(configured({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert workload.train_data[0][0].shape == (4, 2)
    assert (len(workload.train_data), len(workload.eval_data)) == (176, 16)  # type: ignore[arg-type]
    assert ": note." in workload.notes()[0]  # the ignored column
    assert [int(workload.eval_data[k][2]) for k in (0, 6, 7, 15)] == [0, 0, 1, 1]


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_with_and_without_header(tmp_path: Path, header: bool, delimiter: str) -> None:
    path = tmp_path / "r.csv"
    lines = [delimiter.join(("", "time", "Fz", "Cz", "Label"))] if header else []
    for k in range(200):
        cells = [str(k), f"12:{k}", f"{k % 7}", f"{k % 5}e-1", "seizure" if k > 190 else "rest"]
        lines.append(delimiter.join(cells if header else cells[2:4]))
    path.write_text("\n".join(lines))
    workload = prepare(configured({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert workload.train_data[0][0].shape == (4, 2)
    assert len(workload.eval_data[0]) == (3 if header else 2)
    if header:
        assert "(unnamed), time" in workload.notes()[0]
        assert int(workload.eval_data[15][2]) == 1


def test_label_of_one_class_in_the_evaluation_part_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("a,y\n" + "".join(f"{k % 7},{int(k < 20)}\n" for k in range(200)))
    workload = prepare(configured({"name": "eeg", "data": str(path), "hidden": [4]}, micro=8, sequence=4))
    assert "auroc" in workload.notes()[0]
    assert len(workload.eval_data[0]) == 2


# Mistakes in their data.


def test_unreadable_and_odd_files(tmp_path: Path) -> None:
    secret, pipe = tmp_path / "secret.txt", tmp_path / "pipe.txt"
    secret.write_text("x" * 1000)
    secret.chmod(0)
    os.mkfifo(pipe)
    for path in (pipe, *([] if os.access(secret, os.R_OK) else [secret])):
        assert "workload.data" in told("chartext", path)
    assert f"did you mean {pipe}?" in told("chartext", tmp_path / "pip.txt")
    assert "a directory" in told("chartext", tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"abc\n" * 10 + b"\0", "offset 40"),
        (b"abc\n" * 10 + b"\xe9t\xe9", "0xe9 at offset 40 (line 11)"),
        (b"\xef\xbb\xbfabc\xff", "0xff at offset 6 (line 1)"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"aaaaaa" * 100, "one distinct"),
    ],
)
def test_files_that_are_not_text(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    assert named in told("chartext", path)


@pytest.mark.parametrize(
    ("batch", "key", "figures"),
    [
        ({"sequence": 2000}, "batch.sequence", ["1,000", "at most 49"]),
        ({"sequence": 950}, "batch.sequence", ["950", "951"]),
        ({"sequence": 100, "micro": 64}, "batch.sequence", ["50", "101", "at most 49", "0.101"]),
        ({"sequence": 100, "micro": 64}, "batch.micro", ["64", "at most 9"]),
        ({"sequence": 10, "micro": 8, "accumulation": 50}, "batch.accumulation", ["400", "at most 94"]),
    ],
)
def test_text_shorter_than_its_windows(
    tmp_path: Path, batch: dict[str, int], key: str, figures: list[str]
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)  # 950 characters to train on, 50 to evaluate
    text = told("chartext", path, **batch)
    assert key in text and all(figure in text for figure in figures)
    config = configured({"name": "chartext", "data": str(path)}, micro=2, accumulation=47, sequence=10)
    assert problems(config, "run.toml") == []


def test_text_that_is_too_short_for_a_step_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    sets = ("batch.sequence=10", "batch.micro=8", "batch.accumulation=5", "parallel.ranks=4", "run.epochs=1")
    config = read(None, ["workload.name=chartext", f"workload.data={path}", *sets]).resolve()
    (problem,) = problems(config, "run.toml")
    assert (problem.key, problem.found) == ("parallel.ranks", "4")
    assert "160" in problem.message and "94" in str(problem.allowed)


def test_longest_sequence_that_is_allowed_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    config = configured(
        {"name": "chartext", "data": str(path), "layers": 1, "width": 8, "heads": 1}, micro=1, sequence=49
    )
    assert problems(config, "run.toml") == []
    assert facts(config).eval_items == 1
    assert len(prepare(config).eval_data) == 1  # type: ignore[arg-type]


def test_batch_normalisation_needs_two_items(tmp_path: Path) -> None:
    assert [problem.key for problem in problems(configured({"name": "eeg"}, micro=1), "x")] == ["batch.micro"]
    path = tmp_path / "short.csv"
    path.write_text("1,2\n" * 40)
    found = problems(configured({"name": "eeg", "data": str(path)}, micro=1, sequence=50), "x")
    assert [problem.key for problem in found] == ["batch.micro", "batch.sequence"]  # both at once
    gru = {"name": "eeg", "model": "gru", "hidden": [4]}
    assert problems(configured(gru, micro=1), "x") == []


HEAD = "@relation r\n@attribute a numeric\n@attribute b numeric\n@attribute class {0,1}\n@data\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (HEAD, ["no samples"]),
        (HEAD.replace("@data\n", ""), ["@data"]),
        (HEAD.replace("numeric", "string") + "x,y,0\n", ["a, b, class"]),
        (HEAD + "1,2,0\n?,2,0\n1,nan,0\n", ["2 cells", "line 7", "column 'a'"]),
        (HEAD + "{0 1, 1 2}\n", ["line 6", "sparse"]),
        (HEAD + "1,2\n" * 9, ["line 10: 2 cells", "4 more lines"]),
        ("@relation r\n@attribute a\nhello\n@data\n1\n", ["line 2", "line 3", "@relation"]),
        ("a,b\n1,2\n", ["line 1", "@relation", "line 2"]),
        (HEAD + "1,2\n" + "1,x,0\n" + "?,1,0\n", ["line 6: 2 cells", "line 7: 'x'", "1 cell"]),
    ],
)
def test_arff_mistakes(tmp_path: Path, content: str, expected: list[str]) -> None:
    path = tmp_path / "r.arff"
    path.write_text(content)
    text = told("eeg", path)
    assert all(part in text for part in expected), text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\n\n", "no samples"),
        ("a,b\n", "no samples"),
        ("a,b\nx,y\n", "no numeric"),
        ("label\n1\n0\n", "no numeric"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells"),
        ("a;b\n1;2\n1;x\n", "line 3: 'x' in column 'b'"),
        ("a,b\n1,2\n1,\n", "line 3, column 'b'"),
        ("1,2\n3,\x1b[31m\n", "\\x1b[31m"),
        ('a,b\n1,"' + "x" * 200_000 + '"\n', "field larger"),
    ],
)
def test_csv_mistakes(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(content)
    text = told("eeg", path)
    assert expected in text and "\x1b" not in text


def test_other_kinds_of_recording_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.xyz"
    path.write_text("1,2\n")
    assert all(kind in told("eeg", path) for kind in (".arff", ".csv", ".tsv"))
