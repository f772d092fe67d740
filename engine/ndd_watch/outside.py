"""What the script does outside its working directory: files that it writes, hosts that it talks to, and programs.

A trial runs in a copy of that directory; what happens elsewhere is real. Python reports what it opens to an audit hook,
torch.save to our own. Writes in C or Rust without Python are not seen. A process that the script forks has the hook,
too; another program does not, so it is named, or refused.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from . import CAPTURES, FOLDER, MEMORY
from .exceptions import Dropped, of_library
from .library import module_of, os
from .own import own

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
# Event -> places of the program, -1 for none, and of its words among its arguments.
_STARTS = {"subprocess.Popen": (0, 1), "os.system": (-1, 0), "os.exec": (0, 1), "os.posix_spawn": (0, 1)}
# Programs that change nothing, and commands of git that do not.
_READERS = frozenset({
    "uname", "hostname", "nvidia-smi", "rocm-smi", "rocminfo", "lscpu", "lsb_release", "which", "ldconfig", "fc-list",
    "ls", "cat", "df", "du", "free", "nproc", "stty", "clear", "true",
})  # fmt: skip
_READING_GIT = frozenset({"rev-parse", "describe", "log", "diff", "status", "show", "ls-files"})
# Characters with which a shell does more than start one program.
_SHELL = frozenset("<>|;&$`()\n")
# Modules of the library that only ask programs.
_ASKING = ("platform.py", os.path.join("ctypes", "util.py"), "uuid.py")
# Packages whose programs are their own affair: compilers, launchers, and trackers that are offline in a trial.
_LIBRARIES = tuple(
    os.path.join("-packages", name, "")
    for name in (
        "torch", "triton", "accelerate", "deepspeed", "lightning", "wandb", "mlflow", "neptune", "comet_ml", "clearml",
    )
)  # fmt: skip
# Characters of a command.
LONGEST = 200


class Outside:
    """places, hosts, programs: what was seen.

    In a trial, refuse is called before something happens, with what the script does; original: the folder whose copy
    this is. links: the same for a write through a link of the folder `scratch`, which holds a copy.
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
        self.programs: dict[str, bool] = {}
        # Lines of these were recorded already.
        self.told = 0
        self._refuse, self._links = refuse, links
        self._scratch = os.path.join(os.path.realpath(scratch), "") if scratch else None
        self._original = os.path.join(os.path.realpath(original), "") if original else None
        home = os.path.expanduser("~")
        caches = [os.environ.get(name) for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")]
        compilers = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        inside = [
            _folder(), "/tmp", "/var/tmp", "/usr/tmp", "/dev", "/proc", "/sys", os.path.join(home, ".cache"),
            os.path.join(home, ".triton"), os.path.join(home, ".config", "matplotlib"), sys.prefix, sys.base_prefix,
            *caches, *compilers,
        ]  # fmt: skip
        self._inside = tuple(os.path.join(os.path.realpath(place), "") for place in inside if place)
        # Of the observer, also within the original folder.
        ours = [os.environ.get(name) for name in (FOLDER, CAPTURES, MEMORY)]
        self._ours = tuple(os.path.join(os.path.realpath(place), "") for place in ours if place)

    @property
    def seen(self) -> int:
        """How many places, hosts and programs."""
        return len(self.places) + len(self.hosts) + len(self.programs)

    def to_dict(self) -> dict[str, list[str]]:
        """What was seen, for the record."""
        return {"places": list(self.places), "hosts": list(self.hosts), "programs": list(self.programs)}

    def writes(self, path: Any) -> None:
        """The script is about to change a file."""
        # Other kinds of paths could compute theirs.
        if type(path) in (str, bytes) or module_of(type(path)) in _PATHS:
            with Dropped(ValueError, OSError):
                self._writes(os.fsdecode(path))

    def _writes(self, path: str) -> None:
        # Through links: a large file of the scratch copy is one.
        real = os.path.realpath(path)
        place = os.path.join(real, "")
        if place.startswith(self._ours):
            return
        copied = self._scratch
        if (
            copied
            and self._links is not None
            and os.path.abspath(path).startswith(copied) > place.startswith(copied)
        ):
            self._links(_writing(real))
        # Python's `tempfile` reads these when it is used first; the script may set them before.
        temporary = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
        inside = (*self._inside, *(os.path.join(os.path.realpath(one), "") for one in temporary if one))
        if not place.startswith(inside) or (self._original and place.startswith(self._original)):
            if len(self.places) < MOST:
                self.places[real] = True
            if self._refuse is not None:
                self._refuse(_writing(real))

    def heard(self, event: str, given: tuple[Any, ...]) -> None:
        """Python reports what it does to an audit hook."""
        if event == "open":
            path, _, flags = given
            if type(path) is not int and (flags or 0) & _WRITES:
                self.writes(path)
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                self.writes(given[place])
        elif event in ("socket.connect", "socket.sendto"):
            self._connects(given[1])
        elif event in _STARTS:
            self._starts(event, given)

    def _connects(self, address: Any) -> None:
        if type(address) is not tuple or len(address) < 2 or type(address[0]) not in (str, bytes):
            return
        host = os.fsdecode(address[0])
        if host and not host.startswith(_LOCAL) and host != os.uname().nodename and type(address[1]) is int:
            named = f"{host}:{address[1]}"
            if len(self.hosts) < MOST:
                self.hosts[named] = True
            if self._refuse is not None:
                self._refuse(f"connects to {named}")

    def _starts(self, event: str, given: tuple[Any, ...]) -> None:
        program, words = (() if at < 0 else _words(given[at]) for at in _STARTS[event])
        if event == "os.system" or (
            len(words) == 3 and words[1] == "-c" and _name(words[0]) in ("sh", "bash")
        ):
            plain = words[-1] if words else ""
            simple = () if _SHELL & set(plain) else tuple(plain.split())
        else:
            simple = (*(program[:1] or words[:1]), *words[1:])
        called = _name(simple[0]) if simple else ""
        if called in _READERS or (called == "git" and simple[1:2] and simple[1] in _READING_GIT):
            return
        counts, ours = _asked_by(sys._getframe())
        if not counts:
            return
        text = " ".join(words) or " ".join(program)
        named = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        if len(self.programs) < MOST:
            self.programs[named] = True
        # A launcher of the user's starts Python processes, which are observed and refuse by themselves.
        if self._refuse is not None and ours and not called.startswith("python"):
            self._refuse(f"starts another program ({named})")


def _writing(real: str) -> str:
    return f"writes to {real}, outside its folder"


def _name(word: str) -> str:
    return word.rpartition(os.sep)[2]


def _words(given: Any) -> tuple[str, ...]:
    """The words of a command, as far as they can be read without code of the script."""
    if type(given) in (list, tuple):
        return tuple(word for item in given for word in _words(item))
    if type(given) in (str, bytes) or module_of(type(given)) in _PATHS:
        return (os.fsdecode(given),)
    return ()


def _asked_by(frame: Any) -> tuple[bool, bool]:
    """For the innermost code outside Python's library: whether its programs count, and whether it is the user's own."""
    while frame is not None and of_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(_ASKING):
            return False, False
        frame = frame.f_back
    if frame is None:
        return True, False
    name = frame.f_code.co_filename
    return not any(part in name for part in _LIBRARIES), own(frame.f_code)


def _folder() -> str:
    with Dropped(OSError):  # it may have been removed
        return str(os.getcwd())
    return ""
