"""What a script does outside its folder: files that it writes, hosts that it talks to, programs that it starts.

Python reports what it opens to an audit hook, torch.save to our own. `site/sitecustomize.py` adds this one before the
first line of the script, in every Python process that it starts with the environment that it was given. Writes in C or
Rust without Python are not seen. Another program has no hook, so it is named, or refused.

In a scratch copy, a process ends before it does what is not allowed there; the variable LINKED names the copy. Imports
nothing that Python has not loaded by then: a process that never imports torch has only this module and `whose`.
"""

import os as _os
import sys

from . import CAPTURES, FOLDER, LINKED, MEMORY, REFUSED, SITE
from .whose import Dropped, module_of, of_library, ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

# A script may replace functions of the library.
os: "Any" = type(sys.implementation)(**vars(_os))
# Places or hosts that are remembered.
MOST = 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Event -> (place of a path among its arguments at which it changes something, place of the descriptor of the folder
# that the path is relative to, or 0).
_CHANGES = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.truncate": ((0, 0),),
    "shutil.rmtree": ((0, 0),), "os.rename": ((0, 2), (1, 3)), "os.symlink": ((1, 2),), "os.link": ((1, 3),),
    "os.chmod": ((0, 2),), "os.utime": ((0, 3),),
}  # fmt: skip
# Those that change a link, not what it leads to.
_OF_LINKS = frozenset({"os.remove", "os.rename", "os.symlink", "os.link"})
# Modules of the library with classes of paths; a class of the script may run code of its own.
_PATHS = ("pathlib", "pathlib._local")
_CONNECTS = ("socket.connect", "socket.sendto")
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")
# Event -> places of the program, of its words, and of its environment among its arguments; -1 for none.
_STARTS = {
    "subprocess.Popen": (0, 1, 3), "os.system": (-1, 0, -1), "os.exec": (0, 1, 2), "os.posix_spawn": (0, 1, 2),
}  # fmt: skip
# Programs that change nothing, and commands of git that do not.
_READERS = frozenset({
    "uname", "hostname", "nvidia-smi", "rocm-smi", "rocminfo", "lscpu", "lsb_release", "which", "ldconfig", "fc-list",
    "ls", "cat", "df", "du", "free", "nproc", "stty", "clear", "true",
})  # fmt: skip
_READING_GIT = frozenset({
    "rev-parse", "describe", "log", "diff", "status", "show", "ls-files", "ls-tree", "cat-file", "rev-list", "version",
    "--version",
})  # fmt: skip
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
_PREFIXES = sys.prefix, sys.base_prefix


