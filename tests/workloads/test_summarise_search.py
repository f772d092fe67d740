"""Writing summaries: greedy and by beam, on a table of probabilities that was made by hand, and on a real model."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ndd_engine.workloads.summarise import EncodedSources, PointerGenerator, State, beam
from ndd_engine.workloads.summarise_data import END, PADDING, START, UNKNOWN

A, B, C = 4, 5, 6


class Table:
    """A model whose next word depends on the word before alone. after: {word: {next word: probability}}."""

    def __init__(self, after: dict[int, dict[int, float]]) -> None:
        self.likely = torch.full((7, 7), -torch.inf)
        for word, nexts in after.items():
            for following, chance in nexts.items():
                self.likely[word, following] = math.log(chance)

    def read(self, source: Tensor, extended: Tensor, project: bool) -> tuple[EncodedSources, State]:
        batch = len(source)
        memory = EncodedSources(torch.zeros(batch, 1, 2), None, torch.zeros(batch, 1), extended)
        return memory, State(torch.zeros(1, batch, 1), torch.zeros(1, batch, 1), torch.zeros(batch, 2))

    def step(self, words: Tensor, memory: EncodedSources, state: State) -> tuple[Tensor, State]:
        return self.likely[words], state


# The likeliest first word leads nowhere likely: A then END is 0.6 * 0.3, B then END 0.4 * 0.9.
GARDEN_PATH = Table(
    {START: {A: 0.6, B: 0.4}, A: {C: 0.4, B: 0.3, END: 0.3}, B: {END: 0.9, C: 0.1}, C: {A: 0.5, END: 0.5}}
)
ONE = torch.tensor([[A]])


def score(table: Table, words: list[int]) -> float:
    """Mean log-probability of words and END, added up here."""
    path = [START, *words, END]
    return sum(float(table.likely[a, b]) for a, b in pairwise(path)) / (len(path) - 1)


def test_beam_finds_what_the_likeliest_first_word_misses() -> None:
    (best,) = beam(GARDEN_PATH, ONE, ONE, 3, 8)
    assert best.words == [B] and best.score == pytest.approx(score(GARDEN_PATH, [B]))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_search_stops_at_the_longest_summary(limit: int) -> None:
    endless = Table({START: {A: 1.0}, A: {A: 0.5, B: 0.5 - 1e-6, END: 1e-6}, B: {A: 1.0}})
    for width in (1, 3):
        (found,) = beam(endless, ONE, ONE, width, limit)
        assert len(found.words) == limit and END not in found.words


def test_beam_does_not_prefer_short_summaries_for_their_length() -> None:
    """The sum of log-probabilities would take [] (0.4) before [A, A, A] (0.6 * 0.9 ** 3 < 0.44, one more word)."""
    table = Table(
        {START: {END: 0.4, A: 0.6}, A: {B: 0.8, END: 0.2}, B: {C: 0.8, END: 0.2}, C: {END: 0.8, A: 0.2}}
    )
    assert score(table, [A, B, C]) > score(table, [])
    assert 0.6 * 0.8**3 < 0.4
    assert beam(table, ONE, ONE, 4, 6)[0].words == [A, B, C]


def random_model(hoisted: bool = True) -> tuple[PointerGenerator, Tensor, Tensor]:
    torch.manual_seed(5)
    model = PointerGenerator(20, 8, 8, 2, 0.0, hoisted).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform, so that searches differ
    extended = torch.randint(4, 24, (5, 7))
    extended[2, 4:] = PADDING
    return model, torch.where(extended < 20, extended, UNKNOWN), extended


@pytest.mark.parametrize("width", [1, 4])
def test_a_summary_does_not_depend_on_its_company(width: int) -> None:
    """Five sources at once give what each gives alone, without its padding; and either form writes the same."""
    model, source, extended = random_model()
    stepwise, _, _ = random_model(hoisted=False)
    together = beam(model, source, extended, width, 9)
    for row, written in enumerate(together):
        real = slice(0, int((source[row] != PADDING).sum()))
        (alone,) = beam(model, source[row : row + 1, real], extended[row : row + 1, real], width, 9)
        assert alone.words == written.words
        assert alone.score == pytest.approx(written.score, rel=1e-4)
    assert [w.words for w in beam(stepwise, source, extended, width, 9)] == [w.words for w in together]


def test_score_is_the_probability_that_training_sees() -> None:
    """Teacher-forced with what was written, the model has the same mean log-probability."""
    model, source, extended = random_model()
    for row, written in enumerate(beam(model, source, extended, 4, 9)):
        out = torch.tensor([[*written.words, END][:9]])
        known = torch.where(out < 20, out, UNKNOWN)
        target_in = torch.cat((torch.tensor([[START]]), known[:, :-1]), 1)
        with torch.no_grad():
            chosen = model(source[row : row + 1], extended[row : row + 1], target_in, out)
        assert written.score == pytest.approx(float(chosen.log().mean()), rel=1e-4)
