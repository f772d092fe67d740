"""Recordings: reading, resampling and spectra against their definitions, folders, and every mistake in them."""

from __future__ import annotations

import math
import os
import struct
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from problems_help import refused
from torch import Tensor

from ndd_engine.config.schema import Config
from ndd_engine.workloads.antispoof import REAL, SPOOF, SpeechClips, decode_pcm
from ndd_engine.workloads.antispoof_data import SpeechData, held_out, read_folder
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts, problems
from ndd_engine.workloads.problems import Problems

MakeConfig = Callable[..., Config]

TINY: dict[str, Any] = {"name": "antispoof", "blocks": [1, 1, 1, 1], "channels": [16, 16, 16, 16]}


def tone(hertz: float, seconds: float, rate: int) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate)) / rate)


def write_wav(path: Path, signals: Sequence[Tensor] | None = None, rate: int = 8000, width: int = 2) -> Path:
    """A PCM file of one channel a signal (samples,) in -1..1; by default half a second of a tone."""
    signals = signals or [tone(440 + len(path.stem), 0.5, rate)]
    full = 2 ** (8 * width - 1)
    frames = torch.stack(list(signals), dim=1).double().mul(full - 1).round().long().flatten().tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(signals))
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(
            b"".join(
                (value + (full if width == 1 else 0)).to_bytes(width, "little", signed=width > 1)
                for value in frames
            )
        )
    return path


def config_of(make_config: MakeConfig, data: Path | str, **batch: int) -> Config:
    return make_config({**TINY, "data": str(data)}, **{"micro": 2, "sequence": 4000, **batch})


def told(make_config: MakeConfig, data: Path | str, **batch: int) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    return refused(config_of(make_config, data, **batch))


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


def test_held_out_groups_have_their_share_of_each_kind() -> None:
    speakers = {f"s{n}": Counter({True: 10}) for n in range(10)}
    chosen = held_out(speakers, 0.2)
    assert chosen is not None and len(chosen) == 2
    more = held_out({**speakers, "late": Counter({True: 10})}, 0.2)
    assert more is not None and len(more & chosen) >= 1  # an added speaker does not shuffle the others
    mixed = {
        **{f"r{n}": Counter({True: 1}) for n in range(40)},
        **{f"f{n}": Counter({False: 3}) for n in range(20)},
    }
    chosen = held_out(mixed, 0.25)
    assert chosen is not None and sum(name[0] == "r" for name in chosen) == 10
    assert sum(name[0] == "f" for name in chosen) == 5
    assert held_out({"a": Counter({True: 90}), "b": Counter({True: 10})}, 0.2) == {"b"}
    assert held_out({"a": Counter({True: 5})}, 0.2) is None
    assert held_out({"a": Counter({True: 5, False: 5}), "b": Counter({True: 5})}, 0.2) is None


def test_plain_folder_gets_copies_and_is_split_by_speaker(make_config: MakeConfig, tmp_path: Path) -> None:
    for speaker in ("anna", "Bert", "carla"):
        for take in range(3):
            write_wav(tmp_path / f"{take}_{speaker}_{take}.wav", [tone(200 + 50 * take, 0.3, 8000)])
    (tmp_path / "notes.txt").write_text("not a recording")
    data = folder_data(tmp_path)
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for recording in data.recordings:
        sides[recording.held_out].add(recording.speaker)
    assert len(sides[True]) == 1 and len(sides[False]) == 2 and not sides[True] & sides[False]
    workload = prepare(config_of(make_config, tmp_path))
    assert "18 clips of 3" in workload.describe_data()
    notes = workload.notes()
    assert len(notes) == 2 and all("9 of 9" in note for note in notes)  # resampled, and cut
    assert "8,000 Hz" in notes[0] and "batch.sequence" in notes[1]
    clips = workload.train_data
    assert isinstance(clips, SpeechClips)
    assert clips.labels.tolist() == [REAL, SPOOF] * 6 and clips.lengths.tolist() == [4000] * 12
    spectra = clips.batch(torch.arange(2))[0]
    assert float((spectra[0] - spectra[1]).abs().mean()) > 0.01
    known = facts(config_of(make_config, tmp_path))
    assert (known.train_items, known.eval_items) == (12, 6)


