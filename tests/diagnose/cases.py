"""Each cause in a planted run, and a similar run without the cause: the same settings or symptoms, but no such cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planted_runs import (
    GIB,
    GPU_RUN,
    GPU_STEP,
    MB,
    NVML,
    Planted,
    alone,
    beside,
    capture,
    cores,
    data,
    evaluated,
    evaluating,
    files,
    gpu,
    healthy,
    memory,
    of_workers,
    operation,
    own,
    profiled,
    saved,
    saving,
    seen,
    work,
    worked,
)

from ndd_engine.record.event import OVER
from ndd_engine.record.events import (
    DeathEvent,
    DescriptorsEvent,
    EndEvent,
    Event,
    MarkEvent,
    StallEvent,
    TrialEvent,
)
from tests import records


@dataclass(frozen=True)
class Pair:
    """A run with a fault, and one that only looks like it. sets: the edits that the fault's finding proposes first."""

    cause: str
    guilty: Planted
    innocent: Planted
    sets: tuple[str, ...]
    name: str

    @property
    def id(self) -> str:
        return self.cause + (f"-{self.name}" if self.name else "")


def pair(
    cause: str,
    guilty: Mapping[str, Any],
    innocent: Mapping[str, Any],
    tries: tuple[str, ...] = (),
    name: str = "",
    kind: Callable[..., Planted] = Planted,
    **both: Any,
) -> Pair:
    """Two runs that have `both`, and differ in the rest. tries: the edits that are proposed first."""
    return Pair(cause, kind(**{**both, **guilty}), kind(**{**both, **innocent}), tries, name)


def recompiled(step: int) -> tuple[Event, ...]:
    """Two seconds of forward in which a graph was recompiled."""
    return MarkEvent("recompile", step, "", {"graphs": 1, "seconds": 1.9}), beside("forward", 2000, step)


STALL = StallEvent(
    240, 9.0, "storage", "no progress for 9 s: the main process waits", "check the disk", "a.py:3",
    ["the main process (pid 7), state D, read of /data/a.bin"],
)  # fmt: skip
ENDED = StallEvent(240, 1.0, OVER, "training continues after step 240")
COMPUTES = StallEvent(240, 40.0, "computing", "no step for 40 s: the main process computes")
DIED = DeathEvent(240, 4711, "loader worker 1", "SIGKILL", 3 << 30, None, 1)


def at_the_end(*events: Event) -> dict[str, Any]:
    return {"after": {11: events}}


def opened(*counts: int) -> dict[str, Any]:
    """So many open descriptors after the windows of 20 steps."""
    kinds = {"shared memory": 20}
    return {
        "after": {n: (DescriptorsEvent(20 * n + 20, count, 1024, kinds),) for n, count in enumerate(counts)}
    }


def opened_to_the_end(*counts: int) -> dict[str, Any]:
    """The same of a run that has ended."""
    after = dict(opened(*counts)["after"])
    after[max(after)] = (*after[max(after)], EndEvent("done", "finished", 20 * len(counts), 0))
    return {"after": after}


def hooked(first: int, newest: int) -> dict[str, Any]:
    """So many hooks of a module in two profiled steps."""
    counts = ((1, first), (9, newest))
    return {
        "after": {n: (replace(profiled(), step=20 * n + 20, sizes={"hooks:block.3": k}),) for n, k in counts}
    }


def reserved(each: float, until: int = 12, in_use: bool = False) -> dict[str, Any]:
    """After each window up to `until`, so many GiB more are reserved. in_use: so many are in use as well."""
    found: dict[int, tuple[Event, ...]] = {}
    for window in range(12):
        more = int(min(window, until) * each * GIB)
        used = (6 * GIB + more, 7 * GIB + more) if in_use else (6 * GIB, 7 * GIB)
        found[window] = (
            memory(allocated_bytes=used[0], peak_allocated_bytes=used[1], reserved_bytes=8 * GIB + more),
        )
    return {"after": found}


