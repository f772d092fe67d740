"""What torch's compiler did, in words of the run's marks."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_engine.measure.compiling import compile_marks, guard


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


def test_first_compilations_and_later_ones_are_marks_of_their_own() -> None:
    found: dict[str, Any] = {
        "compiled": 2, "compiled_s": 3.0, "again": 1, "again_s": 0.5, "limit": True, "reason": "0/0: n == 1",
        "function": ["/a/train.py", 7, "forward"],
    }  # fmt: skip
    first, again = compile_marks(found, 40)
    assert (first.kind, first.step, first.data) == ("compile", 40, {"seconds": 3.0, "graphs": 2})
    assert again.kind == "recompile" and again.data["limit"] and again.data["reason"] == "n == 1"
    assert (again.data["file"], again.data["line"], again.data["function"]) == ("/a/train.py", 7, "forward")
    assert list(compile_marks({**found, "compiled": 0, "again": 0, "limit": False}, 41)) == []
