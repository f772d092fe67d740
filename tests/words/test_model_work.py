"""The model in a profiler capture, in words: the tree of its modules closes, and what has changed is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ndd_console.words.model_work import changed_modules, work_tables
from ndd_engine.record.events import KernelsEvent

MODULES = [
    ("body.layers.0", "Linear", 4_000_000, 6_000_000, 1, 1 << 20, 4096),
    ("body.layers.2", "Linear", 1_000_000, 2_000_000, 1, 0, 0),
    ("(loss)", "", 500_000, 500_000, 0, 0, 0),
    ("Net", "Net", 500_000, 0, 1, 0, 0),
]
PLACE = "/me/train.py", 12, "Net.forward"
EVENT = KernelsEvent(
    60_000_000, 50_000_000, 0, {}, 30, modules=MODULES, model_ns=20_000_000, method="operators", step=120, steps=3,
    passes={"forward": 8_000_000, "backward": 9_000_000}, lines=[(*PLACE, 5_000_000, 8_000_000, 2)],
    operations=[("linear", "8x4, 2x4", "float", "", *PLACE, "head\x1b[1m", "Linear", 4e6, 6e6, 1, 4e6)],
    loops=[(*PLACE, 40, 1, 4e6, 6e6, 400, 9000, 40, 1, "cell", "GRUCell")],
)  # fmt: skip


def rows(tables: list[Any], word: str) -> list[tuple[str, ...]]:
    return next(list(table.rows) for table in tables if word in table.title)


def test_the_tree_has_what_is_inside_and_what_is_left() -> None:
    tables = work_tables(EVENT, "profiler capture at step 120")
    tree = {row[-1]: row for row in rows(tables, "by module")}
    assert list(tree) == [
        "body", "· layers", "· · 0 (Linear)", "· · 2 (Linear)", "(loss)", "Net (by itself)",
        "(between the operators)",
    ]  # fmt: skip
    assert tree["body"][:3] == ("65 %", "5 ms", "8 ms") and tree["· · 0 (Linear)"][3:6] == (
        "1",
        "1.0 MiB",
        "4 KiB",
    )
    # 8 ms of forward are 6 ms in modules, and 9 ms of backward 8.5 ms.
    assert tree["(between the operators)"][1:3] == ("2 ms", "0.5 ms")
    assert rows(tables, "by line") == [("65 %", "5 ms", "8 ms", "2", "/me/train.py:12 in Net.forward")]
    (operator,) = rows(tables, "Operators")
    assert (
        operator[5] == "linear(8x4, 2x4, float)"
        and "\x1b" not in operator[6]
        and "train.py:12" in operator[6]
    )
    assert rows(tables, "Loops")[0][1:4] == ("40", "0.25 ms", "10")


def test_modules_that_take_another_time_are_named() -> None:
    slower = replace(
        EVENT, modules=[("body.layers.0", "Linear", 9_000_000, 11_000_000, 1, 0, 0), *MODULES[1:]]
    )
    table = changed_modules(EVENT, slower)
    assert table is not None and table.rows == (("body.layers.0 (Linear)", "10 ms", "20 ms", "2.00x"),)
    alike = changed_modules(EVENT, EVENT)
    assert alike is not None and not alike.rows
    assert changed_modules(EVENT, None) is None
