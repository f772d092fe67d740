"""Part "memory predictions": `memory WORKLOAD`, batches 4 to 16 times as large as the probes.

On a GPU the prediction is compared with torch.cuda.max_memory_reserved() of the same steps, on the CPU with the
simulated allocator fed with a recording of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from benchmarks.common import quantile
from benchmarks.memory import MODELS, PRECISIONS

from ndd_engine.config import read
from ndd_engine.errors import NddError
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.predict.allocator import Rules
from ndd_engine.predict.estimate import MANY, Memory, Trace
from ndd_engine.predict.step_probes import Prober
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

from .figures import Task, one_line

TIMES = (4, 8, 16)
# Maximum relative errors: of the recorded batch itself, of the median and of the 95th percentile of larger ones.
SAME, MEDIAN, P95 = 0.005, 0.02, 0.05
# A prediction that is this much too low has to be marked as not reliable.
BELOW = 0.02
# Sizes that take more than a few segments of GPU memory, tried first.
LARGER = {"chartext": ("workload.size=guide", "workload.dropout=0.0")}


@dataclass(frozen=True)
class Case:
    """A relative error, signed. times: how many times as large as the larger probe; 1 for the probe itself."""

    times: int
    error: float
    reliable: bool


def measure(given: Task) -> None:
    """Measure the models of one workload."""
    workload = given.args[0]
    models = (LARGER.get(workload, ()), *MODELS[workload]) if given.on_gpu else MODELS[workload]
    cases: list[Case] = []
    for sets in [sets for sets in models if sets][: int(given.of(4, 1, 1))]:
        for amp in PRECISIONS[: int(given.of(2, 2, 1))]:
            if given.left_s < 10:
                given.skip(f"{_name(sets)} {amp}", "no time left")
                continue
            try:
                cases.extend(extrapolated(given, workload, sets, amp))
            except (NddError, RuntimeError) as error:
                given.skip(f"{_name(sets)} {amp}", one_line(error))
                if not isinstance(error, NddError) and not is_out_of_memory(error):
                    raise
    summary(given, cases)


def extrapolated(given: Task, workload: str, sets: tuple[str, ...], amp: str) -> Iterator[Case]:
    """One configuration: the recorded batch, and larger ones."""
    prober, memory = probed(workload, (*sets, f"precision.amp={amp}"), given.device)
    for times in (1, *TIMES[:: int(given.of(1, 2, 3))]):
        micro = memory.family.at[1] * times
        if micro > len(prober.workload.train_data):  # type: ignore[arg-type]
            continue
        trace = prober.trace(micro)
        reserved = reserved_by(trace, given.on_gpu)
        found = replayed(trace, reserved) if times == 1 else memory.peak(micro, 2)
        error = found / reserved - 1
        note = memory.why_not if not memory.reliable else ""
        shown = f"{reserved / (1 << 20):,.0f} MiB, {error * 100:+.2f} %"
        given.put(f"{_name(sets)} {_precision(amp)}, micro-batch {micro}", shown, why=one_line(note))
        yield Case(times, error, memory.reliable)


def probed(workload: str, sets: tuple[str, ...], device: str) -> tuple[Prober, Memory]:
    """The prober of a configuration, and its prediction of GPU memory without the context."""
    config = read(sets=[*sets, f"run.device={device}"], workload=workload).resolve()
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    same = tuple(item for item in sets if not item.startswith("precision."))
    prober = Prober(config, prepared(workload, same), where, lambda _: None)
    return prober, replace(prober.memory(0), on="gpu")


@lru_cache(maxsize=1)
def prepared(workload: str, sets: tuple[str, ...]) -> Workload:
    """Model and data, which are the same in every precision; making the data may take a minute."""
    config = read(sets=[*sets, "run.device=cpu"], workload=workload).resolve()
    seed(config.run.seed)
    return prepare(config, lambda _: None)


def reserved_by(trace: Trace, on_gpu: bool) -> int:
    """Peak bytes that the allocator reserved for the steps just recorded."""
    if on_gpu:
        return int(torch.cuda.max_memory_reserved())
    return trace.until(MANY).on_gpu(Rules.of_environment()).peak_reserved


def replayed(trace: Trace, reserved: int) -> int:
    """Peak bytes of the simulated allocator: for the order of addresses that is closer, as the order is not known."""
    peaks = (allocator.peak_reserved for allocator in trace.on_any_gpu(Rules.of_environment()))
    return min(peaks, key=lambda peak: abs(peak - reserved))


def summary(given: Task, cases: list[Case]) -> None:
    """The figures with targets."""
    same = [abs(case.error) for case in cases if case.times == 1]
    larger = sorted(abs(case.error) for case in cases if case.times > 1)
    if same:
        name = "replay of the recorded steps, worst"
        given.check_gpu(name, percent(max(same)), f"≤ {percent(SAME)}", max(same) <= SAME)
    if not larger:
        given.skip("larger batches", "none was measured")
        return
    for what, share, limit in (("median", 0.5, MEDIAN), ("p95", 0.95, P95)):
        value = quantile(larger, share)
        name = f"error of {len(larger)} larger batches, {what}"
        given.check(name, percent(value), f"≤ {percent(limit)}", value <= limit)
    silent = sum(case.error < -BELOW and case.reliable for case in cases)
    given.check(f"more than {percent(BELOW)} too low without a warning", str(silent), "0", not silent)


def percent(share: float) -> str:
    """A share as "0.52 %"."""
    return f"{share * 100:.3g} %"


def _name(sets: tuple[str, ...]) -> str:
    return " ".join(item.removeprefix("workload.") for item in sets)


def _precision(amp: str) -> str:
    return "fp32" if amp == "off" else amp
