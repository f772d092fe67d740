"""The fine-tuning workload: a small language model on a few long examples, tokenised in every epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch.utils.data import Dataset

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import FinetuneSection

from .base import Batch, BuiltinWorkload, full_precision
from .byte_pairs import BytePairs, learn, words
from .chartext_model import NextCharacterModel, Size
from .finetune_data import DocumentData
from .problems import Progress

PADDING = 0  # any token would do: attention is causal, and labels at padding are not scored
UNSCORED = -100  # cross_entropy's ignore_index


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


@dataclass
class Perplexity:
    """loss: mean over all tokens, in nats; perplexity: its exp; bits_per_byte: the loss in bits per byte of text.

    Every token has the same weight. Only bits_per_byte is comparable between vocabularies: with a larger one, a text
    has fewer tokens, each harder to predict. piece_bytes: (vocabulary,) int64, bytes of each token.
    """

    piece_bytes: Tensor
    mergeable: ClassVar[bool] = True
    nats: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    bytes_: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        labels: Tensor = batch[1]
        self.piece_bytes = self.piece_bytes.to(labels.device)
        scored, count = labels != UNSCORED, scored_tokens(batch)
        self.nats.append(loss.detach().float() * count)
        self.tokens.append(count)
        self.bytes_.append((self.piece_bytes[labels.clamp(min=0)] * scored).sum())

    def parts(self) -> Any:
        """The sums, see Metric."""
        return [_total(values) for values in (self.nats, self.tokens, self.bytes_)]

    def merge(self, parts: Sequence[Any]) -> None:
        """Continue with the sums of all ranks."""
        sums = [torch.tensor(list(values), dtype=torch.float64) for values in zip(*parts, strict=True)]
        self.nats, self.tokens, self.bytes_ = ([values.sum()] for values in sums)

    def result(self) -> dict[str, float]:
        nats, tokens, text_bytes = (_total(values) for values in (self.nats, self.tokens, self.bytes_))
        loss = nats / tokens if tokens else math.nan
        return {
            "perplexity": math.inf if loss > 700 else math.exp(loss),
            "loss": loss,
            "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else math.nan,
        }


def scored_tokens(batch: Batch) -> Tensor:
    """The number of tokens that the loss of a batch is a mean over, a scalar."""
    count: Tensor = (batch[1] != UNSCORED).sum()
    return count


def _total(values: Sequence[Tensor]) -> float:
    """The sum in double precision, with one copy to the host."""
    return float(torch.stack(list(values)).cpu().double().sum()) if values else 0.0


class Finetune(BuiltinWorkload):
    """A prepared language model; implements Workload. Its output is logits (B, T, vocabulary) of the next token."""

    name = "finetune"
    item = "example"
    token: str | None = "token"

    def __init__(self, _: Config, section: FinetuneSection, data: DocumentData, progress: Progress) -> None:
        encoder, lengths = learn(data.documents, section.vocabulary, progress)
        progress("counting tokens")
        counts = [count_tokens(text, encoder, lengths) for text in data.train]  # before they are cut
        predicted = [min(count - 1, data.sequence) for count in counts]
        self.tokens_per_item = sum(predicted) / len(predicted)
        line = f"{data.line()}; {self.tokens_per_item:,.0f} training tokens per example on average"
        super().__init__(line, [*data.notes, *_notes(section, data.sequence, counts, len(encoder))])
        self.encoder = encoder
        self._section, self._sequence = section, data.sequence
        self._piece_bytes = torch.tensor([len(piece) for piece in encoder.pieces])
        self.train_data = Examples(data.train, encoder, data.sequence)
        self.eval_data = Examples(data.evaluation, encoder, data.sequence)
        self.collate = Pad(data.sequence if section.pad == "full" else None)
        self.weight = scored_tokens
        self._build(lambda: build_model(section, len(encoder), data.sequence), progress)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy in nats, a mean over the tokens of the micro-batch that are not padding."""
        logits = full_precision(output.flatten(0, 1))
        return F.cross_entropy(logits, batch[1].flatten(), ignore_index=UNSCORED)

    def metric(self) -> Perplexity:
        return Perplexity(self._piece_bytes)

    def describe_model(self) -> str:
        section = self._section
        return (
            f"{section.layers} layers, {section.heads} heads, width {section.width}, context "
            f"{self._sequence:,}, {len(self.encoder):,} byte-pair tokens"
        )


def _notes(section: FinetuneSection, sequence: int, counts: Sequence[int], vocabulary: int) -> list[str]:
    """Examples that are cut, batches of varying shape, and a small vocabulary."""
    notes = []
    predicted = [min(count - 1, sequence) for count in counts]
    if longer := sum(count - 1 > sequence for count in counts):
        share = sum(predicted) / sum(count - 1 for count in counts)
        notes.append(
            f"{longer:,} of {len(counts):,} examples are longer than {sequence:,} tokens and are cut after encoding: "
            f"{share:.1%} of the tokens are used for training."
        )
    if section.pad == "longest" and len(set(predicted)) > 1:
        notes.append(
            "Batches are padded to their longest example, so shapes vary; for a fixed shape (compile, CUDA graphs) set "
            'workload.pad to "full".'
        )
    if vocabulary < section.vocabulary:
        notes.append(
            f"The examples give only {vocabulary:,} of {section.vocabulary:,} tokens: no other pair occurs twice."
        )
    return notes


def count_tokens(text: str, encoder: BytePairs, lengths: Mapping[str, int]) -> int:
    """len(encoder.encode(text)), by looking up its words. lengths: the number of tokens of each learned word.

    Only words at the joint of two documents are missing from `lengths`.
    """
    return sum(lengths.get(word) or len(encoder.encode_word(word)) for word in words(text))


def build_model(section: FinetuneSection, vocabulary: int, context: int) -> NextCharacterModel:
    """The transformer of the character models on tokens, with the embedding tied to the output layer as in GPT-2.

    Parameters: (vocabulary + context) x width + layers x (12 width^2 + 2 width) + width.
    """
    size = Size(vocabulary, context, section.layers, section.heads, section.width, section.dropout)
    return NextCharacterModel(size, tie_weights=True)
