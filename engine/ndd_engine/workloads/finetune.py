"""Fine-tuning: a small language model on a few long examples, tokenised in plain Python in every epoch.

A factory like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch.utils.data import Dataset

from ndd_engine.workloads import MeanLoss, Settings, build_checked, full_precision

from .chartext import NextCharacterModel, Size
from .finetune_data import read, utf8

PADDING = 0  # any token would do: attention is causal, and labels at padding are not scored
UNSCORED = -100  # cross_entropy's ignore_index
BYTES = 256  # tokens 0..255 are the bytes; the merges follow in the order of learning
LONGEST = 32  # characters of a word; merging takes quadratic time, so a text without spaces is cut
REPEATED = 2  # minimum count of a pair that becomes a token

Pair = tuple[int, int]

# Letters, digits or other characters with an optional space before them, or white space; matches every character.
_WORD = re.compile(
    rf" ?[^\W\d_]{{1,{LONGEST}}}| ?\d{{1,3}}| ?(?:[^\s\w]|_){{1,{LONGEST}}}|\s{{1,{LONGEST}}}(?!\S)|\s{{1,{LONGEST}}}"
)


def factory(settings: Settings) -> dict[str, Any]:
    """Examples as byte pairs, and a model of the next token with logits (B, T, vocabulary)."""
    data, options, sequence = read(settings), settings.options, settings.sequence
    encoder, lengths = learn(data.documents, options["vocabulary"], settings.progress)
    settings.progress("counting tokens")
    counts = [count_tokens(text, encoder, lengths) for text in data.train]  # before they are cut
    tokens = sum(min(count - 1, sequence) for count in counts) / len(counts)
    layers, heads, width = options["layers"], options["heads"], options["width"]
    size = Size(len(encoder), sequence, layers, heads, width, options["dropout"])
    piece_bytes = torch.tensor([len(piece) for piece in encoder.pieces])
    settings.progress("building the model")
    # As in GPT-2, the embedding is tied to the output layer.
    model = build_checked(lambda: NextCharacterModel(size, tie_weights=True))
    shapes = ("workload.pad=full", "pad all batches to one shape")
    return {
        "model": model,
        "train_data": Examples(data.train, encoder, sequence),
        "eval_data": Examples(data.evaluation, encoder, sequence),
        "collate": Pad(sequence if options["pad"] == "full" else None),
        "loss": cross_entropy,
        "weight": scored_tokens,
        "metric": partial(Perplexity, weight=scored_tokens, piece_bytes=piece_bytes),
        "item": "example",
        "token": "token",
        "tokens_per_item": tokens,
        "parts": model.parts(),
        "alternatives": {"recompile": shapes} if options["pad"] == "longest" else {},
        "describe_model": f"{layers} layers, {heads} heads, width {width}, context {sequence:,}, "
        f"{len(encoder):,} byte-pair tokens",
        "describe_data": f"{data.text}; {tokens:,.0f} training tokens per example on average",
        "notes": [*data.notes, *_notes(settings, counts, len(encoder))],
    }


class Examples(Dataset[Any]):
    """Texts that are tokenised in __getitem__: item i is (n,) int64 with 2 <= n <= sequence + 1.

    The whole text is encoded and then cut, as tokenisers do. Encoding each text only once is left to the loader
    (loader.cache).
    """

    def __init__(self, texts: Sequence[str], encoder: BytePairs, sequence: int) -> None:
        self.texts, self.encoder, self.sequence = texts, encoder, sequence

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return torch.tensor(self.encoder.encode(self.texts[index])[: self.sequence + 1])


@dataclass(frozen=True)
class Pad:
    """Collates examples to (tokens, next tokens), both (B, T) int64, padded on the right.

    T is `length`, or that of the longest example. Right padding needs no mask: in a causal model no token attends to
    the padding after it, and the labels at padding are UNSCORED.
    """

    length: int | None = None

    def __call__(self, items: list[Tensor]) -> tuple[Tensor, Tensor]:
        length = self.length or max(len(item) for item in items) - 1
        inputs = items[0].new_full((len(items), length), PADDING)
        labels = items[0].new_full((len(items), length), UNSCORED)
        for row, item in enumerate(items):
            inputs[row, : len(item) - 1] = item[:-1]
            labels[row, : len(item) - 1] = item[1:]
        return inputs, labels


@dataclass(kw_only=True)
class Perplexity(MeanLoss):
    """loss: mean over all tokens, in nats; perplexity: its exp; bits_per_byte: the loss in bits per byte of text.

    Every token has the same weight. Only bits_per_byte is comparable between vocabularies: with a larger one, a text
    has fewer tokens, each harder to predict. piece_bytes: (vocabulary,) int64, bytes of each token.
    """

    piece_bytes: Tensor
    text_bytes: Tensor | float = 0

    def update(self, output: Any, batch: Any, loss: Tensor) -> None:
        super().update(output, batch, loss)
        labels: Tensor = batch[1]
        self.piece_bytes = self.piece_bytes.to(labels.device)
        scored = self.piece_bytes[labels.clamp(min=0)] * (labels != UNSCORED)
        self.text_bytes = self.text_bytes + scored.sum()

    def parts(self) -> Any:
        return [super().parts(), float(self.text_bytes)]

    def merge(self, parts: Sequence[Any]) -> None:
        super().merge([sums for sums, _ in parts])
        self.text_bytes = sum(text_bytes for _, text_bytes in parts)

    def result(self) -> dict[str, float]:
        loss, text_bytes = super().result()["loss"], float(self.text_bytes)
        return {
            "perplexity": math.inf if loss > 700 else math.exp(loss),
            "loss": loss,
            "bits_per_byte": float(self.total or 0) / math.log(2) / text_bytes if text_bytes else math.nan,
        }


def scored_tokens(batch: Any) -> Tensor:
    """The number of tokens that the loss of a batch is a mean over, a scalar."""
    count: Tensor = (batch[1] != UNSCORED).sum()
    return count


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """In nats, a mean over the tokens of the micro-batch that are not padding."""
    logits = full_precision(output.flatten(0, 1))
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=UNSCORED)


def _notes(settings: Settings, counts: Sequence[int], vocabulary: int) -> list[str]:
    """Examples that are cut, batches of varying shape, and a small vocabulary."""
    notes, sequence, wanted = [], settings.sequence, settings.options["vocabulary"]
    predicted = [min(count - 1, sequence) for count in counts]
    if longer := sum(count - 1 > sequence for count in counts):
        share = sum(predicted) / sum(count - 1 for count in counts)
        notes.append(
            f"{longer:,} of {len(counts):,} examples are longer than {sequence:,} tokens and are cut after encoding: "
            f"{share:.1%} of the tokens are used for training."
        )
    if settings.options["pad"] == "longest" and len(set(predicted)) > 1:
        notes.append(
            "Batches are padded to their longest example, so shapes vary; for a fixed shape (compile, CUDA graphs) set "
            'workload.pad to "full".'
        )
    if vocabulary < wanted:
        notes.append(
            f"The examples give only {vocabulary:,} of {wanted:,} tokens: no other pair occurs twice."
        )
    return notes


def count_tokens(text: str, encoder: BytePairs, lengths: Mapping[str, int]) -> int:
    """len(encoder.encode(text)), by looking up its words. lengths: the number of tokens of each learned word.

    Only words at the joint of two documents are missing from `lengths`.
    """
    return sum(lengths.get(word) or len(encoder.encode_word(word)) for word in words(text))


# A byte-pair encoder in plain Python: learns its merges from texts, encodes and decodes any text.
#
# It caches no words, so that its cost grows with the length of the text, as for a tokeniser in a data loader. Method:
# Sennrich, Haddow & Birch 2016, on bytes and on words as in GPT-2 (Radford et al. 2019).


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
        tokens = list(utf8(word))
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


def merge(tokens: list[int], pair: Pair, token: int) -> list[int]:
    """The tokens with every occurrence of the pair, from left to right, replaced by `token`."""
    merged: list[int] = []
    for value in tokens:
        # A token just made is above both of the pair, so it cannot be the left one again.
        if value == pair[1] and merged and merged[-1] == pair[0]:
            merged[-1] = token
        else:
            merged.append(value)
    return merged


def learn(
    texts: Iterable[str], vocabulary: int, progress: Callable[[str], None]
) -> tuple[BytePairs, dict[str, int]]:
    """(an encoder of at most `vocabulary` tokens, the number of tokens of each distinct word of the texts).

    Merges the most frequent pair first; ties go to the lower left token, then to the lower right one. The vocabulary is
    smaller if no remaining pair occurs twice.
    """
    progress("learning byte pairs")
    counted = Counter[str]()
    for text in texts:
        counted.update(words(text))
    tokens, weights = [list(utf8(word)) for word in counted], list(counted.values())
    counts: dict[Pair, int] = defaultdict(int)
    places: dict[Pair, set[int]] = defaultdict(set)  # words that contain the pair, or did so before
    for place, word in enumerate(tokens):
        for pair in pairwise(word):
            counts[pair] += weights[place]
            places[pair].add(place)
    # May contain outdated counts; a pair whose count changes is pushed again.
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    wanted, merges = vocabulary - BYTES, list[Pair]()
    while len(merges) < wanted and heap:
        negative, pair = heapq.heappop(heap)
        if counts[pair] != -negative or -negative < REPEATED:
            continue
        if merges and len(merges) % 256 == 0:
            progress(f"learning byte pairs: {len(merges):,} of {wanted:,}")
        changed: Counter[Pair] = Counter()
        for place in places.pop(pair):
            before, weight = tokens[place], weights[place]
            tokens[place] = after = merge(before, pair, BYTES + len(merges))
            for other in pairwise(before):
                changed[other] -= weight
            for other in pairwise(after):
                changed[other] += weight
                places[other].add(place)
        for other, change in changed.items():
            counts[other] += change
            if change and counts[other]:
                heapq.heappush(heap, (-counts[other], other))
        merges.append(pair)
    return BytePairs(merges), dict(zip(counted, map(len, tokens), strict=True))
