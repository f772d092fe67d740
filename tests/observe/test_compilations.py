"""What torch's compiler did, as marks of the record."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_watch.apart import Compilations, guard


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "0/0: bins == 0          #   # recompile.py:13 in forward",
            "bins == 0 (recompile.py:13 in forward)",
        ),
        (
            "0/7: bins == 7   # if bins % 2:  # a/b/train.py:13 in forward",
            "bins == 7 (train.py:13 in forward)",
        ),
        ("tensor 'x' size mismatch at index 0", "tensor 'x' size mismatch at index 0"),
    ],
)
def test_the_assumption_and_its_place_are_taken_from_the_reason(reason: str, told: str) -> None:
    assert guard(reason) == told


def record(**found: Any) -> SimpleNamespace:
    return SimpleNamespace(co_filename="/a/train.py", co_firstlineno=7, co_name="forward", **found)


def test_first_compilations_and_later_ones_are_marks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        record(compile_id="0/0", duration_us=1e6), record(compile_id="1/0", duration_us=2e6),
        record(compile_id="1/1", duration_us=5e5, recompile_reason="0/0: n == 1"),
        record(compile_id="1/2", fail_reason="recompile_limit reached"),
    ]  # fmt: skip
    utilities = SimpleNamespace(get_compilation_metrics=lambda: records)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utilities)
    compilations = Compilations()
    first, again = compilations.take()
    assert first == ("compile", "compiled 2 graphs in 3.0 s", {"seconds": 3.0, "graphs": 2})
    kind, text, data = again
    assert kind == "recompile" and "1 graph in 0.5 s: forward (train.py:7)" in text
    assert data == {
        "seconds": 0.5, "graphs": 1, "reason": "n == 1", "limit": True, "file": "/a/train.py", "line": 7,
        "function": "forward",
    }  # fmt: skip
    assert not compilations.take()
