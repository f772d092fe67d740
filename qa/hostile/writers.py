"""Every writer of a file that a user names, onto everything that a path can be."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.trial.written_runs import steady, windows, write_run

from ndd_console.jobs.trials import save_new
from ndd_engine.config import read
from ndd_engine.errors import ConfigError, UsageError
from ndd_engine.files import create_text, replacing, write_problem, write_text
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.train.request import preflight
from qa.hostile.attempts import Attempt, Kind
from qa.hostile.texts import told

BEFORE = "what was there before\n"
# A writer writes this text, or more, onto a path. Raises UsageError or OSError.
Writer = Callable[[Path, str], None]


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    yield Attempt("writers of one file at the same time", partial(at_the_same_time, folder / "same"))
    yield Attempt("a link to another file system", partial(other_file_system, folder / "other"))
    number = 0
    while True:
        places = list(PLACES)
        rng.shuffle(places)
        for place in places:
            for writer in WRITERS:
                text = f"{rng.getrandbits(64)}\n" * rng.choice((1, 1, 3000))
                number += 1
                yield Attempt(
                    f"{writer.__name__} onto {place}",
                    partial(check, PLACES[place], writer, text, folder / f"{number}"),
                )


def check(place: Callable[[Path], Place], writer: Writer, text: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    try:
        found = place(folder)
    except (PermissionError, NotImplementedError):
        return  # device nodes need privileges
    with found.around():
        try:
            writer(found.path, text)
        except UsageError as error:
            assert found.refused, f"refused: {error}"
        except OSError as error:
            assert found.refused, f"refused: {error}"
        else:
            assert not found.refused, "written"
            found.written(writer, text)
    found.kept()
    assert [path.name for path in folder.rglob(".ndd-*")] == [], "an intermediate file was left behind"


class Place:
    """A path, and what has to become of it. refused: writing to it is an error."""

    def __init__(self, path: Path, refused: bool = False, reads: Path | None = None) -> None:
        self.path, self.refused = path, refused
        self.target = path if reads is None else reads
        self.links = {one: one.readlink() for one in path.parent.rglob("*") if one.is_symlink()}
        self.kinds = {
            one: (
                stat.S_IFMT(one.lstat().st_mode),
                one.lstat().st_ino if not stat.S_ISREG(one.lstat().st_mode) else 0,
            )
            for one in path.parent.rglob("*")
        }
        self.mode = stat.S_IMODE(self.target.stat().st_mode) if os.path.isfile(self.target) else None  # noqa: PTH113  the name may be too long
        self.got = b""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield

    def written(self, writer: Writer, text: str) -> None:
        if self.target.is_file():
            assert text in self.target.read_text() or writer in (report_page, trace), (
                "another text was written"
            )
            if self.mode is not None:
                assert stat.S_IMODE(self.target.stat().st_mode) == self.mode, "other permissions"

    def kept(self) -> None:
        """Links, devices and FIFOs are the same as before."""
        for link, target in self.links.items():
            assert link.is_symlink() and link.readlink() == target, f"{link.name} is no longer a link"
        for one, (kind, number) in self.kinds.items():
            now = one.lstat()
            assert stat.S_IFMT(now.st_mode) == kind, f"{one.name} was replaced"
            assert not number or now.st_ino == number, f"{one.name} was replaced"


class Fifo(Place):
    """A FIFO with a reader."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        def drain() -> None:
            self.got = self.path.read_bytes()

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        yield
        reader.join(20)
        assert not reader.is_alive(), "the reader waits for ever"

    def written(self, writer: Writer, text: str) -> None:
        assert text.encode() in self.got or writer in (report_page, trace) or self.got == b""


# What a path can be.


