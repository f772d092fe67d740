"""The command of a training script: whether the observer can get into it, scratch copies, start and output.

It starts in a session of its own. Streams of this process that are a terminal are replaced by a pseudo-terminal, so
that colours and progress bars keep working, and so that the command survives when the terminal is lost. Other streams
go through unchanged. The output goes into console.log, and to a stream as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ndd_engine import processes
from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular, write_text
from ndd_engine.processes import was_given
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.script_sources import sources_beside
from ndd_engine.text import counted, printable, size
from ndd_watch import REFUSED

# Larger files are linked, except weights, which a script may write again.
LINKED = 16 << 20
WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".tar"})
# Places that a message names.
FEW = 4
MOST_FILES = 20_000
MOST_BYTES = 2 << 30
# Folders that are not copied as they are: histories, environments, caches.
LEFT_OUT = frozenset(
    {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache"}
)
# How the names of folders with scratch copies begin.
SCRATCH = ".ndd-"
# Python does not write its compiled files beside the originals that a scratch copy links to.
# Neither does git, if the folder is a part of a repository.
UNWRITTEN = {"PYTHONDONTWRITEBYTECODE": "1", "GIT_OPTIONAL_LOCKS": "0"}
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
    kinds = {"places": "writes to", "hosts": "connects to", "programs": "starts other programs:"}
    said = [
        f"{does} {named(items)}" for kind, does in kinds.items() if (items := list(found.get(kind) or ()))
    ]
    if said:
        raise UsageError(
            f"the script {' and '.join(said)}, which a scratch copy does not contain: add --allow-side-effects "
            "to let the processes of the trial do the same"
        )


def linked(place: Path, folder: Path) -> str:
    """The variable LINKED of processes in a scratch copy of a folder below `place`."""
    return f"{place}{os.pathsep}{folder.resolve()}"


def refused_in(place: Path) -> str:
    """What a process in a scratch copy below `place` wanted to do, which is not allowed; "" for nothing."""
    try:
        return printable((place / REFUSED).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def named(items: Sequence[str]) -> str:
    """The first few items, printable."""
    shown = ", ".join(printable(item) for item in items[:FEW])
    return shown + (f" and {len(items) - FEW} more" if len(items) > FEW else "")


def scratch(folder: Path, place: Path, but: Path) -> Path:
    """Make a copy of a folder below `place`, and return its path. but: as of `copy`.

    The copy lies as deep as the folder, and what is beside each folder above it is linked: a relative path that leaves
    the folder, such as ../data, reaches the original. Processes in it must not write there, see `ndd_watch.trying`.
    """
    folder = folder.resolve()
    there, here = Path(folder.anchor), place / "above"
    here.mkdir(parents=True)
    for part in folder.parts[1:]:
        _link(there, here, part)
        there, here = there / part, here / part
        here.mkdir()
    copy(folder, here, but)
    for path in folder.iterdir():
        # The command may be a program of an environment in the folder.
        if path.is_dir() and _is_environment(path):
            (here / path.name).symlink_to(path)
    return here


def _link(there: Path, here: Path, but: str) -> None:
    """Link what a folder contains, other than `but` and scratch copies; nothing of one that cannot be read."""
    with contextlib.suppress(OSError):
        beside = [path for path in there.iterdir() if path.name != but and not path.name.startswith(SCRATCH)]
        for path in beside if len(beside) <= MOST_FILES else ():
            (here / path.name).symlink_to(path)


# Variables that name programs and the user's own folder; they are the same in a copy.
_STAY = frozenset({"PATH", "HOME", "OLDPWD"})


def in_copy(command: Command, work: Path, environment: Mapping[str, str]) -> tuple[Command, dict[str, str]]:
    """(the command in a copy of its folder, the variables of an environment that differ there).

    Whole paths of what is in the folder are those of the copy. What was left out of it, or is only linked, stays.
    """
    folder, real = command.folder, work.resolve()
    names = {str(folder), str(folder.resolve())}
    # As the shell calls it.
    with contextlib.suppress(OSError):
        if (given := environment.get("PWD")) and Path(given).samefile(folder):
            names.add(given)
    names.discard(os.sep)
    if not names:
        return replace(command, folder=work), {}
    known = "|".join(re.escape(name.rstrip(os.sep)) for name in sorted(names, key=len, reverse=True))
    # A folder, as a path of its own or the beginning of one.
    there = re.compile(rf"(?<![\w./-])(?:{known})(?P<rest>/[^\s:;,'\"]*|(?![\w.-]))")

    def moved(found: re.Match[str]) -> str:
        place = Path(f"{work}{found['rest']}")
        copied = place.resolve().is_relative_to(real) if place.exists() else not Path(found[0]).exists()
        return f"{work}{found['rest']}" if copied else found[0]

    words = tuple(there.sub(moved, word) for word in command.words)
    new = {
        name: there.sub(moved, text)
        for name, text in environment.items()
        if name not in _STAY and not name.startswith("NDD_")
    }
    changed = {name: text for name, text in new.items() if text != environment[name]}
    return replace(command, words=words, folder=work), changed


def copy(folder: Path, target: Path, but: Path) -> list[Path]:
    """Copy a folder; returns the files that are linked instead. but: a folder that is left out, such as the runs.

    Links lead to the copy of what is in the folder, and else to the original. Raises UsageError if there is too much to
    copy, or if a file cannot be read.
    """
    files = total = 0
    linked: list[Path] = []
    links: list[tuple[Path, Path]] = []
    for path, relative in _entries(folder, but.resolve()):
        place = target / relative
        try:
            if path.is_symlink() and not path.is_file():
                links.append((path, place))
                continue
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                _copy_history(path / ".git", place / ".git")
                continue
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
    for path, place in links:
        with contextlib.suppress(OSError, RuntimeError):  # a link in a circle leads nowhere, also in the copy
            original = path.resolve()
            inside = original.is_relative_to(folder.resolve())
            copied = target / original.relative_to(folder.resolve()) if inside else original
            place.symlink_to(copied if copied.exists() or not original.exists() else original)
    return linked


def _entries(folder: Path, but: Path) -> Iterator[tuple[Path, Path]]:
    """(path, relative path) of the folder and what is in it: folders, regular files, and links that lead to no file."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not _is_environment(here / name) and here / name != but
        ]
        with contextlib.suppress(OSError):
            folders[:] = [name for name in folders if (here / name).resolve() != but]
        yield here, here.relative_to(folder)
        for name in (*folders, *names):
            path = here / name
            if path.is_symlink() or path.is_file():
                yield path, path.relative_to(folder)


