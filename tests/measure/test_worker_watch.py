"""Which functions take the time of a batch, from profiles by two clocks."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_engine.measure.worker_watch import functions_of, quantile

MS = 1_000_000


def report(
    rows: list[tuple[str, dict[str, int], dict[str, int]]],
    late: int = 0,
    cpu: int | None = None,
    system: int = 0,
    faults: int = 0,
) -> Any:
    """Of one profile by each clock. rows: (name, ns on the wall by kind, ns of processor time by kind)."""
    wall = sum(sum(walls.values()) for _, walls, _ in rows)
    spent = sum(sum(cpus.values()) for _, _, cpus in rows) if cpu is None else cpu
    functions = [["d.py", 3, name, 8, sum(walls.values()), walls, cpus] for name, walls, cpus in rows]
    return {
        "profiles": [[1, wall, spent, late, system, faults]] * 2,
        "functions": functions,
        "transforms": [],
    }


def shares(found: list[Any]) -> dict[str, float]:
    return {name: share for _, _, name, _, share, _, _ in found}


def test_a_function_that_computes_and_one_that_sleeps() -> None:
    found = functions_of([report([
        ("decode", {"computes": 6 * MS}, {"computes": 6 * MS}), ("fetch", {"sleeps": 4 * MS}, {}),
    ])])  # fmt: skip
    assert shares(found) == {"decode": pytest.approx(0.6), "fetch": pytest.approx(0.4)}
    assert found[1][6] == {"sleeps": pytest.approx(0.4)}


def test_waiting_for_a_processor_is_nobodys() -> None:
    found = functions_of([report([
        ("decode", {"computes": 6 * MS}, {"computes": 6 * MS}), ("scale", {"computes": 20 * MS}, {"computes": 2 * MS}),
    ], late=18 * MS)])  # fmt: skip
    assert shares(found) == {"decode": pytest.approx(0.75), "scale": pytest.approx(0.25)}


def test_waiting_that_has_no_name_belongs_to_the_function_that_waits() -> None:
    found = functions_of([report([
        ("load", {"computes": 20 * MS}, {"computes": 2 * MS}), ("scale", {"computes": 2 * MS}, {"computes": 2 * MS}),
    ])])  # fmt: skip
    assert shares(found)["load"] == pytest.approx(20 / 22)
    assert found[0][6]["waits"] == pytest.approx(18 / 22)


def test_without_a_second_clock_the_wall_decides() -> None:
    one = report([("decode", {"computes": 6 * MS}, {}), ("scale", {"computes": 2 * MS}, {})], cpu=8 * MS)
    one["profiles"] = [one["profiles"][0], [0] * 6]
    assert shares(functions_of([one]))["decode"] == pytest.approx(0.75)


def test_quantiles_are_within_a_class() -> None:
    assert quantile({20: 9, 40: 1}, 0.5) == pytest.approx(1000 * 2**5, rel=0.1)
    assert quantile({20: 9, 40: 1}, 0.99) == pytest.approx(1000 * 2**10, rel=0.1)


def test_touching_memory_first_is_told_from_computing() -> None:
    rows = [
        ("buffer", {"computes": 8 * MS}, {"computes": 8 * MS}),
        ("read", {"storage": 2 * MS}, {"storage": 2 * MS}),
    ]
    touched = functions_of([report(rows, system=7 * MS, faults=2000)])
    assert touched[0][6] == {"touches": pytest.approx(0.5), "computes": pytest.approx(0.3)}
    # The system works for a function that touches nothing new: it may copy, or start a process.
    innocent = functions_of([report(rows, system=7 * MS, faults=20)])
    assert innocent[0][6] == {"computes": pytest.approx(0.8)}


def test_a_read_from_memory_that_waits_for_a_processor_is_no_wait_for_storage() -> None:
    found = functions_of([report([
        ("read", {"storage": 12 * MS}, {"storage": 4 * MS}), ("scale", {"computes": 12 * MS}, {"computes": 4 * MS}),
    ], late=16 * MS)])  # fmt: skip
    assert shares(found) == {"read": pytest.approx(0.5), "scale": pytest.approx(0.5)}
    slow = functions_of([report([
        ("read", {"storage": 12 * MS}, {"storage": 0}), ("scale", {"computes": 4 * MS}, {"computes": 4 * MS}),
    ])])  # fmt: skip
    assert shares(slow) == {"read": pytest.approx(0.75), "scale": pytest.approx(0.25)}


def test_waiting_beside_much_waiting_for_a_processor_is_nobodys() -> None:
    """Another thread of the worker holds the interpreter lock, and has no processor either."""
    rows = [
        ("parse", {"computes": 70 * MS}, {"computes": 3 * MS}), ("scale", {"computes": 30 * MS}, {"computes": MS}),
    ]  # fmt: skip
    busy = functions_of([report(rows, late=86 * MS)])
    assert shares(busy) == {"parse": pytest.approx(0.75), "scale": pytest.approx(0.25)}
    assert "waits" not in busy[0][6]
    assert "waits" in functions_of([report(rows, late=6 * MS)])[0][6]