def old(path: Path) -> Path:
    """A file that is there before, with permissions of its own."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(BEFORE)
    path.chmod(0o640)
    return path


def linked(path: Path, target: str) -> Path:
    """A link to a path beside it."""
    path.symlink_to(target)
    return path


def folder_at(path: Path) -> Path:
    path.mkdir()
    return path


def node(path: Path, kind: int, major: int, minor: int) -> Path:
    """A device. Raises PermissionError, also where the file system does not allow devices."""
    os.mknod(path, 0o666 | kind, os.makedev(major, minor))
    if kind == stat.S_IFCHR:
        path.open("wb").close()
    return path


def fifo_at(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(folder: Path) -> Place:
    target = old(folder / "far" / "old.txt")
    return Place(linked(folder / "link.txt", "far/old.txt"), reads=target)


def chain_of_links(folder: Path) -> Place:
    place = link(folder)
    return Place(linked(folder / "first.txt", place.path.name), reads=place.target)


def loop_of_links(folder: Path) -> Place:
    linked(folder / "b.txt", "a.txt")
    return Place(linked(folder / "a.txt", "b.txt"), refused=True)


def link_to_directory(folder: Path) -> Place:
    folder_at(folder / "sub")
    return Place(linked(folder / "link", "sub"), refused=True)


def unix_socket(folder: Path) -> Place:
    before = Path.cwd()
    os.chdir(folder)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
    os.chdir(before)
    return Place(folder / "s", refused=True)


def link_to_null_device(folder: Path) -> Place:
    node(folder / "null", stat.S_IFCHR, 1, 3)
    return Place(linked(folder / "link", "null"))


def link_to_fifo(folder: Path) -> Place:
    fifo_at(folder / "pipe")
    return Fifo(linked(folder / "link", "pipe"))


PLACES: dict[str, Callable[[Path], Place]] = {
    "nothing": lambda folder: Place(folder / "new.txt"),
    "a file": lambda folder: Place(old(folder / "old.txt")),
    "a link": link,
    "a chain of links": chain_of_links,
    "a dangling link": lambda folder: Place(linked(folder / "link.txt", "a.txt"), reads=folder / "a.txt"),
    "a link to nowhere": lambda folder: Place(linked(folder / "link.txt", "missing/a.txt"), refused=True),
    "a loop of links": loop_of_links,
    "a directory": lambda folder: Place(folder_at(folder / "sub"), refused=True),
    "a link to a directory": link_to_directory,
    "a missing folder": lambda folder: Place(folder / "no" / "a.txt", refused=True),
    "a file as a folder": lambda folder: Place(old(folder / "old.txt") / "a.txt", refused=True),
    "a name that is too long": lambda folder: Place(folder / ("x" * 300), refused=True),
    "the longest name": lambda folder: Place(folder / ("x" * 255)),
    "a socket": unix_socket,
    "the null device": lambda folder: Place(node(folder / "null", stat.S_IFCHR, 1, 3)),
    "a link to the null device": link_to_null_device,
    "a full device": lambda folder: Place(node(folder / "full", stat.S_IFCHR, 1, 7), refused=True),
    "a block device that does not exist": lambda folder: Place(
        node(folder / "disk", stat.S_IFBLK, 250, 250), refused=True
    ),
    "a FIFO": lambda folder: Fifo(fifo_at(folder / "pipe")),
    "a link to a FIFO": link_to_fifo,
}


# The writers.


def text_file(path: Path, text: str) -> None:
    """`-o` of tune, claims and the wizard, and every configuration."""
    if (why := write_problem(path)) is not None:
        raise UsageError(why)
    write_text(path, text, "-o ")


def parts(path: Path, text: str) -> None:
    """Written in parts, as checkpoints and traces are."""
    with replacing(path, 10.0) as stream:
        for start in range(0, len(text), 1000):
            stream.write(text[start : start + 1000].encode())


def report_page(path: Path, _text: str) -> None:
    """`report -o`."""
    with tempfile.TemporaryDirectory() as runs:
        write_run(Path(runs, "one"), windows(steady(20, 0.1)))
        try:
            told("--runs", runs, "report", "one", "-o", str(path), status=(0,))
        except AssertionError as error:
            assert str(error).startswith("status 2"), error
            raise UsageError(str(error)) from None


def trace(path: Path, text: str) -> None:
    """`train --trace`: the check before training, and the export of a capture."""
    try:
        preflight(read(overrides={"log": {"trace": str(path)}}))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    capture = object.__new__(ProfilerCapture)
    capture._trace = Exporter(text)
    capture.export(path)


class Exporter:
    """A profiler that has recorded something."""

    def __init__(self, text: str) -> None:
        self._text = text

    def save(self, path: str) -> None:
        Path(path).write_text(self._text)


WRITERS: tuple[Writer, ...] = (text_file, parts, report_page, trace)


def at_the_same_time(folder: Path) -> None:
    """Each text arrives whole or not at all; new files never replace one another."""
    folder.mkdir(parents=True)
    texts = [f"{number}\n" * 20_000 for number in range(8)]
    work = [threading.Thread(target=write_text, args=(folder / "a.txt", text)) for text in texts]
    work += [threading.Thread(target=save_new, args=(str(folder / "new"), text)) for text in texts]
    for each in work:
        each.start()
    for each in work:
        each.join()
    assert (folder / "a.txt").read_text() in texts
    assert sorted(path.read_text() for path in folder.glob("new*.toml")) == sorted(texts)
    with contextlib.suppress(FileExistsError):
        create_text(folder / "a.txt", "again")
        raise AssertionError("an existing file was replaced")
    assert len(list(folder.iterdir())) == 9


def other_file_system(folder: Path) -> None:
    """The target is replaced beside itself."""
    folder.mkdir(parents=True)
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == folder.stat().st_dev:
        return
    target = elsewhere / f"ndd-hostile-{os.getpid()}"
    try:
        target.write_text(BEFORE)
        (folder / "link").symlink_to(target)
        write_text(folder / "link", "new")
        assert (folder / "link").is_symlink() and target.read_text() == "new"
    finally:
        target.unlink()


KIND = Kind(
    name="files that users name",
    holds="links, devices and FIFOs stay and receive the text; else one error; files are replaced whole or not at all",
    full=240,
    short=42,
    attempts=attempts,
)
