"""Foreign texts in every output: names of runs, records, arguments, paths, files and logs."""

from __future__ import annotations

import contextlib
import html.parser
import io
import os
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

from tests.trial.written_runs import evaluation, steady, window, windows, write_run
from tests.ui.fakes import trial_event

from ndd_console.cli.printing import say, show
from ndd_console.jobs.log_tail import LogTail
from ndd_console.words.blocks import Table
from ndd_engine.config import anywhere, read, to_toml
from ndd_engine.errors import NddError
from ndd_engine.record.events import MarkEvent, SettingEvent, StageEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.wizard.session import difference, into
from qa.hostile import _strange as strange
from qa.hostile._ended import clean, said
from qa.hostile.attempts import Attempt, Kind


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    # Every output with every text before anything is repeated.
    texts = (text or strange.text(rng) for text in chain(strange.TEXTS, repeat("")))
    for number, (text, name) in enumerate((text, name) for text in texts for name in OUTPUTS):
        yield Attempt(f"{name}: {text[:60]!a}", partial(OUTPUTS[name], text, folder / f"{number}"))


def told(*arguments: str, status: tuple[int, ...]) -> None:
    """A command whose output is clean."""
    said(*arguments).check(*status)


# A record from another machine.


def record(text: str, folder: Path, name: str = "foreign") -> RunDir:
    """A finished run whose texts are all foreign."""
    config = {
        "batch": {"micro": 16},
        "loader": {"workers": 0},
        "speed": {"compile": text},
        "run": {text: text},
    }
    phases = {
        "forward": {"host_ns": 8 * 10**8, "device_ns": None},
        text: {"host_ns": 10**8, "device_ns": None},
    }
    events = [
        StageEvent("prepare", text),
        SettingEvent(text, text, text, False, text),
        *windows(steady(20, 0.1)),
        window(210, 0.1, 1.0, phases=phases),
        evaluation(210, **{text: 1.5}),
        MarkEvent("warning", 210, text, {"file": text}),
        replace(trial_event(), sets=[text], against=text, text=text, device=text, loss=text, loss_text=text),
    ]
    return write_run(
        folder / name, events, workload=text, config=config, host=text, device_name=text, item=text, token=text,
        versions={text: text}, precision=text, model=text, data=text,
    )  # fmt: skip


# Commands that show it, with the statuses that are right.
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "list of runs": (("runs",), ("runs", "--json")),
    "home without a terminal": ((),),
    "attached": (("attach", "foreign", "--headless"),),
    "text report": (("report", "foreign", "--text"), ("report", "foreign", "--json")),
    "page": (("report", "foreign"),),
    "compared": (("compare", "foreign", "other"), ("compare", "foreign", "other", "--json")),
}


def shown(commands: tuple[tuple[str, ...], ...], text: str, folder: Path) -> None:
    """What these commands show of records with the text."""
    run = record(text, folder)
    record(text, folder, "other")
    for words in commands:
        told("--runs", str(folder), *words, status=(0, 2) if "compare" in words else (0,))
    page = run.path / "report.html"
    if page.exists():
        written = page.read_text("utf-8")
        clean(written)
        Tags().feed(written)


class Tags(html.parser.HTMLParser):
    """Nothing of a foreign text becomes a tag or an attribute."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not any(name.startswith("on") for name, _ in attrs)


# Arguments.


def argument(text: str) -> str:
    """The text as the kernel passes an argument."""
    return text.replace("\x00", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


# Wrong ones, with the text in the place of {}: each is one message, and exit status 2.
WRONG: dict[str, tuple[str, ...]] = {
    "wrong_set": ("check --set={}", "check --set=loader.{}=1", "check --set=loader.workers={}x"),
    "wrong_workload": ("check --workload={}", "check --workload={}:factory"),
    "wrong_command": ("{}", "runs {}", "check --{}x"),
    "wrong_run": (
        "report -- {}", "attach -- {}", "try --set=loader.workers=2 -- {}", "compare a -- {}", "train --resume={}",
    ),
    "wrong_run_name": ("train --max-steps=1 --run={}/x",),
    "wrong_gpu": ("wizard --headless --gpu={}nosuchgpu",),
}  # fmt: skip
# Texts that would not be wrong there: options, paths that may exist, names of runs.
RIGHT: dict[str, Callable[[str], bool]] = {
    "wrong_command": lambda text: text.startswith("-") or not text,
    "wrong_run": lambda text: "/" in text or not text,
    "wrong_run_name": lambda text: not text or text.isalnum(),
}


def wrong(name: str, text: str, folder: Path) -> None:
    text = argument(text)
    if name in RIGHT and RIGHT[name](text):
        return
    for command in WRONG[name]:
        words = [word.format(text) for word in command.split()]
        told("--runs", str(folder), *words, status=(2, 3) if name == "wrong_gpu" else (2,))


def wrong_file(text: str, folder: Path) -> None:
    path = os.path.join(folder, argument(text) + "x")  # noqa: PTH118  Path would change the text
    told("check", path, status=(2,))
    folder.mkdir()
    told("--runs", path, "runs", status=(0, 2))
    told("scaffold", path, status=(2,))
    record("x", folder / "runs")
    told("--runs", str(folder / "runs"), "report", "foreign", "-o", os.path.join(path, "y"), status=(2,))  # noqa: PTH118


def wrong_toml(text: str, folder: Path) -> None:
    folder.mkdir()
    path = folder / "a.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") + b"\n[batch\n")
    told("check", str(path), status=(2,))
    quoted = "".join(f"\\U{ord(char):08x}" if not 0xD800 <= ord(char) < 0xE000 else "?" for char in text)
    path.write_text(f'[batch]\n"{quoted}" = "{quoted}"\n["{quoted}"]\nmicro = "{quoted}"\n')
    told("check", str(path), status=(2,))


# Files and logs.


def written_toml(text: str, folder: Path) -> None:
    """What is written is valid, reads back as it was, and shows no control character."""
    config = anywhere(read(workload="chartext").resolve())
    body = to_toml(config, text, {"batch.micro": text, "loader.workers": text})
    clean(body.replace("\t", " "))
    assert tomllib.loads(body) == tomllib.loads(to_toml(config))
    try:
        edited = into(
            "[batch]\nmicro = 4 # mine\n", {"batch.micro": 8, "loader.workers": 2}, {"batch.micro": text}
        )
    except NddError:
        return
    assert tomllib.loads(edited) == {"batch": {"micro": 8}, "loader": {"workers": 2}}
    for line in difference("a", edited, text):
        clean(line)


def log_page(text: str, folder: Path) -> None:
    folder.mkdir()
    path = folder / "console.log"
    path.write_bytes(text.encode("utf-8", "surrogatepass") * 3)
    for line in LogTail(path).read():
        clean(line)


def printed(text: str, folder: Path) -> None:
    """The functions that all commands print with."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        say(text)
        show([text, text])
        show([Table("", ("name", "value"), ((text, text),), frozenset({1}))])
        show({text: text})
    for stream in (out, errors):
        clean(stream.getvalue())


Output = Callable[[str, Path], None]
OUTPUTS: dict[str, Output] = {
    **{name: partial(shown, commands) for name, commands in COMMANDS.items()},
    **{name: partial(wrong, name) for name in WRONG},
    **{output.__name__: output for output in (wrong_file, wrong_toml, written_toml, log_page, printed)},
}

KIND = Kind(
    name="foreign texts in every output",
    holds="no control character arrives, HTML is escaped, TOML reads back, the exit status is right, no traceback",
    full=len(strange.TEXTS) * len(OUTPUTS),
    short=len(OUTPUTS),
    attempts=attempts,
)
