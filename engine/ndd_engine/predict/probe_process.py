"""Probes in a subprocess: `python -m ndd_engine.predict.probe_process IN OUT FOLDER`, see `ndd_engine.child`.

Without a GPU, a step is traced as a GPU would run it, from fake tensors.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildServer, Json, Pipe, draft_of
from ndd_engine.config import Config

from .estimate import ItemCounts, Memory, StepTime, TimedBatch, Trace

# Maximum seconds for sampling the lengths of items.
LOOK_S = 1.0
# Another number of threads is proposed if it is so many times as fast.
CLEARLY = 1.1
# Share of the free memory that a probe may use.
GPU_SHARE = 0.95
# Memory of the CUDA context and libraries on a GPU that is not in this machine (measured on others: 287 to 667 MiB).
ABSENT_CONTEXT = 667 << 20


@dataclass(frozen=True)
class Opened:
    """The prepared configuration and its device.

    device: torch device name. chosen_threads: intra-op threads if they were chosen by measurement, else None. size,
    sequence: of the model. memory_gb: memory of the GPU if the size was chosen for it. process_bytes: resident bytes
    after a step, without the model. context_bytes: GPU memory outside the allocator. free_bytes: of the GPU before this
    process took its share, None if unknown or without a GPU. setup_s: seconds to prepare the data. train_items: None if
    the number is unknown. lengths: tokens per sampled item, ascending, if they vary. not_shared: why several ranks
    cannot train it, or "". threads: intra-op threads of the measurements, 0 if unknown; those of the configuration,
    unless others are `faster`. by_threads: fastest seconds of a micro-batch by number of threads, if two were compared.
    """

    device: str
    device_name: str
    chosen_threads: int | None
    item: str
    token: str | None
    tokens_per_item: float
    train_items: int | None
    parameters: int
    model: str
    data: str
    size: str | None
    memory_gb: float | None
    sequence: int
    process_bytes: int
    context_bytes: int
    free_bytes: int | None
    items: ItemCounts
    setup_s: float
    lengths: list[int]
    not_shared: str = ""
    threads: int = 0
    faster: bool = False
    by_threads: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Probed:
    """The result of a probe. time: None if no micro-batch fits. lower_bound: time is from published peak FLOP/s."""

    parameters: int
    tokens_per_item: float
    memory: Memory
    time: StepTime | None
    lower_bound: bool = False


class ProbeProcess(ChildServer):
    """The process: the opened workload and the probes of it."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        self._spec: Json = {}
        self._opened: Opened | None = None
        self.commands = {"open": self.open, "probe": self.probe, "plan": self.plan}

    def open(self, command: Json) -> Json:
        """Prepare the workload. Returns {"opened": …}, see Opened."""
        self.pipe.tell("importing torch")
        import torch

        from ndd_engine.hardware.detect import detect, with_free_memory
        from ndd_engine.hardware.gpus import usable_threads
        from ndd_engine.train.parallel.strategy import why_not
        from ndd_engine.train.prepare import seed
        from ndd_engine.train.rehearsal import decide
        from ndd_engine.workloads.base import item_count, parameter_count
        from ndd_engine.workloads.factory_data import prepare

        from .rank_memory import pretended
        from .step_probes import Prober, context_bytes, items_of

        self._spec = command
        draft = draft_of(command)
        machine = with_free_memory(detect(draft.resolve().run.device))
        device = torch.device(machine.device)
        config, choice = decide(draft, machine, self.pipe.tell)
        product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # loads the libraries
        del product
        free = machine.chosen.free_bytes if machine.chosen is not None else None
        context = context_bytes(device, free)
        self.pipe.tell("reading the data")
        seed(config.run.seed)
        begin = time.monotonic()
        workload = prepare(config, self.pipe.tell)
        setup_s = time.monotonic() - begin
        weights = _weights(workload)
        with pretended(config.parallel.ranks, device):
            prober = Prober(config, workload, device, self.pipe.tell)
            process = prober.warm() - weights
        chosen, threads, faster = None if choice is None else choice.threads, torch.get_num_threads(), False
        by_threads: list[tuple[int, float]] = []
        if told := command.get("threads"):  # by the process before this one
            torch.set_num_threads(told)
        elif device.type == "cpu" and config.parallel.ranks == 1 and chosen is None:
            cores = usable_threads(machine.host)
            other = cores if threads != cores else 1
            times = prober.by_threads(other) if other != threads else ([], [])
            faster = other_is_faster(*times)
            by_threads = [
                (count, min(each)) for count, each in zip((threads, other), times, strict=True) if each
            ]
            if faster:
                torch.set_num_threads(other)
        self._opened = Opened(
            device=machine.device,
            device_name=machine.chosen.name if machine.chosen is not None else machine.host.cpu,
            chosen_threads=chosen,
            item=workload.item,
            token=workload.token,
            tokens_per_item=workload.tokens_per_item,
            train_items=item_count(workload.train_data),
            parameters=parameter_count(workload.model),
            model=workload.describe_model(),
            data=workload.describe_data(),
            size=getattr(config.workload, "size", None),
            memory_gb=None if choice is None else choice.memory_gb,
            sequence=config.batch.sequence,
            process_bytes=max(process, 0),
            context_bytes=context,
            free_bytes=free,
            items=items_of(workload),
            setup_s=setup_s,
            lengths=lengths(workload),
            not_shared=why_not(config.changed(parallel={"ranks": 2, "strategy": "ddp"}), workload.training)
            or "",
            threads=torch.get_num_threads(),
            faster=faster,
            by_threads=by_threads,
        )
        return {"opened": asdict(self._opened)}

    def plan(self, command: Json) -> Json:
        """Choose levels of blocks for memory.budget. Returns {"recompute": …, "reason": …}.

        Raises MachineError if no levels stay within the budget.
        """
        self.pipe.tell("importing torch")
        from .outlook import planned

        recompute, reason = planned(draft_of(command), self.pipe.tell)
        return {"recompute": recompute, "reason": reason}

    def probe(self, command: Json) -> Json:
        """Probe one model. Returns {"probed": …}, see Probed."""
        import torch

        from ndd_engine.train.prepare import seed
        from ndd_engine.workloads.base import parameter_count
        from ndd_engine.workloads.factory_data import prepare

        from .rank_memory import pretended

        draft = draft_of(self._spec, command["sets"])
        # Little data: preparing all of it for each model would take longer than the probe.
        config = draft.resolve(few=True)
        seed(config.run.seed)
        workload = prepare(config, self.pipe.tell)
        if command["gpu"] is not None:
            with pretended(config.parallel.ranks, torch.device("cuda")):
                memory, time = _absent(config, workload, command["gpu"])
        else:
            assert self._opened is not None  # "open" comes first
            with pretended(config.parallel.ranks, torch.device(self._opened.device)):
                memory, time = self._present(config, workload, command)
        known = parameter_count(workload.model), workload.tokens_per_item
        return {"probed": asdict(Probed(*known, memory, time, lower_bound=command["gpu"] is not None))}

    def _present(self, config: Config, workload: Any, command: Json) -> tuple[Memory, StepTime | None]:
        """A model on the device of this machine."""
        import torch

        from ndd_engine.workloads.base import item_count

        from .rank_memory import is_sharded
        from .step_probes import Prober

        opened = self._opened
        assert opened is not None  # "open" comes first
        device = torch.device(opened.device)
        weights = _weights(workload)
        free = command["free_bytes"]
        if device.type == "cuda":
            total = torch.cuda.mem_get_info(device)[1]
            torch.cuda.set_per_process_memory_fraction(min(GPU_SHARE * free / total, 1.0), device)
            outside = opened.context_bytes
        else:
            # A sharded model is created within the recorded steps.
            outside = opened.process_bytes + (0 if is_sharded(config) else weights)
        prober = Prober(config, workload, device, self.pipe.tell)
        memory = prober.memory(outside)
        few = item_count(workload.train_data)  # larger batches are extrapolated
        micros = sorted({micro if few is None else min(micro, few) for micro in command["micros"]})
        times = prober.time(
            micros, command["longest_s"], lambda micro: memory.peak(micro) <= GPU_SHARE * free
        )
        return prober.with_heap(memory), times


