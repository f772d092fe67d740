"""Recordings of speech: which there are, real or spoofed, and which are kept for evaluation. No torch here."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ndd_engine.config.schema import BatchSection, Config
from ndd_engine.config.workload_sections import AntispoofSection
from ndd_engine.text import size

from .files import KEY, alike
from .wav_files import SHORTEST_S, UNREADABLE, read_header, reason, wav_files
from .windows import Complaints, DataFacts

SAMPLE_RATE = 16_000  # Hz, of everything that is trained on
HOP = 160  # samples from one frame of a spectrogram to the next
MAX_BYTES = 4 << 30  # all clips are held in memory, two bytes a sample
SHOWN_FILES = 5  # bad files told one by one; the rest is counted

REAL_FOLDERS = ("bonafide", "genuine", "real")
SPOOF_FOLDERS = ("fake", "spoof")
CLASS_FOLDERS = (
    "the recordings of both kinds in subfolders, for example bonafide and spoof; or only real recordings, of "
    "which copies are made"
)

PAIRS_PER_VOICE = 10  # of the builtin data
VOICES = (2, 50)

_SPEAKER = re.compile(r"\d+_([^\W\d_][^_]*)_\d+")  # DIGIT_SPEAKER_TAKE, as in the Free Spoken Digit Dataset


@dataclass(frozen=True)
class Recording:
    """One real or spoofed recording.

    path: a WAV file, or None for one to be made. number: its place among all. speaker: who is heard, or where
    nobody knows, the name of the file. held_out: kept for evaluation. seconds: its length, 0 for one to be made.
    """

    path: Path | None
    number: int
    speaker: str
    real: bool
    held_out: bool
    sample_rate: int
    seconds: float


@dataclass(frozen=True)
class SpeechData:
    """recordings: in the order in which they are evaluated. copied: each has a Griffin-Lim copy, the spoof.

    samples: length of a clip. speakers: how many, or None where the file names tell none.
    """

    recordings: tuple[Recording, ...]
    copied: bool
    samples: int
    speakers: int | None
    notes: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        """Frames of a clip's spectrogram."""
        return frame_count(self.samples)

    def clips(self, held_out: bool) -> int:
        """Items of the evaluation part, or of the training part."""
        found = sum(recording.held_out is held_out for recording in self.recordings)
        return 2 * found if self.copied else found

    def facts(self) -> DataFacts:
        """The facts that need no torch."""
        return DataFacts(self.clips(False), self.clips(True), self.frames, "clip", "frame", self.line())

    def line(self) -> str:
        """The data in one line for people."""
        total = self.clips(False) + self.clips(True)
        voices = (
            "" if self.speakers is None else f" of {self.speakers} speaker{'' if self.speakers == 1 else 's'}"
        )
        spoofed = sum(not recording.real for recording in self.recordings)
        kinds = "half of them Griffin-Lim copies" if self.copied else f"{spoofed:,} of them spoofed"
        return (
            f"{total:,} clips{voices}, {kinds}: {self.clips(False):,} of {self.frames:,} frames a pass, "
            f"{self.clips(True):,} to evaluate"
        )


def frame_count(samples: int) -> int:
    """Frames of a clip: one centred on each HOP-th sample, the first one included."""
    return samples // HOP + 1


def read(config: Config, section: AntispoofSection, complaints: Complaints) -> SpeechData | None:
    """What there is to train on, with every mistake of it in `complaints`; None when that is not usable."""
    before = len(complaints.problems)
    batch = config.batch
    if batch.micro == 1:
        message = "the model normalises over the items of a micro-batch and needs at least two"
        complaints.add("batch.micro", message, 1, "2 or more")
    shortest = round(SHORTEST_S * SAMPLE_RATE)
    if batch.sequence < shortest:
        message = f"the samples of a clip at {SAMPLE_RATE:,} Hz; so short a clip holds no speech"
        complaints.add("batch.sequence", message, batch.sequence, f"{shortest:,} or more")
    if section.data == "builtin":
        data: SpeechData | None = made_up(section, batch.sequence)
    else:
        data = read_folder(section.data, section.eval_fraction, batch.sequence, complaints)
    if data is not None:
        _check_size(section, data, batch, complaints)
    return None if len(complaints.problems) > before else data


