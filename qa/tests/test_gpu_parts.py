"""The parts of `make gpu` in their smallest form on the CPU, and what needs a GPU with fakes."""

from __future__ import annotations

import itertools
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.common import STATISTICS, Table, Target, as_ratio, statistics_cells
from benchmarks.engine import ONLY_STEPS, engine

from ndd_engine.config import read as read_config
from ndd_engine.diagnose import CAUSES
from ndd_engine.diagnose.finding import Finding
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Gpu
from ndd_engine.measure import clock as phase
from ndd_engine.measure.clock import DevicePhaseClock
from ndd_engine.predict.memory import Fit
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.candidates import Place
from ndd_engine.trial.claims import measurements
from ndd_engine.trial.claims_table import claims as all_claims
from qa.faults import __main__ as faults_command
from qa.faults.cases import Case
from qa.faults.catalogue import all_cases
from qa.faults.on_gpu import GPU_CASES
from qa.faults.outcome import Measured, Outcome
from qa.faults.plants import write_module
from qa.gpu import capped, claims, faults, first, first_scripts, memory, overhead, runs, screen
from qa.gpu.figures import FAIL, PASS, SKIPPED, Figure, Task, read
from qa.gpu.machine import facts as facts_of


def task(
    tmp_path: Path, *args: str, effort: str = "smoke", seconds: float = 300.0, device: str = "cpu"
) -> Task:
    return Task(tmp_path / "figures.jsonl", device, effort, time.monotonic() + seconds, args)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_a_median_below_the_target_fails_only_with_its_interval() -> None:
    assert overhead.judged(0.995, None)[0] == PASS
    assert overhead.judged(0.98, (0.97, 0.985))[0] == FAIL
    assert overhead.judged(0.98, (0.95, 1.01))[0] == "inconclusive"
    assert overhead.judged(0.98, None)[0] == "inconclusive"


class Events:
    """Creates events of a GPU that does nothing, and counts those that were recorded."""

    recorded = 0

    def __call__(self) -> Events:
        return self

    def record(self, _stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Events) -> float:
        return 1.0


def test_the_two_sides_of_device_timing_differ() -> None:
    """A ratio of two equal sides would reach its target without having measured anything."""
    now, events = itertools.count(1, 10**9), Events()  # a second for each reading of the clock
    clock = DevicePhaseClock(events, lambda: next(now))

    def counted(on: bool) -> int:
        overhead.time_device(clock, on)
        before = events.recorded
        for _ in range(8):
            clock.enter(phase.FORWARD)
            clock.end_step()
        return events.recorded - before

    assert counted(True) > 8
    counted(False)  # the step that had been chosen
    assert counted(False) == 0
    assert counted(True) > 8


def test_memory_is_predicted_and_compared_with_a_replay(tmp_path: Path) -> None:
    given = task(tmp_path, "eeg")
    sets = ("workload.hidden=[32]",)
    cases = list(memory.extrapolated(given, "eeg", sets, "off"))
    assert [case.times for case in cases] == [1, 4]
    assert all(abs(case.error) < 0.05 for case in cases)
    memory.summary(given, cases)
    found = by_name(read(given.out))
    assert found["replay vs. max_memory_reserved"].why == "needs a CUDA GPU"
    assert found["error of 1 larger batches, median"].verdict == PASS
    assert found["more than 2 % too low without a warning"].value == "0"


def test_a_prediction_that_is_silently_too_low_fails(tmp_path: Path) -> None:
    given = task(tmp_path, device="cuda")
    low = [memory.Case(1, 0.02, True), memory.Case(4, -0.03, True), memory.Case(8, -0.2, False)]
    memory.summary(given, low)
    found = by_name(read(given.out))
    assert found["replay of the recorded steps, worst"].verdict == FAIL
    assert found["more than 2 % too low without a warning"] == Figure(
        "more than 2 % too low without a warning", "1", "0", FAIL
    )


def windows(*known: tuple[int, float] | None) -> list[runs.Json]:
    return [{"type": "window", "last_loss": None if item is None else list(item)} for item in known]


def test_losses_that_arrive_late_are_compared_by_step() -> None:
    eager = runs.losses(windows((1, 4.0), (2, 2.0), (3, 1.0), (4, 0.5)))
    late = runs.losses(windows(None, (1, 4.0), (1, 4.0), (3, 1.0)))
    assert runs.difference(eager, late) == (0.0, 2), "the loss of step 2 was overtaken"
    other = runs.losses(windows((1, 4.0), (2, 2.1), (4, 0.5)))
    assert runs.difference(eager, other) == (pytest.approx(0.05), 3)
    assert runs.difference(eager, {}) == (0.0, 0), "nothing is compared, so the number is part of a verdict"


