"""Speech recordings: which files there are, real or spoofed, training or evaluation. Imports no torch."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import AntispoofSection
from ndd_engine.text import size

from .files import UNREADABLE_PATH, path_error, suggest_path
from .problems import KEY, ErrorList, Problems, Progress, check_step
from .wav_files import SHORTEST_S, UNREADABLE, read_header, reason, wav_files
from .windows import DataFacts

SAMPLE_RATE = 16_000  # Hz, of all clips
HOP = 160  # samples between the frames of a spectrogram
MAX_BYTES = 4 << 30  # all clips are kept in memory, two bytes per sample

REAL_FOLDERS = ("bonafide", "genuine", "real")
SPOOF_FOLDERS = ("fake", "spoof")
CLASS_FOLDERS = (
    "subfolders with recordings of both kinds, for example bonafide and spoof; or only real recordings, which are "
    "then copied with Griffin-Lim"
)

PAIRS_PER_VOICE = 10  # in the built-in data
VOICES = (2, 50)  # minimum and maximum

_SPEAKER = re.compile(r"\d+_([^\W\d_][^_]*)_\d+")  # DIGIT_SPEAKER_TAKE, as in the Free Spoken Digit Dataset


@dataclass(frozen=True)
class SpeechRecording:
    """One real or spoofed recording.

    path: a WAV file, or None if it is synthetic. number: its index. speaker: the speaker, or the file's name if the
    speaker is unknown. held_out: kept for evaluation. seconds: its length, 0 if it is synthetic.
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
    """recordings: in the order of evaluation. copied: each has a Griffin-Lim copy, which is the spoof.

    samples: length of a clip. speakers: their number, or None if the file names do not contain them.
    """

    recordings: tuple[SpeechRecording, ...]
    copied: bool
    samples: int
    speakers: int | None
    notes: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        return frame_count(self.samples)

    def clips(self, held_out: bool) -> int:
        """Number of clips in the evaluation part, or in the training part."""
        found = sum(recording.held_out is held_out for recording in self.recordings)
        return 2 * found if self.copied else found

    def facts(self) -> DataFacts:
        return DataFacts(self.clips(False), self.clips(True), self.frames, "clip", "frame", self.line())

    def line(self) -> str:
        total = self.clips(False) + self.clips(True)
        voices = (
            f" of {self.speakers} speaker{'s' * (self.speakers != 1)}" if self.speakers is not None else ""
        )
        spoofed = sum(not recording.real for recording in self.recordings)
        kinds = "half of them Griffin-Lim copies" if self.copied else f"{spoofed:,} of them spoofed"
        return (
            f"{total:,} clips{voices}, {kinds}: {self.clips(False):,} of {self.frames:,} frames per epoch, "
            f"{self.clips(True):,} for evaluation"
        )


def frame_count(samples: int) -> int:
    """Frames of a clip: one centred on every HOP-th sample, starting with the first."""
    return samples // HOP + 1


def read_recordings(
    config: Config, section: AntispoofSection, problems: Problems, progress: Progress
) -> SpeechData:
    """The recordings. Raises ConfigError with every error."""
    batch = config.batch
    if batch.micro == 1:
        message = "the model uses batch normalisation, which needs a micro-batch of at least two items"
        problems.add("batch.micro", message, 1, "2 or more")
    shortest = round(SHORTEST_S * SAMPLE_RATE)
    if batch.sequence < shortest:
        message = f"a clip of this many samples at {SAMPLE_RATE:,} Hz is too short for speech"
        problems.add("batch.sequence", message, batch.sequence, f"{shortest:,} or more")
    if section.data == "builtin":
        data = synthetic_recordings(section, batch.sequence)
    else:
        progress(f"reading {section.data}")
        data = read_folder(section.eval_fraction, batch.sequence, problems)
    _check_size(section, data, config, problems)
    problems.check()
    return data