def made_up(section: AntispoofSection, samples: int) -> SpeechData:
    """The builtin recordings, still to be made: about ten of each voice, other voices for the evaluation."""
    pairs = section.clips // 2
    fewest, most = VOICES
    voices = min(max(pairs // PAIRS_PER_VOICE, fewest), most)
    training = voices - max(round(section.eval_fraction * voices), 1)
    recordings = tuple(
        Recording(
            None, number, f"voice {number % voices}", True, number % voices >= training, SAMPLE_RATE, 0.0
        )
        for number in range(pairs)
    )
    return SpeechData(recordings, True, samples, voices)


def read_folder(data: str, eval_fraction: float, samples: int, complaints: Complaints) -> SpeechData | None:
    """A user's folder of WAV files: two subfolders of both kinds, or real recordings alone."""
    found = _wav_files(data, complaints)
    if found is None:
        return None
    folder, files = found
    kinds = {file: kind_of(file.relative_to(folder)) for file in files}
    sorted_out = any(kind is not None for kind in kinds.values())
    notes = []
    if sorted_out:
        outside = sum(kind is None for kind in kinds.values())
        if outside:
            notes.append(
                f"Left out, since they lie in neither kind of folder: {outside:,} of {len(files):,} recordings."
            )
        for kind, names in ((True, REAL_FOLDERS), (False, SPOOF_FOLDERS)):
            if kind not in kinds.values():
                message = (
                    f"there is no {'real' if kind else 'spoofed'} speech, no WAV file in a folder called so"
                )
                advice = (
                    None if kind else "to have copies made, name the folder of the real recordings itself"
                )
                complaints.add(KEY, message, data, " or ".join(names), advice)
                return None
    chosen = [file for file in files if kinds[file] is not None or not sorted_out]
    # In an order that does not sort by kind or speaker: an evaluation of a few batches then sees both.
    chosen.sort(key=lambda file: (zlib.crc32(os.fsencode(file.relative_to(folder))), file))
    recordings = _recordings(chosen, folder, kinds, data, complaints)
    if recordings is None:
        return None
    return _divide(recordings, not sorted_out, eval_fraction, samples, notes, data, complaints)


def kind_of(relative: Path) -> bool | None:
    """True in a folder of real speech, False in one of spoofed speech, None in neither; the innermost tells."""
    for name in reversed(relative.parts[:-1]):
        plain = re.sub(r"[-_ ]", "", name).lower()
        if plain in REAL_FOLDERS:
            return True
        if plain in SPOOF_FOLDERS:
            return False
    return None


def held_out(groups: Mapping[str, Counter[bool]], share: float) -> frozenset[str] | None:
    """Groups that together have about `share` of each kind; None when a kind cannot be on both sides.

    groups: recordings of each kind, by group. Which groups depends on their names alone, so that runs with
    other seeds or a few more recordings are judged on the same voices.
    """
    names = sorted(groups, key=lambda name: (zlib.crc32(name.encode("utf-8", "surrogateescape")), name))
    totals = sum(groups.values(), Counter[bool]())
    chosen: list[str] = []
    have: Counter[bool] = Counter()
    for kind in totals:
        with_kind = [name for name in names if groups[name][kind] and name not in chosen]
        for name in with_kind:
            if have[kind] + groups[name][kind] / 2 <= share * totals[kind]:
                chosen.append(name)
                have += groups[name]
        if not have[kind] and with_kind:
            smallest = min(with_kind, key=lambda name: groups[name][kind])
            chosen.append(smallest)
            have += groups[smallest]
    return frozenset(chosen) if all(0 < have[kind] < totals[kind] for kind in totals) else None


def _wav_files(data: str, complaints: Complaints) -> tuple[Path, list[Path]] | None:
    """The folder, and every .wav file in and below it in the order of their names; None after complaining."""
    try:
        folder = Path(data).expanduser()
        if not folder.exists():
            allowed = '"builtin", a path to a folder of WAV files'
            complaints.add(KEY, "there is no such folder", data, allowed, alike(folder, data, ("builtin",)))
            return None
        if not folder.is_dir():
            complaints.add(
                KEY, "this is a file", data, "a folder of WAV files", f"its folder is {folder.parent}"
            )
            return None
        files = sorted(wav_files(folder))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: "~nobody"; ValueError: a NUL
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        complaints.add(KEY, f"the folder cannot be read: {why}", data)
        return None
    if not files:
        complaints.add(KEY, "there are no WAV files in this folder or below it", data, CLASS_FOLDERS)
        return None
    return folder, files


def _recordings(
    files: Sequence[Path],
    folder: Path,
    kinds: Mapping[Path, bool | None],
    data: str,
    complaints: Complaints,
) -> list[Recording] | None:
    """The files by their headers; None after complaining about those that cannot be used."""
    found: list[Recording] = []
    bad: list[str] = []
    for number, path in enumerate(files):
        try:
            rate, seconds = read_header(path)
        except UNREADABLE as error:
            bad.append(f"{path.relative_to(folder)}: {reason(error)}")
            continue
        # Where there is one kind, all of it is real.
        real = kinds[path] is not False
        found.append(Recording(path, number, path.stem, real, False, rate, seconds))
    for text in bad[:SHOWN_FILES]:
        advice = "ffmpeg -i IN -ac 1 -c:a pcm_s16le -bitexact OUT.wav makes a usable file"
        complaints.add(KEY, text, data, "PCM of 8, 16, 24 or 32 bits", advice if text == bad[0] else None)
    if len(bad) > SHOWN_FILES:
        complaints.add(KEY, f"{len(bad) - SHOWN_FILES:,} more files like these", data)
    return None if bad else found


def _divide(
    recordings: Sequence[Recording],
    copied: bool,
    share: float,
    samples: int,
    notes: list[str],
    data: str,
    complaints: Complaints,
) -> SpeechData | None:
    """Keeps some for evaluation: by speaker where every file name tells one, else by file."""
    matches = [_SPEAKER.fullmatch(recording.speaker) for recording in recordings]
    speakers = [match[1].lower() for match in matches if match is not None]
    known = len(set(speakers)) if len(speakers) == len(recordings) else None
    files = [recording.speaker for recording in recordings]  # the same name in both folders is one group
    kept = None
    groups = speakers if known is not None else files
    if known is not None:
        kept = held_out(_counts(groups, recordings), share)
        if kept is None:
            notes.append(
                "The speakers cannot be parted with both kinds of speech on both sides; recordings are split "
                "one by one, and the same voice may be heard in both parts."
            )
            groups = files
    else:
        notes.append(
            "The file names tell no speakers (like 7_anna_0.wav), so recordings are split one by one: the same "
            "voice may be heard in both parts."
        )
    kept = kept if kept is not None else held_out(_counts(groups, recordings), share)
    if kept is None:
        message = f"too few recordings to part into training and evaluation: {len(recordings):,}"
        allowed = (
            "at least two recordings" if copied else "at least two recordings of each kind, under other names"
        )
        complaints.add(KEY, message, data, allowed)
        return None
    parted = tuple(
        replace(recording, speaker=group, held_out=group in kept)
        for recording, group in zip(recordings, groups, strict=True)
    )
    return SpeechData(parted, copied, samples, known, (*notes, *_notes(recordings, samples)))


def _counts(groups: Sequence[str], recordings: Sequence[Recording]) -> dict[str, Counter[bool]]:
    counts: dict[str, Counter[bool]] = {group: Counter() for group in groups}
    for group, recording in zip(groups, recordings, strict=True):
        counts[group][recording.real] += 1
    return counts


def _notes(recordings: Sequence[Recording], samples: int) -> Iterator[str]:
    """What is done to the recordings before they are clips."""
    rates = sorted({recording.sample_rate for recording in recordings} - {SAMPLE_RATE})
    if rates:
        count = sum(recording.sample_rate != SAMPLE_RATE for recording in recordings)
        listed = ", ".join(f"{rate:,}" for rate in rates[:4]) + (", …" if len(rates) > 4 else "")
        yield f"Resampled from {listed} Hz to {SAMPLE_RATE:,} Hz: {count:,} of {len(recordings):,} recordings."
    longer = sum(recording.seconds * SAMPLE_RATE > samples for recording in recordings)
    if longer:
        yield f"Longer than batch.sequence, only the beginning is used: {longer:,} of {len(recordings):,} recordings."


def _check_size(
    section: AntispoofSection, data: SpeechData, batch: BatchSection, complaints: Complaints
) -> None:
    """Complains when there is not one optimizer step, or more than memory should hold."""
    items = data.clips(False)
    if items < batch.items:
        key = "batch.micro" if batch.micro > items else "batch.accumulation"
        message = (
            f"one optimizer step takes {batch.items:,} clips (micro {batch.micro} x accumulation "
            f"{batch.accumulation}), the training part holds {items:,}"
        )
        found = batch.micro if key == "batch.micro" else batch.accumulation
        advice = "or a higher workload.clips" if section.data == "builtin" else None
        complaints.add(key, message, found, f"micro x accumulation of at most {items:,}", advice)
    longest = data.samples / SAMPLE_RATE
    seconds = sum(min(recording.seconds or longest, longest) for recording in data.recordings)
    held = int(seconds * SAMPLE_RATE * 2) * (2 if data.copied else 1)
    if held > MAX_BYTES:
        key = "workload.clips" if section.data == "builtin" else KEY
        message = f"the clips take {size(held)} and are held in memory whole"
        complaints.add(
            key, message, allowed=f"at most {size(MAX_BYTES)}", suggestion="or a lower batch.sequence"
        )
