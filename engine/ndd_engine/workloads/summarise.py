"""The summariser workload: pairs of text and summary, negative log-likelihood, ROUGE of generated summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import SummariseSection

from .base import Batch, BuiltinWorkload, GatherItems, MeanLoss, Metric
from .problems import Progress
from .rouge import rouge
from .summarise_data import PADDING, Encoded, Pair, PairData, Vocabulary
from .summarise_model import PointerGenerator, negative_log_likelihood
from .summarise_search import beam


class Pairs(NamedTuple):
    """A batch, or an item without the dimension B, all int64 and padded on the right; see Encoded.

    source, extended: (B, S). target_in, target_out: (B, T).
    """

    source: Tensor
    extended: Tensor
    target_in: Tensor
    target_out: Tensor


class PairDataset(GatherItems):
    """Pairs concatenated in int32 tensors.

    words: the four fields of Pairs, (all source tokens,) twice and (all target tokens,) twice. starts: (4, N + 1),
    where each pair starts. limits: S and T of every batch, or None to pad to the longest pair.
    """

    def __init__(
        self, words: tuple[Tensor, ...], starts: Tensor, limits: tuple[int, int] | None = None
    ) -> None:
        self.words, self.starts, self.limits = words, starts, limits

    @classmethod
    def of(cls, encoded: Sequence[Encoded], limits: tuple[int, int] | None) -> PairDataset:
        fields = [[pair[field] for pair in encoded] for field in range(4)]
        words = (
            torch.tensor([number for part in parts for number in part], dtype=torch.int32) for parts in fields
        )
        lengths = torch.tensor([[0, *map(len, parts)] for parts in fields])
        return cls(tuple(words), lengths.cumsum(1), limits)

    def __len__(self) -> int:
        return self.starts.shape[1] - 1

    def __getitem__(self, index: int) -> Pairs:
        self.check(index)
        bounds = self.starts[:, index : index + 2].tolist()
        return Pairs(
            *(words[start:end].long() for words, (start, end) in zip(self.words, bounds, strict=True))
        )

    def batch(self, indices: Tensor) -> Pairs:
        """The pairs at `indices` (B,) on the data's device, as a collated batch, with one gather per field."""
        starts = self.starts[:, indices]
        lengths = self.starts[:, indices + 1] - starts
        widths = lengths.amax(1).tolist() if self.limits is None else [self.limits[n // 2] for n in range(4)]
        parts = []
        for words, start, length, width in zip(self.words, starts, lengths, widths, strict=True):
            place = torch.arange(width, device=words.device)
            real = place < length.unsqueeze(1)
            # Past the end of an item is the next one, or nothing: index 0 is read instead, then replaced.
            found = words[torch.where(real, start.unsqueeze(1) + place, 0)]
            parts.append(torch.where(real, found, PADDING).long())
        return Pairs(*parts)


@dataclass(frozen=True)
class Padder:
    """Collates pairs, padded to the longest or to `limits` (S, T). A class, so that it can be sent to workers."""

    limits: tuple[int, int] | None

    def __call__(self, items: list[Pairs]) -> Pairs:
        fields = []
        for number, part in enumerate(zip(*items, strict=True)):
            rows = pad_sequence(list(part), batch_first=True, padding_value=PADDING)
            if self.limits is not None:
                rows = nn.functional.pad(rows, (0, self.limits[number // 2] - rows.shape[1]), value=PADDING)
            fields.append(rows)
        return Pairs(*fields)


@dataclass
class Rouge:
    """The loss, and ROUGE of generated summaries of the first pairs of an evaluation; implements Metric.

    The summaries of a batch are generated together, with beam search and greedily. pairs: those to generate summaries
    for, at the start of the evaluation data.
    """

    model: PointerGenerator
    vocabulary: Vocabulary
    pairs: Sequence[Pair]
    unknowns: Sequence[Sequence[str]]
    width: int
    limit: int
    mean: MeanLoss = field(default_factory=MeanLoss)
    seen: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """Adds a batch; batches come in the order of the evaluation pairs."""
        self.mean.update(output, batch, loss)
        pairs = self.pairs[self.seen : self.seen + len(batch[0])]
        if not pairs:
            return
        source, extended = batch[0][: len(pairs)], batch[1][: len(pairs)]
        for kind, width in (("", self.width), ("greedy_", 1))[: 2 if self.width > 1 else 1]:
            written = beam(self.model, source, extended, width, self.limit)
            for index, (one, pair) in enumerate(zip(written, pairs, strict=True), self.seen):
                text = " ".join(self.vocabulary.decode(one.words, self.unknowns[index]))
                for name, value in rouge(text, pair.reference).items():
                    self.sums[kind + name] = self.sums.get(kind + name, 0.0) + value
        self.seen += len(pairs)

    def result(self) -> dict[str, float]:
        """ROUGE-L of beam search first, then its other scores, those of greedy search, and the loss."""
        means = {name: total / self.seen for name, total in self.sums.items()}
        return {"rouge_l": means.pop("rouge_l", float("nan")), **means, **self.mean.result()}


class Summarise(BuiltinWorkload):
    """A prepared summariser; implements Workload."""

    name = "summarise"
    item = "pair"
    token: str | None = "token"

    def __init__(self, _: Config, section: SummariseSection, data: PairData, progress: Progress) -> None:
        super().__init__(data.line(), data.notes)
        self.tokens_per_item = data.tokens_per_item
        self.better = "higher" if section.summaries else "lower"
        self._section, self._vocabulary = section, data.vocabulary
        limits = (data.sequence, data.target) if section.pad == "full" else None
        train, evaluation = (
            [data.vocabulary.encode(pair, data.target) for pair in pairs]
            for pairs in (data.train, data.evaluation)
        )
        self._pairs = data.evaluation[: section.summaries]
        self._unknowns = [pair.unknowns for pair in evaluation[: section.summaries]]
        self.train_data = PairDataset.of(train, limits)
        self.eval_data = PairDataset.of(evaluation, limits)
        self.collate = Padder(limits)
        self._writer = self._build(lambda: build_model(section), progress)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        chosen: Tensor = model(*batch)
        return chosen

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean over the words of a summary, then over summaries, in nats."""
        return negative_log_likelihood(output, batch[3])

    def metric(self) -> Metric:
        """ROUGE of `workload.summaries` generated summaries and the loss; only the loss if there are none."""
        section = self._section
        if not section.summaries:
            return MeanLoss()
        return Rouge(
            self._writer, self._vocabulary, self._pairs, self._unknowns, section.beam, section.target
        )

    def describe_model(self) -> str:
        section = self._section
        return (
            f"{section.layers} layers, hidden {section.hidden}, embedding {section.embedding}, vocabulary "
            f"{section.vocabulary:,}, {section.decoder} decoder"
        )


def build_model(section: SummariseSection) -> PointerGenerator:
    """The configured model, with weights from torch's global generator."""
    return PointerGenerator(
        section.vocabulary,
        section.embedding,
        section.hidden,
        section.layers,
        section.dropout,
        section.decoder == "hoisted",
    )