PROCESSES = [
    pair("piling-up", hooked(2, 90), hooked(90, 90)),
    pair("hang", at_the_end(STALL), at_the_end(STALL, ENDED)),
    pair(
        "hang",
        at_the_end(STALL, ENDED, EndEvent("failed", "a worker was killed", 240, 1)),
        at_the_end(STALL, ENDED, EndEvent("interrupted", "Ctrl-C", 240, 130)),
        name="ended",
    ),
    pair("hang", at_the_end(COMPUTES, STALL), at_the_end(COMPUTES), name="computes"),
    pair("died", at_the_end(DIED), at_the_end(COMPUTES)),
    pair("open-files", opened(*range(40, 280, 20)), opened(40, 60, 80, 100)),  # no more since
    pair("open-files", opened(40, 1024), opened(40, 44), name="limit"),
    # A process that ends closes its files; one that closes them again and again keeps none.
    pair(
        "open-files",
        opened_to_the_end(*range(40, 260, 20), 3),
        opened_to_the_end(40, 90, 40, 90, 40, 90, 40, 90, 40, 90, 40, 3),
        name="ended",
    ),
]
WAITING = healthy(data_wait=20.0)
WAITS = {"phases": WAITING}
RESTARTS = {"phases": healthy(**{"data_wait": 12.0, "data_wait/first_batch": 8.0})}
NEIGHBOUR = [{"pid": 4711, "name": "stress", "cores": 0.9, "stoppable": True}]
IN_MEMORY = ("loader.workers=2", "loader.prefetch=3")
LOADER = [
    pair(
        "item-collate", {**WAITS, "loader": data(item_ns=9e4, item_cpu_ns=9e4)}, {"loader": data()},
        ("loader.fetch=auto",), sets=["loader.fetch=item"],
    ),
    pair(
        "in-memory-workers", WAITS, {}, ("loader.workers=0", "loader.prefetch=none"),
        sets=IN_MEMORY, loader=data(), baseline=alone(),
    ),
    pair(
        "in-memory-workers", {"sets": ["loader.workers=2"]}, {"sets": ["loader.workers=0"]}, ("loader.workers=0",),
        "cores", loader=data(), baseline=alone(micro_ns=12e6), host=cores(2, 1.95),
    ),
    pair(
        "worker-restart", RESTARTS, {"phases": healthy(**{"data_wait": 0.5, "data_wait/first_batch": 0.4})},
        ("loader.persistent=true",), sets=["loader.workers=1", "loader.persistent=false"],
        loader=files(epochs_differ=True, item_ns=1e4),
    ),
    # The innocent has long epochs, of which one began late.
    pair(
        "short-epochs", {**RESTARTS, "window": {"passes": 4}},
        {"phases": healthy(**{"data_wait": 0.8, "data_wait/first_batch": 0.7}), "window": {"passes": 1}},
        loader=files(epochs_differ=True, item_ns=1e4),
    ),
    pair("slow-storage", WAITS, {}, ("loader.workers=3",), loader=files(item_cpu_ns=2e4)),
    # The innocent's worker makes a batch in 3 ms of the 20 that a step takes: the wait is not for storage.
    pair(
        "slow-storage", {**WAITS, "loader": files(item_cpu_ns=2e4)},
        {"phases": healthy(data_wait=3.0), "loader": files(item_ns=1e5, item_cpu_ns=2e4)},
        ("loader.workers=3",), "worker", sets=["loader.workers=1"],
    ),
    # As much waiting for items that take long to make: fewer workers would make fewer of them.
    pair(
        "many-workers", {**WAITS, "loader": files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5)},
        {"loader": files(epochs_differ=True), "baseline": alone()}, ("loader.workers=0",), sets=["loader.workers=8"],
    ),
    pair(
        "many-workers", WAITS, {"phases": healthy(data_wait=0.4)}, ("loader.workers=0",), "cheap",
        sets=["loader.workers=1"], loader=files(item_ns=1e5, item_cpu_ns=1e5),
    ),
    # Without its worker, the step would make the batch itself, and gain 0.9 ms of 21.
    pair(
        "many-workers", WAITS, {"phases": healthy(data_wait=2.0), "loader": files(item_ns=3.2e4, item_cpu_ns=3.2e4)},
        ("loader.workers=0",), "little", sets=["loader.workers=1"], loader=files(item_ns=1e5, item_cpu_ns=1e5),
    ),
    # The wait is little longer than making a batch in this process, but the model is slowed down as well.
    pair(
        "many-workers", {"baseline": alone(micro_ns=10e6)}, {"baseline": alone()}, ("loader.workers=0",), "slowed",
        phases=healthy(data_wait=4.0), sets=["loader.workers=8"], host=cores(2.0, 1.95),
        loader=files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5),
    ),
    pair(
        "on-the-fly", {"phases": healthy(data_wait=32.0), "loader": files()},
        {"phases": healthy(data_wait=0.5), "loader": files(item_ns=1e4, item_cpu_ns=1e4)}, ("loader.cache=true",),
    ),
    # The dataset makes whole batches, and computes each.
    pair(
        "on-the-fly",
        {"phases": healthy(data_wait=32.0), "loader": data(item_ns=2e6, item_cpu_ns=1.9e6, gather_ns=31e6)},
        {"phases": healthy(data_wait=0.3), "loader": data(item_ns=1e4, item_cpu_ns=1e4)},
        ("loader.cache=true",), "batches",
    ),
    pair(
        "few-workers", {"phases": healthy(data_wait=32.0), "host": cores(1.2, 1.1)},
        {"sets": ["loader.workers=1"], "host": cores(1.9, 1.9)}, ("loader.workers=2",),
        loader=files(epochs_differ=True),
    ),
    pair("data-wait", WAITS, {}, ("loader.workers=1",)),
    # A batch is made in far less time than its phase takes: it is not the data that is waited for.
    pair("data-wait", {"loader": data(gather_ns=15e6)}, {"loader": data()}, (), "made-here", phases=WAITING),
]  # fmt: skip


