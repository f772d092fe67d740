"""Checkpoints: everything a run needs to resume bit for bit, written so that a crash never destroys a good one.

A checkpoint is two files: `step-00001200.pt`, and `step-00001200.json` with its size and SHA-256. Each is written to a
temporary file, synced and renamed, the JSON file last: a checkpoint without it is ignored. Several ranks write a folder
`step-00001200` instead of the first file, see `checkpoint_folder`; then the SHA-256 is that of its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ndd_engine.errors import CheckpointError, said, shortened
from ndd_engine.files import PATIENCE_S, open_regular, replacing
from ndd_engine.limits import limit_of
from ndd_engine.text import printable, size

from .checkpoint_folder import explained, read, remove, verify

FORMAT = 1
_MOST_JSON = 65536  # bytes
_LATEST = 1e11  # seconds: the year 5138


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, from its JSON file. metric: the headline metric of the evaluation at its step.

    path: a file, or a folder that several ranks wrote; sha256: of the file, or of the folder's manifest.
    """

    path: Path
    step: int
    bytes: int
    sha256: str
    t: float
    metric: float | None
    description: Path

    @property
    def folder(self) -> bool:
        """Whether several ranks wrote it."""
        return self.path.suffix != ".pt"


@dataclass(frozen=True)
class Slot:
    """Where a new checkpoint goes. earlier: what the same step has already, which stays valid until `commit`."""

    step: int
    path: Path
    description: Path
    earlier: Path | None
    t: float


def last_good(saved: Saved | None) -> str:
    """For a message: the newest checkpoint."""
    return (
        "there is no checkpoint"
        if saved is None
        else f"the last good checkpoint is step {saved.step} ({saved.path.name})"
    )


