"""Speech recordings: which files there are, real or spoofed, training or evaluation. Imports no torch."""

from __future__ import annotations

import os
import re
import wave
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ndd_engine.workloads import DataFacts, ErrorList, Problems, Settings, files_below

SAMPLE_RATE = 16_000  # Hz, of all clips
HOP = 160  # samples between the frames of a spectrogram
MAX_GIB = 4  # all clips are kept in memory, two bytes per sample
SHORTEST_S = 0.1  # minimum length of a recording
RATES = (4_000, 192_000)  # Hz
UNREADABLE = (OSError, EOFError, wave.Error, ValueError)  # raised when a bad file is read

REAL_FOLDERS = ("bonafide", "genuine", "real")
SPOOF_FOLDERS = ("fake", "spoof")
CLASS_FOLDERS = (
    "subfolders with recordings of both kinds, for example bonafide and spoof; or only real recordings, which are "
    "then copied with Griffin-Lim"
)

PAIRS_PER_VOICE = 10  # in the built-in data
VOICES = (2, 50)  # minimum and maximum

_SPEAKER = re.compile(r"\d+_([^\W\d_][^_]*)_\d+")  # DIGIT_SPEAKER_TAKE, as in the Free Spoken Digit Dataset
# Messages of the standard library about WAV files, and what is shown instead.
_REASONS = {
    "file does not start with RIFF id": "this is not a WAV file: it does not start with RIFF",
    "not a WAVE file": "this is not a WAV file",
    "fmt chunk and/or data chunk missing": "it has no samples",
    "bad # of channels": "it has no channels",
    "": "the file is truncated",
    "unknown format: 3": "it has floating-point samples, not plain PCM",
    "unknown format: 65534": "it has the extensible format, not plain PCM",
}


@dataclass(frozen=True)
class VoiceRecording:
    """One real or spoofed recording.

    path: a WAV file, or None if it is synthetic. number: its index. speaker: the speaker, or the file's name if the
    speaker is unknown. held_out: kept for evaluation. seconds: its length, 0 if it is synthetic.
    """

    path: Path | None
    number: int
    speaker: str
    real: bool
    held_out: bool = False
    sample_rate: int = SAMPLE_RATE
    seconds: float = 0.0


@dataclass(frozen=True)
class SpeechData:
    """recordings: in the order of evaluation. copied: each has a Griffin-Lim copy, which is the spoof.

    samples: length of a clip. speakers: their number, or None if the file names do not contain them.
    """

    recordings: Sequence[VoiceRecording]
    copied: bool
    samples: int
    speakers: int | None
    notes: Sequence[str] = ()

    def clips(self, held_out: bool) -> int:
        """Number of clips in the evaluation part, or in the training part."""
        found = sum(recording.held_out is held_out for recording in self.recordings)
        return 2 * found if self.copied else found

    @property
    def facts(self) -> DataFacts:
        train, evaluation, frames = self.clips(False), self.clips(True), self.samples // HOP + 1
        voices = "" if self.speakers is None else f" of {self.speakers} speaker{'s' * (self.speakers != 1)}"
        spoofed = sum(not recording.real for recording in self.recordings)
        kinds = "half of them Griffin-Lim copies" if self.copied else f"{spoofed:,} of them spoofed"
        parts = f"{train:,} of {frames:,} frames per epoch, {evaluation:,} for evaluation"
        text = f"{train + evaluation:,} clips{voices}, {kinds}: {parts}"
        return DataFacts(train, evaluation, frames, "clip", "frame", text)


