"""The cores that other processes use, told where they leave none."""

from __future__ import annotations

import pytest

from ndd_engine.hardware.load import LoadWatch


@pytest.mark.parametrize(
    ("busy", "own", "foreign", "taken"),
    [
        (20.0, 4.0, 1.6, "other processes used 1.6 of 2 cores"),
        (20.0, 20.0, 0.0, ""),  # nobody else
        (12.0, 4.0, 0.8, ""),  # cores are free
        (20.0, 21.0, 0.0, ""),  # the clocks of the kernel tick by 10 ms
        (30.0, 4.0, 2.6, "other processes used 2.0 of 2 cores"),
    ],
)
def test_cores_of_others_count_where_none_is_left(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, foreign: float, taken: str
) -> None:
    watch = LoadWatch()
    looks = iter([(0.0, 100.0, 5.0), (10.0, 100.0 + busy, 5.0 + own), (10.0, 100.0 + busy, 5.0 + own)])
    monkeypatch.setattr(watch, "_cores", frozenset({0, 1}))
    monkeypatch.setattr(watch, "_look", lambda: next(looks))
    watch.restart()
    assert watch.foreign() == pytest.approx(foreign)
    assert watch.taken() == taken


def test_the_clocks_are_read() -> None:
    watch = LoadWatch()
    now, busy, own = watch._look()
    assert now > 0 and busy > 0 and own > 0 and watch.foreign() >= 0