# What git changes; its objects stay where they are.
_OF_GIT = ("HEAD", "config", "config.worktree", "packed-refs", "index", "shallow", "info", "refs", "reftable")


def _copy_history(original: Path, copied: Path) -> None:
    """Let git read the history of a folder in its copy, and write to the copy only. original: a folder `.git`."""
    objects = original / "objects"
    if not objects.is_dir():
        return
    for name in _OF_GIT:
        if (original / name).is_dir():
            shutil.copytree(original / name, copied / name)
        elif (original / name).is_file():
            copied.mkdir(exist_ok=True)
            shutil.copy2(original / name, copied / name)
    (copied / "objects" / "info").mkdir(parents=True, exist_ok=True)
    (copied / "objects" / "info" / "alternates").write_bytes(os.fsencode(objects.resolve()) + b"\n")


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


PYTHON = re.compile(r"python[0-9.]*(\.exe)?")
# Options of Python without an argument, as far as they may stand before the ones below.
_PLAIN = frozenset("bBdiOPqRsuvx")
# Options of Python with an argument.
_WITH_VALUE = frozenset("WX")
# Options that keep the observer out -> why.
KEEPS_OUT = {
    "I": "Python ignores PYTHONPATH with -I",
    "E": "Python ignores PYTHONPATH with -E",
    "S": "Python does not import sitecustomize with -S",
}
_UNFIT = re.compile(r"[^A-Za-z0-9._]+")
# Variables that Python or this program set for themselves.
OWN_VARIABLES = ("LC_CTYPE", "TEXTUAL_FPS", "ESCDELAY")
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})


