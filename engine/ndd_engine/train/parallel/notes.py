"""Short texts that ranks leave for each other outside of collectives: why one failed, or where one hangs.

Ranks that `ndd-console train --ranks` started are processes of one host and leave files: these outlive the rank that
holds the store, and can be read while it is stopped. Under another launcher they are keys of the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The folder of the notes, set by the launcher of `ndd-console train --ranks`.
ENV_NOTES = "NDD_RANKS_NOTES"


class Notes(Protocol):
    """Texts by name. Neither method raises an Exception: a rank that reports a failure may be the only one left."""

    def put(self, name: str, text: str) -> None:
        """Leave a text, in place of an earlier one with that name."""

    def get(self, name: str) -> str | None:
        """The text with that name, or None."""


class FolderNotes:
    """Notes in a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """See Notes."""
        path = self._path(name)
        temporary = path.with_name(f".{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):
            # Services that clean the folder of temporary files may have removed it.
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)

    def get(self, name: str) -> str | None:
        """See Notes."""
        try:
            return self._path(name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")


class StoreNotes:
    """Notes in the store of the ranks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """See Notes."""
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(f"note/{name}", text)

    def get(self, name: str) -> str | None:
        """See Notes."""
        with contextlib.suppress(Exception):
            if self._store.check([f"note/{name}"]):
                return bytes(self._store.get(f"note/{name}")).decode()
        return None


def notes_of(store: Store, here: Place) -> Notes:
    """The notes of the ranks since their last restart."""
    folder = os.environ.get(ENV_NOTES)
    return StoreNotes(store) if folder is None else FolderNotes(Path(folder) / str(here.restart))
