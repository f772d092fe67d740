"""What the script does outside its working directory: files that it writes and hosts that it talks to.

A trial runs in a copy of that directory; what happens elsewhere is real. Python reports what it opens to an audit hook,
torch.save to our own. Writes in C or Rust without Python are not seen.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from .exceptions import Dropped
from .library import os

# Places or hosts that are remembered.
MOST = 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Event -> places of the paths among its arguments at which it changes something.
_CHANGES = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.truncate": (0,), "shutil.rmtree": (0,),
    "os.rename": (0, 1), "os.symlink": (1,), "os.link": (1,),
}  # fmt: skip
# Modules of the library with classes of paths; a class of the script may run code of its own.
_PATHS = ("pathlib", "pathlib._local")
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")


class Outside:
    """places, hosts: what was seen.

    In a trial, refuse is called with the path of a write before it happens; original: the folder whose copy this is.
    links: the same for a write through a link of the folder `scratch`, which holds a copy.
    """

    def __init__(
        self,
        refuse: Callable[[str], None] | None = None,
        original: str | None = None,
        links: Callable[[str], None] | None = None,
        scratch: str | None = None,
    ) -> None:
        self.places: dict[str, bool] = {}
        self.hosts: dict[str, bool] = {}
        # Lines of these were recorded already.
        self.told = 0
        self._refuse, self._links = refuse, links
        self._scratch = os.path.join(os.path.realpath(scratch), "") if scratch else None
        self._original = os.path.join(os.path.realpath(original), "") if original else None
        home = os.path.expanduser("~")
        caches = [os.environ.get(name) for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "NDD_WATCH")]
        compilers = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        inside = [
            _folder(), "/tmp", "/var/tmp", "/usr/tmp", "/dev", "/proc", "/sys", os.path.join(home, ".cache"),
            os.path.join(home, ".triton"), os.path.join(home, ".config", "matplotlib"), sys.prefix, sys.base_prefix,
            *caches, *compilers,
        ]  # fmt: skip
        self._inside = tuple(os.path.join(os.path.realpath(place), "") for place in inside if place)

    @property
    def seen(self) -> int:
        """How many places and hosts."""
        return len(self.places) + len(self.hosts)

    def writes(self, path: Any) -> None:
        """The script is about to change a file."""
        # Other kinds of paths could compute theirs.
        if type(path) in (str, bytes) or type(path).__module__ in _PATHS:
            with Dropped(ValueError, OSError):
                self._writes(os.fsdecode(path))

    def _writes(self, path: str) -> None:
        # Through links: a large file of the scratch copy is one.
        real = os.path.realpath(path)
        place = os.path.join(real, "")
        copied = self._scratch
        if (
            copied
            and self._links is not None
            and os.path.abspath(path).startswith(copied) > place.startswith(copied)
        ):
            self._links(real)
        # Python's `tempfile` reads these when it is used first; the script may set them before.
        temporary = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
        inside = (*self._inside, *(os.path.join(os.path.realpath(one), "") for one in temporary if one))
        if not place.startswith(inside) or (self._original and place.startswith(self._original)):
            if len(self.places) < MOST:
                self.places[real] = True
            if self._refuse is not None:
                self._refuse(real)

    def heard(self, event: str, given: tuple[Any, ...]) -> None:
        """Python reports what it does to an audit hook."""
        if event == "open":
            path, _, flags = given
            if type(path) is not int and (flags or 0) & _WRITES:
                self.writes(path)
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                self.writes(given[place])
        elif event == "socket.connect":
            self._connects(given[1])

    def _connects(self, address: Any) -> None:
        remote = type(address) is tuple and address and not str(address[0]).startswith(_LOCAL)
        if remote and len(self.hosts) < MOST:
            self.hosts[f"{address[0]}:{address[1]}"] = True


def _folder() -> str:
    with Dropped(OSError):  # it may have been removed
        return str(os.getcwd())
    return ""
