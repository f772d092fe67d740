"""The summariser workload: pairs of text and summary, negative log-likelihood, ROUGE of the summaries it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import SummariseSection

from . import summarise_data
from .base import Batch, Collate, MeanLoss, Metric, Parted, built
from .rouge import rouge
from .summarise_data import PADDING, Encoded, Pair, PairData, Vocabulary
from .summarise_model import PointerGenerator, negative_log_likelihood
from .summarise_search import Written, beam, greedy
from .windows import Complaints


class Pairs(NamedTuple):
    """A batch, or one item without the dimension B, all int64; see Encoded. source, extended: (B, S). target_in,
    target_out: (B, T). Padded on the right."""

    source: Tensor
    extended: Tensor
    target_in: Tensor
    target_out: Tensor


class PairDataset(Dataset[Pairs]):
    """Pairs end to end in int32 tensors: words[0] and words[1] are (all source tokens,), words[2] and words[3]
    (all target tokens,). starts: (4, N + 1), where each pair begins. limits: S and T where batches have one shape,
    or None to pad them to their longest."""

    def __init__(
        self, words: tuple[Tensor, ...], starts: Tensor, limits: tuple[int, int] | None = None
    ) -> None:
        self.words, self.starts, self.limits = words, starts, limits

    @classmethod
    def of(cls, encoded: Sequence[Encoded], limits: tuple[int, int] | None) -> PairDataset:
        """The dataset of encoded pairs."""
        fields = [[pair[field] for pair in encoded] for field in range(4)]
        words = (
            torch.tensor([number for part in parts for number in part], dtype=torch.int32) for parts in fields
        )
        lengths = torch.tensor([[0, *map(len, parts)] for parts in fields])
        return cls(tuple(words), lengths.cumsum(1), limits)

    def __len__(self) -> int:
        return self.starts.shape[1] - 1

    def __getitem__(self, index: int) -> Pairs:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        bounds = self.starts[:, index : index + 2].tolist()
        return Pairs(
            *(words[start:end].long() for words, (start, end) in zip(self.words, bounds, strict=True))
        )

    def batch(self, indices: Tensor) -> Pairs:
        """The pairs at `indices` (B,) on the data's device, as the collated batch, by one gather for each part."""
        starts = self.starts[:, indices]
        lengths = self.starts[:, indices + 1] - starts
        if self.limits is None:
            widths = lengths.amax(1).tolist()
        else:
            widths = [limit for limit in self.limits for _ in range(2)]
        parts = []
        for words, start, length, width in zip(self.words, starts, lengths, widths, strict=True):
            place = torch.arange(width, device=words.device)
            real = place < length.unsqueeze(1)
            # Past the end of an item is the next one, or nothing: looked up elsewhere, then replaced.
            found = words[torch.where(real, start.unsqueeze(1) + place, 0)]
            parts.append(torch.where(real, found, PADDING).long())
        return Pairs(*parts)

    def to(self, device: torch.device) -> PairDataset:
        """The same pairs on another device."""
        return PairDataset(
            tuple(words.to(device) for words in self.words), self.starts.to(device), self.limits
        )

    @property
    def nbytes(self) -> int:
        """What `to` takes on the device."""
        return sum(tensor.nbytes for tensor in (*self.words, self.starts))


class Padder:
    """Collates pairs: to the longest of them, or to `limits`, source and target. A class, so that loader processes
    can be sent one."""

    def __init__(self, limits: tuple[int, int] | None) -> None:
        self.limits = limits

    def __call__(self, items: list[Pairs]) -> Pairs:
        source, extended, target_in, target_out = (
            pad_sequence(list(part), batch_first=True, padding_value=PADDING)
            for part in zip(*items, strict=True)
        )
        if self.limits is None:
            return Pairs(source, extended, target_in, target_out)
        sources, targets = self.limits
        return Pairs(
            _widened(source, sources),
            _widened(extended, sources),
            _widened(target_in, targets),
            _widened(target_out, targets),
        )


def _widened(rows: Tensor, width: int) -> Tensor:
    return nn.functional.pad(rows, (0, width - rows.shape[1]), value=PADDING)