class Linear:
    """A prediction of 10 bytes per item."""

    def fit(self, micro: int, _accumulation: int, cap: int) -> Fit:
        return Fit(10 * micro, 10 * micro <= cap)


@pytest.mark.parametrize(
    ("cap", "micro"), [(1000, 96), (960, 96), (959, 88), (80, 8), (79, None), (10**9, None)]
)
def test_the_proposal_is_the_largest_batch_within_the_limit(cap: int, micro: int | None) -> None:
    assert capped.proposal(Linear(), cap, 100_000) == micro  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "runs", "larger"), [(105, True, 107), (95, False, 107), (200, True, None)])
def test_a_proposal_runs_and_a_larger_batch_does_not(
    monkeypatch: pytest.MonkeyPatch, most: int, runs: bool, larger: int | None
) -> None:
    monkeypatch.setattr(capped, "fits", lambda _prober, micro, _cap, _gpu: micro <= most)
    assert capped.tried(None, 96, 1000, True) == capped.Result(96, runs, larger)  # type: ignore[arg-type]


def test_proposals_under_a_limit_are_replayed_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = task(tmp_path, "off")
    monkeypatch.setattr(capped, "task", lambda: given)
    assert capped.main() == 0
    found = by_name(read(given.out))
    assert found["steps on the GPU under a limit"].verdict == SKIPPED
    assert found["out of memory, of 1"].verdict == PASS


@pytest.mark.parametrize("runs_out", [False, True])
def test_a_limit_ends_with_the_steps_that_it_is_for(monkeypatch: pytest.MonkeyPatch, runs_out: bool) -> None:
    parts_of_memory: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * capped.GIB, 8 * capped.GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts_of_memory.append)

    class Probe:
        def trace(self, micro: int) -> None:
            assert parts_of_memory == [0.25]
            if runs_out:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert capped.fits(Probe(), 8, 2 * capped.GIB, True) is not runs_out  # type: ignore[arg-type]
    assert parts_of_memory == [0.25, 1.0]


def test_the_facts_name_the_gpu_and_not_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(
        0,
        0,
        "GPU-1",
        "NVIDIA A10",
        24 << 30,
        (8, 6),
        "580.1",
        "13.0",
        "13.0",
        processes=(),
        free_bytes=20 << 30,
    )
    found = detect("cpu")
    machine = replace(found, gpus=(gpu,), chosen=gpu, device="cuda:0")
    monkeypatch.setattr("ndd_engine.hardware.detect.detect", lambda *_: machine)
    facts = dict(facts_of(task(tmp_path, device="cuda")))
    assert facts["GPU"] == "NVIDIA A10"
    assert facts["GPU memory"] == "24.0 GiB, 20.0 GiB free"
    assert facts["driver"] == "580.1, for CUDA up to 13.0"
    assert facts["other processes on the GPU"] == "0"
    assert "torch" in facts and "triton" in facts
    assert not [value for value in facts.values() if socket.gethostname() in value.split()]


def test_the_tables_of_the_screen_become_figures(tmp_path: Path) -> None:
    given = task(tmp_path)
    table = Table("screen", ("figure", *STATISTICS))
    table.add(
        "steps/s, screen on / off",
        *statistics_cells([0.97, 0.98, 0.99, 0.98, 0.98], as_ratio, Target(0.99, True)),
    )
    table.add("CPU ms per refresh", *statistics_cells([3.0], as_ratio))
    screen.put(given, table)
    ratio, cost = read(given.out)
    assert (ratio.verdict, ratio.target) == (FAIL, "≥ 0.9900")
    assert ratio.value.startswith("0.9800 (95 % CI 0.97")
    assert (cost.verdict, cost.value) == ("info", "3.0000")


def test_limits_emulate_gpus_and_follow_what_is_free(tmp_path: Path) -> None:
    full = dict(capped.settings(task(tmp_path, effort="full"), 10 * capped.GIB))
    assert full["guide"] == [size * capped.GIB for size in (8, 12, 16, 24, 48)]
    assert len(full["small"]) > 200
    assert all(capped.GIB <= cap <= 8 * capped.GIB for cap in full["small"])


def test_claims_take_turns_by_guide_and_share_the_time() -> None:
    order = claims.in_turn(all_claims())
    assert len(order) == len(all_claims())
    guides = list(dict.fromkeys(claim.guide for claim in all_claims()))
    assert [claim.guide for claim in order[: len(guides)]] == guides
    assert claims.LEAST_S <= claims.budget(35, 955) <= 30
    assert claims.budget(35, 10) == claims.LEAST_S
    assert claims.budget(1, 1000) == claims.MOST_S


