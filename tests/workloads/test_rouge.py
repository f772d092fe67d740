"""ROUGE against cases that were worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.workloads.summarise import common_subsequence, overlap, rouge, words

TEXTS = st.lists(st.sampled_from(list("abcde")), max_size=8)


def test_words_are_lower_cased_runs_of_letters_and_digits() -> None:
    assert words("Don't call foo_bar(2): Ärger!") == ["don", "t", "call", "foo", "bar", "2", "ärger"]


def test_lin_s_example() -> None:
    """Lin (2004), section 3.1: both candidates have three of the four words, but not in the same order."""
    reference = "police killed the gunman"
    same_order, other_order = (
        rouge(text, reference) for text in ("police kill the gunman", "the gunman kill police")
    )
    assert same_order["rouge_l"] == pytest.approx(3 / 4)
    assert other_order["rouge_l"] == pytest.approx(2 / 4)
    # Both have the one pair of words "the gunman", of three.
    assert same_order["rouge_2"] == other_order["rouge_2"] == pytest.approx(1 / 3)
    assert same_order["rouge_1"] == other_order["rouge_1"] == pytest.approx(3 / 4)


def test_lengths_weigh_in() -> None:
    """2 of 2 words are right (precision 1) and 2 of 6 found (recall 1/3): F1 is 2 * 1/3 / (4/3)."""
    found = rouge("the cat", "The cat sat on the mat.")
    assert found["rouge_1"] == found["rouge_l"] == pytest.approx(0.5)
    # 1 of 1 and 1 of 5 pairs: 2 * 1 * 0.2 / 1.2.
    assert found["rouge_2"] == pytest.approx(1 / 3)


def test_repeating_a_word_is_not_rewarded() -> None:
    """ "the" counts twice, as the reference has it twice: 2 of 7 and 2 of 6."""
    found = rouge("the the the the the the the", "the cat sat on the mat")
    assert found["rouge_1"] == found["rouge_l"] == pytest.approx(4 / 13)
    assert found["rouge_2"] == 0


@given(TEXTS, TEXTS)
def test_properties(left: list[str], right: list[str]) -> None:
    longest = common_subsequence(left, right)
    assert longest == common_subsequence(right, left) <= min(len(left), len(right))
    assert common_subsequence(left, left + right) == len(left)
    for n in (1, 2):
        assert overlap(left, right, n) == overlap(right, left, n)
        assert 0 <= overlap(left, right, n) <= 1
    if longest:
        assert 2 * longest / (len(left) + len(right)) <= overlap(left, right, 1) + 1e-12
    assert overlap(left, left, 1) == bool(left)
