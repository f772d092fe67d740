"""Summaries by a pointer-generator (See, Liu & Manning, ACL 2017), with ROUGE of those that it writes.

A factory like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ndd_engine.workloads import GatherItems, Settings, build_checked

from .pointer_generator import PointerGenerator, negative_log_likelihood
from .summarise_data import END, PADDING, START, Encoded, Vocabulary, read

_WORD = re.compile(r"[^\W_]+")


def factory(settings: Settings) -> dict[str, Any]:
    """Pairs of a text and its summary, and a model whose output is the probability of each target word."""
    data, options = read(settings), settings.options
    size, embedding, hidden, layers = (
        options[key] for key in ("vocabulary", "embedding", "hidden", "layers")
    )
    settings.progress("building the model")
    model = build_checked(
        lambda: PointerGenerator(
            size, embedding, hidden, layers, options["dropout"], options["decoder"] == "hoisted"
        )
    )
    target, count = options["target"], options["summaries"]
    limits = (settings.sequence, target) if options["pad"] == "full" else None
    train, evaluation = (
        [data.vocabulary.encode(pair, target) for pair in pairs] for pairs in (data.train, data.evaluation)
    )
    written = [(pair.reference, of.unknowns) for pair, of in zip(data.evaluation, evaluation, strict=True)]
    parts = {
        "model": model,
        "train_data": PairDataset.of(train, limits),
        "eval_data": PairDataset.of(evaluation, limits),
        "collate": Padder(limits),
        "forward": lambda model, batch: model(*batch),
        "loss": lambda output, batch: negative_log_likelihood(output, batch[3]),
        "better": "higher" if count else "lower",
        "item": "pair",
        "token": "token",
        "tokens_per_item": data.facts.tokens_per_item,
        "parts": model.parts(),
        "describe_model": f"{layers} layers, hidden {hidden}, embedding {embedding}, vocabulary {size:,}, "
        f"{options['decoder']} decoder",
        "describe_data": data.facts.text,
        "notes": data.notes,
    }
    alternatives = {}
    if options["pad"] == "longest":
        alternatives["recompile"] = ("workload.pad=full", "pad all batches to one shape")
    if options["decoder"] == "stepwise":
        text = "compute the projections once for all steps (same loss and gradients)"
        alternatives["stepwise"] = ("workload.decoder=hoisted", text)
    if count:
        alternatives["evaluation"] = (
            "workload.summaries=0",
            "do not generate summaries for ROUGE during training",
        )
    parts["alternatives"] = alternatives
    if count:
        parts["metric"] = lambda: Rouge(model, data.vocabulary, written[:count], options["beam"], target)
    return parts


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


# The metric.


@dataclass
class Rouge:
    """ROUGE of generated summaries of the first pairs of an evaluation.

    The summaries of a batch are generated together, with beam search and greedily. pairs: of those to generate
    summaries for, at the start of the evaluation data, the reference and the words that the vocabulary lacks.
    """

    model: PointerGenerator
    vocabulary: Vocabulary
    pairs: Sequence[tuple[str, Sequence[str]]]
    width: int
    limit: int
    seen: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def update(self, output: Any, batch: Any, loss: Tensor) -> None:
        """Adds a batch; batches come in the order of the evaluation pairs."""
        pairs = self.pairs[self.seen : self.seen + len(batch[0])]
        if not pairs:
            return
        source, extended = batch[0][: len(pairs)], batch[1][: len(pairs)]
        for kind, width in (("", self.width), ("greedy_", 1))[: 2 if self.width > 1 else 1]:
            written = beam(self.model, source, extended, width, self.limit)
            for one, (reference, unknowns) in zip(written, pairs, strict=True):
                text = " ".join(self.vocabulary.decode(one.words, unknowns))
                for name, value in rouge(text, reference).items():
                    self.sums[kind + name] = self.sums.get(kind + name, 0.0) + value
        self.seen += len(pairs)

    def result(self) -> dict[str, float]:
        """ROUGE-L of beam search first, then its other scores, and those of greedy search."""
        means = {name: total / self.seen for name, total in self.sums.items()}
        return {"rouge_l": means.pop("rouge_l", float("nan")), **means}


def rouge(candidate: str, reference: str) -> dict[str, float]:
    """The F1 scores of Lin (2004) for a single reference, between 0 and 1: rouge_1, rouge_2, rouge_l.

    Words are lower-cased runs of letters and digits, without stemming or stop words; ROUGE-L takes the summary as one
    sentence.
    """
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


class WrittenSummary(NamedTuple):
    """A summary as extended words, without END. score: mean log-probability of its words and END."""

    words: list[int]
    score: float


@torch.no_grad()
def beam(model: Any, source: Tensor, extended: Tensor, width: int, limit: int) -> list[WrittenSummary]:
    """Beam search with `width` summaries per source: sources (B, S) -> B summaries.

    Each step keeps the `width` most probable prefixes; finished summaries stay and compete with the others. The best
    has the highest mean log-probability, since a sum would favour short ones. Width 1 is greedy search. model: a
    PointerGenerator, or anything with its methods read and step.
    """
    batch = len(source)
    memory, state = model.read(source, extended, True)
    each = torch.arange(batch, device=source.device).repeat_interleave(width)
    memory, state = memory.rows(each), state.rows(each)
    first = torch.arange(batch, device=source.device).unsqueeze(1) * width  # row of each source
    words = torch.full((batch, width), START, device=source.device)
    done = torch.zeros_like(words, dtype=torch.bool)
    length = torch.zeros_like(words)
    # All rows of a source start equal: only one of them may be extended in the first step.
    total = torch.full(words.shape, -torch.inf, dtype=torch.float64, device=words.device)
    total[:, 0] = 0.0
    written = words.new_zeros(batch, width, 0)
    while written.shape[2] < limit and not bool(done.all()):
        likely, state = model.step(words.flatten(), memory, state)
        likely = likely.view(batch, width, -1).double()
        # A finished summary is extended by padding only, at no cost.
        ended = torch.full_like(likely[0, 0], -torch.inf)
        ended[PADDING] = 0.0
        likely = torch.where(done.unsqueeze(2), ended, likely)
        best = (total.unsqueeze(2) + likely).flatten(1).topk(width, dim=1)
        parent, words = best.indices // likely.shape[2], best.indices % likely.shape[2]
        total = best.values
        was_done = done.gather(1, parent)
        length = length.gather(1, parent) + ~was_done
        done = was_done | (words == END)
        written = written.gather(1, parent.unsqueeze(2).expand(-1, -1, written.shape[2]))
        written = torch.cat((written, words.unsqueeze(2)), dim=2)
        state = state.rows((first + parent).flatten())
    score = total / length
    chosen = score.argmax(1, keepdim=True)
    best_words = written.gather(1, chosen.unsqueeze(2).expand(-1, -1, written.shape[2])).squeeze(1)
    found = []
    for row, mean in zip(best_words.tolist(), score.amax(1).tolist(), strict=True):
        end = row.index(END) if END in row else len(row)
        found.append(WrittenSummary(row[:end], mean))
    return found