def read(settings: Settings) -> SpeechData:
    """The recordings. Raises ConfigError with every error."""
    problems, options, samples = settings.problems, settings.options, settings.sequence
    builtin, share = settings.data == "builtin", options["eval_fraction"]
    if settings.micro == 1:
        message = "the model uses batch normalisation, which needs a micro-batch of at least two items"
        problems.add("batch.micro", message, 1, "2 or more")
    shortest = round(SHORTEST_S * SAMPLE_RATE)
    if samples < shortest:
        message = f"a clip of this many samples at {SAMPLE_RATE:,} Hz is too short for speech"
        problems.add("batch.sequence", message, samples, f"{shortest:,} or more")
    if builtin:
        data = synthetic_recordings(options["clips"], share, samples)
    else:
        settings.progress(f"reading {settings.data}")
        data = read_folder(share, samples, problems)
    settings.check_items(data.clips(False), "clips", "or a higher workload.clips" if builtin else None)
    longest = samples / SAMPLE_RATE
    seconds = sum(min(recording.seconds or longest, longest) for recording in data.recordings)
    held = int(seconds * SAMPLE_RATE * 2) * (2 if data.copied else 1)
    if held > MAX_GIB << 30:
        message = f"the clips take {held / (1 << 30):.3g} GiB and are kept in memory"
        key, allowed = "workload.clips" if builtin else problems.key, f"at most {MAX_GIB} GiB"
        problems.add(key, message, allowed=allowed, suggestion="or a lower batch.sequence")
    problems.check()
    return data


