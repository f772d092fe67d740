"""What signal handlers set is heard, whatever they interrupt."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
