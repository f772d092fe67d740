"""The byte-pair encoder: lossless, repeatable, and the same as its definition written naively."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.workloads.finetune import BYTES, LONGEST, BytePairs, Pair, learn, utf8, words

ANY_TEXT = st.text(st.integers(0, 0x10FFFF).map(chr))  # lone surrogates too, as a JSON escape can make them
FEW_LETTERS = st.text("ab c\n1_é", max_size=60)


def taught(*texts: str, vocabulary: int = 1024) -> BytePairs:
    return learn(texts, vocabulary, lambda _: None)[0]


def replaced(tokens: list[int], pair: Pair, token: int) -> list[int]:
    """Left to right, by a stack."""
    result: list[int] = []
    fresh = False  # whether the last token was there before, and not just made
    for value in tokens:
        if result and not fresh and (result[-1], value) == pair:
            result[-1] = token
            fresh = True
        else:
            result.append(value)
            fresh = False
    return result


def naive_merges(texts: list[str], wanted: int) -> list[Pair]:
    """Counts every pair of every word again for each merge."""
    tokens = [list(utf8(word)) for text in texts for word in words(text)]
    merges: list[Pair] = []
    while len(merges) < wanted:
        counts = Counter(pair for word in tokens for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        tokens = [replaced(word, best, BYTES + len(merges)) for word in tokens]
        merges.append(best)
    return merges


@given(ANY_TEXT)
def test_words_are_the_whole_text_in_bounded_parts(text: str) -> None:
    parts = words(text)
    assert "".join(parts) == text
    assert all(0 < len(part) <= LONGEST + 1 for part in parts)


def test_words_keep_their_space_and_kinds_apart() -> None:
    assert words("def f(x1):\n    return  x_ 2024") == [
        "def", " f", "(", "x", "1", "):", "\n   ", " return", " ", " x", "_", " 202", "4",
    ]  # fmt: skip


@given(ANY_TEXT)
def test_any_text_comes_back(text: str) -> None:
    for encoder in (BytePairs(()), taught("the cat and the dog, naïve 😀😀", text, text)):
        tokens = encoder.encode(text)
        assert encoder.decode(tokens) == text
        assert all(0 <= token < len(encoder) for token in tokens)


def test_merges_worked_by_hand() -> None:
    # Words "ab", " ab", " abc": (a, b) three times, (space, a) twice, (b, c) once. Then (space, ab) twice, (ab, c)
    # once: the end.
    encoder, lengths = learn(["ab ab abc"], 1024, lambda _: None)
    assert encoder.merges == ((97, 98), (32, 256))
    assert len(encoder) == 258 and encoder.pieces[256:] == [b"ab", b" ab"]
    assert encoder.encode("abc ab") == [256, 99, 257]
    assert lengths == {"ab": 1, " ab": 1, " abc": 2}


def test_a_pair_in_itself_is_merged_from_the_left() -> None:
    encoder = taught("aaaaa aaaaa", vocabulary=257)
    assert encoder.merges == ((97, 97),)
    assert encoder.encode("aaaaa") == [256, 256, 97]


@given(st.lists(FEW_LETTERS, max_size=5), st.integers(1, 30))
def test_learning_is_its_definition_in_any_order_of_texts(texts: list[str], wanted: int) -> None:
    encoder, lengths = learn(texts, BYTES + wanted, lambda _: None)
    assert list(encoder.merges) == naive_merges(texts, wanted)
    assert taught(*reversed(texts), vocabulary=BYTES + wanted).merges == encoder.merges
    assert lengths == {word: len(encoder.encode_word(word)) for text in texts for word in words(text)}


@given(FEW_LETTERS, FEW_LETTERS)
def test_encoding_is_every_merge_in_its_order(known: str, text: str) -> None:
    encoder = taught(known * 3, "a cab, a bac\n" * 3)
    expected: list[int] = []
    for word in words(text):
        tokens = list(utf8(word))
        for rank, pair in enumerate(encoder.merges):
            tokens = replaced(tokens, pair, BYTES + rank)
        expected += tokens
    assert encoder.encode(text) == expected


def test_vocabulary_is_as_large_as_asked_and_helps(sentences: str) -> None:
    sizes = []
    for vocabulary in (257, 290, 320):
        encoder = taught(sentences, vocabulary=vocabulary)
        assert len(encoder) == vocabulary
        sizes.append(len(encoder.encode(sentences)))
    assert len(sentences) > sizes[0] > sizes[1] > sizes[2]
    everything = taught(sentences, vocabulary=65_536)
    # Some thirty distinct words: no pair is left within one.
    assert 320 < len(everything) < 400
    assert len(everything.encode(sentences)) == len(words(sentences))
