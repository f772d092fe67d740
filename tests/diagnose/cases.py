"""Each cause in a planted run, and a similar run without the cause: the same settings or symptoms, but no such cost."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import GPU
from pairs import MB, Pair, capture, gpu, memory, own
from planted_runs import (
    GIB,
    Planted,
    alone,
    beside,
    cores,
    data,
    evaluated,
    evaluating,
    files,
    healthy,
    of_workers,
    profiled,
    saved,
    saving,
    seen,
    work,
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


def recompiled(step: int) -> tuple[Event, ...]:
    """Two seconds of forward in which a graph was recompiled."""
    return MarkEvent("recompile", step, "", {"graphs": 1, "seconds": 1.9}), beside("forward", 2000, step)


STALL = StallEvent(
    240, 9.0, "storage", "no progress for 9 s: the main process waits", "check the disk", "a.py:3",
    ["the main process (pid 7), state D, read of /data/a.bin"],
)  # fmt: skip
ENDED = StallEvent(240, 1.0, OVER, "training continues after step 240")
COMPUTES = StallEvent(240, 40.0, "computing", "no step for 40 s: the main process computes")


def opened(*counts: int) -> dict[int, tuple[Event, ...]]:
    """So many open descriptors after the windows of 20 steps."""
    kinds = {"shared memory": 20}
    return {
        index: (DescriptorsEvent(20 * (index + 1), count, 1024, kinds),) for index, count in enumerate(counts)
    }


def hooked(first: int, newest: int) -> dict[int, tuple[Event, ...]]:
    """So many hooks of a module in two profiled steps."""
    return {
        index: (replace(profiled(), step=20 * (index + 1), sizes={"hooks:block.3": count}),)
        for index, count in ((1, first), (9, newest))
    }


def reserved(each: float, until: int = 12, in_use: bool = False) -> dict[int, tuple[Event, ...]]:
    """After each window up to `until`, so many GiB more are reserved. in_use: so many are in use as well."""
    found: dict[int, tuple[Event, ...]] = {}
    for window in range(12):
        more = int(min(window, until) * each * GIB)
        used = (6 * GIB + more, 7 * GIB + more) if in_use else (6 * GIB, 7 * GIB)
        found[window] = (
            memory(allocated_bytes=used[0], peak_allocated_bytes=used[1], reserved_bytes=8 * GIB + more),
        )
    return found


PROCESSES = [
    Pair("piling-up", Planted(after=hooked(2, 90)), Planted(after=hooked(90, 90))),
    Pair("hang", Planted(after={11: (STALL,)}), Planted(after={11: (STALL, ENDED)})),
    Pair(
        "hang",
        Planted(after={11: (STALL, ENDED, EndEvent("failed", "a worker was killed", 240, 1))}),
        Planted(after={11: (STALL, ENDED, EndEvent("interrupted", "Ctrl-C", 240, 130))}),
        name="ended",
    ),
    Pair("hang", Planted(after={11: (COMPUTES, STALL)}), Planted(after={11: (COMPUTES,)}), name="computes"),
    Pair(
        "died",
        Planted(after={11: (DeathEvent(240, 4711, "loader worker 1", "SIGKILL", 3 << 30, None, 1),)}),
        Planted(after={11: (COMPUTES,)}),
    ),
    Pair(
        "open-files",
        Planted(after=opened(*range(40, 280, 20))),
        Planted(after=opened(40, 60, 80, 100)),  # no more since
    ),
    Pair("open-files", Planted(after=opened(40, 1024)), Planted(after=opened(40, 44)), name="limit"),
]
WAITING = healthy(data_wait=20.0)
BETTER = alone(threads=1, by_threads=[[2.0, 10.5e6]])
NEIGHBOUR = [{"pid": 4711, "name": "stress", "cores": 0.9, "stoppable": True}]
COMPILING = MarkEvent("compile", 0, "", {"seconds": 20.0, "mode": "default"})
COMPILED = ("speed.compile=default",)
OWN_LOOP = profiled(
    ("forward", "my/model.py", 10, "Net.forward", 0.5), ("forward", "my/model.py", 31, "penalty", 13.5)
)
# The same by stack samples, as in old records.
OWN_LOOP_SAMPLED = seen(
    ("forward", "my/model.py", 10, "Net.forward", 22, 1), ("forward", "my/model.py", 31, "penalty", 20, 1),
    ("forward", "my/model.py", 32, "penalty", 30, 1), ("backward", "torch/a.py", 1, "backward", 60, 0),
)  # fmt: skip
LOADER = [
    Pair(
        "item-collate",
        Planted(phases=WAITING, sets=["loader.fetch=item"], loader=data(item_ns=9e4, item_cpu_ns=9e4)),
        Planted(sets=["loader.fetch=item"], loader=data()),
        ("loader.fetch=auto",),
    ),
    Pair(
        "in-memory-workers",
        Planted(
            phases=WAITING, sets=["loader.workers=2", "loader.prefetch=3"], loader=data(), baseline=alone()
        ),
        Planted(sets=["loader.workers=2", "loader.prefetch=3"], loader=data(), baseline=alone()),
        ("loader.workers=0", "loader.prefetch=none"),
    ),
    Pair(
        "in-memory-workers",
        Planted(sets=["loader.workers=2"], loader=data(), baseline=alone(micro_ns=12e6), host=cores(2, 1.95)),
        Planted(sets=["loader.workers=0"], loader=data(), baseline=alone(micro_ns=12e6), host=cores(2, 1.95)),
        ("loader.workers=0",),
        "cores",
    ),
    Pair(
        "worker-restart",
        Planted(
            phases=healthy(**{"data_wait": 12.0, "data_wait/first_batch": 8.0}),
            sets=["loader.workers=1", "loader.persistent=false"],
            loader=files(epochs_differ=True, item_ns=1e4),
        ),
        Planted(
            phases=healthy(**{"data_wait": 0.5, "data_wait/first_batch": 0.4}),
            sets=["loader.workers=1", "loader.persistent=false"],
            loader=files(epochs_differ=True, item_ns=1e4),
        ),
        ("loader.persistent=true",),
    ),
    Pair(
        "short-epochs",
        Planted(
            phases=healthy(**{"data_wait": 12.0, "data_wait/first_batch": 8.0}),
            loader=files(epochs_differ=True, item_ns=1e4),
            window={"passes": 4},
        ),
        # Epochs are long, and one of them began late.
        Planted(
            phases=healthy(**{"data_wait": 0.8, "data_wait/first_batch": 0.7}),
            loader=files(epochs_differ=True, item_ns=1e4),
            window={"passes": 1},
        ),
    ),
    Pair(
        "slow-storage",
        Planted(phases=WAITING, loader=files(item_cpu_ns=2e4)),
        Planted(loader=files(item_cpu_ns=2e4)),
        ("loader.workers=3",),
    ),
    Pair(
        "slow-storage",
        Planted(phases=WAITING, sets=["loader.workers=1"], loader=files(item_cpu_ns=2e4)),
        # The worker makes a batch in 3 ms of the 20 that a step takes: the wait is not for storage.
        Planted(
            phases=healthy(data_wait=3.0),
            sets=["loader.workers=1"],
            loader=files(item_ns=1e5, item_cpu_ns=2e4),
        ),
        ("loader.workers=3",),
        "worker",
    ),
    Pair(
        "many-workers",
        Planted(
            phases=WAITING,
            sets=["loader.workers=8"],
            loader=files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5),
        ),
        # As much waiting for items that take long to make: fewer workers would make fewer of them.
        Planted(sets=["loader.workers=8"], loader=files(epochs_differ=True), baseline=alone()),
        ("loader.workers=0",),
    ),
    Pair(
        "many-workers",
        Planted(phases=WAITING, sets=["loader.workers=1"], loader=files(item_ns=1e5, item_cpu_ns=1e5)),
        Planted(
            phases=healthy(data_wait=0.4),
            sets=["loader.workers=1"],
            loader=files(item_ns=1e5, item_cpu_ns=1e5),
        ),
        ("loader.workers=0",),
        "cheap",
    ),
    Pair(
        "many-workers",
        # The wait is little longer than making a batch in this process, but the model is slowed down as well.
        Planted(
            phases=healthy(data_wait=4.0),
            sets=["loader.workers=8"],
            loader=files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5),
            baseline=alone(micro_ns=10e6),
            host=cores(2.0, 1.95),
        ),
        Planted(
            phases=healthy(data_wait=4.0),
            sets=["loader.workers=8"],
            loader=files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5),
            baseline=alone(),
            host=cores(2.0, 1.95),
        ),
        ("loader.workers=0",),
        "slowed",
    ),
    Pair(
        "on-the-fly",
        Planted(phases=healthy(data_wait=32.0), loader=files()),
        Planted(phases=healthy(data_wait=0.5), loader=files(item_ns=1e4, item_cpu_ns=1e4)),
        ("loader.cache=true",),
    ),
    Pair(
        "on-the-fly",
        # The dataset makes whole batches, and computes each.
        Planted(phases=healthy(data_wait=32.0), loader=data(item_ns=2e6, item_cpu_ns=1.9e6, gather_ns=31e6)),
        Planted(phases=healthy(data_wait=0.3), loader=data(item_ns=1e4, item_cpu_ns=1e4)),
        ("loader.cache=true",),
        "batches",
    ),
    Pair(
        "few-workers",
        Planted(phases=healthy(data_wait=32.0), loader=files(epochs_differ=True), host=cores(1.2, 1.1)),
        Planted(sets=["loader.workers=1"], loader=files(epochs_differ=True), host=cores(1.9, 1.9)),
        ("loader.workers=2",),
    ),
    Pair("data-wait", Planted(phases=WAITING), Planted(), ("loader.workers=1",)),
    Pair(
        "data-wait",
        Planted(phases=WAITING, loader=data(gather_ns=15e6)),
        # A batch is made in far less time than its phase takes: it is not the data that is waited for.
        Planted(phases=WAITING, loader=data()),
        (),
        "made-here",
    ),
]

PROCESSOR = [
    Pair(
        "oversubscribed",
        Planted(run={"threads": 8}, baseline=alone(threads=8, by_threads=[[2.0, 11e6]])),
        Planted(run={"threads": 8}, baseline=alone(threads=8, by_threads=[[2.0, 18.8e6]])),
        ("run.threads=2",),
    ),
    Pair(
        "many-threads",
        Planted(
            run={"threads": 2}, baseline=alone(threads=2, by_threads=[[1.0, 10e6]]), host=cores(1.9, 1.9)
        ),
        Planted(
            run={"threads": 2}, baseline=alone(threads=2, by_threads=[[1.0, 18e6]]), host=cores(1.9, 1.9)
        ),
        ("run.threads=1",),
    ),
    Pair(
        "few-threads",
        Planted(run={"threads": 1}, baseline=BETTER, host=cores(1.0, 1.0)),
        Planted(
            run={"threads": 1}, baseline=alone(threads=1, by_threads=[[2.0, 18.9e6]]), host=cores(1.0, 1.0)
        ),
        ("run.threads=2",),
    ),
    Pair(
        "neighbour-cores",
        Planted(host=cores(2.0, 1.1, neighbours=NEIGHBOUR), baseline=alone(micro_ns=11e6)),
        Planted(
            host=cores(1.96, 1.94, neighbours=[{"pid": 1, "name": "sleep", "cores": 0.01}]), baseline=alone()
        ),
        ("run.threads=1",),
    ),
    Pair(
        "quota",
        Planted(host=cores(2.0, 1.9, cpu_throttled=0.3), sets=["loader.workers=1"]),
        Planted(host=cores(2.0, 1.9, cpu_throttled=0.01), sets=["loader.workers=1"]),
        ("run.threads=1",),
    ),
    Pair(
        "gc",
        Planted(window={"gc_ns": 60_000_000, "gc_count": 3, "gc_max_ns": 30_000_000}),
        Planted(window={"gc_ns": 4_000_000, "gc_count": 3, "gc_max_ns": 3_000_000}),
        ("run.gc_every_steps=50",),
    ),
]

STEP = [
    Pair(
        "optimizer",
        Planted(phases=healthy(optimizer=6.0), sets=["optimizer.implementation=loop"]),
        Planted(phases=healthy(optimizer=0.2), sets=["optimizer.implementation=loop"]),
        ("optimizer.implementation=fused",),
    ),
    Pair(
        "optimizer",
        Planted(phases=healthy(zero_grad=4.0), sets=["optimizer.set_to_none=false"]),
        Planted(phases=healthy(optimizer=3.0)),
        ("optimizer.set_to_none=true",),
        "zeros",
    ),
    Pair(
        "denormals",
        Planted(
            phases=healthy(optimizer=9.0),
            functions=replace(profiled(), denormals={"exp_avg_sq": (0.6, 20.0)}),
        ),
        # The optimizer takes little time.
        Planted(functions=replace(profiled(), denormals={"exp_avg_sq": (0.6, 20.0)})),
        ("speed.flush_denormal=true",),
    ),
    Pair(
        "denormals",
        Planted(functions=replace(profiled(), denormals={"parameters": (0.2, 3.0)})),
        # They are zero already.
        Planted(
            functions=replace(profiled(), denormals={"parameters": (0.2, 3.0)}),
            sets=["speed.flush_denormal=true"],
        ),
        ("speed.flush_denormal=true",),
        "parameters",
    ),
    Pair(
        "clip",
        Planted(phases=healthy(clip=4.0), sets=["clip.max_norm=1.0"]),
        Planted(phases=healthy(clip=0.1), sets=["clip.max_norm=1.0"]),
        ("clip.max_norm=0.0",),
    ),
    Pair(
        "logging",
        Planted(phases=healthy(other=3.0), sets=["log.window_s=0", "log.every_steps=1"]),
        Planted(sets=["log.every_steps=1"]),
        ("log.window_s=1.0", "log.every_steps=10"),
    ),
    Pair(
        "evaluation",
        Planted(sets=["evaluate.every_steps=20"], after={n: evaluated(200, 20 * n + 20) for n in range(12)}),
        Planted(sets=["evaluate.every_steps=200"], after={n: evaluated(20, 20 * n + 20) for n in (5, 11)}),
        ("evaluate.every_steps=200",),
    ),
    Pair(
        "checkpoint",
        Planted(sets=["checkpoint.every_steps=20"], after={n: saved(100, 20 * n + 20) for n in range(12)}),
        Planted(sets=["checkpoint.every_steps=20"], after={n: saved(4, 20 * n + 20) for n in range(12)}),
        ("checkpoint.every_steps=100",),
    ),
]

MODEL = [
    Pair(
        "user-code",
        own(phases=healthy(forward=20.0), functions=OWN_LOOP),
        own(phases=healthy(forward=7.0)),
        name="pace",
    ),
    Pair(
        "user-code",
        own(phases=healthy(forward=20.0), functions=None, stacks=OWN_LOOP_SAMPLED),
        own(phases=healthy(forward=7.0), functions=None, stacks=OWN_LOOP_SAMPLED),
        name="sampled",
    ),
    Pair(
        "user-code",
        own(phases=healthy(forward=20.0), functions=OWN_LOOP, baseline=alone(micro_ns=31e6)),
        # By itself the same code is much faster: something else takes its time.
        own(phases=healthy(forward=20.0), functions=OWN_LOOP, baseline=alone()),
        name="by-itself",
    ),
    Pair(
        "user-code",
        own(kernels=capture(launch_gaps=30), functions=OWN_LOOP),
        own(kernels=capture(launch_gaps=2), functions=OWN_LOOP),
        name="capture",
    ),
    Pair(
        "small-micro",
        Planted(
            "summarise", ["batch.micro=2", "batch.accumulation=8"],
            baseline=alone(micro=2, micro_ns=2.4e6, other_micro=1, other_ns=2.2e6),
        ),
        Planted(
            "summarise", ["batch.micro=2", "batch.accumulation=8"],
            baseline=alone(micro=2, micro_ns=2.4e6, other_micro=1, other_ns=1.22e6),
        ),
        ("batch.micro=16", "batch.accumulation=1"),
    ),
    Pair(
        "stepwise",
        Planted("summarise", ["workload.decoder=stepwise"], baseline=alone(operations=6000), work=work()),
        Planted("summarise", ["workload.decoder=hoisted"], baseline=alone(operations=6000), work=work()),
        ("workload.decoder=hoisted",),
    ),
    Pair(
        "slowing",
        Planted(grows={"forward": 1.0}, windows=24),
        # It varies as much, and becomes no slower.
        Planted(wobble=0.3, windows=24),
    ),
    Pair(
        "recompile",
        Planted("finetune", COMPILED, after={3: recompiled(80)}),
        Planted("finetune", COMPILED, after={3: (MarkEvent("recompile", 80, "", {"graphs": 1, "seconds": 0.01}),)}),
        ("speed.compile_dynamic=true",),
    ),
    Pair(
        "compile-cost",
        Planted(sets=COMPILED, run={"total_steps": 240}, marks=[COMPILING]),
        Planted(sets=COMPILED, marks=[COMPILING]),
        ("speed.compile=off",),
    ),
    Pair(
        "deterministic",
        Planted(
            sets=["speed.deterministic=true"],
            trials=[TrialEvent(["speed.deterministic=false"], "now", "faster", "1.3x", 1.3, 1.2, 1.4)],
        ),
        Planted(
            sets=["speed.deterministic=true"],
            trials=[TrialEvent(["speed.deterministic=false"], "now", "no difference", "1.0x", 1.0, 0.99, 1.01)],
        ),
        ("speed.deterministic=false",),
    ),
]  # fmt: skip

TABLES = replace(profiled(), tables=[("Net.table", "Embedding", 100_000, 64, 512, 0.9, "AdamW")])
NEEDLESS = [
    Pair(
        "dense-embedding",
        own(phases=healthy(optimizer=12.0), functions=TABLES),
        # The optimizer takes as long, and not for a table.
        own(phases=healthy(optimizer=12.0), functions=profiled()),
    ),
    Pair(
        "dense-embedding",
        own(phases=healthy(backward=40.0), functions=TABLES),
        own(functions=TABLES),
        name="backward",
    ),
    Pair(
        "retain-graph",
        own(functions=replace(profiled(), retains=("step.py", 9))),
        own(functions=profiled()),
    ),
    Pair("anomaly", own(functions=replace(profiled(), anomaly=True)), own(functions=profiled())),
]

HAZARDS = [
    Pair(
        "not-finite",
        Planted(window={"skipped": 18, "loss_scale": 0.0}),
        # As many as a scaler skips to find the largest scale.
        Planted(after={2: [records.window(70, 10, 10**9, skipped=4)]}, window={"loss_scale": 4096.0}),
        name="skipped",
    ),
    Pair(
        "not-finite",
        Planted(window={"bad_loss": ("NaN", 40, 39, 0.7, 0.6)}),
        # It was not finite for a moment.
        Planted(after={2: [records.window(70, 10, 10**9, bad_loss=("infinite", 65, 64, 0.7, 0.6))]}),
        name="loss",
    ),
    Pair(
        "leak",
        Planted(host=cores(1.9, 1.9), used=[(400 + 20 * n) * MB for n in range(12)]),
        # It grows, and levels off.
        Planted(host=cores(1.9, 1.9), used=[(400 + min(80 * n, 320)) * MB for n in range(12)]),
    ),
    Pair(
        "worker-memory",
        Planted(host=cores(1.9, 1.9), after=of_workers([(100, 1500), (250, 1350), (330, 1270), (370, 1230)])),
        # The workers start, and then keep what they have.
        Planted(host=cores(1.9, 1.9), after=of_workers([(20, 640), (28, 640), (30, 640), (31, 640)])),
        name="copies",
    ),
    Pair(
        "worker-memory",
        Planted(host=cores(1.9, 1.9), after=of_workers([(100 + 20 * n, 600) for n in range(12)])),
        # A cache in each worker fills up.
        Planted(host=cores(1.9, 1.9), after=of_workers([(100 + min(50 * n, 200), 600) for n in range(12)])),
        name="keeps",
    ),
    Pair("fragmentation", gpu(after=reserved(0.4)), gpu(after=reserved(0.4, until=4))),
    Pair("fragmentation", gpu(after=reserved(0.4)), gpu(after=reserved(0.4, in_use=True)), name="in-use"),
    Pair(
        "near-limit",
        Planted(host=cores(1.9, 1.9, memory_available_bytes=100 * MB), sets=["loader.cache=true"]),
        Planted(host=cores(1.9, 1.9), sets=["loader.cache=true"]),
        name="host",
    ),
    Pair(
        "near-limit",
        gpu(memory=memory(free_bytes=500 * MB, reserved_bytes=79 << 30, peak_allocated_bytes=79 << 30)),
        # All of it is reserved, and most of that is not in use.
        gpu(memory=memory(free_bytes=500 * MB, reserved_bytes=79 << 30, peak_allocated_bytes=30 << 30)),
        name="gpu",
    ),
]

ASIDES = [
    Pair(
        cause,
        Planted(host=cores(1.9, 1.9), after={6: aside(1300)}),
        Planted(host=cores(1.9, 1.9), after={6: aside(440)}),
    )
    for cause, aside in (("evaluation-memory", evaluating), ("checkpoint-memory", saving))
]

PAIRS = [*LOADER, *PROCESSOR, *STEP, *MODEL, *NEEDLESS, *GPU, *HAZARDS, *PROCESSES, *ASIDES]
