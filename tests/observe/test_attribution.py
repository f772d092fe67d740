"""To which function the time of a profile belongs, and what it is spent with."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_watch.attribution import TimeShares, kind_of
from ndd_watch.call_times import CallEntry

SLEEP = "<built-in method time.sleep>"


def entries(times: dict[str, float], calls: dict[tuple[str, str], float]) -> dict[Any, CallEntry]:
    """Functions with their seconds, and (caller, function) with those of the calls."""
    found = {name: CallEntry(name, 1, seconds) for name, seconds in times.items()}
    for (caller, name), seconds in calls.items():
        found[caller].inside[name] = CallEntry(name, 1, seconds)
    return found


def users(name: Any) -> bool:
    return str(name).startswith("user")


def test_what_a_library_does_belongs_to_its_callers_in_proportion() -> None:
    known = entries(
        {"user.a": 4.0, "user.b": 2.0, "library": 5.0, SLEEP: 4.0},
        {("user.a", "library"): 4.0, ("user.b", "library"): 1.0, ("library", SLEEP): 4.0},
    )
    shares = TimeShares(known, users, kind_of)
    assert shares.spent("user.a") == pytest.approx({"computes": 0.8, "sleeps": 3.2})
    assert shares.spent("user.b") == pytest.approx({"computes": 1.2, "sleeps": 0.8})


def test_a_function_of_the_user_that_a_library_calls_keeps_its_time() -> None:
    known = entries(
        {"user.a": 10.0, "library": 9.0, "user.inner": 6.0},
        {("user.a", "library"): 9.0, ("library", "user.inner"): 6.0},
    )
    shares = TimeShares(known, users)
    assert sum(shares.spent("user.a").values()) == pytest.approx(4.0)
    assert shares.apart_in("user.a") == pytest.approx(6.0)
    assert shares.apart_of(known["user.a"].inside["library"]) == pytest.approx(6.0)


def test_time_is_neither_lost_nor_doubled_where_library_functions_call_each_other() -> None:
    """As `collate` calls a comprehension, and that calls `collate`; most of the time is spent deep inside."""
    known = entries(
        {"user.a": 10.0, "collate": 10.0, "comprehension": 9.5, SLEEP: 8.0},
        {
            ("user.a", "collate"): 10.0, ("collate", "comprehension"): 9.5, ("comprehension", "collate"): 9.0,
            ("collate", SLEEP): 8.0,
        },
    )  # fmt: skip
    spent = TimeShares(known, users, kind_of).spent("user.a")
    assert sum(spent.values()) == pytest.approx(10.0)
    assert spent["sleeps"] > 0.5 * sum(spent.values())


def test_kinds_of_waits_are_the_same_in_a_step_and_in_a_worker() -> None:
    assert kind_of("<method 'synchronize' of 'torch.Event' objects>") == "device"
    assert kind_of(("/x/torch/cuda/__init__.py", 7, "synchronize")) == "device"
    assert kind_of(("/home/u/train.py", 7, "synchronize")) == "computes"
    assert kind_of("<built-in method gc.collect>") == "collects"
    assert kind_of("<method 'recv' of '_socket.socket' objects>") == "connection"