def test_the_decisive_claims_and_severe_faults_run_and_the_others_are_left_to_only() -> None:
    place = Place(True, 16)
    decisive, other = (claims.wanted(which, "full", place) for which in ("decisive", "other"))
    assert [claim.id for claim in decisive] == list(claims.DECISIVE)
    assert {claim.id for claim in (*decisive, *other)} == {claim.id for claim in all_claims()}
    assert len(decisive) + len(other) == len(all_claims())
    assert all(measurements(claim, place) == 1 for claim in decisive)
    severe, rest = (faults.wanted(which, "full") for which in ("severe", "other"))
    assert {case.fault for case in severe} == {case.fault for case in GPU_CASES}
    assert len({case.name for case in (*severe, *rest)}) == len(severe) + len(rest) == len(GPU_CASES)


def test_the_faults_that_need_a_gpu_can_be_configured(tmp_path: Path) -> None:
    assert {case.fault for case in GPU_CASES} >= {"launch-bound", "sync", "transfer", "amp"}
    assert all(case.truth in CAUSES for case in GPU_CASES)
    names = [case.name for case in all_cases(gpu=True)]
    assert len(set(names)) == len(names)
    assert not set(all_cases()) & set(GPU_CASES)
    write_module(tmp_path)
    for case in GPU_CASES:
        sets = case.all_sets(tmp_path)
        config = read_config(sets=sets, workload=case.workload_name).resolve()
        assert config.run.device == "cuda"
        assert config != read_config(sets=[*sets, *case.cure], workload=case.workload_name).resolve()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_make_faults_includes_them_on_a_machine_with_a_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(detect("cpu"), device=device)
    monkeypatch.setattr(faults_command, "detect", lambda **_: machine)
    monkeypatch.setattr(sys, "argv", ["faults", "--list"])
    assert faults_command.main() == 0
    printed = capsys.readouterr()
    assert ("fault-launch-bound-high-chartext" in printed.out) == (device == "cuda:0")
    assert ("12 cases that need one are left out" in printed.err) == (device == "cpu")


def test_the_planted_workloads_train(tmp_path: Path) -> None:
    write_module(tmp_path)
    reading = ("workload.options.reads=3", "workload.options.empty=1", "workload.options.rounds=4")
    for factory, options in (("reading", reading), ("heavy", ("workload.options.megabytes=2",))):
        sets = (f'workload.path=["{tmp_path}"]', *options, *ONLY_STEPS, "run.device=cpu", "batch.micro=4")
        with engine(f"planted:{factory}", sets) as subject:
            subject.train(3)
            assert subject.loop.step == 3


def test_faults_are_run_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(tmp_path, "severe", effort="full", device="cuda")
    ran: list[str] = []

    def carried_out(_self: object, case: Case) -> Outcome:
        ran.append(case.name)
        if len(ran) == 3:
            given.__dict__["deadline"] = 0.0
            return replace(Outcome.of(case), error="run hung; see /nowhere")
        gain = Measured(("a=1",), "faster", 2.0, 1.9, 2.1)
        named = case.truth if len(ran) == 1 else "healthy"
        return Outcome.of(case, named=named, found=((named, 3.0),), fix=("a=1",), tried=gain, cured=gain)

    monkeypatch.setattr(faults, "task", lambda: given)
    monkeypatch.setattr(faults.Suite, "carry_out", carried_out)
    assert faults.main() == 0
    found = read(given.out)
    assert ran[0].endswith("-high-chartext"), "the most severe come first"
    assert [figure.verdict for figure in found[:2]] == [PASS, FAIL]
    assert any("run hung" in figure.why for figure in found)
    assert sum(figure.why == "no time left" for figure in found) == 1
    assert found[-1] == Figure("correct", "1 of 3", "all", FAIL)


# The first checks: the verdicts that need a GPU, from records made by hand.


def ended(tmp_path: Path, *events: runs.Json, status: str = "done") -> runs.Trained:
    return runs.Trained(EndEvent(status, "why", 8, 0), list(events), RunDir(tmp_path / "run"))


