"""Validation of answers, the combinations they allow, the Pareto front and the order by goal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from situations import BASE

from ndd_engine.config import Config, read
from ndd_engine.errors import UsageError
from ndd_engine.wizard.proposals import (
    MOST_MICROS,
    Answers,
    Batch,
    Model,
    Proposal,
    batches,
    cost_in_words,
    gpu_named,
    longest_sequence,
    models,
    pareto,
    ranked,
    sequences,
    worth_a_row,
)


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", *sets], "chartext").resolve()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 SUPER"),
        ("rtx-4080-super", "NVIDIA GeForce RTX 4080 SUPER"),
        ("h200", "NVIDIA H200"),
        ("RTX 4070", "NVIDIA GeForce RTX 4070"),
        ("4070 laptop", "NVIDIA GeForce RTX 4070 Laptop GPU"),
        ("NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti"),
    ],
)
def test_a_gpu_is_found_by_its_common_names(wanted: str, found: str) -> None:
    assert gpu_named(wanted).name.startswith(found)
    if found == "NVIDIA GeForce RTX 4070":
        assert "Laptop" not in gpu_named(wanted).name


@pytest.mark.parametrize(("wanted", "named"), [("RTX 2080", "2080 Ti"), ("4070", "4070 Laptop")])
def test_another_model_of_the_same_number_is_asked_about(wanted: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        gpu_named(wanted)


@pytest.mark.parametrize("wanted", ["RTX 3080", "Voodoo 2", ""])
def test_unknown_or_ambiguous_gpus_are_rejected_with_the_known_names(wanted: str) -> None:
    with pytest.raises(UsageError, match="RTX 3080"):
        gpu_named(wanted)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (Answers(goal="time"), "--items N"),
        (Answers(goal="fast"), "throughput, low-memory, reproducible, time"),  # type: ignore[arg-type]
        (Answers(items=0), "1 or more"),
        (Answers(effective_batch=-3), "1 or more"),
        (Answers(min_sequence=1), "2 to 64"),
        (Answers(min_sequence=65), "2 to 64"),
        (Answers(reserve_bytes=-1), "0 or more"),
        (Answers(sizes=("tiny", "huge")), "tiny, mini"),
        (Answers(gpu="Voodoo"), "no profile"),
    ],
)
def test_invalid_answers_are_rejected_with_the_allowed_values(answers: Answers, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answers.checked(64, ("tiny", "mini"))


def test_sequences_are_halved_down_to_the_minimum() -> None:
    assert sequences(256, None) == [256]
    assert sequences(256, 64) == [256, 128, 64]
    assert sequences(256, 100) == [256, 128, 100]
    assert sequences(256, 2) == [256, 128, 64, 32, 2]


def test_accumulation_keeps_the_effective_batch() -> None:
    found = batches(config(), 96, 10_000)
    assert found[-1] == Batch(96, 1)
    assert all(batch.items == 96 for batch in found)
    assert {batch.micro for batch in found} == {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96}
    assert [batch.micro for batch in batches(config(), 96, 20)][-1] == 16


def test_a_free_batch_grows_in_even_steps() -> None:
    found = batches(config("batch.micro=20"), None, 100)
    assert all(batch.accumulation == 1 for batch in found)
    assert [batch.micro for batch in found][-3:] == [48, 64, 96]
    assert 20 in [batch.micro for batch in found]


def test_longest_sequence_of_an_automatic_size() -> None:
    assert longest_sequence(read(None, [], "chartext")) == 256  # of guide
    assert longest_sequence(read(None, ["workload.size=tiny"], "chartext")) == 64


def kept(found: list[Batch], most: int, now: int = 16, free: bool = False) -> list[int]:
    return [batch.micro for batch in worth_a_row(found, now, lambda micro: micro <= most, free)]


def test_small_micro_batches_are_shown_if_larger_ones_do_not_fit() -> None:
    found = batches(config(), None, 10_000)
    assert kept(found, 40) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    everything = kept(found, 10_000)
    assert everything[0] == 2 and everything[-1] == 4096 and 16 in everything
    assert len(everything) <= MOST_MICROS + 1
    assert kept(found, 1) == [2, 3]  # nothing fits: the two smallest


@pytest.mark.parametrize("most", [40, 90, 127, 1000, 2500])
def test_a_free_batch_gets_close_to_the_memory_limit(most: int) -> None:
    fitting = [micro for micro in kept(batches(config(), None, 10_000), most, free=True) if micro <= most]
    assert most - 8 < fitting[-1] <= most


def test_micro_batches_divide_the_effective_batch() -> None:
    found = kept(batches(config(), 720, 10_000), 300, now=20)
    assert all(720 % micro == 0 for micro in found)
    assert {2, 20, 240} <= set(found)


def test_with_peak_flops_only_larger_micro_batches_come_first() -> None:
    bound = replace(BASE, lower_bound=True, free_bytes=1000)
    rows = [
        replace(bound, batch=Batch(micro, 16 // micro), step_s=0.1 + micro * 1e-6, memory_bytes=50 * micro)
        for micro in (2, 4, 8, 16)
    ]
    assert ranked(rows, Answers())[0].batch.micro == 16
    assert ranked(rows, Answers(goal="time", items=1600))[0].batch.micro == 16
    # At most half of the memory.
    assert ranked(rows, Answers(goal="low-memory"))[0].batch.micro == 8
    assert pareto(rows) == rows  # each needs less memory than the next


def test_the_pareto_front_of_many_rows() -> None:
    rows = [
        replace(BASE, batch=Batch(micro, 1), memory_bytes=micro % 97, step_s=1 + (micro * 31) % 89)
        for micro in range(1, 400)
    ]

    def dominated(one: Proposal) -> bool:
        mine = (-(one.memory_bytes or 0), one.items_per_s or 0)
        others = [(-(row.memory_bytes or 0), row.items_per_s or 0) for row in rows]
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)

    assert pareto(rows) == [one for one in rows if not dominated(one)]


def test_the_configured_model_comes_first() -> None:
    found = models(config(), Answers(min_sequence=16), ["mini", "tiny"], ["off", "bf16"])
    assert found[0] == Model("tiny", 64, "off")
    assert len(found) == 2 * 3 * 2
    for model in found:
        resolved = config(*model.sets())
        assert (resolved.workload.size, resolved.batch.sequence) == (model.size, model.sequence)


def test_rates_times_and_missing_memory_of_a_proposal() -> None:
    assert BASE.items_per_s == 160
    assert BASE.tokens_per_s == 160 * 64
    assert BASE.total_s == 10
    assert BASE.fits
    assert replace(BASE, memory_bytes=700).missing_bytes == 200
    assert replace(BASE, step_s=None).total_s is None
    resolved = config(*BASE.sets())
    assert (resolved.batch.micro, resolved.batch.accumulation) == (8, 2)


def test_the_goal_determines_the_order() -> None:
    lean = replace(BASE, step_s=0.12, memory_bytes=50)
    slow = replace(BASE, step_s=0.5, memory_bytes=10)
    late = replace(BASE, step_s=0.05, setup_s=100.0, memory_bytes=300)
    rows = [slow, BASE, lean, late]
    assert ranked(rows, Answers(goal="throughput"))[0] is late
    assert ranked(rows, Answers(goal="time", items=1600))[0] is BASE
    assert ranked([slow, BASE, lean], Answers(goal="low-memory"))[0] is lean
    assert ranked([slow, BASE, lean], Answers(goal="low-memory"))[-1] is slow


def test_costs_are_described() -> None:
    words = cost_in_words(
        config(), "character", ("tiny", 64), Model("mini", 32, "bf16"), Batch(8, 1), (1000, 25_000)
    )
    assert all(part in words for part in ("32", "64", "8", "16", "bf16"))
    assert cost_in_words(config(), None, ("tiny", 64), Model("tiny", 64, "off"), Batch(16, 1), (1, 1)) == ""
