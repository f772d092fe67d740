"""Where steps end, by the order in which optimizers step."""

from __future__ import annotations

import pytest

from ndd_watch.ends import Ends


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("A" * 50, 50),
        ("AB" * 40, 40),  # both in each step
        ("AAAAAB" * 20, 20),  # a critic, and what it criticises
        ("ABC" * 30, 30),
        ("AAABBB" * 10, 60),  # they take turns
        (("A" * 7 + "B" * 7) * 3, 42),
        (("A" * 25 + "B" * 25) * 2, 100),
        ("A" * 40 + "B" * 40, 80),  # one takes the place of another
        ("A" * 5 + "B" * 50, 55),
        ("A" * 40 + "AB" * 40, 80),  # one joins
        ("A" * 10 + "B" * 10 + "AB" * 40, 60),  # first alone, then together
        ("A" * 200 + "B" * 200 + "AB" * 40, 440),
        (("A" * 10 + "B" * 10) * 3 + "AB" * 50, 110),
        ("AAABBB" * 2 + "AB" * 40, 52),
    ],
)  # fmt: skip
def test_steps_end_where_the_order_says(order: str, steps: int) -> None:
    ends = Ends()
    assert sum(sum(ends.stepped(ord(key))) for key in order) + ends.finished() == steps
