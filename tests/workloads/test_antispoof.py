"""The anti-spoofing workload: its size, its metric, clips, speech as tensors, recordings and mistakes in them."""

from __future__ import annotations

import errno
import math
import os
import struct
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from workload_help import ANTISPOOF, configured, refused

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads import antispoof_data
from ndd_engine.workloads.antispoof import (
    AugmentedClips,
    SpeechClips,
    equal_error_rate,
    evaluation_notes,
    make_clips,
)
from ndd_engine.workloads.antispoof_data import HOP, SpeechData, read_folder
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import Settings, facts, problems
from ndd_engine.workloads.problems import Problems
from ndd_engine.workloads.speech_signals import (
    FLOOR,
    N_FFT,
    REAL,
    SPOOF,
    LogMel,
    decode_pcm,
    mel_filters,
    resample,
)

TINY = {**ANTISPOOF, "dropout": 0.0, "clips": 24}


def clips_of(workload: Workload) -> SpeechClips:
    assert isinstance(workload.train_data, SpeechClips)
    return workload.train_data


def test_loss_weighs_clips_by_class() -> None:
    workload = prepare(configured({**TINY, "class_weights": [0.1, 0.9]}, micro=2, sequence=1600))
    logits, labels = torch.randn(6, 2, requires_grad=True), torch.tensor([0, 1, 1, 0, 0, 0])
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([0.1, 0.9]))
    assert torch.allclose(workload.loss(logits, (None, labels)), expected)
    assert workload.loss(logits.half(), (None, labels)).dtype == torch.float32


@pytest.mark.parametrize(
    ("real", "spoof", "expected"),
    [
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 2.0], 25.0),
        ([5.0, 5.0, 5.0], [5.0], 50.0),  # a model with the same output for every clip
        ([5.0, 6.0], [5.0, 4.0], 25.0),  # equal scores: midway between rejecting and accepting them
        ([7.0, 8.0, 9.0], [8.5], 66.667),  # the one spoofed clip is accepted until two of three are rejected
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


def test_metric_without_both_kinds_has_no_equal_error_rate() -> None:
    workload = prepare(configured(TINY, micro=2, sequence=1600))
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


def test_builtin_voices_repeat_and_evaluation_hears_others() -> None:
    config = configured({**TINY, "clips": 60}, micro=4, sequence=4800)
    first, again = (prepare(config) for _ in range(2))
    assert torch.equal(clips_of(first).samples, clips_of(again).samples)
    other = prepare(configured({**TINY, "clips": 60}, seed=1, micro=4, sequence=4800))
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


def test_an_evaluation_of_one_kind_is_told() -> None:
    clips = SpeechClips.of([(torch.zeros(9, dtype=torch.int16), label) for label in (1, 1, 1, 1, 0)], 1600)
    config = configured(TINY, micro=2, sequence=1600)
    short = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"batches": 2})})
    assert evaluation_notes(Settings.of(config), clips) == []
    assert "evaluate.batches" in evaluation_notes(Settings.of(short), clips)[0]


def test_augmentation_differs_by_epoch_and_item_and_repeats() -> None:
    section = {**TINY, "augment": True}
    workload = prepare(configured(section, micro=4, sequence=6000))
    data = workload.train_data
    assert workload.epochs_differ and isinstance(data, AugmentedClips)
    assert not hasattr(data, "batch")  # nothing that would be gathered or kept
    assert isinstance(workload.eval_data, SpeechClips)
    items = len(data)
    plain = data.clips[3][0]
    changed = [data[3 + epoch * items] for epoch in range(3)]
    assert all(int(label) == int(data.clips.labels[3]) for _, label in changed)
    seen = [plain, *(spectrogram for spectrogram, _ in changed)]
    assert all(float((a - b).abs().mean()) > 0.05 for n, a in enumerate(seen) for b in seen[:n])
    torch.manual_seed(5)  # a resumed run has another global state
    again = prepare(configured(section, micro=4, sequence=6000)).train_data
    assert torch.equal(again[3 + items][0], changed[1][0])
    other = prepare(configured(section, seed=2, micro=4, sequence=6000)).train_data
    assert not torch.equal(other[3 + items][0], changed[1][0])


