"""Generates summaries with a pointer-generator by beam search, for many sources at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ndd_engine.batches import map_tensors

from .summarise_data import END, PADDING, START
from .summarise_model import EncodedSources, State


class Searcher(Protocol):
    """The methods of a model that a search uses; see PointerGenerator."""

    def read(self, source: Tensor, extended: Tensor, project: bool) -> tuple[EncodedSources, State]: ...

    def step(self, words: Tensor, memory: EncodedSources, state: State) -> tuple[Tensor, State]: ...


class Written(NamedTuple):
    """A summary as extended words, without END. score: mean log-probability of its words and END."""

    words: list[int]
    score: float


@torch.no_grad()
def beam(model: Searcher, source: Tensor, extended: Tensor, width: int, limit: int) -> list[Written]:
    """Beam search with `width` summaries per source: sources (B, S) -> B summaries.

    Each step keeps the `width` most probable prefixes; finished summaries stay and compete with the others. The best
    has the highest mean log-probability, since a sum would favour short ones. Width 1 is greedy search.
    """
    batch = len(source)
    memory, state = model.read(source, extended, True)
    memory = map_tensors(memory, lambda tensor: tensor.repeat_interleave(width, 0))
    state = state.rows(torch.arange(batch, device=source.device).repeat_interleave(width))
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
    return _written(best_words, score.gather(1, chosen).squeeze(1))


def _written(words: Tensor, scores: Tensor) -> list[Written]:
    """The summaries in words (B, T), each up to END."""
    found = []
    for row, score in zip(words.tolist(), scores.tolist(), strict=True):
        end = row.index(END) if END in row else len(row)
        found.append(Written(row[:end], score))
    return found