def test_plain_folder_without_speakers_is_split_by_file(make_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(8):
        write_wav(tmp_path / "deep" / f"recording {number}.WAV", rate=16_000)
    data = folder_data(tmp_path)
    assert data.copied and data.speakers is None and data.clips(True) == 4 and data.clips(False) == 12
    assert "same voice" in data.notes[0]


@pytest.mark.parametrize("names", [("x/Bona-Fide", "y/Spoof"), ("Real", "FAKE")])
def test_folders_of_both_kinds(make_config: MakeConfig, tmp_path: Path, names: tuple[str, str]) -> None:
    for number in range(8):
        write_wav(tmp_path / names[0] / f"{number}.wav", [tone(300, 0.2, 16_000)], 16_000)
        write_wav(tmp_path / names[1] / f"{number}.wav", [tone(900, 0.2, 16_000)], 16_000)
    write_wav(tmp_path / "other" / "stray.wav")
    data = folder_data(tmp_path)
    assert not data.copied and "1 of 17" in data.notes[0]
    stems = [
        {r.path.stem for r in data.recordings if r.path and r.held_out is part} for part in (True, False)
    ]
    assert (
        len(stems[0]) == 2 and not stems[0] & stems[1]
    )  # a clip and its copy of the same name stay together
    workload = prepare(config_of(make_config, tmp_path, sequence=3200))
    assert isinstance(workload.train_data, SpeechClips)
    spectra, labels = workload.train_data.batch(torch.arange(12))
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


def test_real_digits(real_data: Path) -> None:
    data = folder_data(real_data / "spoken-digits", 0.2)
    assert (data.clips(False), data.clips(True)) == (1000, 200)
    heard = [{r.speaker for r in data.recordings if r.held_out is part} for part in (True, False)]
    assert len(heard[0]) == 1 and len(heard[1]) == 5 and not heard[0] & heard[1]


def test_missing_empty_and_odd_folders(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "voices").mkdir()
    assert str(tmp_path / "voices") in told(make_config, tmp_path / "voice")
    assert '"builtin"' in told(make_config, "bulitin")
    assert "WAV files" in told(make_config, tmp_path / "voices")
    path = write_wav(tmp_path / "voices" / "a.wav")
    assert f"is {tmp_path / 'voices'}" in told(make_config, path)  # its folder
    assert "evaluation: 1" in told(make_config, tmp_path / "voices")
    for name in (tmp_path / "no" / "x", "a\0b", "~nobody-of-this-name/voices", "x" * 5000):
        assert "workload.data" in told(make_config, name)


def test_one_kind_missing(make_config: MakeConfig, tmp_path: Path) -> None:
    write_wav(tmp_path / "bonafide" / "a.wav")
    (tmp_path / "spoof").mkdir()
    assert "no spoofed" in told(make_config, tmp_path)
    (tmp_path / "spoof").rmdir()
    (tmp_path / "bonafide").rename(tmp_path / "fake")
    assert "no real" in told(make_config, tmp_path)


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
def test_files_that_cannot_be_used(make_config: MakeConfig, tmp_path: Path, case: str) -> None:
    content, expected = BAD[case]
    for number in range(4):
        write_wav(tmp_path / f"{number}.wav")
    (tmp_path / "bad.wav").write_bytes(content)
    text = told(make_config, tmp_path)
    assert "bad.wav" in text and expected in text
    assert text.count("\n") == 0


def test_a_pipe_named_like_a_recording_is_not_waited_for(make_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(4):
        write_wav(tmp_path / f"{number}.wav")
    os.mkfifo(tmp_path / "pipe.wav")
    assert "pipe.wav" in told(make_config, tmp_path)


def test_many_bad_files_are_counted_and_all_mistakes_told(make_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"\x1b{number}.wav").write_bytes(b"x")
    text = told(make_config, tmp_path, micro=1, sequence=100)
    assert text.count("\\x1b") == 5 and "4 more files" in text and "\x1b" not in text
    assert "batch.micro = 1" in text and "batch.sequence" in text and "1,600 or more" in text


def test_a_file_longer_by_its_header_than_by_its_bytes_is_used(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """As a recorder leaves it that was killed, or that wrote to a pipe."""
    for number in range(4):
        write_wav(tmp_path / f"{number}.wav")
    path = tmp_path / "cut.wav"
    content = bytearray(write_wav(path).read_bytes()[:4044])
    content[40:44] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    workload = prepare(config_of(make_config, tmp_path, sequence=16_000))
    assert isinstance(workload.train_data, SpeechClips) and isinstance(workload.eval_data, SpeechClips)
    lengths = workload.train_data.lengths.tolist() + workload.eval_data.lengths.tolist()
    assert sorted(lengths) == [4000] * 2 + [8000] * 8


def test_too_few_clips_for_a_step(make_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(8):
        write_wav(tmp_path / f"{number}.wav")
    text = told(make_config, tmp_path, micro=13)
    assert "micro = 13" in text and "at most 12" in text
    assert "batch.accumulation" in told(make_config, tmp_path, micro=4, accumulation=4)
    assert problems(config_of(make_config, tmp_path, micro=4, accumulation=3), "x") == []
    text = told(make_config, "builtin", micro=321)
    assert "only 320" in text and "workload.clips" in text


def test_data_beyond_memory_is_refused(make_config: MakeConfig) -> None:
    config = make_config({**TINY, "clips": 100_000}, micro=2, sequence=64_600)
    assert "kept in memory" in str(problems(config, "x")[0])