def window(steps: int = 10, device_steps: int = 2, **device_ms: float | None) -> runs.Json:
    """Steps of 10 ms."""
    rows = {
        name: {"host_ns": 1_000_000 * steps, "device_ns": None if ms is None else round(ms * 1e6)}
        for name, ms in device_ms.items()
    }
    return {
        "type": "window", "steps": steps, "device_steps": device_steps, "wall_ns": 10_000_000 * steps,
        "phases": rows, "last_loss": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("windows", "verdict"),
    [
        ([window(forward=3.0, backward=6.0)], PASS),
        ([window(forward=3.0, backward=9.0)], FAIL),  # 12 ms of a step that takes 10
        (
            [window(forward=3.0, backward=6.0) | {"steps": 5}, window(20, 0, forward=None, backward=None)],
            PASS,
        ),
        ([window(device_steps=0, forward=None, backward=None)], FAIL),
        ([window(forward=3.0, backward=0.0)], FAIL),
        ([], FAIL),
    ],
)
def test_the_device_clock_is_compared_with_the_steps(
    tmp_path: Path, windows: list[runs.Json], verdict: str
) -> None:
    given = task(tmp_path, device="cuda")
    first.clocks(given, "run", ended(tmp_path, *windows))
    assert by_name(read(given.out))["run: device clock"].verdict == verdict


def test_a_part_of_a_phase_is_not_counted_twice(tmp_path: Path) -> None:
    given = task(tmp_path, device="cuda")
    rows = {"forward": 4.0, "forward/graph": 4.0, "backward": 5.0}
    first.clocks(given, "run", ended(tmp_path, window(**rows)))
    found = by_name(read(given.out))["run: device clock"]
    assert (found.verdict, found.value) == (PASS, "9.00 ms on the device, 10.00 ms by the host")


@pytest.mark.parametrize(
    ("waits_ms", "causes", "verdict"),
    [(0.05, (), PASS), (0.05, ("optimizer",), PASS), (0.05, ("data-wait",), FAIL), (3.0, (), FAIL)],
)
def test_a_loader_is_blamed_for_what_the_gpu_waits(
    tmp_path: Path, waits_ms: float, causes: tuple[str, ...], verdict: str
) -> None:
    given = task(tmp_path, device="cuda")
    findings = tuple(Finding(cause, "", (), "certain") for cause in causes)
    first.verdict_on_loader(given, window(data_wait=waits_ms, forward=5.0), findings)
    assert by_name(read(given.out))["the loader is not blamed"].verdict == verdict


def test_a_run_that_warns_or_ignores_a_setting_is_a_failure(tmp_path: Path) -> None:
    warning = {"type": "mark", "kind": "warning", "text": "odd"}
    setting = {"type": "setting", "name": "speed.compile", "in_effect": False}
    given = task(tmp_path)
    first.ended(given, "bad", ended(tmp_path, warning, setting, status="failed"))
    first.ended(given, "good", ended(tmp_path, setting | {"in_effect": True}))
    found = {name: figure.verdict for name, figure in by_name(read(given.out)).items()}
    assert found == {
        "bad: run": FAIL, "bad: warnings": FAIL, "bad: settings not in effect": FAIL,
        "good: run": PASS, "good: warnings": PASS, "good: settings not in effect": PASS,
    }  # fmt: skip


def test_what_cannot_be_read_after_tf32_is_switched_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises() -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(first, "READERS", {"old": raises, "new": lambda: True})
    given = task(tmp_path)
    before = torch.get_float32_matmul_precision()
    first.tf32(given, tmp_path)
    torch.set_float32_matmul_precision(before)
    found = by_name(read(given.out))
    assert found["TF32 on: old"] == Figure(
        "TF32 on: old", "raises", "can be read", FAIL, "mix of the legacy and new APIs"
    )
    assert found["TF32 on: new"].verdict == PASS
    assert found["TF32 on: products"].why == "needs a CUDA GPU"


def test_a_trial_that_measures_launches_only_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 50 ms of the GPU; the host has launched it after 2 ms."""
    given = task(tmp_path, device="cuda")
    monkeypatch.setattr(first_scripts, "observed", lambda *_: RunDir(tmp_path))
    result = {"base": {"step_s": 0.002}, "change": {"step_s": 0.051}}
    monkeypatch.setattr(first_scripts, "tried", lambda *_: result)
    monkeypatch.setattr(first_scripts, "synchronised", lambda _: 0.05)
    before = torch.get_float32_matmul_precision()
    first_scripts.trial(given, tmp_path)
    torch.set_float32_matmul_precision(before)
    found = [(figure.value, figure.verdict) for figure in read(given.out)]
    assert found == [("2.00 ms vs. 50.00 ms", FAIL), ("51.00 ms vs. 50.00 ms", PASS)]


@pytest.mark.long
def test_a_console_that_fails_is_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(tmp_path)
    monkeypatch.setattr(first_scripts, "SCRIPT", "raise SystemExit('no such device')")
    assert first_scripts.observed(given, tmp_path) is None
    assert first_scripts.tried(given, tmp_path, "precision.tf32=true") is None
    observed, tried = read(given.out)
    assert (observed.verdict, tried.verdict) == (FAIL, FAIL)
    assert "no such device" in observed.why
