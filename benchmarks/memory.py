"""Accuracy of memory predictions for large batches from two small traces, vs. real traces.

Five workloads, several models each, fp32 and bf16: a step is recorded at two small micro-batches, extrapolated to
micro-batches 4 to 24 times as large, and compared with recordings of these. The peak of allocated memory is "in use";
"reserved" is the memory that the CUDA caching allocator would reserve for the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ndd_engine.config import Config, read
from ndd_engine.errors import NddError
from ndd_engine.predict.allocator import Rules
from ndd_engine.predict.estimate import HOST_GRANULE, MANY, ONE
from ndd_engine.predict.step_probes import Prober
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.factory_data import prepare

from .common import TARGETS, Options, Table, as_count, quantile, say

CPU = torch.device("cpu")
TIMES = (4, 8, 16, 24)
PRECISIONS = ("off", "bf16")
BELOW = 0.02
_MANUAL = ("workload.size=tiny", "workload.examples=78", "workload.eval_examples=1")
MODELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "eeg": (
        ("workload.hidden=[32]",), ("workload.hidden=[256, 128]",),
        ("workload.hidden=[64, 64, 64]", "batch.sequence=64"),
    ),
    "chartext": (
        ("workload.size=tiny",), ("workload.size=mini",), ("workload.size=small", "batch.sequence=64"),
    ),
    "antispoof": (
        ("workload.size=tiny", "workload.clips=320"),
        ("workload.size=tiny", "workload.clips=320", "workload.channels=[4, 4, 8, 16]", "workload.reduction=4"),
        ("workload.size=tiny", "workload.clips=320", "workload.channels=[16, 16, 32, 32]"),
    ),
    "finetune": (
        (*_MANUAL, "workload.document_chars=600"),
        (*_MANUAL, "workload.layers=1", "workload.document_chars=600"),
        (*_MANUAL, "batch.sequence=64", "workload.document_chars=600"),
    ),
    "summarise": (
        ("workload.size=tiny", "workload.pairs=800", "batch.sequence=32", "workload.target=12"),
        ("workload.size=tiny", "workload.pairs=800", "batch.sequence=64", "workload.target=8"),
        ("workload.size=tiny", "workload.pairs=800", "batch.sequence=24", "workload.target=16", "workload.layers=1"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One extrapolation. in_use, reserved: signed relative errors. aligned: whether the two probes matched."""

    workload: str
    amp: str
    micro: int
    in_use: float
    reserved: float
    aligned: bool


def measure(options: Options) -> list[Table]:
    """All extrapolations; --quick uses one model per workload and two sizes."""
    cases = list(_cases(options))
    table = Table(
        "peak memory of batches 4 to 24 times the size of the probes: predicted / recorded - 1",
        ("workload", "precision", "cases", "not aligned", "in use: median", "p95", "lowest", "highest",
         "reserved: median", "p95", "lowest", "highest"),
    )  # fmt: skip
    for workload in MODELS:
        for amp in PRECISIONS:
            _row(
                table, workload, amp, [case for case in cases if (case.workload, case.amp) == (workload, amp)]
            )
    _row(table, "all", "", cases)
    table.note("probes at micro-batches 4 and 8; if these are not aligned, 8 and 16, or 16 and 32")
    table.note("p95: of the absolute error")
    return [table, _targets(cases)]


def _targets(cases: list[Case]) -> Table:
    table = Table("targets", TARGETS)
    errors = [abs(case.in_use) for case in cases]
    table.target("median error of memory in use", quantile(errors, 0.5), 0.005, _percent)
    table.target("p95 of that error", quantile(errors, 0.95), 0.02, _percent)
    silent = sum(case.in_use < -BELOW and case.aligned for case in cases)
    table.target("more than 2 % too low, without a warning", silent, 0, as_count)
    return table


def _row(table: Table, workload: str, amp: str, cases: list[Case]) -> None:
    if not cases:
        return
    cells = []
    for name in ("in_use", "reserved"):
        signed = sorted(getattr(case, name) for case in cases)
        size = sorted(map(abs, signed))
        cells += [
            _percent(quantile(size, 0.5)),
            _percent(quantile(size, 0.95)),
            _signed(signed[0]),
            _signed(signed[-1]),
        ]
    loose = sum(not case.aligned for case in cases)
    table.add(workload, "fp32" if amp == "off" else amp, str(len(cases)), str(loose), *cells)


def _cases(options: Options) -> Iterator[Case]:
    torch.set_num_threads(1)
    times = options.cases(TIMES[::3] if options.quick else TIMES)
    for workload in options.cases(MODELS):
        for sets in MODELS[workload][: options.repeats(3, 1)]:
            for amp in options.cases(PRECISIONS):
                say(f"memory: {workload} {' '.join(sets)} {amp}")
                try:
                    yield from _extrapolations(workload, sets, amp, times)
                except NddError as error:
                    say(f"memory: {workload}: {error}")


def _extrapolations(workload: str, sets: tuple[str, ...], amp: str, times: Sequence[int]) -> Iterator[Case]:
    config = read(sets=[*sets, f"precision.amp={amp}", "run.device=cpu"], workload=workload).resolve()
    prober = prober_of(config, CPU)
    family = prober.family()
    for many in times:
        micro = family.at[1] * many
        if micro > len(prober.workload.train_data):  # type: ignore[arg-type]
            continue  # larger than the built-in data
        truth = prober.trace(micro).ordered()
        for mark in (ONE, MANY):
            predicted, real = family.trace(micro).until(mark), truth.until(mark)
            in_use = predicted.peak(HOST_GRANULE) / real.peak(HOST_GRANULE) - 1
            reserved = predicted.on_gpu(Rules()).peak_reserved / real.on_gpu(Rules()).peak_reserved - 1
            yield Case(workload, amp, micro, in_use, reserved, family.aligned)


def prober_of(config: Config, device: torch.device) -> Prober:
    """What predicts and records the memory of a configuration, in the present process group."""
    seed(config.run.seed)
    return Prober(config, prepare(config, lambda _: None), device, lambda _: None)


def _percent(value: float) -> str:
    return f"{value:.3%}"


def _signed(value: float) -> str:
    return f"{value:+.2%}"