class Outside:
    """places, hosts, programs: what was seen.

    In a scratch copy, refuse is called before something happens, with what the script does; original: the folder whose
    copy this is; scratch: the folder that holds the copy. Links in it lead to what may not be changed.
    """

    def __init__(
        self,
        refuse: "Callable[[str], None] | None" = None,
        original: "str | None" = None,
        scratch: "str | None" = None,
    ) -> None:
        self.places: dict[str, bool] = {}
        self.hosts: dict[str, bool] = {}
        self.programs: dict[str, bool] = {}
        # Lines of these were recorded already.
        self.recorded = 0
        self._refuse, self._copy, self._original = refuse, scratch, original
        # A process that the script starts elsewhere has no folder of its own in a scratch copy.
        self._folder = "" if scratch else _folder()
        # Of the observer, also within the original folder.
        self._own = [place for place in map(os.environ.get, (FOLDER, CAPTURES, MEMORY)) if place]
        self._known: dict[str, tuple[str, ...]] = {}

    def _find(self) -> None:
        """Folders that may be changed, and others. Most processes write nothing."""
        home = os.path.expanduser("~")
        caches = [os.environ.get(name) for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")]
        compilers = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        inside = [
            self._folder, "/tmp", "/var/tmp", "/usr/tmp", "/dev", "/proc", "/sys", os.path.join(home, ".cache"),
            os.path.join(home, ".triton"), os.path.join(home, ".config", "matplotlib"), *map(_packages, _PREFIXES),
            *caches, *compilers,
        ]  # fmt: skip
        known = {"inside": inside, "own": self._own, "copy": [self._copy], "original": [self._original]}
        self._known = {kind: _whole(places) for kind, places in known.items()}

    @property
    def seen(self) -> int:
        """How many places, hosts and programs."""
        return len(self.places) + len(self.hosts) + len(self.programs)

    def to_dict(self) -> "dict[str, list[str]]":
        """What was seen, for the record."""
        return {"places": list(self.places), "hosts": list(self.hosts), "programs": list(self.programs)}

    def writes(self, path: "Any", link: bool = False) -> None:
        """The script is about to change a file. link: not what it leads to, if it is a link."""
        # Other kinds of paths could compute theirs.
        if type(path) in (str, bytes) or module_of(type(path)) in _PATHS:
            with Dropped(ValueError, OSError):
                self._writes(os.fsdecode(path), link)

    def _writes(self, path: str, link: bool) -> None:
        if not self._known:
            self._find()
        known, whole = self._known, os.path.abspath(path)
        # Through links: a large file of the scratch copy is one.
        folder, name = os.path.split(whole)
        real = os.path.join(os.path.realpath(folder), name) if link else os.path.realpath(path)
        place = os.path.join(real, "")
        if place.startswith((*known["own"], *known["copy"])):
            return
        if self._refuse is None and "__pycache__" in real:  # not written in a scratch copy
            return
        # Python's `tempfile` reads these when it is used first; the script may set them before.
        temporary = _whole([os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")])
        kept = place.startswith(known["original"]) or whole.startswith(known["copy"])
        if kept or not place.startswith((*known["inside"], *temporary)):
            if len(self.places) < MOST:
                self.places[real] = True
            if self._refuse is not None:
                self._refuse(f"writes to {real}, outside its folder")

    def audit(self, event: str, given: "tuple[Any, ...]") -> None:
        """Python reports what it does to an audit hook."""
        if event == "open":
            path, _, flags = given
            if type(path) is not int and (flags or 0) & _WRITES:
                self.writes(path)
        elif event in _CHANGES:
            for place, folder in _CHANGES[event]:
                self.writes(_within(given[place], given[folder] if folder else -1), event in _OF_LINKS)
        elif event == "sqlite3.connect":
            self.writes(_database(given[0]))
        elif event in _CONNECTS:
            self._connects(given[1])
        elif event in _STARTS:
            self._starts(event, given)

    def _connects(self, address: "Any") -> None:
        if type(address) is not tuple or len(address) < 2 or type(address[0]) not in (str, bytes):
            return
        host = os.fsdecode(address[0])
        if host and not host.startswith(_LOCAL) and host != os.uname().nodename and type(address[1]) is int:
            named = f"{host}:{address[1]}"
            if len(self.hosts) < MOST:
                self.hosts[named] = True
            if self._refuse is not None:
                self._refuse(f"connects to {named}")

    def _starts(self, event: str, given: "tuple[Any, ...]") -> None:
        program, words = (() if at < 0 else _words(given[at]) for at in _STARTS[event][:2])
        if event == "os.system" or (
            len(words) == 3 and words[1] == "-c" and _name(words[0]) in ("sh", "bash")
        ):
            plain = words[-1] if words else ""
            simple = () if _SHELL & set(plain) else tuple(plain.split())
        else:
            simple = (*(program[:1] or words[:1]), *words[1:])
        called = _name(simple[0]) if simple else ""
        if called in _READERS or (called == "git" and _git(simple) in _READING_GIT):
            return
        counts, asks = _asked_by(sys._getframe())
        if not counts:
            return
        text = " ".join(words) or " ".join(program)
        named = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        if len(self.programs) < MOST:
            self.programs[named] = True
        if self._refuse is None:
            return
        # A Python process is observed, and refuses by itself. Git of a library could change the original history.
        if called == "git" or (
            not (called.startswith("python") and _watched(simple, event, given)) and _of_user(asks)
        ):
            self._refuse(f"starts another program ({named})")


def _packages(prefix: str) -> str:
    """The folder of a Python's packages, which write caches; `/usr` has more than that."""
    major, minor = sys.version_info[:2]
    return str(os.path.join(prefix, "lib", f"python{major}.{minor}"))


def _within(path: "Any", folder: "Any") -> "Any":
    """A path that may be relative to the folder of a descriptor."""
    if type(folder) is not int or folder < 0 or type(path) not in (str, bytes):
        return path
    with Dropped(OSError, ValueError):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    return path


def _name(word: str) -> str:
    return word.rpartition(os.sep)[2]


def _words(given: "Any") -> "tuple[str, ...]":
    """The words of a command, as far as they can be read without code of the script."""
    if type(given) in (list, tuple):
        return tuple(word for item in given for word in _words(item))
    if type(given) in (str, bytes) or module_of(type(given)) in _PATHS:
        return (os.fsdecode(given),)
    return ()


def _git(words: "tuple[str, ...]") -> str:
    """The command of git among its words, after the folder in which it runs."""
    at = 1
    while words[at : at + 1] == ("-C",):
        at += 2
    return "".join(words[at : at + 1])


def _database(given: "Any") -> "Any":
    """The file that sqlite writes; "" for a database in memory, and for one that is only read."""
    if type(given) is not str:
        return given
    if given.startswith("file:"):
        given, _, options = given[5:].partition("?")
        if any(option in options for option in ("mode=ro", "mode=memory", "immutable=1")):
            return None
        given = "/" + given.lstrip("/") if given.startswith("//") else given
    return None if given in ("", ":memory:") else given


def _watched(words: "tuple[str, ...]", event: str, given: "tuple[Any, ...]") -> bool:
    """Whether the hook is in a Python process that these words start."""
    at = _STARTS[event][2]
    environment = given[at] if at >= 0 else None
    if type(environment) is dict:
        names = {
            os.fsdecode(name): value for name, value in environment.items() if type(name) in (str, bytes)
        }
        if not names.get(FOLDER) or SITE not in os.fsdecode(names.get("PYTHONPATH", "")):
            return False
    elif environment is not None and environment is not _os.environ:
        return False
    for word in words[1:]:
        if not word.startswith("-") or word in ("-c", "-m"):
            break
        if not word.startswith(("--", "-W", "-X")) and set("IES") & set(word):
            return False
    return True


def _asked_by(frame: "Any") -> "tuple[bool, Any]":
    """For the innermost code outside Python's library: whether its programs count, and that code or None."""
    while frame is not None and of_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(_ASKING):
            return False, None
        frame = frame.f_back
    if frame is None:
        return True, None
    name = frame.f_code.co_filename
    return not any(part in name for part in _LIBRARIES), frame.f_code


def _of_user(code: "Any") -> bool:
    from .looks import own  # needed only where something is refused

    return own(code)


def _whole(places: "list[Any]") -> "tuple[str, ...]":
    return tuple(os.path.join(os.path.realpath(place), "") for place in places if place)


def _folder() -> str:
    with Dropped(OSError):  # it may have been removed
        return str(os.getcwd())
    return ""


def _found() -> Outside:
    """What is seen of this process. In a scratch copy, it ends before it does what is not allowed there."""
    place, _, original = os.environ.get(LINKED, "").partition(os.pathsep)
    if not place:
        return Outside()

    def refuse(does: str) -> None:
        told = f"the script {does}: add --allow-side-effects to allow it\n"
        # Of a process that it forked, nothing else may reach the console.
        try:
            with open(os.path.join(place, REFUSED), "w", encoding="utf-8") as file:
                file.write(told)
            sys.stderr.write(told)
            sys.stderr.flush()
        finally:
            os._exit(1)

    return Outside(refuse, original, place)


# Events of `Outside.audit`.
_HEARD = frozenset({"open", "sqlite3.connect", *_CHANGES, *_CONNECTS, *_STARTS})
# What is seen of this process, and who hears all events from `import torch` on.
here: "Outside | None" = None
listener: "Callable[[str, tuple[Any, ...]], None] | None" = None


def begin() -> Outside:
    """Hear what this process does from now on."""
    global here
    if here is None:
        here = _found()
        sys.addaudithook(_hear)
    return here


def _hear(event: str, given: "tuple[Any, ...]") -> None:
    if event in _HEARD and here is not None:
        try:
            here.audit(event, given)
        except Exception as error:
            if not ours(error):
                raise
    if listener is not None:
        listener(event, given)
