"""A scratch copy of the folder that a script runs in, so that a trial changes nothing in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.text import counted, printable, size

# Larger files are linked, except weights, which a script may write again.
LINKED = 16 << 20
WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".tar"})
# Places that a message names.
FEW = 4
MOST_FILES = 20_000
MOST_BYTES = 2 << 30
# Folders that a script does not need: histories, environments, caches, and our own runs.
LEFT_OUT = frozenset(
    {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache"}
)
# Trackers write into the scratch folder instead of a server.
OFFLINE = {
    "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:./mlruns", "NEPTUNE_MODE": "offline",
    "COMET_MODE": "disabled", "CLEARML_OFFLINE_MODE": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def check_contained(seen: Mapping[str, Any]) -> None:
    """Raises UsageError if the script was seen to do what a scratch copy does not contain. seen: of its run."""
    script = seen.get("script")
    found = script.get("outside") if isinstance(script, Mapping) else None
    if not isinstance(found, Mapping):
        return
    places, hosts = list(found.get("places") or ()), list(found.get("hosts") or ())
    said = [f"writes to {named(places)}"] * bool(places) + [f"connects to {named(hosts)}"] * bool(hosts)
    if said:
        raise UsageError(
            f"the script {' and '.join(said)}, which a scratch copy does not contain: add --allow-side-effects "
            "to let the processes of the trial do the same"
        )


def named(items: Sequence[str]) -> str:
    """The first few items, printable."""
    shown = ", ".join(printable(item) for item in items[:FEW])
    return shown + (f" and {len(items) - FEW} more" if len(items) > FEW else "")


def copy(folder: Path, target: Path, but: Path) -> list[Path]:
    """Copy a folder; returns the files that are linked instead. but: a folder that is left out, such as the runs.

    Raises UsageError if there is too much to copy, or if a file cannot be read.
    """
    files = total = 0
    linked: list[Path] = []
    for path, relative in _files(folder, but.resolve()):
        place = target / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            status = path.stat()
            files += 1
            if status.st_size > LINKED and path.suffix not in WEIGHTS:
                place.symlink_to(path.absolute())
                linked.append(path)
                continue
            total += status.st_size
            if files > MOST_FILES or total > MOST_BYTES:
                raise UsageError(
                    f"{printable(str(folder))} has more than {counted(files - 1, 'file')} ({size(total)}) to copy "
                    "for a trial: start the script from a smaller folder"
                )
            shutil.copy2(path, place)
        except OSError as error:
            raise UsageError(
                f"{printable(str(path))} cannot be copied for a trial: {error.strerror}"
            ) from None
    return linked


def _files(folder: Path, but: Path) -> Iterator[tuple[Path, Path]]:
    """(path, relative path) of the regular files."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not _is_environment(here / name) and here / name != but
        ]
        with contextlib.suppress(OSError):
            folders[:] = [name for name in folders if (here / name).resolve() != but]
        for name in names:
            if (path := here / name).is_file():
                yield path, path.relative_to(folder)


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()