def test_files_that_vanish_are_told(tmp_path: Path) -> None:
    settings = Settings.of(configured({**TINY, "clips": 8}, micro=2, sequence=1600))
    made = antispoof_data.read(settings)
    gone = antispoof_data.VoiceRecording(tmp_path / "gone.wav", 0, "gone", True, False, 16_000, 1.0)
    data = antispoof_data.SpeechData((gone, *made.recordings), True, 1600, None)
    with pytest.raises(ConfigError, match=r"gone\.wav"):
        make_clips(data, settings)


# Signals.


def tone(hertz: float, seconds: float, rate: int) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [4000, 8000, 11_025, 16_000, 22_050, 44_100, 48_000, 16_001])
def test_resampling_keeps_a_tone(rate: int) -> None:
    found = resample(tone(700, 0.5, rate), rate, 16_000)
    expected = tone(700, 0.5, 16_000)
    assert abs(len(found) - 8000) <= 1
    inner = slice(200, 7700)  # the ends miss what was before and after
    assert torch.allclose(found[inner], expected[inner], atol=1e-3)
    assert torch.allclose(resample(torch.ones(rate // 4), rate, 16_000)[200:-200], torch.ones(1), atol=1e-5)


def test_resampling_does_not_fold_what_is_too_high() -> None:
    assert float(resample(tone(10_000, 0.5, 44_100), 44_100, 16_000)[200:-200].abs().max()) < 0.01
    high = LogMel()(resample(tone(1000, 0.5, 8000), 8000, 16_000)[None])[0, 100:]  # above 4 kHz: no mirror
    assert float(high[:, 5:-5].exp().max()) < 1e-4 * float(
        LogMel()(tone(1000, 0.5, 16_000)[None]).exp().max()
    )


def test_log_mel_is_its_definition() -> None:
    """By a discrete Fourier transform written out, in double precision."""
    samples = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 0.1
    found = LogMel()(samples[None])[0]
    assert found.shape == (128, 7)
    half = N_FFT // 2
    padded = torch.cat((samples[1 : half + 1].flip(0), samples, samples[-half - 1 : -1].flip(0))).double()
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(N_FFT).double() / N_FFT)
    angles = 2 * math.pi / N_FFT * torch.outer(torch.arange(half + 1), torch.arange(N_FFT)).double()
    for frame in range(7):
        part = padded[frame * HOP : frame * HOP + N_FFT] * window
        power = (torch.cos(angles) @ part).square() + (torch.sin(angles) @ part).square()
        expected = torch.log(mel_filters().double() @ power + FLOOR)
        assert torch.allclose(found[:, frame].double(), expected, atol=1e-3)


# Recordings of the user.


def write_wav(path: Path, signals: Sequence[Tensor] | None = None, rate: int = 8000, width: int = 2) -> Path:
    """A PCM file of one channel a signal (samples,) in -1..1; by default half a second of a tone."""
    signals = signals or [tone(440 + len(path.stem), 0.5, rate)]
    full = 2 ** (8 * width - 1)
    low = full if width == 1 else 0
    frames = torch.stack(list(signals), dim=1).double().mul(full - 1).round().long().flatten().tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(signals))
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(
            b"".join((value + low).to_bytes(width, "little", signed=width > 1) for value in frames)
        )
    return path


def config_of(data: Path | str, **batch: int) -> Config:
    return configured({**TINY, "data": str(data)}, **{"micro": 2, "sequence": 4000, **batch})


def told(data: Path | str, **batch: int) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    return refused(config_of(data, **batch))


def folder_data(folder: Path, share: float = 0.25) -> SpeechData:
    return read_folder(share, 4000, Problems("x", str(folder)))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_every_width(tmp_path: Path, width: int) -> None:
    left, right = tone(100, 0.1, 8000), -tone(300, 0.1, 8000)
    with wave.open(str(write_wav(tmp_path / "a.wav", [left, right], width=width)), "rb") as file:
        content = file.readframes(file.getnframes())
    mono = decode_pcm(content, width, 2)
    assert torch.allclose(mono, (left + right) / 2, atol=2.0 / 2 ** (8 * width - 1) + 1e-6)
    assert len(decode_pcm(content[:-1], width, 2)) == len(mono) - 1  # cut off inside a frame
    lowest = (0 if width == 1 else 1 << (8 * width - 1)).to_bytes(width, "little")
    assert decode_pcm(lowest, width, 1).tolist() == [-1.0]


def test_plain_folder_gets_copies_and_is_split_by_speaker(tmp_path: Path) -> None:
    for speaker in ("anna", "Bert", "carla"):
        for take in range(3):
            write_wav(tmp_path / f"{take}_{speaker}_{take}.wav", [tone(200 + 50 * take, 0.3, 8000)])
    (tmp_path / "notes.txt").write_text("not a recording")
    data = folder_data(tmp_path)
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for recording in data.recordings:
        sides[recording.held_out].add(recording.speaker)
    assert len(sides[True]) == 1 and len(sides[False]) == 2 and not sides[True] & sides[False]
    workload = prepare(config_of(tmp_path))
    assert "18 clips of 3" in workload.describe_data()
    notes = workload.notes()
    assert len(notes) == 2 and all("9 of 9" in note for note in notes)  # resampled, and cut
    assert "8,000 Hz" in notes[0] and "batch.sequence" in notes[1]
    clips = clips_of(workload)
    assert clips.labels.tolist() == [REAL, SPOOF] * 6 and clips.lengths.tolist() == [4000] * 12
    spectra = clips.batch(torch.arange(2))[0]
    assert float((spectra[0] - spectra[1]).abs().mean()) > 0.01
    known = facts(config_of(tmp_path))
    assert (known.train_items, known.eval_items) == (12, 6)


def test_plain_folder_without_speakers_is_split_by_file(tmp_path: Path) -> None:
    for number in range(8):
        write_wav(tmp_path / "deep" / f"recording {number}.WAV", rate=16_000)
    data = folder_data(tmp_path)
    assert data.copied and data.speakers is None and data.clips(True) == 4 and data.clips(False) == 12
    assert "same voice" in data.notes[0]


@pytest.mark.parametrize("names", [("x/Bona-Fide", "y/Spoof"), ("Real", "FAKE")])
def test_folders_of_both_kinds(tmp_path: Path, names: tuple[str, str]) -> None:
    for number in range(8):
        write_wav(tmp_path / names[0] / f"{number}.wav", [tone(300, 0.2, 16_000)], 16_000)
        write_wav(tmp_path / names[1] / f"{number}.wav", [tone(900, 0.2, 16_000)], 16_000)
    write_wav(tmp_path / "other" / "stray.wav")
    data = folder_data(tmp_path)
    assert not data.copied and "1 of 17" in data.notes[0]
    stems = [
        {r.path.stem for r in data.recordings if r.path and r.held_out is part} for part in (True, False)
    ]
    # A clip and its copy of the same name stay together.
    assert len(stems[0]) == 2 and not stems[0] & stems[1]
    workload = prepare(config_of(tmp_path, sequence=3200))
    spectra, labels = clips_of(workload).batch(torch.arange(12))
    assert int(labels.sum()) == 6
    low, high = spectra[labels == REAL].mean((0, 2)), spectra[labels == SPOOF].mean((0, 2))
    assert int(low.argmax()) < int(high.argmax())


def test_speakers_with_one_kind_only_are_split_by_file(tmp_path: Path) -> None:
    for number in range(6):
        write_wav(tmp_path / "real" / f"{number}_anna_0.wav")
        write_wav(tmp_path / "fake" / f"{number}_anna_1.wav")
    data = folder_data(tmp_path)
    assert data.speakers == 1 and "speaker" in data.notes[0]
    for part in (True, False):
        assert {r.real for r in data.recordings if r.held_out is part} == {True, False}


def test_missing_empty_and_odd_folders(tmp_path: Path) -> None:
    (tmp_path / "voices").mkdir()
    assert str(tmp_path / "voices") in told(tmp_path / "voice")
    assert "WAV files" in told(tmp_path / "voices")
    path = write_wav(tmp_path / "voices" / "a.wav")
    assert f"is {tmp_path / 'voices'}" in told(path)  # its folder
    assert "evaluation: 1" in told(tmp_path / "voices")


def test_a_folder_below_that_cannot_be_read_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wav(tmp_path / "a.wav")
    (tmp_path / "closed").mkdir()
    plain = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "Permission denied" in told(tmp_path)


def test_one_kind_missing(tmp_path: Path) -> None:
    write_wav(tmp_path / "bonafide" / "a.wav")
    (tmp_path / "spoof").mkdir()
    assert "no spoofed" in told(tmp_path)
    (tmp_path / "spoof").rmdir()
    (tmp_path / "bonafide").rename(tmp_path / "fake")
    assert "no real" in told(tmp_path)


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(content)) + content for name, content in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(kind: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16) -> tuple[bytes, bytes]:
    align = channels * bits // 8
    return b"fmt ", struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits)


