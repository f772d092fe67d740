"""Which code of a run is the user's own or a workload's, rather than Python's, torch's or the engine's."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ndd_watch.own import own_file

# Files of the folder of workloads, by the beginnings of their names, that only call the user's code.
_PLUMBING = ("base", "factory_data", "order", "own_module", "registry", "result", "training")


class OwnCode:
    """Tells the user's own code by its file. ours: folders of this product, with a separator at the end."""

    def __init__(self) -> None:
        self.ours = _product_folders()
        self._foreign = _foreign_folders()
        self._workloads = _inside(Path(__file__).parents[1] / "workloads")
        self._plumbing = tuple(self._workloads + name for name in _PLUMBING)
        self._here = _cwd()
        self._known: dict[str, bool] = {}

    def __call__(self, code: Any) -> bool:
        """Whether a code object is the user's own or a workload's; a built-in function is not."""
        if not isinstance(code, CodeType):
            return False
        file = code.co_filename
        found = self._known.get(file)
        if found is None:
            found = self._known[file] = self._is_own(file)
        return found

    def short(self, file: str) -> str:
        """The path relative to the working directory if inside it, otherwise its last two parts."""
        inside = file.startswith(self._here)
        return file[len(self._here) :] if inside else "/".join(Path(file).parts[-2:])

    def _is_own(self, file: str) -> bool:
        if file.startswith(self.ours):
            return file.startswith(self._workloads) and not file.startswith(self._plumbing)
        return own_file(file) and not file.startswith(self._foreign)


def _product_folders() -> tuple[str, ...]:
    """Folders of this product's packages."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("ndd_engine", "ndd_console"))
    return tuple(_inside(Path(file).parent) for file in files if file is not None)


def _foreign_folders() -> tuple[str, ...]:
    """Folders of Python, of torch, and of the code that torch.compile generates."""
    paths = sysconfig.get_paths()
    folders = {Path(paths[name]) for name in ("platstdlib", "scripts") if name in paths}
    folders |= {Path(torch.__file__).parent, Path(os.__file__).parent}
    # A frame may name the target of a symbolic link.
    folders |= {folder.resolve() for folder in folders}
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir(), "torchinductor_"))
    return (*sorted(map(_inside, folders)), compiled)


def _inside(folder: Path) -> str:
    """The prefix of every path in the folder."""
    return f"{folder}{os.sep}"


def _cwd() -> str:
    with suppress(OSError):  # the folder was deleted
        return _inside(Path.cwd())
    return os.sep
