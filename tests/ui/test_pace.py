"""How often the live screen is drawn on fast and slow CPUs."""

from __future__ import annotations

import pytest

from ndd_console.screens.live import SHARE, DrawPace

TICK_S = 0.25


class Machine:
    """A clock, and a thread that needs `refresh_s` per refresh."""

    def __init__(self, refresh_s: float) -> None:
        self.now = self.cpu = 0.0
        self.refresh_s = refresh_s
        self.drawn: list[float] = []

    def run(self, seconds: float) -> None:
        pace = DrawPace(lambda: self.now, lambda: self.cpu)
        while self.now < seconds:
            self.now += TICK_S
            if pace.due():
                self.drawn.append(self.now)
                self.cpu += self.refresh_s


@pytest.mark.parametrize(
    ("refresh_ms", "a_second"), [(0.5, 4.0), (1.8, 4.0), (3.6, 2.0), (7.0, 1.0), (80.0, 1.0)]
)
def test_a_screen_is_drawn_as_often_as_its_share_of_a_core_allows(refresh_ms: float, a_second: float) -> None:
    machine = Machine(refresh_ms * 1e-3)
    machine.run(40.0)
    assert len(machine.drawn) / 40.0 == pytest.approx(a_second, rel=0.05)
    if a_second > 1:
        assert machine.cpu / 40.0 <= SHARE * 1.12


def test_one_refresh_that_was_slow_does_not_slow_the_next_ones() -> None:
    machine = Machine(0.05)
    machine.run(1.0)
    machine.refresh_s = 1e-3
    before = len(machine.drawn)
    machine.run(11.0)
    assert len(machine.drawn) - before >= 36