def synthetic_recordings(section: AntispoofSection, samples: int) -> SpeechData:
    """The built-in recordings, not synthesised yet: about ten per voice, with separate voices for evaluation."""
    pairs = section.clips // 2
    fewest, most = VOICES
    voices = min(max(pairs // PAIRS_PER_VOICE, fewest), most)
    training = voices - max(round(section.eval_fraction * voices), 1)
    recordings = tuple(
        SpeechRecording(
            None, number, f"voice {number % voices}", True, number % voices >= training, SAMPLE_RATE, 0.0
        )
        for number in range(pairs)
    )
    return SpeechData(recordings, True, samples, voices)


def read_folder(eval_fraction: float, samples: int, problems: Problems) -> SpeechData:
    """A folder of WAV files: subfolders with real and spoofed speech, or only real recordings."""
    folder, files = _wav_files(problems)
    kinds = {file: kind_of(file.relative_to(folder)) for file in files}
    has_classes = any(kind is not None for kind in kinds.values())
    notes = []
    if has_classes:
        outside = sum(kind is None for kind in kinds.values())
        if outside:
            notes.append(
                f"Ignored because they are in no folder of real or spoofed speech: {outside:,} of "
                f"{len(files):,} recordings."
            )
        for kind, names in ((True, REAL_FOLDERS), (False, SPOOF_FOLDERS)):
            if kind not in kinds.values():
                wanted = "real" if kind else "spoofed"
                message = f"there is no {wanted} speech: no WAV file in a folder with such a name"
                advice = None if kind else "to generate it, set the path to the folder of real recordings"
                problems.stop(message, " or ".join(names), advice)
    chosen = [file for file in files if kinds[file] is not None or not has_classes]
    # Not sorted by kind or speaker, so that an evaluation of a few batches has both.
    chosen.sort(key=lambda file: (zlib.crc32(os.fsencode(file.relative_to(folder))), file))
    recordings: list[SpeechRecording] = []
    bad = ErrorList(problems, "PCM of 8, 16, 24 or 32 bits", "files")
    for number, path in enumerate(chosen):
        try:
            rate, seconds = read_header(path)
        except UNREADABLE as error:
            advice = "ffmpeg -i IN -ac 1 -c:a pcm_s16le -bitexact OUT.wav writes a usable file"
            bad.add(str(path.relative_to(folder)), reason(error), None if bad.count else advice)
            continue
        # Without folders of both kinds, every recording is real.
        real = kinds[path] is not False
        recordings.append(SpeechRecording(path, number, path.stem, real, False, rate, seconds))
    bad.finish()
    divided, speakers = _divide(recordings, eval_fraction, notes)
    if divided is None:
        allowed = "at least two recordings" + (" of each kind, with different names" if has_classes else "")
        problems.stop(f"too few recordings for training and evaluation: {len(recordings):,}", allowed)
    notes += _notes(recordings, samples)
    return SpeechData(divided, not has_classes, samples, speakers, tuple(notes))


def kind_of(relative: Path) -> bool | None:
    """True in a folder of real speech, False in one of spoofed speech, else None; the innermost folder decides."""
    for name in reversed(relative.parts[:-1]):
        plain = re.sub(r"[-_ ]", "", name).lower()
        if plain in REAL_FOLDERS:
            return True
        if plain in SPOOF_FOLDERS:
            return False
    return None


def held_out(groups: Mapping[str, Counter[bool]], share: float) -> frozenset[str] | None:
    """Groups with about `share` of each kind in total; None if a kind cannot be in both parts.

    groups: recordings of each kind, by group. The choice depends only on the groups' names, so that runs with other
    seeds or a few more recordings are evaluated on the same voices.
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


def _wav_files(problems: Problems) -> tuple[Path, list[Path]]:
    """The folder and every .wav file in it and below, sorted by name."""
    try:
        folder = Path(problems.data).expanduser()
        if not folder.exists():
            advice = suggest_path(folder, problems.data, ("builtin",))
            problems.stop("there is no such folder", '"builtin", a path to a folder of WAV files', advice)
        if not folder.is_dir():
            problems.stop("this is a file", "a folder of WAV files", f"its folder is {folder.parent}")
        files = sorted(wav_files(folder))
    except UNREADABLE_PATH as error:
        problems.stop(f"the folder cannot be read: {path_error(error)}")
    if not files:
        problems.stop("there are no WAV files in this folder or below it", CLASS_FOLDERS)
    return folder, files


def _divide(
    recordings: Sequence[SpeechRecording], share: float, notes: list[str]
) -> tuple[tuple[SpeechRecording, ...] | None, int | None]:
    """(the recordings, of which a share is held out, number of speakers); None for each that cannot be.

    Splits by speaker if every file name contains one, else by file.
    """
    matches = [_SPEAKER.fullmatch(recording.speaker) for recording in recordings]
    speakers = [match[1].lower() for match in matches if match is not None]
    known = len(set(speakers)) if len(speakers) == len(recordings) else None
    kept = None if known is None else held_out(_counts(speakers, recordings), share)
    groups = speakers
    if kept is None:
        without = "The file names do not contain speakers (like 7_anna_0.wav)"
        mixed = "The data cannot be split by speaker with both kinds of speech in both parts"
        why = without if known is None else mixed
        notes.append(f"{why}: recordings are split one by one, and both parts may have the same voice.")
        groups = [recording.speaker for recording in recordings]  # the same name in both folders is one group
        kept = held_out(_counts(groups, recordings), share)
    if kept is None:
        return None, known
    divided = tuple(
        replace(recording, speaker=group, held_out=group in kept)
        for recording, group in zip(recordings, groups, strict=True)
    )
    return divided, known


def _counts(groups: Sequence[str], recordings: Sequence[SpeechRecording]) -> dict[str, Counter[bool]]:
    counts: dict[str, Counter[bool]] = {group: Counter() for group in groups}
    for group, recording in zip(groups, recordings, strict=True):
        counts[group][recording.real] += 1
    return counts


def _notes(recordings: Sequence[SpeechRecording], samples: int) -> Iterator[str]:
    """How the recordings are changed to become clips."""
    rates = sorted({recording.sample_rate for recording in recordings} - {SAMPLE_RATE})
    if rates:
        count = sum(recording.sample_rate != SAMPLE_RATE for recording in recordings)
        listed = ", ".join(f"{rate:,}" for rate in rates[:4]) + (", …" if len(rates) > 4 else "")
        yield f"Resampled from {listed} Hz to {SAMPLE_RATE:,} Hz: {count:,} of {len(recordings):,} recordings."
    longer = sum(recording.seconds * SAMPLE_RATE > samples for recording in recordings)
    if longer:
        yield f"Cut to batch.sequence: {longer:,} of {len(recordings):,} recordings, of which only the start is used."


def _check_size(section: AntispoofSection, data: SpeechData, config: Config, problems: Problems) -> None:
    """Adds a problem if there is not one optimizer step, or more data than fits into memory."""
    builtin = section.data == "builtin"
    advice = "or a higher workload.clips" if builtin else None
    check_step(config, data.clips(False), "clips", problems, advice)
    longest = data.samples / SAMPLE_RATE
    seconds = sum(min(recording.seconds or longest, longest) for recording in data.recordings)
    held = int(seconds * SAMPLE_RATE * 2) * (2 if data.copied else 1)
    if held > MAX_BYTES:
        message = f"the clips take {size(held)} and are kept in memory"
        allowed, advice = f"at most {size(MAX_BYTES)}", "or a lower batch.sequence"
        problems.add("workload.clips" if builtin else KEY, message, allowed=allowed, suggestion=advice)
