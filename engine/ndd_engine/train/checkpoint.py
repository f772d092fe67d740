"""Checkpoints: everything a run needs to resume bit for bit, written so that a crash never destroys a good one.

A checkpoint is two files: `step-00001200.pt`, and `step-00001200.json` with its size and SHA-256. Each is written to a
temporary file, synced and renamed, the JSON file last: a checkpoint without it is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ndd_engine.errors import CheckpointError
from ndd_engine.files import PATIENCE_S, replacing
from ndd_engine.text import printable, size

FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, from its JSON file. metric: the headline metric of the evaluation at its step."""

    path: Path
    step: int
    bytes: int
    sha256: str
    t: float
    metric: float | None
    description: Path


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Saved]:
        """All complete checkpoints, oldest first. Files without a readable JSON file are ignored.

        The order is that of writing, not of steps: a run that returned to an earlier step continues from there.
        """
        found = []
        for description in self.folder.glob("step-*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                body = json.loads(description.read_text(encoding="utf-8"))
                path, sha256 = self.folder / Path(str(body["file"])).name, str(body["sha256"])
                step, count, t = int(body["step"]), int(body["bytes"]), float(body["t"])
                found.append(Saved(path, step, count, sha256, t, body.get("metric"), description))
        return sorted(found, key=lambda saved: (saved.t, saved.step))

    def save(self, step: int, state: dict[str, Any], metric: float | None, best_is_lower: bool) -> Saved:
        """Write a checkpoint and delete those no longer kept. Raises OSError and then leaves the disk unchanged."""
        if metric is not None and not math.isfinite(metric):
            metric = None  # NaN compares with nothing
        self.folder.mkdir(exist_ok=True)  # never recreates a deleted run folder
        every = self.all()
        description = self.folder / f"step-{step:08d}.json"
        earlier = next((saved.path for saved in every if saved.description == description), None)
        # An earlier checkpoint of this step stays valid until the new JSON file replaces its own.
        path = description.with_suffix(".pt")
        if path == earlier:
            path = description.with_suffix(".again.pt")
        with replacing(path, PATIENCE_S) as file:
            digest = _Digest(file)
            try:
                torch.save(state, digest)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch raises its own error on top of the one from the file or from a stop.
                raise (digest.failed or _interruption(error) or error) from None
        # Clocks can go backwards and differ between hosts; the order of writing must not.
        t = max([time.time(), *(saved.t + 1e-3 for saved in every)])
        saved = Saved(path, step, digest.count, digest.hash.hexdigest(), t, metric, description)
        body = {"format": FORMAT, "file": path.name, **asdict(saved)}
        del body["path"], body["description"]
        try:
            with replacing(description, PATIENCE_S) as file:
                file.write(json.dumps(body).encode())
        except BaseException:
            path.unlink(missing_ok=True)  # without its JSON file it only takes up space
            raise
        if earlier is not None:
            earlier.unlink(missing_ok=True)
        self._prune(best_is_lower)
        return saved

    def load(self, saved: Saved) -> dict[str, Any]:
        """Load a checkpoint. Raises CheckpointError with the file and what is wrong with it."""
        shown = printable(str(saved.path))
        try:
            actual = saved.path.stat().st_size
            if actual != saved.bytes:
                sizes = f"{size(actual)} instead of {size(saved.bytes)}"
                raise CheckpointError(f"{shown} is damaged: its size is {sizes}")
            with saved.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != saved.sha256:
                raise CheckpointError(f"{shown} is damaged: its contents do not match the checksum")
            state = torch.load(saved.path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(f"{shown} is missing") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {shown}: {error.strerror}") from None
        except pickle.UnpicklingError:
            raise CheckpointError(
                f"{shown} contains more than tensors and plain values, so it is not loaded"
            ) from None
        except (RuntimeError, EOFError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{shown} is damaged: {printable(str(error).splitlines()[0])}") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"{shown} is not a checkpoint of this program (format {FORMAT})")
        return state

    def _prune(self, best_is_lower: bool) -> None:
        every = self.all()
        judged = [saved for saved in every if saved.metric is not None]
        best = (min if best_is_lower else max)(judged, key=lambda saved: saved.metric or 0.0, default=None)
        for saved in every[: -self.keep]:
            if saved != best:
                # The JSON file first: a crash in between must not leave one that refers to a missing file.
                saved.description.unlink(missing_ok=True)
                saved.path.unlink(missing_ok=True)
        for stale in self.folder.glob("*.tmp"):
            stale.unlink(missing_ok=True)


def newest_good(store: CheckpointStore, step: int | None = None) -> tuple[Saved, dict[str, Any]]:
    """The newest checkpoint, or the one of `step`, with its state.

    Raises CheckpointError if there is none or if it is damaged; the message then names the previous good one.
    """
    every = store.all()
    if step is not None:
        chosen = [saved for saved in every if saved.step == step]
        if not chosen:
            there = ", ".join(str(saved.step) for saved in every) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step}; available: {there}")
        return chosen[0], store.load(chosen[0])
    if not every:
        orphans = ", ".join(sorted(path.name for path in store.folder.glob("step-*.pt")))
        extra = f" ({orphans} is incomplete)" if orphans else ""
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


def finite(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer that contains NaN or infinity, or None."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return str(name)
    return None


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