def unwritten(error: OSError, step: int, folder: Path) -> str:
    """Why the checkpoint of a step could not be written."""
    reason = limit_of(error) or error.strerror or said(error)
    where = printable(str(folder))
    return (
        f"cannot write the checkpoint of step {step} to {where}: {reason} ({size(free_space(folder))} free)"
    )


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Saved]:
        """All complete checkpoints, oldest first. Files without a valid JSON file are ignored, see `damaged`.

        The order is that of writing, not of steps: a run that returned to an earlier step continues from there.
        """
        return self._every()

    def _every(self) -> list[Saved]:
        found = [saved for saved in map(_described, self._descriptions()) if saved is not None]
        return sorted(found, key=lambda saved: (saved.t, saved.step))

    def damaged(self) -> list[str]:
        """Names of the JSON files that do not describe a checkpoint."""
        return [path.name for path in sorted(self._descriptions()) if _described(path) is None]

    def _descriptions(self) -> Iterator[Path]:
        return self.folder.glob("step-*.json")

    def save(self, step: int, state: dict[str, Any], metric: float | None, best_is_lower: bool) -> Saved:
        """Write a checkpoint and delete those no longer kept. Raises OSError and then leaves the disk unchanged."""
        slot = self.slot(step, ".pt")
        with replacing(slot.path, PATIENCE_S) as file:
            digest = _Digest(file)
            try:
                torch.save(state, digest)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch raises its own error on top of the one from the file or from a stop.
                raise (digest.failed or _interruption(error) or error) from None
        return self.commit(slot, digest.count, digest.hash.hexdigest(), metric, best_is_lower)

    def slot(self, step: int, suffix: str) -> Slot:
        """Where to write a checkpoint of this step. suffix: ".pt", or "" for a folder. Raises OSError."""
        self.folder.mkdir(exist_ok=True)  # never recreates a deleted run folder
        every = self._every()
        description = self.folder / f"step-{step:08d}.json"
        earlier = next((saved.path for saved in every if saved.description == description), None)
        # An earlier checkpoint of this step stays valid until the new JSON file replaces its own.
        path = description.with_suffix(suffix)
        if path == earlier:
            path = description.with_suffix(f".again{suffix}")
        # Clocks can go backwards and differ between hosts; the order of writing must not.
        t = max([time.time(), *(saved.t + 1e-3 for saved in every)])
        return Slot(step, path, description, earlier, t)

    def commit(self, slot: Slot, count: int, sha256: str, metric: float | None, best_is_lower: bool) -> Saved:
        """Make what lies at `slot.path` a checkpoint, and delete those no longer kept. Raises OSError.

        count: its bytes. sha256: see Saved.
        """
        if metric is not None and not math.isfinite(metric):
            metric = None  # NaN compares with nothing
        saved = Saved(slot.path, slot.step, count, sha256, slot.t, metric, slot.description)
        body = {"format": FORMAT, "file": slot.path.name, **asdict(saved)}
        del body["path"], body["description"]
        try:
            with replacing(slot.description, PATIENCE_S) as file:
                file.write(json.dumps(body).encode())
        except BaseException:
            _delete(slot.path)  # without its JSON file it only takes up space
            raise
        if slot.earlier is not None:
            _delete(slot.earlier)
        self._prune(best_is_lower)
        return saved

    def load(self, saved: Saved, only: Collection[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint; of a folder, only these keys. Raises CheckpointError with the file and what is wrong.

        The random generators of a folder are those of rank 0.
        """
        if saved.folder:
            names = verify(saved.path, saved.bytes, saved.sha256)
            return own_format(saved, read(saved.path, names, only=only and {"format", *only}))
        verify_file(saved)
        with explained(saved.path):
            return own_format(saved, torch.load(saved.path, map_location="cpu", weights_only=True))

    def _prune(self, best_is_lower: bool) -> None:
        every = self._every()
        judged = [saved for saved in every if saved.metric is not None]
        best = (min if best_is_lower else max)(judged, key=lambda saved: saved.metric or 0.0, default=None)
        for saved in every[: -self.keep]:
            if saved != best:
                # The JSON file first: a crash in between must not leave one that refers to a missing file.
                with contextlib.suppress(OSError):
                    saved.description.unlink(missing_ok=True)
                    _delete(saved.path)
        self.clean()

    def clean(self) -> None:
        """Delete what a crash left while it was written. Only for the process that writes the checkpoints."""
        for stale in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                _delete(stale)


def verify_file(saved: Saved) -> None:
    """Raise CheckpointError unless the file of a checkpoint is as it was written."""
    shown = printable(str(saved.path))
    with explained(saved.path):
        status = saved.path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{shown} is damaged: it is not a regular file")
        actual = status.st_size
        if actual != saved.bytes:
            sizes = f"{size(actual)} instead of {size(saved.bytes)}"
            raise CheckpointError(f"{shown} is damaged: its size is {sizes}")
        with saved.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != saved.sha256:
            raise CheckpointError(f"{shown} is damaged: its contents do not match the checksum")


def own_format(saved: Saved, state: Any) -> dict[str, Any]:
    """The loaded state, if this program wrote it. Raises CheckpointError."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        shown = printable(str(saved.path))
        raise CheckpointError(f"{shown} is not a checkpoint of this program (format {FORMAT})")
    return state


def _delete(path: Path) -> None:
    """Delete the file or folder of a checkpoint, if it is there. Raises OSError for a file."""
    if path.is_dir() and not path.is_symlink():
        remove(path)
    else:
        path.unlink(missing_ok=True)


def newest_good(store: CheckpointStore, step: int | None = None) -> tuple[Saved, dict[str, Any]]:
    """The newest checkpoint, or the one of `step`, with its state.

    Raises CheckpointError if there is none or if it is damaged; the message then names the previous good one.
    """
    every = store.all()
    damaged = ", ".join(shortened(name, 40) for name in store.damaged()[:5])
    if step is not None:
        chosen = [saved for saved in every if saved.step == step]
        if not chosen:
            there = ", ".join(str(saved.step) for saved in every) or "none"
            bad = f" ({damaged} is damaged)" if damaged else ""
            raise CheckpointError(f"there is no checkpoint of step {step}; available: {there}{bad}")
        return chosen[0], store.load(chosen[0])
    if not every:
        orphans = ", ".join(
            sorted(path.name for path in store.folder.glob("step-*") if path.suffix != ".json")
        )
        extra = f" ({orphans} is incomplete)" if orphans else f" ({damaged} is damaged)" if damaged else ""
        folder = printable(str(store.folder))
        raise CheckpointError(f"{folder} contains no checkpoint{extra}; start a new run")
    try:
        return every[-1], store.load(every[-1])
    except CheckpointError as error:
        for earlier in reversed(every[:-1]):
            try:
                store.load(earlier)
            except CheckpointError:
                continue
            advice = f"the previous checkpoint is good: add --from-step {earlier.step}"
            raise CheckpointError(f"{error}; {advice}") from None
        raise CheckpointError(f"{error}; there is no other good checkpoint") from None


def _described(description: Path) -> Saved | None:
    """The checkpoint that a JSON file describes; None if the file is damaged."""
    try:
        file = open_regular(description)
        try:
            body = json.loads(os.read(file, _MOST_JSON))
        finally:
            os.close(file)
        step, count, t, metric = body["step"], body["bytes"], body["t"], body.get("metric")
        name, sha256 = body["file"], body["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    stem = f"step-{step:08d}" if type(step) is int and 0 <= step < 2**63 else None
    valid = (
        description.name == f"{stem}.json"
        and name in (f"{stem}.pt", f"{stem}.again.pt", stem, f"{stem}.again")
        and type(count) is int
        and isinstance(sha256, str)
        and isinstance(t, (int, float))
        and 0 <= t < _LATEST
        and (metric is None or (isinstance(metric, (int, float)) and abs(metric) < math.inf))
    )
    return Saved(description.with_name(name), step, count, sha256, t, metric, description) if valid else None


class _Digest:
    """A file wrapper that counts and hashes what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.count = 0
        self.failed: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            written = self._file.write(view)
        except BaseException as error:
            self.failed = error
            raise
        self.hash.update(view)
        self.count += view.nbytes
        return written

    def flush(self) -> None:
        self._file.flush()


def _interruption(error: BaseException) -> BaseException | None:
    """The immediate stop behind an error, if there is one: it can arrive between any two writes."""
    seen: BaseException | None = error
    while isinstance(seen, Exception):
        seen = seen.__cause__ or seen.__context__
    return seen


def free_space(folder: Path) -> int | None:
    """Free bytes for this user on the folder's disk, or None if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
