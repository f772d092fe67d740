"""The benchmarks' own arithmetic: pairing, statistics, tables, what is planted, and the loops that are compared."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.common import FOREIGN_LIMIT, Ratio, Table, paired, parity, summarise, undisturbed
from benchmarks.engine import ONLY_STEPS, engine
from benchmarks.guides import guides, merged
from benchmarks.quality import judge
from benchmarks.rival_loops import Bare, EngineSide, InOrder, Witness, first_losses, seconds
from benchmarks.switching import CASES, KEYS, NOT_SHOWN
from benchmarks.whole_runs import COLUMNS, SIDES, Measured, _rows
from qa.scripts.planted_models import WIDTH, gain

from benchmarks import switching
from ndd_engine.config import read
from ndd_engine.record.events import TrialEvent
from ndd_engine.train.prepare import seed
from ndd_engine.trial.blocks import can_switch
from ndd_engine.trial.outcome import differences
from ndd_engine.workloads.factory_data import prepare

TINY = (
    "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8", "batch.micro=16",
    "batch.accumulation=3", "clip.max_norm=1.0", "run.threads=1", "run.device=cpu", "precision.amp=off",
)  # fmt: skip


def test_a_drift_of_the_machine_does_not_look_like_a_gain() -> None:
    speed = 100.0
    order: list[str] = []

    def block(name: str) -> float:
        nonlocal speed
        order.append(name)
        speed *= 0.97  # the machine gets slower and slower; both sides are equally fast
        return speed

    found = paired(lambda: block("A"), lambda: block("B"), 4, 60.0)
    assert order == ["A", "B", "B", "A", "A", "B", "B", "A"]
    product = torch.tensor([ratio.value for ratio in found]).log().sum()
    assert float(product) == pytest.approx(0.0, abs=1e-6)


def test_disturbed_pairs_are_left_out_while_enough_are_left() -> None:
    quiet, busy = Ratio(1.0, 0.0), Ratio(5.0, FOREIGN_LIMIT * 2)
    values, note = undisturbed([quiet] * 6 + [busy])
    assert values == [1.0] * 6
    assert "1 of 7" in note
    values, note = undisturbed([quiet, busy])
    assert values == [1.0, 5.0]
    assert "quiet machine" in note


def test_an_interval_holds_the_median_and_needs_five_values() -> None:
    assert summarise([1.0, 2.0, 3.0, 4.0]).interval is None
    found = summarise([0.9, 0.95, 1.0, 1.05, 2.0])
    assert found.interval is not None
    assert found.interval[0] <= found.median <= found.interval[1]


def test_quality_is_judged_by_the_spread_over_seeds() -> None:
    plain = [1.0, 1.2, 1.4]
    assert judge(plain, [value + 0.1 for value in plain]).within
    assert not judge(plain, [value - 0.5 for value in plain]).within
    # Differences that cancel are no loss of quality, however large each is.
    assert judge(plain, [0.5, 1.2, 1.9]).difference == pytest.approx(0.0)
    with pytest.raises(ValueError, match="two seeds"):
        judge([1.0], [1.0])
    with pytest.raises(ValueError, match="shorter"):
        judge([1.0, 2.0], [1.0])


def test_parity_says_identical_only_when_it_is() -> None:
    assert parity([1.0, 2.0], [1.0, 2.0]) == "identical"
    assert parity([1.0, 2.0], [1.0, 2.0 + 1e-9]) != "identical"
    assert parity([2.0, -4.0], [2.0, -5.0]) == "first 0e+00, all 2e-01"
    with pytest.raises(ValueError, match="shorter"):
        parity([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no losses"):
        parity([], [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_setting_of_the_guides_can_be_configured(device: str) -> None:
    for guide in guides(device):
        settings = dict(guide.before)
        for step in guide.steps:
            if step.gpu and device == "cpu":
                continue
            sets = [f"{key}={value}" for key, value in merged(settings, step.sets).items()]
            config = read(sets=[*guide.scaled, *sets], workload=guide.workload).resolve()
            assert config.workload.name == guide.workload
            settings = merged(settings, step.sets)  # type: ignore[assignment]


def test_the_rivals_meet_the_engines_epochs_in_whole_steps() -> None:
    with engine("eeg", (*TINY, *ONLY_STEPS)) as subject:
        config, batches = subject.prepared.config, subject.loop.batches
        workload = prepare(config)
        order = InOrder(config, workload)
        assert len(order) == subject.loop.steps_per_epoch * 3
        iter(order)  # looked for and let go: takes nothing
        for epoch in (0, 1):
            batches.sampler.set(epoch)
            expected = list(islice(batches.sampler, len(order)))
            assert list(order) == expected
        order.set(0)
        batches.sampler.set(0)
        assert next(iter(order)) == next(iter(batches.sampler))


def test_the_bare_loop_and_the_engine_do_the_same_work() -> None:
    with engine("eeg", (*TINY, *ONLY_STEPS, "loader.fetch=item")) as subject:
        config = subject.prepared.config
        seed(config.run.seed)
        workload = prepare(config)
        sides = (EngineSide(subject), Bare(config, workload, subject.prepared.device))
        losses = []
        for side in sides:
            seed(config.run.seed)
            losses.append(first_losses(side, 10))
            assert seconds(side, 1, 5) > 0
        assert len(losses[0]) == 10
        assert losses[0] == losses[1]


def test_a_witness_times_the_steps_it_was_told_to_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("benchmarks.engine.time.perf_counter", lambda: now)

    class Work:
        def forward(self, _model: object, batch: float) -> float:
            return batch

        def loss(self, output: float, _batch: float) -> torch.Tensor:
            return torch.tensor(output)

    witness = Witness(Work(), 2, torch.device("cpu"))  # type: ignore[arg-type]
    steps = witness.expect(1, 3, note=True)
    now = 1000.0  # setting up takes long
    for micro in range(steps * 2):
        witness.loss(witness.forward(torch.nn.Identity(), float(micro)), float(micro))
        now += 100.0 if micro < 2 else 1.0  # and so does the first step
    assert witness.seconds == 6.0  # three steps of two micro-batches
    assert witness.losses == [0.5, 2.5, 4.5, 6.5, 8.5]
    witness.expect(1, 30)
    witness.forward(torch.nn.Identity(), 0.0)
    with pytest.raises(RuntimeError, match="last step"):
        _ = witness.seconds


def test_each_run_is_compared_with_the_bare_one_of_its_round() -> None:
    factors = dict(zip(SIDES, (1.0, 1.0, 1.02, 1.4), strict=True))
    rounds = [
        {side: Measured(speed * factor, speed * factor, 0.5, 0.0) for side, factor in factors.items()}
        for speed in (0.001, 0.002, 0.0005, 0.001, 0.003, 0.001)  # a machine whose speed changes
    ]
    table = Table("", COLUMNS)
    _rows(table, rounds, [dict(factors)])
    found = {row[1]: row for row in table.rows}
    assert [found[side][3] for side in SIDES[1:]] == ["+0.00 %", "+2.00 %", "+40.00 %"]


# Both ways to measure.


def test_every_key_that_one_process_switches_is_measured_or_has_a_reason() -> None:
    assert CASES.keys() | NOT_SHOWN.keys() == KEYS
    assert not CASES.keys() & NOT_SHOWN.keys()


@pytest.mark.parametrize("key", CASES)
def test_a_case_is_what_one_process_switches(key: str) -> None:
    workload, sets, change = CASES[key]
    base, changed = (read(None, items, workload).resolve() for items in (sets, (*sets, *change)))
    keys = list(differences(base, changed))
    assert keys == [key] and can_switch((base, changed), keys)


def event(ratio: float, **changes: Any) -> TrialEvent:
    body: dict[str, Any] = {
        "sets": [], "against": "", "verdict": "faster", "text": "", "ratio": ratio, "low": ratio * 0.98,
        "high": ratio * 1.02, "abba_blocks": 40, "pairs": 0, "df": 30.0, "method": "one process",
    }  # fmt: skip
    return TrialEvent(**{**body, **changes})


@pytest.mark.parametrize(("pairs", "agree"), [(1.21, "yes"), (1.4, "NO")])
def test_rounds_are_joined_and_both_ways_compared(pairs: float, agree: str) -> None:
    together = [event(1.19), event(1.21), event(1.20), event(1.20)]
    apart = [event(pairs, pairs=5, df=4.0, method="pairs") for _ in range(4)]
    one, other, quotient, found, differ, expected = switching.cells(together, apart)
    assert one.startswith("1.20x (95 % CI 1.1") and found == agree
    assert quotient.startswith(f"{1.2 / pairs:.2f}x") and other.startswith(f"{pairs:.2f}x")
    assert differ.endswith("%") and expected.endswith("%")
    assert set(switching.cells(together, [])) == {"n/a"}


# A planted 5 %.


@pytest.mark.parametrize(("planted", "more"), [(1, 1.05), (0, 1.0)])
def test_a_twentieth_more_work_is_planted_and_its_twin_has_none(
    monkeypatch: pytest.MonkeyPatch, planted: int, more: float
) -> None:
    settings = SimpleNamespace(option=lambda name, default: planted)
    model: Any = gain(settings)["model"]
    assert model.values.numel() < 32768  # from there on torch would use the second thread
    done: list[float] = []
    model.values = SimpleNamespace(mul_=done.append)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        done.append(threads * 1000)
        model(torch.ones(2, WIDTH))
    second = done.index(2000)
    assert (len(done) - second - 1) / (second - 1) == more