def _absent(config: Config, workload: Any, slug: str) -> tuple[Memory, StepTime | None]:
    """A model on a GPU that is not in this machine: memory from fake tensors, time from published peak FLOP/s."""
    from ndd_engine.hardware.gpus import load

    from .fakes import traced
    from .step_probes import alike, caveat, extremes, sizes

    gpu = next(gpu for gpu in load() if gpu.slug == slug)
    flops: dict[int, float] = {}
    longest, _ = extremes(workload)

    def trace(micro: int) -> Trace:
        found, flops[micro] = traced(config, workload, micro, longest)
        if longest:  # memory of the longest batch, FLOPs of an ordinary one
            flops[micro] = traced(config, workload, micro)[1]
        return found

    family = alike(trace, sizes(workload))
    source = f"steps traced with fake tensors for {gpu.name}"
    memory = Memory(family, "gpu", ABSENT_CONTEXT, source, caveat=caveat(config))
    amp = config.precision.amp
    kind = amp if amp in ("bf16", "fp16") else "tf32" if config.precision.tf32 else "fp32"
    peak = gpu.peak_tflops(kind) or gpu.peak_tflops("fp32")
    if not peak:
        return memory, None
    points = tuple(TimedBatch(micro, flops[micro] / (peak * 1e12), 0.0, 0.0) for micro in family.at)
    return memory, StepTime(points, 0.0, on_gpu=True)


def other_is_faster(present: list[float], other: list[float]) -> bool:
    """Whether each time of the other number of threads is clearly shorter than all of the present one."""
    return bool(present and other) and max(other) * CLEARLY < min(present)


def _weights(workload: Any) -> int:
    """Bytes of the parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*workload.model.parameters(), *workload.model.buffers()))


def lengths(workload: Any, most: int = 256) -> list[int]:
    """Tokens of items sampled across the data, ascending; [] if all have the same length."""
    import torch

    from ndd_engine.workloads.base import Stream

    if workload.collate is None or isinstance(workload.train_data, Stream):
        return []
    data, found = workload.train_data, []
    count = len(data)
    end = time.monotonic() + LOOK_S
    for place in range(0, count, max(count // most, 1)):
        if time.monotonic() > end:
            break  # reading an item may encode it
        item = data[place]
        first = item[0] if isinstance(item, (tuple, list)) else item
        if not isinstance(first, torch.Tensor) or not first.ndim:
            return []
        found.append(int(first.shape[0]))
    return sorted(found) if len(set(found)) > 1 else []


if __name__ == "__main__":
    ProbeProcess.main(sys.argv[1:])