def threads(count: int, others: float, ns: float) -> dict[str, Any]:
    """So many threads, and what a micro-batch takes with another number of them."""
    return {"run": {"threads": count}, "baseline": alone(threads=count, by_threads=[[others, ns]])}


FEW_COLLECTIONS = {"gc_ns": 4_000_000, "gc_count": 3, "gc_max_ns": 3_000_000}
PROCESSOR = [
    pair("oversubscribed", threads(8, 2.0, 11e6), threads(8, 2.0, 18.8e6), ("run.threads=2",)),
    pair(
        "many-threads", threads(2, 1.0, 10e6), threads(2, 1.0, 18e6), ("run.threads=1",), host=cores(1.9, 1.9)
    ),
    pair(
        "few-threads", threads(1, 2.0, 10.5e6), threads(1, 2.0, 18.9e6), ("run.threads=2",), host=cores(1.0, 1.0)
    ),
    pair(
        "neighbour-cores", {"host": cores(2.0, 1.1, neighbours=NEIGHBOUR), "baseline": alone(micro_ns=11e6)},
        {"host": cores(1.96, 1.94, neighbours=[{"pid": 1, "name": "sleep", "cores": 0.01}]), "baseline": alone()},
        ("run.threads=1",),
    ),
    pair(
        "quota", {"host": cores(2.0, 1.9, cpu_throttled=0.3)}, {"host": cores(2.0, 1.9, cpu_throttled=0.01)},
        ("run.threads=1",), sets=["loader.workers=1"],
    ),
    pair(
        "gc", {"window": {"gc_ns": 60_000_000, "gc_count": 3, "gc_max_ns": 30_000_000}},
        {"window": FEW_COLLECTIONS}, ("run.gc_every_steps=50",),
    ),
]  # fmt: skip


def takes(**phases: float) -> dict[str, Any]:
    return {"phases": healthy(**phases)}


def denormal(name: str, share: float, ms: float) -> Any:
    return replace(profiled(), denormals={name: (share, ms)})


STEP = [
    pair(
        "optimizer", takes(optimizer=6.0), takes(optimizer=0.2), ("optimizer.implementation=fused",),
        sets=["optimizer.implementation=loop"],
    ),
    pair(
        "optimizer", {**takes(zero_grad=4.0), "sets": ["optimizer.set_to_none=false"]}, takes(optimizer=3.0),
        ("optimizer.set_to_none=true",), "zeros",
    ),
    # The innocent's optimizer takes little time; the next one's are zero already.
    pair(
        "denormals", takes(optimizer=9.0), {}, ("speed.flush_denormal=true",),
        functions=denormal("exp_avg_sq", 0.6, 20.0),
    ),
    pair(
        "denormals", {}, {"sets": ["speed.flush_denormal=true"]}, ("speed.flush_denormal=true",), "parameters",
        functions=denormal("parameters", 0.2, 3.0),
    ),
    pair("clip", takes(clip=4.0), takes(clip=0.1), ("clip.max_norm=0.0",), sets=["clip.max_norm=1.0"]),
    pair(
        "logging", {**takes(other=3.0), "sets": ["log.window_s=0", "log.every_steps=1"]},
        {"sets": ["log.every_steps=1"]}, ("log.window_s=1.0", "log.every_steps=10"),
    ),
    pair(
        "evaluation",
        {"sets": ["evaluate.every_steps=20"], "after": {n: evaluated(200, 20 * n + 20) for n in range(12)}},
        {"sets": ["evaluate.every_steps=200"], "after": {n: evaluated(20, 20 * n + 20) for n in (5, 11)}},
        ("evaluate.every_steps=200",),
    ),
    pair(
        "checkpoint", {"after": {n: saved(100, 20 * n + 20) for n in range(12)}},
        {"after": {n: saved(4, 20 * n + 20) for n in range(12)}}, ("checkpoint.every_steps=100",),
        sets=["checkpoint.every_steps=20"],
    ),
]  # fmt: skip

