"""Findings of losses and gradients that are not finite: the words for each thing that was so first."""

from __future__ import annotations

from typing import Any

import pytest
from planted_runs import Planted

from ndd_console.words.run import loss_text, summary
from ndd_engine.record.events import NotFiniteEvent

SKIPPING = {"skipped": 19, "first_skipped": 12, "loss_scale": 0.0}
LOST = {"bad_loss": ("NaN", 40, 28, 0.7, 0.6)}
PLACE = {"file": "/home/me/train.py", "line": 15, "function": "main"}


def axis(name: str, at: list[int], places: int, size: int) -> dict[str, Any]:
    return {"axis": name, "at": at, "places": places, "size": size}


def run(window: dict[str, Any], **origin: Any) -> Planted:
    return Planted(window=window, after={3: [NotFiniteEvent(41, **origin)]} if origin else {})


@pytest.mark.parametrize(
    ("origin", "cause", "advice"),
    [
        (
            {"what": "input", "name": "x", "nan": True, **axis("column", [3], 1, 128), "share": 1 / 128},
            "the input x is not finite (NaN in column 3 of 128)", "repair such values",
        ),
        (
            {"what": "input", "name": "batch['y']", "infinite": True, **axis("item", [1, 2, 4], 9, 64)},
            "the input batch['y'] is not finite (infinite in 9 of 64 items)", "repair such values",
        ),
        (
            {"what": "output", "name": "blocks.1.norm", "kind": "Norm", "nan": True, "share": 1.0},
            "the output of blocks.1.norm (Norm) is not finite (NaN in all values), while its inputs are",
            "division by zero",
        ),
        (
            {"what": "output", "name": "fc", "kind": "Linear", "nan": True, "share": 1.0, "largest": 2e30},
            "while its inputs are, up to 2e+30", "lower learning rate",
        ),
        (
            {"what": "gradient", "name": "fc.weight", "infinite": True, "share": 0.5, "count": 4, "of": 6},
            "the gradients of 4 of 6 parameters are not finite, such as fc.weight (infinite in 50 % of its values)",
            "bfloat16",
        ),
        (
            {"what": "parameter", "name": "fc.weight", "nan": True, "share": 1.0, "count": 2, "of": 2},
            "2 of 2 parameters are not finite", "continue from a checkpoint",
        ),
    ],
)  # fmt: skip
def test_skipped_updates_say_what_was_not_finite_first(
    origin: dict[str, Any], cause: str, advice: str
) -> None:
    found = run(SKIPPING, **origin, **PLACE).verdict()
    assert found.cause == "not-finite" and found.confidence == "certain"
    assert (
        found.title.startswith("228 of 240 updates skipped (95 %) since step 12: ") and cause in found.title
    )
    assert advice in found.changes[0].text and found.changes[0].where == "train.py:15"
    assert any("lowest" in item.text for item in found.evidence)


def test_a_loss_that_is_not_finite_is_the_first_finding_and_the_first_line() -> None:
    snapshot = run(LOST).snapshot()
    assert loss_text(snapshot) == "loss NaN since about step 40"
    assert summary(snapshot, None, "runs/it")[0].startswith("finding: the loss is NaN since about step 40; ")
    exact = run({"bad_loss": ("infinite", 40, 39, 0.7, 0.6)}).snapshot()
    assert loss_text(exact) == "loss infinite since step 40"


def test_a_loss_that_had_grown_says_so() -> None:
    found = run({"bad_loss": ("NaN", 40, 39, 4.5e9, 2.3)}).verdict()
    assert "it had grown from 2.30 to 4.5e+09" in found.title
    assert "lower learning rate" in found.changes[0].text


def test_it_is_no_finding_any_more_when_losses_are_finite_again() -> None:
    assert "not-finite" not in Planted(window={"skipped": 0, "loss_scale": 65536.0}).causes()
