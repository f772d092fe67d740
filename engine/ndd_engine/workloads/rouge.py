"""ROUGE-1, ROUGE-2 and ROUGE-L: how much of a reference summary a candidate summary contains. Imports no torch.

The F1 scores of Lin (2004, "ROUGE: A Package for Automatic Evaluation of Summaries") for a single reference. Words are
lower-cased runs of letters and digits, without stemming or stop words; ROUGE-L takes the summary as one sentence.
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
    """The words of a text: "Don't use foo_bar()" has don, t, use, foo and bar."""
    return _WORD.findall(text.lower())


def overlap(candidate: Sequence[str], reference: Sequence[str], n: int) -> float:
    """F1 of the n-grams that both have, counting repetitions that both have."""
    left, right = (
        Counter(zip(*(text[start:] for start in range(n)), strict=False)) for text in (candidate, reference)
    )
    return f1((left & right).total(), left.total(), right.total())


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence of words."""
    above = [0] * (len(right) + 1)
    for word in left:
        row = [0]
        for place, other in enumerate(right):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        above = row
    return above[-1]


def f1(hits: int, candidate: int, reference: int) -> float:
    """Harmonic mean of hits / candidate and hits / reference; 0 if there are no hits."""
    return 2 * hits / (candidate + reference) if hits else 0.0
