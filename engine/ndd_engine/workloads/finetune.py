"""The fine-tuning workload: a small language model on a few long examples, tokenised anew each time they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.utils.data import Dataset

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import FinetuneSection

from . import finetune_data
from .base import Batch, Collate, Parted, built
from .byte_pairs import BytePairs, learn, words
from .chartext_model import NextCharacterModel
from .finetune_data import DocumentData
from .windows import Complaints

PADDING = 0  # any token would do: nothing before the padding sees it, and what follows is not scored
UNSCORED = -100  # cross_entropy's ignore_index


class Examples(Dataset[Any]):
    """Texts that become tokens when they are asked for: item i is (n,) int64 with 2 <= n <= sequence + 1.

    The whole text is encoded and then cut, as tokenisers do it. To encode each text once and keep the tokens is the
    loader's business (loader.cache), not this dataset's.
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
    """Examples to a batch: (tokens, tokens one later), both (B, T) int64, padded at the end.

    T is that of the longest example, or always `length`. Padding at the end needs no mask: in a causal model a token
    attends only to tokens before it, so none attends to the padding, and the padding's own outputs are UNSCORED.
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
    """perplexity: exp of the mean loss of all tokens; loss: that mean, in nats; bits_per_byte: it per byte of text.

    Tokens count alike whatever batch they are in. Only bits_per_byte compares between vocabularies: a larger one has
    fewer tokens, each harder to predict. piece_bytes: (vocabulary,) int64, bytes of each token.
    """

    piece_bytes: Tensor
    nats: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    bytes_: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """Keeps three scalars on the device."""
        labels: Tensor = batch[1]
        self.piece_bytes = self.piece_bytes.to(labels.device)
        scored = labels != UNSCORED
        count = scored.sum()
        self.nats.append(loss.detach().float() * count)
        self.tokens.append(count)
        self.bytes_.append((self.piece_bytes[labels.clamp(min=0)] * scored).sum())

    def result(self) -> dict[str, float]:
        """As named above."""
        nats, tokens, text_bytes = (_total(values) for values in (self.nats, self.tokens, self.bytes_))
        loss = nats / tokens if tokens else math.nan
        return {
            "perplexity": math.inf if loss > 700 else math.exp(loss),
            "loss": loss,
            "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else math.nan,
        }


def _total(values: Sequence[Tensor]) -> float:
    """The sum in double precision, read back at once."""
    return float(torch.stack(list(values)).cpu().double().sum()) if values else 0.0


class Finetune:
    """A prepared language model; implements Workload."""

    name = "finetune"
    item = "example"
    token: str | None = "token"
    better = "lower"
    epochs_differ = False

    def __init__(
        self, section: FinetuneSection, data: DocumentData, encoder: BytePairs, counts: Sequence[int]
    ) -> None:
        """counts: tokens of each training example, before it is cut."""
        predicted = [min(count - 1, data.sequence) for count in counts]
        self.encoder = encoder
        self.tokens_per_item: float = sum(predicted) / len(predicted)
        self._section, self._data, self._counts, self._predicted = section, data, counts, predicted
        self._piece_bytes = torch.tensor([len(piece) for piece in encoder.pieces])
        self.train_data: Dataset[Any] = Examples(data.train, encoder, data.sequence)
        self.eval_data: Dataset[Any] = Examples(data.evaluation, encoder, data.sequence)
        self.collate: Collate | None = Pad(data.sequence if section.pad == "full" else None)
        model = built(lambda: build_model(section, len(encoder), data.sequence))
        self.model: nn.Module = model
        self.parts: Mapping[str, Parted] = model.parts()

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Logits of the next token (B, T, vocabulary)."""
        return model(batch[0])

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy in nats, a mean over the real tokens of the micro-batch."""
        return F.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten(), ignore_index=UNSCORED)

    def metric(self) -> Perplexity:
        """Perplexity and bits per byte."""
        return Perplexity(self._piece_bytes)

    def describe_model(self) -> str:
        """One line."""
        section = self._section
        return (
            f"{section.layers} layers, {section.heads} heads, width {section.width}, context "
            f"{self._data.sequence:,}, {len(self.encoder):,} byte-pair tokens"
        )

    def describe_data(self) -> str:
        """One line."""
        return f"{self._data.line()}; a mean example trains {self.tokens_per_item:,.0f} tokens"

    def notes(self) -> Sequence[str]:
        """Examples that are cut, batches of varying shape, a small vocabulary, and what the reader noted."""
        notes = list(self._data.notes)
        sequence, counts = self._data.sequence, self._counts
        longer = sum(count - 1 > sequence for count in counts)
        if longer:
            share = sum(self._predicted) / sum(count - 1 for count in counts)
            notes.append(
                f"Of {len(counts):,} examples {longer:,} are longer than {sequence:,} tokens and are cut after "
                f"encoding: {share:.1%} of the tokens are trained on."
            )
        if self._section.pad == "longest" and len(set(self._predicted)) > 1:
            notes.append(
                "Batches are as long as their examples, so shapes vary; for one shape (compile, CUDA graphs) set "
                'workload.pad to "full".'
            )
        if len(self.encoder) < self._section.vocabulary:
            notes.append(
                f"The examples give {len(self.encoder):,} tokens instead of {self._section.vocabulary:,}: no other "
                "pair occurs twice."
            )
        return notes


def prepare(
    config: Config, section: FinetuneSection, complaints: Complaints, tell: Callable[[str], None]
) -> Finetune | None:
    """The workload of a configuration; None after complaining."""
    tell(f"reading {finetune_data.source_name(section)}")
    data = finetune_data.read(config, section, complaints)
    if data is None:
        return None
    encoder, lengths = learn(data.documents, section.vocabulary, tell)
    tell("counting tokens")
    counts = [count_tokens(text, encoder, lengths) for text in data.train]
    tell("building the model")
    return Finetune(section, data, encoder, counts)


def count_tokens(text: str, encoder: BytePairs, lengths: Mapping[str, int]) -> int:
    """len(encoder.encode(text)), at the price of looking up its words. lengths: tokens of the words met in learning.

    A word that is not in there stands where two documents were joined.
    """
    return sum(lengths.get(word) or len(encoder.encode_word(word)) for word in words(text))


def build_model(section: FinetuneSection, vocabulary: int, context: int) -> NextCharacterModel:
    """The transformer of the character models on tokens, its embedding shared with the output layer as in GPT-2.

    Parameters: (vocabulary + context) x width + layers x (12 width^2 + 2 width) + width.
    """
    return NextCharacterModel(
        vocabulary, context, section.layers, section.heads, section.width, section.dropout, tie_weights=True
    )
