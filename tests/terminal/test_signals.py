"""What signal handlers set is heard, whatever they interrupt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ndd_console.widgets import textual_private
from tests.waiting import LIMIT_S

# Signals arrive every 0.1 ms, until 5,000 handlers have set the event.
HANDLERS = """
import signal, sys
from ndd_engine.processes import SignalEvent

event, heard = SignalEvent(), 0

def handle(*_):
    global heard
    heard += 1
    event.set()

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while heard < 5_000:
    {doing}
signal.setitimer(signal.ITIMER_REAL, 0)
print(event.wait(0))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("doing", "words"),
    [("event.set()", ["True"]), ("event.wait(0.001); event.clear()", ["True", "False"])],
)
def test_a_handler_that_interrupts_it(doing: str, words: list[str]) -> None:
    command = [sys.executable, "-c", HANDLERS.format(doing=doing)]
    heard = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert heard.strip() in words


def test_a_process_that_continues_in_the_background_after_its_screen_has_ended_just_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(textual_private, "in_background", lambda _handle: True)
    driver = object.__new__(textual_private.BackgroundDriver)
    driver._writer_thread, driver._auto_restart, driver.fileno = None, True, 0
    driver._sigcont_application()  # as signals do, here without an event loop