COMPILING = MarkEvent("compile", 0, "", {"seconds": 20.0, "mode": "default"})
COMPILED = ("speed.compile=default",)
NO_COMPILATION = MarkEvent("recompile", 80, "", {"graphs": 1, "seconds": 0.01})
OWN_LOOP = profiled(
    ("forward", "my/model.py", 10, "Net.forward", 0.5), ("forward", "my/model.py", 31, "penalty", 13.5)
)
# The same by stack samples, as in old records.
OWN_LOOP_SAMPLED = seen(
    ("forward", "my/model.py", 10, "Net.forward", 22, 1), ("forward", "my/model.py", 31, "penalty", 20, 1),
    ("forward", "my/model.py", 32, "penalty", 30, 1), ("backward", "torch/a.py", 1, "backward", 60, 0),
)  # fmt: skip


def without_determinism(verdict: str, ratio: float) -> dict[str, Any]:
    sets = ["speed.deterministic=false"]
    return {"trials": [TrialEvent(sets, "now", verdict, f"{ratio}x", ratio, ratio - 0.01, ratio + 0.01)]}


def small_micro(other_ns: float) -> dict[str, Any]:
    return {"baseline": alone(micro=2, micro_ns=2.4e6, other_micro=1, other_ns=other_ns)}


MODEL = [
    pair("user-code", {**takes(forward=20.0), "functions": OWN_LOOP}, takes(forward=7.0), (), "pace", own),
    pair(
        "user-code", takes(forward=20.0), takes(forward=7.0), (), "sampled", own,
        functions=None, stacks=OWN_LOOP_SAMPLED,
    ),
    # By itself the innocent's code is much faster: something else takes its time.
    pair(
        "user-code", {"baseline": alone(micro_ns=31e6)}, {"baseline": alone()}, (), "by-itself", own,
        phases=healthy(forward=20.0), functions=OWN_LOOP,
    ),
    pair(
        "user-code", {"kernels": capture(launch_gaps=30)}, {"kernels": capture(launch_gaps=2)}, (), "capture", own,
        functions=OWN_LOOP,
    ),
    # Where other programs use the cores, operators wait for one as well.
    pair(
        "user-code", {"host": cores(2.0, 1.9)}, {"host": cores(2.0, 0.2)}, (), "shared", own,
        kernels=capture(launch_gaps=30), functions=None,
    ),
    pair(
        "small-micro", small_micro(2.2e6), small_micro(1.22e6), ("batch.micro=16", "batch.accumulation=1"),
        workload="summarise", sets=["batch.micro=2", "batch.accumulation=8"],
    ),
    pair(
        "stepwise", {"run": {"alternatives": {"stepwise": ("workload.decoder=hoisted", "compute them once")}}}, {},
        ("workload.decoder=hoisted",), workload="summarise", baseline=alone(operations=6000), work=work(),
    ),
    pair("slowing", {"grows": {"forward": 1.0}}, {"wobble": 0.3}, windows=24),  # varies as much, and is no slower
    pair(
        "recompile", {"after": {3: recompiled(80)}}, {"after": {3: (NO_COMPILATION,)}},
        ("speed.compile_dynamic=true",), workload="finetune", sets=COMPILED,
    ),
    pair(
        "compile-cost", {"run": {"total_steps": 240}}, {}, ("speed.compile=off",), sets=COMPILED, marks=[COMPILING]
    ),
    pair(
        "deterministic", without_determinism("faster", 1.3), without_determinism("no difference", 1.0),
        ("speed.deterministic=false",), sets=["speed.deterministic=true"],
    ),
]  # fmt: skip