# Files, and what the message says of them.
BAD = {
    "empty": (b"", "truncated"),
    "other kind": (b"ID3" + b"x" * 100, "RIFF"),
    "other form": (riff(form(), (b"data", bytes(8000))).replace(b"WAVE", b"AVI "), "not a WAV file"),
    "floats": (riff(form(kind=3, bits=32), (b"data", bytes(8000))), "floating-point"),
    "compressed": (riff(form(kind=85), (b"data", bytes(8000))), "format 85"),
    "64 bits": (riff(form(bits=64), (b"data", bytes(8000))), "64 bits"),
    "no rate": (riff(form(rate=0), (b"data", bytes(8000))), "0 Hz"),
    "no channels": (riff(form(channels=0), (b"data", bytes(8000))), "no channels"),
    "no data": (riff(form()), "no samples"),
    "short": (riff(form(), (b"data", bytes(800))), "0.050 s"),
    "cut off": (riff(form(), (b"data", bytes(8000)))[:444], "0.1 s"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_used(tmp_path: Path, case: str) -> None:
    content, expected = BAD[case]
    for number in range(4):
        write_wav(tmp_path / f"{number}.wav")
    (tmp_path / "bad.wav").write_bytes(content)
    text = told(tmp_path)
    assert "bad.wav" in text and expected in text
    assert text.count("\n") == 0


def test_many_bad_files_are_counted_and_all_mistakes_told(tmp_path: Path) -> None:
    """One of them is a pipe, which is not waited for."""
    for number in range(8):
        (tmp_path / f"\x1b{number}.wav").write_bytes(b"x")
    os.mkfifo(tmp_path / "\x1bpipe.wav")
    text = told(tmp_path, micro=1, sequence=100)
    assert text.count("\\x1b") == 5 and "4 more files" in text and "\x1b" not in text
    assert "batch.micro = 1" in text and "batch.sequence" in text and "1,600 or more" in text


def test_a_file_longer_by_its_header_than_by_its_bytes_is_used(tmp_path: Path) -> None:
    """As a recorder leaves it that was killed, or that wrote to a pipe."""
    for number in range(4):
        write_wav(tmp_path / f"{number}.wav")
    path = tmp_path / "cut.wav"
    content = bytearray(write_wav(path).read_bytes()[:4044])
    content[40:44] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    workload = prepare(config_of(tmp_path, sequence=16_000))
    parts: Any = (workload.train_data, workload.eval_data)
    lengths = [int(length) for part in parts for length in part.lengths]
    assert sorted(lengths) == [4000] * 2 + [8000] * 8


def test_too_few_clips_for_a_step(tmp_path: Path) -> None:
    for number in range(8):
        write_wav(tmp_path / f"{number}.wav")
    text = told(tmp_path, micro=13)
    assert "micro = 13" in text and "at most 12" in text
    assert "batch.accumulation" in told(tmp_path, micro=4, accumulation=4)
    assert problems(config_of(tmp_path, micro=4, accumulation=3), "x") == []
    text = refused(configured({**TINY, "clips": 400}, micro=321, sequence=4000))
    assert "only 320" in text and "workload.clips" in text


def test_data_beyond_memory_is_refused() -> None:
    config = configured({**TINY, "clips": 100_000}, micro=2, sequence=64_600)
    assert "in memory" in str(problems(config, "x")[0])
