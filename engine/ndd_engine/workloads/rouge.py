"""ROUGE-1, ROUGE-2 and ROUGE-L: how much of a reference summary another summary says. No torch here.

The definitions of Lin (2004, "ROUGE: A Package for Automatic Evaluation of Summaries"), as F1, for one reference:
precision and recall weigh the same. Words are lower-cased runs of letters and digits; there is no stemming and
no list of words to ignore, and ROUGE-L takes the whole summary as one sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def rouge(candidate: str, reference: str) -> dict[str, float]:
    """F1 between 0 and 1 by name: rouge_1, rouge_2, rouge_l."""
    left, right = words(candidate), words(reference)
    return {
        "rouge_1": overlap(left, right, 1),
        "rouge_2": overlap(left, right, 2),
        "rouge_l": f1(common_subsequence(left, right), len(left), len(right)),
    }


def words(text: str) -> list[str]:
    """The words that count: "Don't use foo_bar()" has don, t, use, foo and bar."""
    return _WORD.findall(text.lower())


def overlap(candidate: Sequence[str], reference: Sequence[str], n: int) -> float:
    """F1 of the n-grams that both have; one that is repeated counts as often as both repeat it."""
    left, right = (
        Counter(zip(*(text[start:] for start in range(n)), strict=False)) for text in (candidate, reference)
    )
    return f1((left & right).total(), left.total(), right.total())


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest sequence of words that both have in this order, with anything in between."""
    above = [0] * (len(right) + 1)
    for word in left:
        row = [0]
        for place, other in enumerate(right):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        above = row
    return above[-1]


def f1(hits: int, candidate: int, reference: int) -> float:
    """Harmonic mean of hits / candidate and hits / reference; 0 where nothing was hit or there is nothing."""
    return 2 * hits / (candidate + reference) if hits else 0.0