LOOP = ("my/model.py", 12, "Net.forward", 40, 1, 20_000_000, 45_000_000, 400, 20_000)
MANY = "64x64, 32000x64, 32000"
QUERIES = "8x4x128x16, 8x4x128x16, 8x4x128x16"


def works(cause: str, guilty: dict[str, Any], innocent: dict[str, Any], tries: tuple[str, ...] = ()) -> Pair:
    """Two captures of the same model."""
    sides = ({"kernels": worked(**rows)} for rows in (guilty, innocent))
    return pair(cause, *sides, tries, kind=own)


WORK = [
    works(
        "sequential-loop", {"loops": [(*LOOP, 40, 1, "cell", "GRUCell")]},
        {"loops": [(*LOOP, 40, 40, "layers.*", "Linear")]},  # over layers
    ),
    works(
        "large-vocabulary", {"operations": [operation("linear", MANY)]},
        {"operations": [operation("linear", "32000x64, 64x64, 64")]},  # so many rows
    ),
    works(
        "small-operations", {"small": 1500, "small_ns": 80_000_000, "median_ns": 4000}, {"small": 1500},
        ("speed.compile=default",),
    ),
    works(
        "unfused-attention",
        {"operations": [operation("scaled_dot_product_attention", QUERIES, "math, dropout")]},
        {"operations": [operation("scaled_dot_product_attention", QUERIES)]},
    ),
    works(
        "computed-twice",
        {"repeats": [("encoder", "Encoder", "my/model.py", 9, "Net.forward", 1, 12_000_000, 20_000_000)]},
        {"repeats": [("norm", "Norm", "my/model.py", 9, "Net.forward", 1, 10_000, 20_000)]},
    ),
]  # fmt: skip

TABLES = replace(profiled(), tables=[("Net.table", "Embedding", 100_000, 64, 512, 0.9, "AdamW")])
NEEDLESS = [
    # The innocent's optimizer takes as long, and not for a table.
    pair("dense-embedding", {"functions": TABLES}, {}, kind=own, phases=healthy(optimizer=12.0)),
    pair("dense-embedding", takes(backward=40.0), {}, (), "backward", own, functions=TABLES),
    pair("retain-graph", {"functions": replace(profiled(), retains=("step.py", 9))}, {}, kind=own),
    pair("anomaly", {"functions": replace(profiled(), anomaly=True)}, {}, kind=own),
]

# A GPU without formats faster than TF32.
OLD_GPU = {
    **GPU_RUN, "precision": "fp32", "gpu": {"profile": {"dense_tflops": {"tf32": 494.7, "fp32": 66.9}}},
}  # fmt: skip
TF32_WORK = work(flops_per_step=600 * 10**9, peak_tflops=66.9, peak_kind="fp32", accumulation=1)
AMP_WORK = work(flops_per_step=4000 * 10**9, peak_tflops=494.7, peak_kind="tf32")
LITTLE = 10**9
SCRIPT = {
    "config": {"script": {"command": ["python", "train.py"]}, "batch": {"accumulation": 1, "micro": 8}},
    "precision": "",
}
UNPINNED = ("precision.amp=bf16", "loader.pin_memory=false")
READS = ("precision.amp=bf16", "log.every_steps=1")
MICRO = ("precision.amp=bf16", "batch.micro=32")
FEWER_READS, PINNED = ("log.every_steps=10",), ("loader.pin_memory=true",)


def busy(more: Mapping[str, Any] | None = None, **idle: int) -> dict[str, Any]:
    """A capture of a GPU that is idle for so many milliseconds by cause."""
    return {"kernels": replace(capture("kernels", **idle), **(more or {}))}


def products(**busy_ms: int) -> dict[str, Any]:
    """A capture in which matrix products take so many milliseconds by number format."""
    return busy({"products_ns": {name: ms * 10**6 for name, ms in busy_ms.items()}})


