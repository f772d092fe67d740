"""Every screen at two sizes: each key of its footer by keyboard and by mouse, and the wheel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot
from textual.scroll_view import ScrollView

from ndd_console.screens import base, home, live, pages, trial, tuning, wizard
from ndd_console.screens.base import Dialog, KeyScreen
from ndd_console.view.keys import SCROLL_KEYS, SIDEWAYS_KEY, Key
from ndd_console.view.rows import cells
from ndd_console.view.style import PLAIN

from . import serve
from .pilots import press, text_of

SIZES = ((80, 24), (120, 40))
# Scenes that show other figures on a screen that another scene shows.
ALIKE = ("live-", "ranks-1024", "diagnosis-", "log-search", "wizard-long", "trial-mistake", "palette")
WALKED = [name for name in serve.SCREENS if not name.startswith(ALIKE) or name == "live-finding"]
# Keys that move in what scrolls, and those that show nothing new here: the folder is read again.
MOVES = (*SCROLL_KEYS, SIDEWAYS_KEY)
UNSEEN = {("home", "reload")}

Place = tuple[Key, tuple[int, int]]


def footer(screen: KeyScreen, height: int) -> Iterator[Place]:
    """The keys of the footer, each with a cell of its word."""
    row = screen.canvas.rows[-1] if isinstance(screen, live.LiveScreen) else screen.bar.rows[0]  # type: ignore[attr-defined]
    x = 0 if isinstance(screen, live.LiveScreen) else screen.bar.region.x  # type: ignore[attr-defined]
    shown: Key | None = None
    for text, style in row:
        if style == "key":
            shown = screen.key_named(text.strip())
            assert shown is not None, text
        elif shown is not None:
            yield shown, (x + 1, height - 1)
            shown = None
        x += cells(text)


def test_every_kind_of_screen_is_walked() -> None:
    kinds = {
        kind
        for module in (base, home, live, pages, trial, tuning, wizard)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
        and issubclass(kind, KeyScreen | Dialog)
        and not kind.__subclasses__()
    }
    named = {kind.__name__.removesuffix("Screen").lower() for kind in kinds}
    seen = {name.partition("-")[0] for name in serve.SCREENS}
    assert (
        named - seen == {"ownvalues", "textquestion"} and {"values", "log"} <= seen
    )  # log-search asks for a text


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", WALKED)
async def test_each_key_of_a_footer_works_by_keyboard_and_by_click_and_the_wheel_scrolls(
    name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, used = serve.SCREENS[name], list[Key]()
    app = scene.app(PLAIN)
    async with app.run_test(size=size) as pilot:
        await serve.press(pilot, scene.keys)
        screen = app.screen
        if isinstance(screen, KeyScreen):
            monkeypatch.setattr(KeyScreen, "use", lambda _, key: used.append(key))
            offered = list(footer(screen, size[1]))
            assert {key.shown for key, _ in offered} <= {key for key, _ in screen.key_words()}
            assert any(key.action in ("back", "quit", "close") for key, _ in offered)
            for key, place in offered:
                await pilot.click(offset=place)
                if key not in MOVES:
                    await pilot.press(key.names.partition(",")[0])
                await pilot.pause()
                assert used == [key] * (1 if key in MOVES else 2), key
                used.clear()
        await _wheel(pilot)


async def _wheel(pilot: Pilot[Any]) -> None:
    """What has more rows than it shows scrolls there and back again; on other screens nothing moves."""
    views = [one for one in pilot.app.screen.query(ScrollView) if one.display and one.max_scroll_y > 0]
    for view in views:
        view.scroll_to(y=0, animate=False, immediate=True)
        await pilot.pause()
    before = text_of(pilot.app)
    middle = views[0].region.center if views else (5, 5)
    for event, moved in ((MouseScrollDown, bool(views)), (MouseScrollUp, False)):
        for _ in range(4):
            await pilot._post_mouse_events([event], offset=tuple(map(int, middle)))
        await pilot.pause(0.05)
        assert (text_of(pilot.app) != before) == moved


@pytest.mark.long
@pytest.mark.parametrize("clicked", [False, True], ids=["80x24 by keyboard", "120x40 by click"])
@pytest.mark.parametrize("name", WALKED)
async def test_each_key_of_a_footer_has_an_effect(name: str, clicked: bool) -> None:
    scene, size, place = serve.SCREENS[name], SIZES[clicked], 0
    while True:
        app = scene.app(PLAIN)
        async with app.run_test(size=size) as pilot:
            await serve.press(pilot, scene.keys)
            screen = app.screen
            if not isinstance(screen, KeyScreen):
                return
            keys = [one for one in footer(screen, size[1]) if one[0] not in MOVES]
            if place == len(keys):
                return
            (key, where), place = keys[place], place + 1
            before = (screen, text_of(app), app.clipboard)
            if clicked:
                await pilot.click(offset=where)
            await press(pilot, *([] if clicked else [key.names.partition(",")[0]]))
            if app.is_running and app.return_value is None and (name, key.action) not in UNSEEN:
                await serve.settled(pilot)
                assert (app.screen, text_of(app), app.clipboard) != before, key
