"""The private names of Textual that the console uses exist in the installed version, and are what the console expects.

`make test-textual` runs this with the lowest and the highest version of the range in pyproject.toml.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import textual.app
import textual.constants
import textual.timer
from packaging.specifiers import SpecifierSet
from textual._compositor import ChopsUpdate, Compositor, CompositorUpdate
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.widget import Widget

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "tui" / "ndd_console"
USES = [CONSOLE / "app.py", *(CONSOLE / "screens").glob("*.py"), *(CONSOLE / "widgets").glob("*.py")]
PRIVATE_FILE = CONSOLE / "widgets" / "textual_private.py"
# Private names of Textual in the console's code; each has a test below.
PRIVATE = {
    "_compositor", "_dirty_regions", "_regions_to_spans", "_skip", "_capture_stdout", "_capture_stderr", "_filters",
    "_handle_exception", "_app", "_auto_restart", "_must_signal_resume", "_sigcont_application",
    "_sigtstp_application", "_writer_thread",
}  # fmt: skip


THEIRS = (App, Screen, Compositor, Widget, textual.timer.Timer, LinuxDriver)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@cache
def set_in(module: str) -> set[str]:
    """Private attributes that the classes of a module set or read."""
    return set(re.findall(r"self\.(_[a-z]\w*)\b", inspect.getsource(sys.modules[module])))


@cache
def names(kind: type) -> set[str]:
    """Private names of a class and its bases in Textual."""
    modules = {each.__module__ for each in kind.__mro__ if each.__module__.startswith("textual.")}
    return {name for name in dir(kind) if re.match(r"_[a-z]", name)}.union(*map(set_in, modules))


def test_the_versions_that_are_tested_and_pinned_are_in_the_range() -> None:
    supported = SpecifierSet(re.findall(r'"textual([<>=0-9.,]+)"', (ROOT / "pyproject.toml").read_text())[0])
    tested = re.search(r"^TEXTUAL_RANGE \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.search(r"^textual==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested is not None and pinned is not None
    low, high = tested[1].split()
    assert all(one in supported for one in (low, high, pinned[1], version("textual")))
    assert f">={low.removesuffix('.0')}" in str(supported)


def test_bytes_that_are_not_utf8_do_not_end_the_thread_that_reads_keys() -> None:
    """Textual's driver decodes with this name, and by itself raises for a terminal of another encoding."""
    assert "getincrementaldecoder" in LinuxDriver.run_input_thread.__code__.co_names
    importlib.import_module("ndd_console.widgets.textual_private")
    decode = LinuxDriver.run_input_thread.__globals__["getincrementaldecoder"]("utf-8")().decode
    assert (
        decode(b"caf\xe9 ", final=False) + decode(b"\xc3", final=True)
        == "caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"
    )


def test_private_names_are_in_one_file_and_each_is_checked_here() -> None:
    theirs = {name for kind in THEIRS for name in names(kind)}
    tree = ast.parse(PRIVATE_FILE.read_text("utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for name in used if re.match(r"_[a-z]", name)} & theirs == PRIVATE
    for path in [
        CONSOLE / "app.py",
        *(CONSOLE / "screens").glob("*.py"),
        *(CONSOLE / "widgets").glob("*.py"),
    ]:
        if path == PRIVATE_FILE:
            continue
        text = path.read_text("utf-8")
        own = set(re.findall(r"(?:def |self\.)(_[a-z]\w*)(?:\(| *[:=])", text))
        used = set(re.findall(r"\b(?:app|timer|self|screen|super\(\))\.(_[a-z]\w*)", text))
        assert used & theirs <= own, path
        assert not re.search(r"(?:from|import) textual\._", text), path


def test_no_class_hides_a_private_name_of_textual() -> None:
    """An attribute or a method of a screen or a widget that Textual uses for something else."""
    count = 0
    for path in USES:
        module = importlib.import_module(".".join(path.relative_to(ROOT / "tui").with_suffix("").parts))
        text = path.read_text("utf-8")
        for node in ast.parse(text).body if path != PRIVATE_FILE else ():
            kind = getattr(module, node.name) if isinstance(node, ast.ClassDef) else object
            if issubclass(kind, Widget | App):
                base = next(each for each in kind.__mro__ if each.__module__.startswith("textual."))
                source = ast.get_source_segment(text, node) or ""
                own = set(re.findall(r"self\.(_[a-z]\w*)(?:: [^=\n]*)? = ", source))
                own |= set(re.findall(r"def (_[a-z]\w*)\(", source))
                assert not own & names(base), kind
                count += 1
    assert count > 20


def test_the_compositor() -> None:
    assert issubclass(ChopsUpdate, CompositorUpdate)
    assert parameters(Compositor.render_partial_update) == ["self"]
    assert parameters(CompositorUpdate.render_segments) == ["self", "console"]
    compositor = Compositor()
    assert compositor._dirty_regions == set()
    assert compositor.root is None
    assert isinstance(inspect.getattr_static(Compositor, "visible_widgets"), property)
    spans = Compositor._regions_to_spans([Region(2, 1, 3, 1), Region(0, 0, 4, 1)])
    assert sorted(spans) == [(0, 0, 4), (1, 2, 5)]  # (row, first column, column after the last)


async def test_a_screen_takes_another_compositor_and_an_app_another_output() -> None:
    assert parameters(Widget.render_lines) == ["self", "crop"]
    app = App[None](ansi_color=True)
    assert hasattr(app, "_capture_stdout") and hasattr(app, "_capture_stderr")
    assert isinstance(app._filters, list)
    async with app.run_test():
        assert isinstance(app.screen._compositor, Compositor)
        app.screen._compositor = Compositor()


def test_the_driver() -> None:
    for name in ("_sigtstp_application", "_sigcont_application"):
        assert parameters(getattr(LinuxDriver, name))[0] == "self"
    assert parameters(App._handle_exception) == ["self", "error"]
    source = inspect.getsource(LinuxDriver) + inspect.getsource(LinuxDriver.__mro__[1])
    for name in ("_app", "_auto_restart", "_must_signal_resume", "_writer_thread"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    assert "self.suspend_application_mode()" in inspect.getsource(LinuxDriver._sigtstp_application)
    assert "self.resume_application_mode()" in inspect.getsource(LinuxDriver._sigcont_application)


async def test_a_timer_that_is_late_can_be_told_to_fire() -> None:
    assert parameters(MessagePump.set_timer) == ["self", "delay", "callback", "name", "pause"]
    fired = asyncio.Event()
    async with App[None]().run_test() as pilot:
        timer = pilot.app.set_timer(0.01, fired.set)
        assert timer._skip is True
        timer._skip = False
        await asyncio.wait_for(fired.wait(), 10)


def test_the_environment_variables_are_still_read() -> None:
    source = inspect.getsource(textual.constants)
    assert '"TEXTUAL_FPS"' in source and '"ESCDELAY"' in source
