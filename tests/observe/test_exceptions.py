"""Exceptions of the script that are raised while our code runs go on; ours end there."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ndd_engine.api.observing import Observation


class Slow:
    """Says things slowly: a signal arrives meanwhile."""

    class emitter:  # noqa: N801
        @staticmethod
        def say(*_: Any, **__: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(params=[TimeoutError, ValueError, RuntimeError])
def raised(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """A signal handler of the script raises this."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise request.param("time is up")

    before = signal.signal(signal.SIGUSR1, handler)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


def test_a_timeout_of_the_script_goes_on_while_a_metric_is_told(raised: type[Exception]) -> None:
    with pytest.raises(raised, match="time is up"):
        Observation(Slow(), None, None).evaluation(3, loss=0.5)


def test_errors_of_the_observer_and_of_what_it_calls_end_there() -> None:
    Observation(None, None, None).evaluation(3, loss=0.5)  # None has no emitter
    Observation(SimpleNamespace(emitter=SimpleNamespace(say=json.loads)), None, None).note("note")
