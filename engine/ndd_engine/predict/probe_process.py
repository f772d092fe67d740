"""Probes in a subprocess: `python -m ndd_engine.predict.probe_process IN OUT FOLDER`, see `ndd_engine.child`.

For a GPU that is not in this machine, a step is traced as a GPU would run it, from fake tensors.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildServer, Json, Pipe, draft_of
from ndd_engine.config import Config, Draft
from ndd_engine.errors import UsageError
from ndd_engine.text import counted

from .estimate import ItemCounts, Memory, StepTime
from .launches import StepEstimate

# Maximum seconds for sampling the lengths of items.
LOOK_S = 1.0
# Another number of threads is proposed if it is so many times as fast.
CLEARLY = 1.1
# Share of the free memory that a probe may use.
GPU_SHARE = 0.95


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
    normalises: whether the model normalises over the items of a batch, and cannot train on a single one.
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
    normalises: bool = True


@dataclass(frozen=True)
class Probed:
    """The result of a probe. time: None if no micro-batch fits. estimate: of a GPU that is not in this machine, the
    range of `time`; None if it was measured. data_share: items of the same data, relative to the first model.
    recomputes: which blocks compute again for memory.budget, in words.
    """

    parameters: int
    tokens_per_item: float
    memory: Memory
    time: StepTime | None
    estimate: StepEstimate | None = None
    data_share: float = 1.0
    recomputes: str = ""


class ProbeProcess(ChildServer):
    """The process: the opened workload and the probes of it."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        self._spec: Json = {}
        self._opened: Opened | None = None
        # The latest workload that was prepared for its shapes: the configuration without its precision, the workload,
        # also with items that are read once, and how long its batches take.
        self._shaped: tuple[dict[str, Any], Any, Any] | None = None
        self._data_s: list[tuple[int, float]] | None = None
        # What the steps of the latest model loop over.
        self._leaves: tuple[tuple[int, int], ...] = ()
        # Whether a third micro-batch has confirmed the first two.
        self._confirmed = False
        # Items in the data of the first probe.
        self._first_items: int | None = None
        self.commands = {"open": self.open, "probe": self.probe, "plan": self.plan}

    def open(self, command: Json) -> Json:
        """Prepare the workload. Returns {"opened": …}, see Opened.

        gpu: of one that is not there, or None. tier: settings of the configured model alone, for its memory.
        """
        self.pipe.tell("importing torch")
        if command.get("gpu") is not None:
            self._spec = command
            return {"opened": self._opened_by_shapes()}
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
            normalises=_normalises(workload.model),
            not_shared=why_not(config.changed(parallel={"ranks": 2, "strategy": "ddp"}), workload.training)
            or "",
            threads=torch.get_num_threads(),
            faster=faster,
            by_threads=by_threads,
        )
        return {"opened": self._opened}

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
        if command["gpu"] is not None:
            return {"probed": self._absent(draft, command)}
        # Little data: preparing all of it for each model would take longer than the probe.
        config = draft.resolve(few=True)
        seed(config.run.seed)
        workload = prepare(config, self.pipe.tell)
        assert self._opened is not None  # "open" comes first
        with pretended(config.parallel.ranks, torch.device(self._opened.device)):
            memory, time, recomputes = self._present(config, workload, command)
        known = parameter_count(workload.model), workload.tokens_per_item
        share = self._share_of(workload)
        return {"probed": Probed(*known, memory, time, data_share=share, recomputes=recomputes)}

    def _opened_by_shapes(self) -> Opened:
        """What is known without a step and with the least data, for a GPU that is not in this machine."""
        from ndd_engine.train.parallel.strategy import why_not
        from ndd_engine.workloads.base import parameter_count

        from .absent import all_items

        draft = draft_of(self._spec, self._spec["tier"])
        config = draft.resolve()
        workload, read_once = self._prepared(draft)
        count, items, data = all_items(config, draft.resolve(shapes=True), workload)
        ranks = config.changed(parallel={"ranks": 2, "strategy": "ddp"})
        return Opened(
            device="cpu",
            device_name="",
            chosen_threads=None,
            item=workload.item,
            token=workload.token,
            tokens_per_item=workload.tokens_per_item,
            train_items=count,
            parameters=parameter_count(workload.model),
            model=workload.describe_model(),
            data=data,
            size=getattr(config.workload, "size", None),
            memory_gb=None,
            sequence=config.batch.sequence,
            process_bytes=0,
            context_bytes=0,
            free_bytes=None,
            items=items,
            setup_s=0.0,
            lengths=lengths(read_once),
            normalises=_normalises(workload.model),
            not_shared=why_not(ranks, workload.training) or "",
        )

    def _prepared(self, draft: Draft) -> tuple[Any, Any]:
        """(the workload with the least data, the same with items that are read once); the latest one again, if only
        precision or memory budget differ."""
        from ndd_engine.train.prepare import seed
        from ndd_engine.workloads.factory_data import prepare

        from .absent import reading_once

        config = draft.resolve(shapes=True)
        key = config.model_dump(exclude={"precision": {"amp"}, "memory": True})
        if self._shaped is None or self._shaped[0] != key:
            self.pipe.tell("reading the data")
            seed(config.run.seed)
            workload = prepare(config, self.pipe.tell)
            self._shaped, self._data_s = (key, workload, reading_once(workload)), None
        return self._shaped[1:]

    def _absent(self, draft: Draft, command: Json) -> Probed:
        """A model on a GPU that is not in this machine, by the shapes of its steps."""
        import torch

        from ndd_engine.hardware.named_gpus import gpu_named
        from ndd_engine.workloads.base import parameter_count

        from .absent import ShapeTracer, data_s
        from .rank_memory import pretended
        from .step_probes import sizes

        gpu = gpu_named(command["gpu"])
        workload, read_once = self._prepared(draft)
        config = draft.resolve(shapes=True)
        with pretended(config.parallel.ranks, torch.device("cuda")):
            tracer = ShapeTracer(config, read_once, self.pipe.tell, self._leaves)
            check = command["check"] or not self._confirmed
            memory = tracer.memory(f"steps traced by their shapes for {gpu.name}", check)
            self._leaves = tracer.leaves
            if check:
                self._confirmed = memory.family.at == sizes(workload)[:2] and not memory.family.nonlinear
            recomputes = ""
            if (budget := config.memory.budget_bytes) is not None:
                tracer.config = config.changed(batch=draft.resolve().batch.model_dump())
                plan = tracer.within(budget, 0, memory.source)
                if plan is None:
                    raise UsageError("it does not fit, even if all blocks compute again")
                tracer, memory, count, blocks = plan
                recomputes = _again(count, blocks)
            if self._data_s is None:
                self.pipe.tell("timing the data")
                self._data_s = data_s(config, workload, command["micros"])
            found = tracer.estimate(gpu, command["micros"]).with_data(self._data_s)
        known = parameter_count(workload.model), workload.tokens_per_item
        return Probed(*known, memory, found.middle, found, self._share_of(workload), recomputes)

    def _share_of(self, workload: Any) -> float:
        """Items of the data, relative to the first probe: a shorter sequence may cut a text into more segments."""
        from ndd_engine.workloads.base import item_count

        count = item_count(workload.train_data)
        self._first_items = self._first_items or count
        return count / self._first_items if count and self._first_items else 1.0

    def _present(self, config: Config, workload: Any, command: Json) -> tuple[Memory, StepTime | None, str]:
        """A model on the device of this machine, and which of its blocks compute again for memory.budget."""
        import torch

        from ndd_engine.workloads.base import item_count

        from .budget import BudgetPlanner
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
        memory, recomputes = prober.memory(outside), ""
        if (budget := config.memory.budget_bytes) is not None:
            plan = BudgetPlanner(prober, memory, 0, runs_plain=False).plan(budget)
            if plan.memory is None:
                raise UsageError(f"it does not fit, even if blocks compute again: {plan.why}")
            prober, memory = prober.with_levels(plan.levels), plan.memory
            recomputes = _again(len(plan.levels), plan.blocks)
        few = item_count(workload.train_data)  # larger batches are extrapolated
        micros = sorted({micro if few is None else min(micro, few) for micro in command["micros"]})
        times = prober.time(
            micros, command["longest_s"], lambda micro: memory.peak(micro) <= GPU_SHARE * free
        )
        return prober.with_heap(memory), times, recomputes


def _again(count: int, blocks: int) -> str:
    return f"{count} of {counted(blocks, 'block')} compute again in backward"


def other_is_faster(present: list[float], other: list[float]) -> bool:
    """Whether each time of the other number of threads is clearly shorter than all of the present one."""
    return bool(present and other) and max(other) * CLEARLY < min(present)


def _normalises(model: Any) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


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
