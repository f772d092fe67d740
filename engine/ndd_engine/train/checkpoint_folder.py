"""A checkpoint that several ranks wrote: a folder of files, with a manifest of their sizes and checksums.

    step-00001200/
        manifest.json       size and SHA-256 of every other file
        state.pt            all that is not a tensor, and the places of the tensors
        rank-00000.pt       what belongs to a rank, such as its random generators
        .metadata           index of the tensors (torch.distributed.checkpoint)
        __0_0.distcp        tensors and shards that rank 0 wrote

The manifest's own checksum is in the JSON file beside the folder, which is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndd_engine.errors import CheckpointError, UsageError, said, shortened
from ndd_engine.files import open_regular
from ndd_engine.text import printable, size

from .checkpoint_tree import Like, Place, mapped, top_level

MANIFEST = "manifest.json"
PLAIN = "state.pt"
# Bytes of a manifest: some hundred thousand ranks.
_MOST_MANIFEST = 1 << 26


def rank_file(rank: int) -> str:
    """Name of the file of one rank's own state."""
    return f"rank-{rank:05d}.pt"


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise CheckpointError with the path and what is wrong with it, for whatever reading it raises."""
    shown = printable(str(path))
    try:
        yield
    except (CheckpointError, UsageError):
        raise
    except FileNotFoundError as error:
        inside = error.filename if error.filename and Path(error.filename).parent == path else path
        raise CheckpointError(f"{printable(str(inside))} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {shown}: {error.strerror or said(error)}") from None
    except pickle.UnpicklingError:
        text = "contains more than tensors and plain values, so it is not loaded"
        raise CheckpointError(f"{shown} {text}") from None
    except Exception as error:  # noqa: BLE001  torch's reader does not limit what it raises
        raise CheckpointError(f"{shown} is damaged: {said(error)}") from None


def digest_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a regular file. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    """The contents of the manifest. files: name -> size in bytes, SHA-256."""
    body = {name: {"bytes": count, "sha256": sha256} for name, (count, sha256) in sorted(files.items())}
    return json.dumps({"format": 1, "files": body}, indent=1).encode()


def verify(folder: Path, count: int, sha256: str, part: int = 0, parts: int = 1) -> frozenset[str]:
    """Compare the folder with its manifest, whose SHA-256 is given; returns the names of its files.

    count: bytes of all files. part, parts: compute the checksums of this share of the files only; sizes and names are
    always compared. Raises CheckpointError that names the file.
    """
    with explained(folder):
        if folder.is_symlink() or not folder.is_dir():
            what = "is not a folder" if os.path.lexists(folder) else "is missing"
            raise CheckpointError(f"{printable(str(folder))} {what}")
        listed = _listed(folder / MANIFEST, sha256)
        present = {entry.name for entry in folder.iterdir()} - {MANIFEST}
        for name in sorted(listed.keys() - present):
            raise CheckpointError(f"{printable(str(folder / name))} is missing")
        for name in sorted(present - listed.keys()):
            text = "does not belong to the checkpoint; move it away"
            raise CheckpointError(f"{shortened(str(folder / name))} {text}")
        for name, (expected, _) in sorted(listed.items()):
            actual = (folder / name).stat().st_size
            if actual != expected:
                sizes = f"{size(actual)} instead of {size(expected)}"
                raise CheckpointError(f"{printable(str(folder / name))} is damaged: its size is {sizes}")
        total = sum(expected for expected, _ in listed.values()) + (folder / MANIFEST).stat().st_size
        if total != count:
            sizes = f"{size(total)} instead of {size(count)}"
            raise CheckpointError(f"{printable(str(folder))} is damaged: its size is {sizes}")
        for name in sorted(listed)[part::parts]:
            path = folder / name
            with explained(path):
                if digest_of(path)[1] != listed[name][1]:
                    text = "is damaged: its contents do not match the checksum"
                    raise CheckpointError(f"{printable(str(path))} {text}")
    return frozenset(listed)


def _listed(path: Path, sha256: str) -> dict[str, tuple[int, str]]:
    """The files of a manifest: name -> size, SHA-256."""
    with explained(path):
        with os.fdopen(open_regular(path), "rb") as file:
            content = file.read(_MOST_MANIFEST)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise CheckpointError(
                f"{printable(str(path))} is damaged: its contents do not match the checksum"
            )
        files = json.loads(content)["files"]
        return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}


def read(
    folder: Path,
    names: frozenset[str],
    rank: int = 0,
    only: Collection[str] | None = None,
    like: Like | None = None,
) -> dict[str, Any]:
    """The state in a folder that was verified, as `CheckpointStore.load` returns it, and "ranks", their number.

    names: the files of the folder. rank: whose own state to add, if it has one. only: load nothing but these keys.
    like: the placement of each tensor, see Like; None: all tensors whole, on the CPU. Needs no process group. Raises
    CheckpointError.
    """
    path = folder / PLAIN
    with explained(path):
        plain = torch.load(path, map_location="cpu", weights_only=True)
        tree, places, ranks = plain["tree"], plain["places"], int(plain["ranks"])
        places = top_level([Place(tuple(path), str(name), stride) for path, name, stride in places], only)
    with explained(folder):
        tensors = _tensors(folder, names, places, like)
    by_path = {place.path: tensors[place.name] for place in places}
    kept = {key: value for key, value in tree.items() if only is None or key in only}
    found: dict[str, Any] = mapped(kept, lambda value, path: by_path.get(path, value))
    if (name := rank_file(rank)) in names:
        with explained(folder / name):
            own = torch.load(folder / name, map_location="cpu", weights_only=True)
            found |= {key: value for key, value in own.items() if only is None or key in only}
    return {**found, "ranks": ranks}


def _tensors(
    folder: Path, names: frozenset[str], places: Collection[Place], like: Like | None
) -> dict[str, Tensor]:
    if not places:
        return {}
    if not torch.distributed.is_available():
        shown = printable(str(folder))
        raise CheckpointError(f"{shown} was written by several ranks; this torch has no torch.distributed")
    from .checkpoint_shards import read_tensors

    return read_tensors(folder, names, places, like)


def temporary(folder: Path) -> Path:
    """A new name beside the folder, by which what a crash leaves is recognised."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")


def remove(folder: Path) -> None:
    """Delete the folder. Its name goes first, so that what a crash leaves is recognised. Errors are ignored."""
    with contextlib.suppress(OSError):
        gone = temporary(folder)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