CONVOLUTIONS = busy({"convolution_ns": 60_000_000})
QUEUED = {"queued": [("another stream", 25_000_000, 40), ("short", 5_000_000, 900)]}
COLLECTIVES = {"collective_ns": 30_000_000}
CROWDED = {**NVML, "processes": 1, "memory_others_bytes": 9 << 30}
GPU = [
    pair("transfer", {"device": {**GPU_STEP, "to_device": 4.0}}, {}, PINNED, kind=gpu, sets=UNPINNED),
    # Copies that the GPU waits for, by a capture: from the host clock alone nothing of them is seen.
    pair(
        "transfer", busy({"exposed_copies_ns": {"host to GPU": 16_000_000}}, copying=20),
        busy({"exposed_copies_ns": {"host to GPU": 1_000_000}}, copying=1),
        PINNED, "capture", gpu, sets=UNPINNED,
    ),
    pair(
        "device-copies", busy({"exposed_copies_ns": {"within the GPU": 15_000_000, "fill": 5_000_000}}),
        busy({"exposed_copies_ns": {"within the GPU": 1_000_000, "fill": 1_000_000}}), kind=gpu,
    ),
    pair(
        "launch-bound", busy(launch_gaps=40), busy(launch_gaps=2), ("speed.cuda_graph=true",), "capture", gpu
    ),
    pair(
        "launch-bound", {"gpu": {**NVML, "util_percent": 45, "power_w": 200.0}},
        {"gpu": {**NVML, "util_percent": 99, "power_w": 200.0}}, ("speed.cuda_graph=true",), "counters", gpu,
    ),
    pair("sync", busy(synchronising=20), busy(synchronising=1), FEWER_READS, "capture", gpu, sets=READS),
    # A synchronisation empties the queue: what the host needs to fill it again belongs to it.
    pair(
        "sync", busy({"after_waits_ns": 18_000_000}, synchronising=2, launch_gaps=20), busy(synchronising=2),
        FEWER_READS, "after", gpu, sets=READS,
    ),
    # The innocent's host waits there while the GPU computes.
    pair(
        "sync", {"device": {**GPU_STEP, "log": 3.0}}, takes(log=8.0), FEWER_READS, "clock", gpu, sets=READS
    ),
    pair("queue-gaps", busy(QUEUED, between_queued_kernels=30), busy(between_queued_kernels=3), kind=gpu),
    pair("gpu-idle", busy(other=20), busy(other=2), (), "host", gpu),
    pair("gpu-idle", busy(launch_gaps=8, other=7), busy(launch_gaps=4), (), "mixed", gpu),
    pair(
        "collectives", busy({**COLLECTIVES, "exposed_ns": 20_000_000}), busy({**COLLECTIVES, "exposed_ns": 1_000_000}),
        kind=gpu,
    ),
    pair(
        "tf32", {"work": TF32_WORK}, {"work": replace(TF32_WORK, flops_per_step=LITTLE)}, ("precision.tf32=true",),
        kind=gpu, run=OLD_GPU, sets=("precision.amp=off", "precision.tf32=false"),
    ),
    pair(
        "amp", {"work": AMP_WORK}, {"work": replace(AMP_WORK, flops_per_step=LITTLE)}, ("precision.amp=bf16",),
        kind=gpu, run={**GPU_RUN, "precision": "tf32"}, sets=("precision.amp=off",),
    ),
    # Where operations are not counted, as of a script, the kernels of a capture show the format.
    pair(
        "tf32", products(fp32=50), products(tf32=50), ("precision.tf32=true",), kind=gpu,
        run={**OLD_GPU, **SCRIPT},
    ),
    pair("amp", products(tf32=50), products(tf32=1), ("precision.amp=bf16",), kind=gpu, run={**GPU_RUN, **SCRIPT}),
    # A capture of an own run shows more than the number of its operations.
    pair(
        "tf32", {**products(fp32=50), "work": replace(TF32_WORK, flops_per_step=LITTLE)},
        {**products(fp32=1), "work": TF32_WORK}, ("precision.tf32=true",), kind=gpu, run=OLD_GPU,
        sets=("precision.amp=off", "precision.tf32=false"),
    ),
    pair(
        "cudnn-benchmark", CONVOLUTIONS, busy(), ("speed.cudnn_benchmark=true",), kind=gpu, workload="antispoof"
    ),
    # The innocent has one shape: timed once, and as fast as before training.
    pair(
        "cudnn-shapes", {"baseline": alone(threads=16, micro_ns=10e6)}, {}, ("speed.cudnn_benchmark=false",), kind=gpu,
        workload="my.model:make", sets=("precision.amp=bf16", "speed.cudnn_benchmark=true"), **CONVOLUTIONS,
    ),
    pair("neighbour-gpu", {"baseline": alone(micro_ns=10e6)}, {}, kind=gpu, gpu=CROWDED),
    pair(
        "throttling", {"gpu": {**NVML, "throttle": ["thermal"], "sm_clock_mhz": 1100}},
        {"gpu": {**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1900}}, kind=gpu,
    ),
    pair(
        "thrash", {"memory": memory(retries=40)}, {"memory": memory(retries=1)},
        ("batch.micro=16", "batch.accumulation=2"), kind=gpu, sets=MICRO,
    ),
]  # fmt: skip


