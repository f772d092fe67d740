"""A byte-pair encoder in plain Python: learns its merges from texts, encodes and decodes any text.

It caches no words, so that its cost grows with the length of the text, as for a tokeniser in a data loader. Method:
Sennrich, Haddow & Birch 2016, on bytes and on words as in GPT-2 (Radford et al. 2019).
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .problems import Progress

BYTES = 256  # tokens 0..255 are the bytes; the merges follow in the order of learning
LONGEST = 32  # characters of a word; merging takes quadratic time, so a text without spaces is cut
REPEATED = 2  # minimum count of a pair that becomes a token

Pair = tuple[int, int]

# Letters, digits or other characters with an optional space before them, or white space; matches every character.
_WORD = re.compile(
    rf" ?[^\W\d_]{{1,{LONGEST}}}| ?\d{{1,3}}| ?(?:[^\s\w]|_){{1,{LONGEST}}}|\s{{1,{LONGEST}}}(?!\S)|\s{{1,{LONGEST}}}"
)


class BytePairs:
    """Merges in the order of their ranks; merge i makes token 256 + i. pieces: the bytes of each token."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = tuple(merges)
        self.pieces = [bytes((value,)) for value in range(BYTES)]
        for left, right in self.merges:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for word in words(text):
            tokens += self.encode_word(word)
        return tokens

    def encode_word(self, word: str) -> list[int]:
        """The tokens of one of the `words` of a text: its bytes, merged pair by pair, lowest rank first."""
        tokens = to_bytes(word)
        ranks, never = self._ranks, len(self._ranks)
        while len(tokens) > 1:
            best = min(pairwise(tokens), key=lambda pair: ranks.get(pair, never))
            rank = ranks.get(best, never)
            if rank == never:
                break
            tokens = merge(tokens, best, BYTES + rank)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens. Raises UnicodeDecodeError if they start or end within a character."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "surrogatepass")


def words(text: str) -> list[str]:
    """Splits a text into words, within which pairs are merged; joined, they are the text again."""
    return _WORD.findall(text)


def to_bytes(text: str) -> list[int]:
    """UTF-8 bytes; lone surrogates (from JSON escapes) are encoded too."""
    return list(text.encode("utf-8", "surrogatepass"))


def merge(tokens: Sequence[int], pair: Pair, token: int) -> list[int]:
    """The tokens with every occurrence of the pair, from left to right, replaced by `token`."""
    left, right = pair
    merged: list[int] = []
    place, last = 0, len(tokens) - 1
    while place <= last:
        if place < last and tokens[place] == left and tokens[place + 1] == right:
            merged.append(token)
            place += 2
        else:
            merged.append(tokens[place])
            place += 1
    return merged


def learn(texts: Iterable[str], vocabulary: int, progress: Progress) -> tuple[BytePairs, dict[str, int]]:
    """(an encoder of at most `vocabulary` tokens, the number of tokens of each distinct word of the texts).

    Merges the most frequent pair first; ties go to the lower left token, then to the lower right one. The vocabulary is
    smaller if no remaining pair occurs twice.
    """
    progress("learning byte pairs")
    counted = Counter[str]()
    for text in texts:
        counted.update(words(text))
    counts = _PairCounts([to_bytes(word) for word in counted], list(counted.values()))
    wanted = vocabulary - BYTES
    merges: list[Pair] = []
    while len(merges) < wanted and (pair := counts.most_frequent()) is not None:
        if merges and len(merges) % 256 == 0:
            progress(f"learning byte pairs: {len(merges):,} of {wanted:,}")
        counts.merge(pair, BYTES + len(merges))
        merges.append(pair)
    return BytePairs(merges), dict(zip(counted, map(len, counts.tokens), strict=True))


class _PairCounts:
    """Distinct words as tokens, their frequencies, and the counts of their pairs, updated only where words change."""

    def __init__(self, tokens: list[list[int]], weights: list[int]) -> None:
        self.tokens, self.weights = tokens, weights
        self.counts: dict[Pair, int] = defaultdict(int)
        self.places: dict[Pair, set[int]] = defaultdict(set)  # words that contain the pair, or did so before
        for place, word in enumerate(tokens):
            for pair in pairwise(word):
                self.counts[pair] += weights[place]
                self.places[pair].add(place)
        # May contain outdated counts; a pair whose count changes is pushed again.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> Pair | None:
        """The pair to merge next; None if no pair occurs twice."""
        while self.heap:
            negative, pair = heapq.heappop(self.heap)
            if self.counts.get(pair) == -negative:
                return pair if -negative >= REPEATED else None
        return None

    def merge(self, pair: Pair, token: int) -> None:
        """Replaces the pair in every word and updates the counts of its neighbours."""
        left, right = pair
        counts, changed = self.counts, {pair}
        for place in self.places.pop(pair):
            tokens, weight = self.tokens[place], self.weights[place]
            at = 0
            while (at := _find(tokens, left, right, at)) >= 0:
                tokens[at : at + 2] = [token]
                gone, new = [pair], []
                if at:
                    gone.append((tokens[at - 1], left))
                    new.append((tokens[at - 1], token))
                at += 1
                if at < len(tokens):
                    gone.append((right, tokens[at]))
                    new.append((token, tokens[at]))
                for old in gone:
                    counts[old] -= weight
                for made in new:
                    counts[made] += weight
                    self.places[made].add(place)
                changed.update(gone, new)
        for other in changed:
            if counts[other]:
                heapq.heappush(self.heap, (-counts[other], other))
            else:
                del counts[other]
                self.places.pop(other, None)


def _find(tokens: list[int], left: int, right: int, start: int) -> int:
    """Index of the next occurrence of the pair from `start` on; -1 if there is none."""
    last = len(tokens) - 1
    try:
        while tokens[(start := tokens.index(left, start, last)) + 1] != right:
            start += 1
    except ValueError:
        return -1
    return start