@dataclass(frozen=True)
class Command:
    """A command to observe. words: as given; folder: the working directory; path: its `PYTHONPATH`."""

    words: tuple[str, ...]
    folder: Path
    path: str = field(default_factory=lambda: os.environ.get("PYTHONPATH", ""))

    def check(self) -> None:
        """Raises UsageError if the command does not exist, or if the observer cannot get into it."""
        if not self.words:
            raise UsageError(
                "name the command to observe after --, for example: ndd-console run -- python train.py"
            )
        program = self.words[0]
        if program.startswith("-"):
            raise UsageError(f"{printable(program)}: run has no such option; the command follows after --")
        if shutil.which(program, path=None) is None:
            hint = f"; to run a Python file: python {program}" if program.endswith(".py") else ""
            raise UsageError(f"{printable(program)}: there is no such command{hint}")
        if why := kept_out(self.words):
            raise UsageError(f"{printable(' '.join(self.words))}: cannot be observed: {why}")
        script = file_of(self.words)
        if script and not (self.folder / script).exists():
            raise UsageError(f"{printable(script)}: there is no such file in {printable(str(self.folder))}")

    def check_repeatable(self) -> None:
        """Raises UsageError if it can be started once only."""
        if _program(self.words) == "-":
            raise UsageError(
                "the script is read from standard input, which a trial cannot read again: write it to a file"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {"command": list(self.words), "folder": str(self.folder)}

    def keep(self, run: RunDir) -> None:
        """Write it into the folder of a run, with the source of its script. Raises UsageError."""
        write_text(run.command, json.dumps({**self.to_dict(), "path": self.path}, indent=2) + "\n")
        sources_beside(self._main, self.folder).keep(run)

    @property
    def _main(self) -> Path | None:
        """The file that is run, also by a launcher; None if it is unknown."""
        for place, word in enumerate(self.words):
            paths = [word] if word.endswith(".py") and not word.startswith("-") else []
            if word == "-m" and place + 1 < len(self.words):
                module = self.words[place + 1].replace(".", os.sep)
                paths = [f"{module}.py", f"{module}/__main__.py"]
            if found := next((self.folder / path for path in paths if (self.folder / path).is_file()), None):
                return found
        return None

    @property
    def title(self) -> str:
        """What is trained, in short: the script, the module, or the program."""
        return title_of(self.words)

    @property
    def run_name(self) -> str:
        """The beginning of the name of a run."""
        stem = Path(self.title).stem if self.title.endswith((".py", ".sh")) else self.title.rpartition(".")[2]
        return _UNFIT.sub("-", stem).strip("-._")[:40] or "script"

    @property
    def text(self) -> str:
        """The command in one line, printable."""
        return printable(" ".join(word if word and " " not in word else repr(word) for word in self.words))


def command_of(run: RunDir) -> Command:
    """The command of the run of a script. Raises UsageError if its file is damaged."""
    try:
        body = json.loads(run.command.read_bytes())
        words, folder = tuple(map(str, body["command"])), Path(str(body["folder"]))
        return Command(words, folder, str(body["path"])) if "path" in body else Command(words, folder)
    except OSError as error:
        raise UsageError(f"{printable(str(run.command))} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{printable(str(run.command))} is damaged") from None


def kept_out(words: Sequence[str]) -> str:
    """Why the observer cannot get into the Python that the words start; "" if nothing in them says so."""
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return ""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word in ("-", "--") or word.startswith("--"):
            return ""
        for place, letter in enumerate(word[1:], 1):
            if letter in KEEPS_OUT:
                return KEEPS_OUT[letter]
            if letter in _WITH_VALUE:
                if place == len(word) - 1:
                    next(rest, None)
                break
            if letter not in _PLAIN:  # -c, -m
                return ""
    return ""


def file_of(words: Sequence[str]) -> str:
    """The file that the words give to Python; "" for a module, a line of code, standard input or another program."""
    found = _program(words)
    return "" if found == "-" else found


def _program(words: Sequence[str]) -> str:
    """As `file_of`, but "-" for standard input."""
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return ""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            return word
        letters = word[1:]
        at = next((place for place, letter in enumerate(letters) if letter in _WITH_VALUE), None)
        if not set(letters[:at]) <= set(_PLAIN):
            return ""
        if at == len(letters) - 1:
            next(rest, None)
    return "-"


def title_of(words: Sequence[str]) -> str:
    """The script, the module after -m, or the program."""
    for place, word in enumerate(words):
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return Path(word).name
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith("torch.distributed"):
            return words[place + 1]
        if word == "-c":
            return "python -c"
    named = [word for word in words if Path(word).name not in _LAUNCHERS and not word.startswith("-")]
    return Path((named or list(words))[0]).name if words else ""


def environment(records: Path, site: str, base: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of the command. records: folder of the observer's records; site: its way in."""
    found = dict(os.environ if base is None else base)
    for name in OWN_VARIABLES:
        if name in found and not was_given(name):
            del found[name]
    before = found.get("PYTHONPATH")
    found["PYTHONPATH"] = f"{site}{os.pathsep}{before}" if before else str(site)
    found["NDD_WATCH"] = str(records)
    return found


_SHIM = str(Path(__file__).with_name("shim.py"))
CHUNK = 1 << 16
# Seconds to read the rest of the output after the end of the command; a process that it left behind may keep the
# terminal open.
LAST_WORDS_S = 1.0


def becoming(words: Sequence[str], parent: int, tells: str = "", terminal: str = "streams") -> list[str]:
    """A command that becomes another one as a shell would start it. parent, tells, terminal: see `shim`."""
    ignored, closed = (",".join(map(str, numbers)) for numbers in (processes.ignored(), processes.closed()))
    return [sys.executable, "-I", "-S", _SHIM, str(parent), tells, terminal, ignored, closed, *words]


def inherited_descriptors() -> list[int]:
    """Open descriptors that were passed to this program; its own ones are not passed on."""
    found = []
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if int(entry.name) > 2 and os.get_inheritable(int(entry.name)):
                    found.append(int(entry.name))
    return found


class Launched:
    """A started command. output: called in a thread with what it writes to its terminal. pid: of the command."""

    def __init__(
        self,
        command: Command,
        environment: Mapping[str, str],
        output: Callable[[bytes], None],
        screen: bool,
        size: tuple[int, int] = (80, 24),
    ) -> None:
        """screen: a screen occupies this terminal, so that all streams of the command go to its own terminal.

        Raises OSError if no process or no terminal can be made.
        """
        self._output = output
        self.master = -1
        replaced = [screen or os.isatty(stream) for stream in range(3)]
        slave = -1
        if any(replaced):
            self.master, slave = pty.openpty()
            self.resize(*size)
        stdin, stdout, stderr = (slave if ours else None for ours in replaced)
        controlling = "terminal" if replaced[0] else "streams"
        told, tells = os.pipe()
        words = becoming(command.words, os.getpid(), str(tells), controlling)
        try:
            self._leader = subprocess.Popen(
                words, cwd=command.folder, env=dict(environment), start_new_session=True, stdin=stdin, stdout=stdout,
                stderr=stderr, pass_fds=[*inherited_descriptors(), tells],
            )  # fmt: skip
        except BaseException:
            os.close(told)
            self._close_master()
            raise
        finally:
            os.close(tells)
            if slave >= 0:
                os.close(slave)
        with os.fdopen(told) as lines:  # empty if no process could be made
            self.pid = int(lines.readline() or self._leader.pid)
        self._reader = threading.Thread(target=self._read, name="ndd-output", daemon=True)
        if self.master >= 0:
            self._reader.start()

    @property
    def interactive(self) -> bool:
        """Whether the command reads from its own terminal."""
        return self.master >= 0

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the command's terminal."""
        if self.master >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        """Input for the command, as if typed."""
        if self.master >= 0:
            with contextlib.suppress(OSError):
                os.write(self.master, data)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the command's group, also when it has left the first one."""
        groups = {self._leader.pid}
        if self._leader.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(self.pid))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def pass_on(self, number: int) -> None:
        """Send a signal to the command's own process, as a shell or a batch system would."""
        if self._leader.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill every process of the command's session, and what it has started in others (torchrun's ranks)."""
        every = set(session_of(self._leader.pid))
        with contextlib.suppress(psutil.Error):
            every |= {child.pid for child in psutil.Process(self._leader.pid).children(recursive=True)}
        for pid in every:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status as a shell has it (128 + the signal), or None after the timeout."""
        try:
            code: int = self._leader.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """Read the rest of the output. Call after the end of the command."""
        if self.master >= 0:
            self._reader.join(LAST_WORDS_S)
            self._close_master()

    def _close_master(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def _read(self) -> None:
        master = self.master
        while True:
            try:
                ready = select.select([master], [], [], 0.2)[0]
                data = os.read(master, CHUNK) if ready else b""
            except (OSError, ValueError):  # the last process has closed the terminal, or we have
                return
            if data:
                self._output(data)
            elif ready or self._leader.returncode is not None:
                return


def session_of(leader: int) -> list[int]:
    """Ids of the processes in the session of a process, besides itself. Linux only; [] elsewhere."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and int(entry.name) != leader:
                with contextlib.suppress(OSError):
                    if os.getsid(int(entry.name)) == leader:
                        found.append(int(entry.name))
    return found


# Of a file, at once.
OUTPUT_CHUNK = 1 << 20
# A log of this size is moved to console.log.1, and a new one begins.
MOST_OUTPUT_BYTES = 64 << 20


class OutputLog:
    """Writes the bytes of a script's terminal. stream: descriptor that gets them as well, or None. Never raises later.

    Raises OSError if the log cannot be opened.
    """

    def __init__(self, path: Path, stream: int | None) -> None:
        self._path, self._stream = path, stream
        self._handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._written = 0

    def write(self, data: bytes) -> None:
        """Called in the thread that reads the script's terminal: a reader that stops reading stops the script, too."""
        if self._stream is not None:
            try:
                _all(self._stream, data)
            except OSError:  # the terminal is lost; the log continues
                self._stream = None
        self.keep(data)

    def keep(self, data: bytes) -> None:
        """Write to the log only."""
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):  # a full disk costs output, not the script
            _all(self._handle, data)
            self._written += len(data)
            if self._written >= MOST_OUTPUT_BYTES:
                self._turn()

    def _turn(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        os.close(self._handle)
        self._handle, self._written = -1, 0
        self._handle = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def close(self) -> None:
        """Close the log."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class FileOutput:
    """Reads what a command writes to the files that are its standard output and error, from now on.

    output: called by `poll` with what is new. The command has the files as they are; nothing is between.
    """

    def __init__(self, output: Callable[[bytes], None]) -> None:
        self._output = output
        # By device and number of the file: a descriptor of our own, and how far it was read.
        self._files: dict[tuple[int, int], list[int]] = {}
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                about = os.fstat(stream)
                key = about.st_dev, about.st_ino
                if stat.S_ISREG(about.st_mode) and key not in self._files:
                    handle = os.open(f"/proc/self/fd/{stream}", os.O_RDONLY | os.O_CLOEXEC)
                    self._files[key] = [handle, max(about.st_size, os.lseek(stream, 0, os.SEEK_CUR))]

    def poll(self) -> bool:
        """Read what is new; whether there may be more."""
        more = False
        for one in self._files.values():
            with contextlib.suppress(OSError):
                handle, done = one
                if os.fstat(handle).st_size < done:  # somebody has emptied it
                    one[1] = done = 0
                if data := os.pread(handle, OUTPUT_CHUNK, done):
                    one[1] += len(data)
                    self._output(data)
                    more = more or len(data) == OUTPUT_CHUNK
        return more

    def close(self) -> None:
        """Read the rest."""
        while self.poll():
            pass
        for handle, _ in self._files.values():
            os.close(handle)
        self._files = {}


def _all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
