"""The summariser: pairs of texts, batches, the pointer-generator, the search for summaries, and ROUGE."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from workload_help import SUMMARISE, configured, evaluate, made, refused

import ndd_profiles
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.interface import Settings
from ndd_engine.workloads.pointer_generator import (
    DecoderSteps,
    EncodedSources,
    Pointer,
    PointerGenerator,
    State,
    StepwisePointer,
    negative_log_likelihood,
)
from ndd_engine.workloads.summarise import Padder, Pairs, beam, common_subsequence, overlap, rouge, words
from ndd_engine.workloads.summarise_data import (
    END,
    PADDING,
    START,
    UNKNOWN,
    Pair,
    PairData,
    Vocabulary,
    documented,
    library_pairs,
    read,
    tokens,
)

ROWS = [(f"the cat number {number} sees a dog", f"cat {number} sees") for number in range(20)]


def pairs_of(sequence: int = 16, micro: int = 1, **section: Any) -> PairData:
    config = configured({"name": "summarise", **section}, micro=micro, sequence=sequence)
    return read(Settings.of(config))


def told(data: Path | str, micro: int = 1, **section: Any) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    config = configured({"name": "summarise", "data": str(data), **section}, micro=micro, sequence=16)
    return refused(config)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"article": a, "abstract": b}) + "\n" for a, b in ROWS), "utf-8")
    return path


def test_tokens() -> None:
    assert tokens("Don't call foo_bar(x='é', 2.5)") == (
        "don't", "call", "foo_bar", "(", "x", "=", "'", "é", "'", ",", "2", ".", "5", ")",
    )  # fmt: skip


def test_source_words_outside_of_the_vocabulary_can_be_copied() -> None:
    vocabulary = Vocabulary(["the", "cat"], 10)
    source, summary = ("the", "ocelot", "and", "ocelot", "cat"), ("cat", "ocelot", "lynx")
    found = vocabulary.encode(Pair(source, summary, ""), 8)
    assert found.source == [4, UNKNOWN, UNKNOWN, UNKNOWN, 5]
    assert found.extended == [4, 10, 11, 10, 5]
    assert found.target_in == [START, 5, UNKNOWN, UNKNOWN]
    # A summary's word that neither the vocabulary nor the source has stays unknown.
    assert found.target_out == [5, 10, UNKNOWN, END]
    assert found.unknowns == ["ocelot", "and"]
    # Rows 6 to 9 stand for no word.
    assert vocabulary.decode([5, 10, 7, UNKNOWN, 11], found.unknowns) == ["cat", "ocelot", "and"]


def test_a_summary_that_is_cut_has_no_end() -> None:
    vocabulary = Vocabulary(["a", "b", "c"], 10)
    pair = Pair(("a",), ("a", "b", "c"), "")
    assert vocabulary.encode(pair, 4).target_out == [4, 5, 6, END]
    cut = vocabulary.encode(pair, 3)
    assert (cut.target_in, cut.target_out) == ([START, 4, 5], [4, 5, 6])


def test_documented_functions_and_classes() -> None:
    body = "\n".join(f"        total = self.add(value_{number}, total)" for number in range(6))
    source = (
        'class Sum:\n    """Adds up many\n    values.\n  \n    More of it."""\n\n    def all(self):\n'
        f'        """Adds all of the values."""\n{body}\n\n    def none(self):\n{body}\n\n'
        '    def short(self):\n        """Much too short to tell."""\n        return 1\n'
    )
    whole, method = documented(source)
    assert whole.reference == "Adds up many\nvalues."
    assert whole.summary == ("adds", "up", "many", "values", ".")
    assert whole.source[:6] == ("class", "sum", ":", "def", "all", "(")
    assert method.reference == "Adds all of the values."
    assert "adds" not in method.source and method.source.count("total") == 12
    assert documented("def broken(:") == ()


def test_library_is_read_in_one_order_and_no_further_than_asked() -> None:
    said: list[str] = []
    few = library_pairs(30, said.append)
    assert len(few) == 30 and len(said) == 1
    assert library_pairs(60)[:30] == few
    assert all(len(pair.source) >= 30 and len(pair.summary) >= 4 for pair in few)


def test_functions_are_joined_to_the_length_of_a_source() -> None:
    data = pairs_of(200, pairs=120, vocabulary=300)
    raw = library_pairs(120)
    lengths = [len(pair.source) for pair in data.train]
    assert max(lengths) == 200 and all(length == 200 for length in lengths[:-1])
    assert len(data.train) < 114 and data.notes
    # The first item holds the first functions from the beginning, with all of their summaries.
    taken: tuple[str, ...] = ()
    count = 0
    while len(taken) < 200:
        taken, count = taken + raw[count].source, count + 1
    assert data.train[0].source == taken[:200]
    assert data.train[0].reference == "\n".join(pair.reference for pair in raw[:count])
    # Nothing that is trained on is evaluated with: the last 5 % of the pairs are kept apart before joining.
    assert data.evaluation[0].source[:30] == raw[114].source[:30]


def test_both_kinds_of_file_give_the_same_pairs(tmp_path: Path, jsonl: Path) -> None:
    expected = pairs_of(data=str(jsonl))
    assert (len(expected.train), len(expected.evaluation)) == (19, 1)
    assert expected.train[3] == Pair(tokens(ROWS[3][0]), tokens(ROWS[3][1]), ROWS[3][1])
    plain = "".join(f"{source}\t{summary}\r\n" for source, summary in ROWS)
    turned = "id\tSummary\ttext\n" + "".join(f"x\t{b}\t{a}\n\n" for a, b in ROWS)
    for text in (plain, turned, "source\ttarget\n" + plain):
        path = tmp_path / "pairs.tsv"
        path.write_text(text, "utf-8")
        found = pairs_of(data=str(path))
        assert (found.train, found.evaluation) == (expected.train, expected.evaluation)
    assert pairs_of(data=str(jsonl), pairs=10).train == expected.train[:9]


def test_vocabulary_has_the_most_frequent_training_words(jsonl: Path) -> None:
    """Words as frequent as each other in the order of the alphabet; the table always has all of its rows."""
    data = pairs_of(data=str(jsonl), vocabulary=16)
    assert data.vocabulary.size == 16
    assert data.vocabulary.words[:7] == ("cat", "sees", "a", "dog", "number", "the", "0")
    assert len(data.vocabulary.words) == 12 and not data.notes
    wide = pairs_of(data=str(jsonl), vocabulary=100)
    # The 20th pair is kept for evaluation: its number is no training word.
    assert set(wide.vocabulary.words) == {"the", "cat", "number", "sees", "a", "dog", *map(str, range(19))}
    assert any("vocabulary" in note and "100" in note for note in wide.notes)
    cut = pairs_of(5, 2, data=str(jsonl), target=3).notes
    assert any("20 of 20" in note for note in cut) and not any("summaries" in note for note in cut)


def test_all_mistakes_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    good = json.dumps({"source": "a b", "summary": "a"})
    path.write_text(
        "\n".join([
            good, "{broken", "[1]", '{"source": "a"}', '{"text": 3, "target": "x"}', '{"source": " ", "summary": ""}',
            "", *["nonsense"] * 4, good,
        ])
    )  # fmt: skip
    text = told(path)
    for expected in ("column 2", "line 3: ", "line 4: ", "line 5: ", "line 6: ", "4 more lines"):
        assert expected in text
    assert "line 8" not in text


def test_files_that_cannot_be_used(tmp_path: Path, jsonl: Path) -> None:
    other = tmp_path / "pairs.csv"
    other.write_text("a,b\n")
    assert ".tsv" in told(other) and ".jsonl" in told(other)
    table = tmp_path / "pairs.tsv"
    table.write_text("one two\tone\n" * 3 + "a\tb\tc\n" + "alone\n" + "a b\t\x1b[2Jred\tc\n")
    text = told(table)
    assert "line 4: 3" in text and "line 5: 1" in text and "\x1b" not in text
    for content in ("source\tsummary\n", "\n \n", "one two\tone\n"):
        table.write_text(content)
        assert "workload.data" in told(table)
    text = told(jsonl, micro=20)
    assert "batch.micro" in text and "at most 19" in text


# Batches and the metric.


def make(**section: Any) -> Workload:
    return made({**SUMMARISE, **section}, 8, 48)


def test_items_say_what_their_unknown_words_are() -> None:
    workload = make()
    for source, extended, target_in, target_out in workload.train_data:  # type: ignore[attr-defined]
        assert torch.equal(source, torch.where(extended < 500, extended, 0))
        assert torch.equal(target_in[1:], torch.where(target_out < 500, target_out, 0)[:-1])
        copied = target_out[target_out >= 500]
        assert torch.isin(copied, extended).all()
        assert PADDING not in source and len(source) <= 48 and len(target_out) <= 24


def test_metric_writes_the_first_summaries_and_compares_them(tmp_path: Path) -> None:
    """A source of one unknown word, which the model is made to copy and then to end."""
    names = ["ocelot", "lynx", "puma"]
    rows = [{"source": "a a a b", "summary": "a"}] * 12 + [
        {"source": name, "summary": f"{name} cat {name}"} for name in names
    ]
    path = tmp_path / "cats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    cats = {"data": str(path), "pairs": None, "vocabulary": 16, "eval_fraction": 0.2}
    workload = make(**cats, summaries=2, target=4)
    assert workload.better == "higher"
    model: Any = workload.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pointer.gate.bias.fill_(-3.0)  # copies, nearly always
    found = evaluate(workload, micro=2)
    # "ocelot ocelot ocelot ocelot" against "ocelot cat ocelot": 2 of 4 and 2 of 3 words.
    expected = rouge("ocelot " * 4, "ocelot cat ocelot")
    assert expected["rouge_1"] == pytest.approx(4 / 7)
    assert next(iter(found)) == "rouge_l"
    for name, value in expected.items():
        assert found[name] == found[f"greedy_{name}"] == pytest.approx(value)
    assert set(found) == {*expected, *(f"greedy_{name}" for name in expected), "loss"}
    assert "greedy_rouge_l" not in evaluate(make(**cats, beam=1))


def test_without_summaries_the_loss_is_what_counts() -> None:
    workload = make(summaries=0)
    assert workload.better == "lower"
    assert list(evaluate(workload, micro=8)) == ["loss"]


# The model.


VOCABULARY = 40


def pointer_generator(hoisted: bool, layers: int = 2, dropout: float = 0.0) -> PointerGenerator:
    torch.manual_seed(3)
    return PointerGenerator(VOCABULARY, 6, 5, layers, dropout, hoisted)


def draw_pair(draw: torch.Generator, source: int, target: int) -> Pairs:
    """A pair with words that the vocabulary lacks, some of them in the summary."""
    extended = torch.randint(4, VOCABULARY + 3, (source,), generator=draw)
    extended[1] = VOCABULARY
    words = torch.where(extended < VOCABULARY, extended, UNKNOWN)
    out = torch.randint(4, VOCABULARY, (target,), generator=draw)
    out[0], out[1], out[-1] = VOCABULARY, extended[0], END
    known = torch.where(out < VOCABULARY, out, UNKNOWN)
    return Pairs(words, extended, torch.cat((torch.tensor([START]), known[:-1])), out)


def drawn(*lengths: tuple[int, int]) -> list[Pairs]:
    draw = torch.Generator().manual_seed(0)
    return [draw_pair(draw, *length) for length in lengths]


def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
    return negative_log_likelihood(model(*batch), batch.target_out)


def gradients(model: nn.Module, batch: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return loss.detach(), found


@pytest.mark.parametrize(
    ("layers", "dtype", "tolerance"),
    [(1, torch.float64, 1e-12), (3, torch.float64, 1e-12), (2, torch.float32, 1e-5)],
)
def test_both_forms_have_the_same_loss_and_gradients(
    layers: int, dtype: torch.dtype, tolerance: float
) -> None:
    hoisted, stepwise = pointer_generator(True, layers).to(dtype), pointer_generator(False, layers).to(dtype)
    # A checkpoint of one form is one of the other.
    stepwise.load_state_dict(hoisted.state_dict())
    batch = Padder(None)(drawn((9, 6), (5, 3), (12, 4)))
    (left, ours), (right, theirs) = gradients(hoisted, batch), gradients(stepwise, batch)
    assert left.dtype == dtype and float(left) == pytest.approx(float(right), rel=tolerance)
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("hoisted", [True, False])
def test_padding_changes_nothing(hoisted: bool) -> None:
    """A pair has the loss and the gradient of its own in any company, and with any padding."""
    model = pointer_generator(hoisted).double()
    pairs = drawn((9, 6), (5, 3), (12, 8))
    alone = [gradients(model, Padder(None)([pair])) for pair in pairs]
    full = [gradients(model, Padder((20, 11))([pair])) for pair in pairs]
    together = gradients(model, Padder(None)(pairs))
    for (loss, own), (padded_loss, padded) in zip(alone, full, strict=True):
        assert float(padded_loss) == pytest.approx(float(loss), rel=1e-12)
        for name, gradient in own.items():
            torch.testing.assert_close(padded[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
    assert float(together[0]) == pytest.approx(sum(float(loss) for loss, _ in alone) / 3, rel=1e-12)
    for name, gradient in together[1].items():
        mean = torch.stack([own[name] for _, own in alone]).mean(0)
        torch.testing.assert_close(gradient, mean, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", [Pointer, StepwisePointer])
def test_probability_is_that_of_generating_or_copying(kind: type[Pointer]) -> None:
    """By hand: p_gen p_vocab(word) + (1 - p_gen) (attention on its places in the source)."""
    torch.manual_seed(0)
    pointer = kind(10, 2, 3).double()
    steps = DecoderSteps(
        torch.randn(1, 2, 3).double(),
        torch.randn(1, 2, 6).double(),
        torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.2, 0.0]]]).double(),
    )
    embedded = torch.randn(1, 2, 2).double()
    # Word 5, an unknown one (10), word 5 again, another unknown one (11).
    extended = torch.tensor([[5, 10, 5, 11]])
    memory = EncodedSources(torch.empty(0), None, torch.empty(0), extended)
    features = torch.cat((steps.hidden, steps.context, embedded), 2)
    generated = torch.softmax(features @ pointer.words.weight.T + pointer.words.bias, 2)[0]
    gate = torch.sigmoid(features @ pointer.gate.weight.T + pointer.gate.bias)[0, :, 0]
    for target, first, second in ((5, 0.4, 0.9), (10, 0.2, 0.1), (11, 0.4, 0.0), (7, 0.0, 0.0)):
        found = pointer(steps, embedded, memory, torch.full((1, 2), target))[0]
        expected = (1 - gate) * torch.tensor([first, second]).double()
        if target < 10:
            expected = expected + gate * generated[:, target]
        torch.testing.assert_close(found, expected)
    whole = pointer.distribution(steps, embedded, memory)
    assert whole.shape == (1, 2, 14)
    torch.testing.assert_close(whole.sum(2), torch.ones(1, 2).double())


@pytest.mark.parametrize("hoisted", [True, False])
def test_an_impossible_word_has_a_finite_loss_and_gradient(hoisted: bool) -> None:
    """A vocabulary that is sure of another word, and a target that is not in the source: probability 0 in fp32."""
    model = pointer_generator(hoisted)
    with torch.no_grad():
        model.pointer.words.bias[7] = 1e4
        model.pointer.gate.bias.fill_(1e4)
    batch = Pairs(
        torch.tensor([[7, 8]]), torch.tensor([[7, 8]]), torch.tensor([[START]]), torch.tensor([[9]])
    )
    loss, found = gradients(model, batch)
    assert 20 < float(loss) < 30
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


@pytest.mark.parametrize("hoisted", [True, False])
@pytest.mark.parametrize("size", ndd_profiles.read("workloads", "summarise")["sizes"])
def test_at_every_size_each_sub_phase_is_called(size: str, hoisted: bool) -> None:
    settings: dict[str, Any] = ndd_profiles.read("workloads", "summarise")["sizes"][size]["workload"]
    torch.manual_seed(0)
    model = PointerGenerator(
        VOCABULARY, settings["embedding"], settings["hidden"], settings.get("layers", 2), 0.0, hoisted
    )
    calls: Counter[str] = Counter()
    for name, part in model.parts().items():
        for module in [part] if isinstance(part, nn.Module) else part:
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(*Padder(None)(drawn((9, 6), (5, 3))))
    assert calls.keys() == {"embedding", "encoder", "attention", "decoder", "pointer"}


# The search.


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


# ROUGE.


def test_words_are_lower_cased_runs_of_letters_and_digits() -> None:
    assert words("Don't call foo_bar(2): Ärger!") == ["don", "t", "call", "foo", "bar", "2", "ärger"]


def test_lin_s_example() -> None:
    """Lin (2004), section 3.1: both candidates have three of the four words, but not in the same order."""
    reference = "police killed the gunman"
    same_order, other_order = (
        rouge(text, reference) for text in ("police kill the gunman", "the gunman kill police")
    )
    assert same_order["rouge_l"] == pytest.approx(3 / 4)
    assert other_order["rouge_l"] == pytest.approx(2 / 4)
    # Both have the one pair of words "the gunman", of three.
    assert same_order["rouge_2"] == other_order["rouge_2"] == pytest.approx(1 / 3)
    assert same_order["rouge_1"] == other_order["rouge_1"] == pytest.approx(3 / 4)


TEXTS = st.lists(st.sampled_from(list("abcde")), max_size=8)


@given(TEXTS, TEXTS)
def test_properties(left: list[str], right: list[str]) -> None:
    longest = common_subsequence(left, right)
    assert longest == common_subsequence(right, left) <= min(len(left), len(right))
    assert common_subsequence(left, left + right) == len(left)
    for n in (1, 2):
        assert overlap(left, right, n) == overlap(right, left, n)
        assert 0 <= overlap(left, right, n) <= 1
    if longest:
        assert 2 * longest / (len(left) + len(right)) <= overlap(left, right, 1) + 1e-12
    assert overlap(left, left, 1) == bool(left)