def synthetic_recordings(clips: int, eval_fraction: float, samples: int) -> SpeechData:
    """The built-in recordings, not synthesised yet: about ten per voice, with separate voices for evaluation."""
    pairs = clips // 2
    voices = min(max(pairs // PAIRS_PER_VOICE, VOICES[0]), VOICES[1])
    training = voices - max(round(eval_fraction * voices), 1)
    recordings = [
        VoiceRecording(None, number, f"voice {number % voices}", True, number % voices >= training)
        for number in range(pairs)
    ]
    return SpeechData(recordings, True, samples, voices)


def read_folder(eval_fraction: float, samples: int, problems: Problems) -> SpeechData:
    """A folder of WAV files: subfolders with real and spoofed speech, or only real recordings."""
    files = files_below(problems, (".wav",), "WAV files", ("builtin",), CLASS_FOLDERS)
    folder = Path(problems.data).expanduser()
    kinds = {file: kind_of(file.relative_to(folder)) for file in files}
    chosen = [file for file in files if kinds[file] is not None]
    notes = []
    if chosen:
        if outside := len(files) - len(chosen):
            notes.append(
                f"Ignored because they are in no folder of real or spoofed speech: {outside:,} of {len(files):,} "
                "recordings."
            )
        advice = "to generate it, set the path to the folder of real recordings"
        for real, wanted, names, more in (
            (True, "real", REAL_FOLDERS, None),
            (False, "spoofed", SPOOF_FOLDERS, advice),
        ):
            if real not in kinds.values():
                message = f"there is no {wanted} speech: no WAV file in a folder with such a name"
                problems.stop(message, " or ".join(names), more)
    recordings: list[VoiceRecording] = []
    bad = ErrorList(problems, "PCM of 8, 16, 24 or 32 bits", "files")
    # Not sorted by kind or speaker, so that an evaluation of a few batches has both.
    for path in sorted(chosen or files, key=lambda file: (_hash(file.relative_to(folder)), file)):
        try:
            rate, seconds = _read_header(path)
        except UNREADABLE as error:
            advice = "ffmpeg -i IN -ac 1 -c:a pcm_s16le -bitexact OUT.wav writes a usable file"
            bad.add(str(path.relative_to(folder)), reason(error), None if bad.count else advice)
            continue
        # Without folders of both kinds, every recording is real.
        real = kinds[path] is not False
        recordings.append(VoiceRecording(path, len(recordings), path.stem, real, False, rate, seconds))
    bad.finish()
    divided, speakers = _divide(recordings, eval_fraction, notes)
    if divided is None:
        allowed = "at least two recordings" + (" of each kind, with different names" if chosen else "")
        problems.stop(f"too few recordings for training and evaluation: {len(recordings):,}", allowed)
    other = [recording.sample_rate for recording in recordings if recording.sample_rate != SAMPLE_RATE]
    if other:
        rates = [f"{rate:,}" for rate in sorted(set(other))]
        listed = ", ".join([*rates[:4], *(["…"] if len(rates) > 4 else [])])
        of = f"{len(other):,} of {len(recordings):,} recordings"
        notes.append(f"Resampled from {listed} Hz to {SAMPLE_RATE:,} Hz: {of}.")
    if longer := sum(recording.seconds * SAMPLE_RATE > samples for recording in recordings):
        of = f"{longer:,} of {len(recordings):,} recordings"
        notes.append(f"Cut to batch.sequence: {of}, of which only the start is used.")
    return SpeechData(divided, not chosen, samples, speakers, notes)


def kind_of(relative: Path) -> bool | None:
    """True in a folder of real speech, False in one of spoofed speech, else None; the innermost folder decides."""
    for name in reversed(relative.parts[:-1]):
        plain = re.sub(r"[-_ ]", "", name).lower()
        if plain in (*REAL_FOLDERS, *SPOOF_FOLDERS):
            return plain in REAL_FOLDERS
    return None


def held_out(groups: Mapping[str, Counter[bool]], share: float) -> frozenset[str] | None:
    """Groups with about `share` of each kind in total; None if a kind cannot be in both parts.

    groups: recordings of each kind, by group. The choice depends only on the groups' names, so that runs with other
    seeds or a few more recordings are evaluated on the same voices.
    """
    names = sorted(groups, key=lambda name: (_hash(name), name))
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


def _hash(name: str | Path) -> int:
    return zlib.crc32(os.fsencode(name))


def _divide(
    recordings: Sequence[VoiceRecording], share: float, notes: list[str]
) -> tuple[list[VoiceRecording] | None, int | None]:
    """(the recordings, of which a share is held out, number of speakers); None for each that cannot be.

    Splits by speaker if every file name contains one, else by file; the same name in both folders is one group.
    """
    matches = [_SPEAKER.fullmatch(recording.speaker) for recording in recordings]
    speakers = [match[1].lower() for match in matches if match is not None]
    known = len(set(speakers)) if len(speakers) == len(recordings) else None
    files = [recording.speaker for recording in recordings]
    for groups in (files,) if known is None else (speakers, files):
        counts: dict[str, Counter[bool]] = {group: Counter() for group in groups}
        for group, recording in zip(groups, recordings, strict=True):
            counts[group][recording.real] += 1
        kept = held_out(counts, share)
        if groups is files:
            without = "The file names do not contain speakers (like 7_anna_0.wav)"
            mixed = "The data cannot be split by speaker with both kinds of speech in both parts"
            why = without if known is None else mixed
            notes.append(f"{why}: recordings are split one by one, and both parts may have the same voice.")
        if kept is not None:
            divided = zip(groups, recordings, strict=True)
            return [replace(of, speaker=group, held_out=group in kept) for group, of in divided], known
    return None, known


# WAV files.


def _read_header(path: Path) -> tuple[int, float]:
    """(sample rate, seconds) of a WAV file. Raises UNREADABLE."""
    if not path.is_file():
        raise ValueError("this is not a regular file")
    with _opened(path) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        claimed = file.getnframes()
    if width not in (1, 2, 3, 4):
        raise ValueError(f"its samples have {8 * width} bits")
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"its sample rate of {rate:,} Hz is not between {RATES[0]:,} and {RATES[1]:,} Hz")
    # The header of a truncated file, or of one written to a pipe, claims more than the file has.
    seconds = min(claimed, path.stat().st_size // (width * channels)) / rate
    if seconds < SHORTEST_S:
        raise ValueError(f"it lasts {seconds:.3f} s; the minimum is {SHORTEST_S:g} s")
    return rate, seconds


def read_samples(path: Path, seconds: float) -> tuple[bytes, int, int]:
    """(PCM bytes of the first `seconds` or less, bytes per sample, channels) of a WAV file. Raises UNREADABLE."""
    with _opened(path) as file:
        frames = min(file.getnframes(), round(seconds * file.getframerate()))
        return file.readframes(frames), file.getsampwidth(), file.getnchannels()


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(os.fspath(path), "rb") as file:
            yield file
    except RuntimeError:  # a chunk that ends outside the file
        raise ValueError("the chunk lengths in its header are inconsistent") from None


def reason(error: Exception) -> str:
    """Why a WAV file cannot be read, as a message."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    other = re.fullmatch(r"unknown format: (\d+)", text)
    return _REASONS.get(text, text if other is None else f"it has format {other[1]}, not plain PCM")