class Rouge:
    """The loss, and ROUGE of the summaries of the first `count` pairs that an evaluation meets; implements Metric.

    The summaries of a batch are written when it comes, all at once, by a beam and greedily.
    """

    def __init__(
        self,
        model: PointerGenerator,
        vocabulary: Vocabulary,
        pairs: Sequence[Pair],
        unknowns: Sequence[Sequence[str]],
        count: int,
        width: int,
        limit: int,
    ) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._pairs, self._unknowns = pairs[:count], unknowns
        self._width, self._limit = width, limit
        self._loss = MeanLoss()
        self._seen = 0
        self._sums: dict[str, float] = {}

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """Batches in the order of the evaluation pairs."""
        self._loss.update(output, batch, loss)
        pairs = self._pairs[self._seen : self._seen + len(batch[0])]
        if not pairs:
            return
        source, extended = batch[0][: len(pairs)], batch[1][: len(pairs)]
        self._add("", beam(self._model, source, extended, self._width, self._limit), pairs)
        if self._width > 1:
            self._add("greedy_", greedy(self._model, source, extended, self._limit), pairs)
        self._seen += len(pairs)

    def _add(self, kind: str, written: Sequence[Written], pairs: Sequence[Pair]) -> None:
        for index, (one, pair) in enumerate(zip(written, pairs, strict=True), self._seen):
            text = " ".join(self._vocabulary.decode(one.words, self._unknowns[index]))
            for name, value in rouge(text, pair.reference).items():
                self._sums[kind + name] = self._sums.get(kind + name, 0.0) + value

    def result(self) -> dict[str, float]:
        """ROUGE-L of the beam first, then its other figures, those of greedy summaries, and the loss."""
        means = {name: total / self._seen for name, total in self._sums.items()}
        return {"rouge_l": means.pop("rouge_l", float("nan")), **means, **self._loss.result()}


class Summarise:
    """A prepared summariser; implements Workload."""

    name = "summarise"
    item = "pair"
    token: str | None = "token"
    epochs_differ = False

    def __init__(self, section: SummariseSection, data: PairData) -> None:
        self.tokens_per_item: float = data.tokens_per_item
        self.better = "higher" if section.summaries else "lower"
        self._section, self._data = section, data
        limits = (data.sequence, data.target) if section.pad == "full" else None
        train, evaluation = (
            [data.vocabulary.encode(pair, data.target) for pair in pairs]
            for pairs in (data.train, data.evaluation)
        )
        self._unknowns = [pair.unknowns for pair in evaluation[: section.summaries]]
        self.train_data: Dataset[Any] = PairDataset.of(train, limits)
        self.eval_data: Dataset[Any] = PairDataset.of(evaluation, limits)
        self.collate: Collate | None = Padder(limits)
        self._writer = built(lambda: build_model(section))
        self.model: nn.Module = self._writer
        self.parts: Mapping[str, Parted] = self._writer.parts()

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Probability of each target word (B, T)."""
        chosen: Tensor = model(*batch)
        return chosen

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean over a summary's words, then over the summaries, in nats."""
        return negative_log_likelihood(output, batch[3])

    def metric(self) -> Metric:
        """ROUGE of `summaries` written summaries and the loss; with none of them the loss alone."""
        section = self._section
        if not section.summaries:
            return MeanLoss()
        return Rouge(
            self._writer,
            self._data.vocabulary,
            self._data.evaluation,
            self._unknowns,
            section.summaries,
            section.beam,
            section.target,
        )

    def describe_model(self) -> str:
        """One line."""
        section = self._section
        return (
            f"{section.layers} layers, hidden {section.hidden}, embedding {section.embedding}, vocabulary "
            f"{section.vocabulary:,}, {section.decoder} decoder"
        )

    def describe_data(self) -> str:
        """One line."""
        return self._data.line()

    def notes(self) -> Sequence[str]:
        """What was joined and cut, and rows of the vocabulary that stand for no word."""
        return self._data.notes


def prepare(
    config: Config, section: SummariseSection, complaints: Complaints, tell: Callable[[str], None]
) -> Summarise | None:
    """The workload of a configuration; None after complaining."""
    tell(f"reading {summarise_data.source_name(section)}")
    data = summarise_data.read(config, section, complaints, tell)
    if data is None:
        return None
    tell("building the model")
    return Summarise(section, data)


def build_model(section: SummariseSection) -> PointerGenerator:
    """The model of the section, with weights from torch's global generator."""
    return PointerGenerator(
        section.vocabulary,
        section.embedding,
        section.hidden,
        section.layers,
        section.dropout,
        section.decoder == "hoisted",
    )
