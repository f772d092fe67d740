"""The private names of Textual that the console uses exist in the installed version, and are what the console expects.

`make test-textual` runs this with the lowest and the highest version of the range in pyproject.toml.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
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
PRIVATE_FILE = CONSOLE / "widgets" / "textual_private.py"
# Private names of Textual in the console's code; each has a test below.
PRIVATE = {
    "_compositor", "_dirty_regions", "_regions_to_spans", "_skip", "_capture_stdout", "_capture_stderr", "_filters",
    "_handle_exception", "_app", "_auto_restart", "_must_signal_resume", "_sigcont_application",
    "_sigtstp_application", "_writer_thread",
}  # fmt: skip


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def supported() -> SpecifierSet:
    return SpecifierSet(re.findall(r'"textual([<>=0-9.,]+)"', (ROOT / "pyproject.toml").read_text())[0])


def test_the_versions_that_are_tested_and_pinned_are_in_the_range() -> None:
    tested = re.search(r"^TEXTUAL_RANGE \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.search(r"^textual==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested is not None and pinned is not None
    low, high = tested[1].split()
    assert all(one in supported() for one in (low, high, pinned[1], version("textual")))
    assert f">={low.removesuffix('.0')}" in str(supported())


def test_bytes_that_are_not_utf8_do_not_end_the_thread_that_reads_keys() -> None:
    """Textual's driver decodes with this name, and by itself raises for a terminal of another encoding."""
    assert "getincrementaldecoder" in LinuxDriver.run_input_thread.__code__.co_names
    importlib.import_module("ndd_console.widgets.textual_private")
    decode = LinuxDriver.run_input_thread.__globals__["getincrementaldecoder"]("utf-8")().decode
    assert (
        decode(b"caf\xe9 ", final=False) + decode(b"\xc3", final=True)
        == "caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"
    )


THEIRS = (App, Screen, Compositor, Widget, textual.timer.Timer, LinuxDriver)


def test_every_private_name_in_use_is_checked_here() -> None:
    """Private names of the classes of Textual that the file uses or defines anew, and that are not its own."""
    tree = ast.parse(PRIVATE_FILE.read_text("utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    theirs = {name for kind in THEIRS for name in _names(kind)}
    assert {name for name in used if re.match(r"_[a-z]", name)} & theirs == PRIVATE


def test_all_private_names_are_in_one_file() -> None:
    theirs = {name for kind in THEIRS for name in _names(kind)}
    for path in (
        CONSOLE / "app.py",
        *(CONSOLE / "screens").glob("*.py"),
        *(CONSOLE / "widgets").glob("*.py"),
    ):
        text = path.read_text("utf-8")
        own = set(re.findall(r"(?:def |self\.)(_[a-z]\w*)(?:\(| *[:=])", text))
        used = set(re.findall(r"\b(?:app|timer|self|screen|super\(\))\.(_[a-z]\w*)", text)) & theirs
        assert path == PRIVATE_FILE or used <= own, path
        assert path == PRIVATE_FILE or not re.search(r"(?:from|import) textual\._", text), path


@pytest.mark.long
def test_no_class_hides_a_private_name_of_textual() -> None:
    """An attribute of a screen or a widget that Textual uses for something else."""
    for kind in (*_subclasses(Widget), *_subclasses(App)):
        if (
            kind.__module__.startswith("ndd_console.")
            and kind.__module__ != "ndd_console.widgets.textual_private"
        ):
            base = next(each for each in kind.__mro__ if each.__module__.startswith("textual."))
            own = set(re.findall(r"self\.(_[a-z]\w*)(?:: [^=\n]*)? = ", inspect.getsource(kind)))
            assert not own & _names(base), kind


def _subclasses(kind: type) -> set[type]:
    return {each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))}


def _names(kind: type) -> set[str]:
    """Private names of a class and its bases in Textual: methods, and attributes that their source sets."""
    sources = [inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("textual.")]
    attributes = {name for source in sources for name in re.findall(r"self\.(_[a-z]\w*)\b", source)}
    return {name for name in dir(kind) if re.match(r"_[a-z]", name)} | attributes


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