def workers(*used: tuple[int, int]) -> dict[str, Any]:
    return {"host": cores(1.9, 1.9), "after": of_workers(used)}


def resident(*used: int) -> dict[str, Any]:
    return {"host": cores(1.9, 1.9), "used": [each * MB for each in used]}


FULL = {"free_bytes": 500 * MB, "reserved_bytes": 79 << 30}
HAZARDS = [
    # The innocent skips as many as a scaler does to find the largest scale.
    pair(
        "not-finite", {"window": {"skipped": 18, "loss_scale": 0.0}},
        {"after": {2: [records.window(70, 10, 10**9, skipped=4)]}, "window": {"loss_scale": 4096.0}}, (), "skipped",
    ),
    # The innocent's was not finite for a moment.
    pair(
        "not-finite", {"window": {"bad_loss": ("NaN", 40, 39, 0.7, 0.6)}},
        {"after": {2: [records.window(70, 10, 10**9, bad_loss=("infinite", 65, 64, 0.7, 0.6))]}}, (), "loss",
    ),
    # It grows, or it grows and levels off.
    pair(
        "leak", resident(*range(400, 640, 20)), resident(*(400 + min(80 * n, 320) for n in range(12)))
    ),
    # The innocent's workers start, and then keep what they have; the next one's fill a cache.
    pair(
        "worker-memory", workers((100, 1500), (250, 1350), (330, 1270), (370, 1230)),
        workers((20, 640), (28, 640), (30, 640), (31, 640)), (), "copies",
    ),
    # The innocent's worker starts, which takes memory at once.
    pair(
        "worker-memory", workers((100, 1500), (250, 1350), (330, 1270), (370, 1230)),
        workers((20, 130), (60, 98), (60, 98), (60, 98)), (), "starts",
    ),
    pair(
        "worker-memory", workers(*((100 + 20 * n, 600) for n in range(12))),
        workers(*((100 + min(50 * n, 200), 600) for n in range(12))), (), "keeps",
    ),
    # It grows slowly, and is full then.
    pair(
        "worker-memory", workers(*((100 + 20 * n, 600) for n in range(24))),
        workers(*((100 + min(20 * n, 200), 600) for n in range(24))), (), "slowly",
    ),
    pair("fragmentation", reserved(0.4), reserved(0.4, until=4), kind=gpu),
    pair("fragmentation", reserved(0.4), reserved(0.4, in_use=True), (), "in-use", gpu),
    pair(
        "near-limit", {"host": cores(1.9, 1.9, memory_available_bytes=100 * MB)}, {"host": cores(1.9, 1.9)}, (), "host",
        sets=["loader.cache=true"],
    ),
    # All of the innocent's memory is reserved, and most of that is not in use.
    pair(
        "near-limit", {"memory": memory(**FULL, peak_allocated_bytes=79 << 30)},
        {"memory": memory(**FULL, peak_allocated_bytes=30 << 30)}, (), "gpu", gpu,
    ),
    # The innocent fails for another reason, or was asked to end.
    pair(
        "out-of-memory",
        at_the_end(EndEvent("failed", "out of memory on cpu at step 241 in forward: tried to allocate 2 GiB", 240, 1)),
        at_the_end(EndEvent("failed", "ValueError at step 241 in forward: the memory bank is empty", 240, 1)),
    ),
    pair(
        "out-of-memory",
        at_the_end(EndEvent("failed", "the command ended with status 1 after 240 steps: OutOfMemoryError: CUDA out of "
                            "memory. Tried to allocate 20.00 MiB", 240, 1)),
        at_the_end(EndEvent("interrupted", "Ctrl-C, after 240 steps", 240, 130)), (), "gpu", gpu,
    ),
]  # fmt: skip

ASIDES = [
    pair(cause, {"after": {6: aside(1300)}}, {"after": {6: aside(440)}}, host=cores(1.9, 1.9))
    for cause, aside in (("evaluation-memory", evaluating), ("checkpoint-memory", saving))
]

PAIRS = [*LOADER, *PROCESSOR, *STEP, *MODEL, *WORK, *NEEDLESS, *GPU, *HAZARDS, *PROCESSES, *ASIDES]
