"""Tells what is observed: lines in the memory that others can read, see `mapped`."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable

from . import FOLDER, clock
from .clock import DONE, NAMES, TRAINER, S, memory
from .compilers import Compilations
from .exceptions import Dropped, ours
from .garbage import Garbage
from .library import os, threading, time
from .looks import Looks
from .mapped import CORRECTION, FIRST_NS, MICRO, NATIVE, PENDING, SKIPPED
from .places import Places
from .process import Heap, let_read, resident
from .steps import Steps
from .waits import strategy_of

# The script may clear its environment before it trains.
FOLDER_AT_START = os.environ.get(FOLDER, "")


class Recorder:
    """The record of this process. replicated: whether there is a DistributedDataParallel."""

    def __init__(self, steps: Steps, looks: Looks, places: Places, replicated: Callable[[], bool]) -> None:
        self._steps, self._looks, self._places, self._replicated = steps, looks, places, replicated
        self._garbage = Garbage()
        self._compilations, self._heap = Compilations(), Heap()
        self._cpu = 0
        self._micro = 0
        # Python forgets it before a short script's model is described at its exit.
        self._main = getattr(sys.modules.get("__main__"), "__file__", None)
        self._status = ("done", "")
        self._closed = False
        # The device on which the model was described.
        self._described: Any = None
        self.paused = False
        # Kinds of failures that were recorded.
        self._told: set[str] = set()
        # A learning rate on a GPU, as it was a window ago.
        self._late_rate: float | None = None

    def open(self, early: list[tuple[str, dict[str, Any]]], place: dict[str, Any]) -> None:
        """Begin. early: what was observed before. place: see `waits.place`. Raises OSError."""
        folder, rank = os.environ.get(FOLDER) or FOLDER_AT_START, os.environ.get("RANK")
        memory.attach(folder, f"rank-{rank}" if rank is not None and rank.isdigit() else f"pid-{os.getpid()}")
        torch: Any = sys.modules["torch"]
        S[NATIVE] = threading.get_native_id()
        self.put(
            "process", argv=_texts(sys.argv), pid=os.getpid(), host=os.uname().nodename, **place,
            python=sys.version.split()[0], torch=str(torch.__version__), cuda=torch.version.cuda or torch.version.hip,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        for kind, body in early:
            self.put(kind, **body)
        self._cpu = time.process_time_ns()
        if not place["exchanges"]:  # what ranks share on GPUs may need another choice
            let_read(os.environ.get("NDD_WATCH_TRACER", ""))

    def put(self, kind: str, /, **body: Any) -> None:
        """Record a line."""
        memory.put(kind, body)

    def resume(self) -> None:
        """Observe garbage collections."""
        self.paused = False
        self._garbage.begin()

    def pause(self) -> None:
        """Observe nothing more."""
        self.paused = True
        self._garbage.end()

    def window(self) -> None:
        """End a window after a step: the reader joins it with the rows and lengths of its steps."""
        steps = self._steps
        if steps.device != self._described:
            self._described = steps.device
            self._describe()
        self.resume()
        wall, rest = clock.take()
        if steps.values is not None:
            steps.values.read()
        if steps.late and steps.gate is None:
            steps.loss = steps.late[-1]
            steps.late.clear()
        steps.device_rows += clock.gpu.read()
        newest = steps.loss
        shape = steps.shape
        if steps.gate is None:  # a trial reads them itself
            steps.loss = steps.shape = None
        device, steps.device_rows = steps.device_rows, []
        garbage = self._garbage.take()
        cpu = time.process_time_ns()
        more: dict[str, Any] = {}
        if steps.ranks:
            more = {"cpu_ns": cpu - self._cpu, "rss_bytes": resident()}
        if steps.profiled:
            steps.profiled, more["profiled"] = False, True
        self._cpu = cpu
        micro, self._micro = S[MICRO] - self._micro, S[MICRO]
        if (compiled := self._compilations.take()) is not None:
            self.put("compiled", step=S[DONE] + S[CORRECTION], **compiled)
        for kind, why in (
            ("untimed", clock.gpu.failed),
            ("unread", "" if steps.values is None else steps.values.failed),
        ):
            if why and kind not in self._told:
                self._told.add(kind)
                self.put(kind, reason=why)
        self.put(
            "steps", step=S[DONE], correction=S[CORRECTION] + S[PENDING], micro_steps=micro, wall_ns=wall, rest=rest,
            loss=None if newest is None else newest[1], loss_step=None if newest is None else newest[0] + 1,
            device=[_by_name(found) for _, found in device], outside=_by_name(clock.gpu.outside()),
            lr=self._rate(), shape=shape, gc_ns=garbage.ns, gc_count=garbage.number,
            gc_max_ns=garbage.longest_ns,
            skipped_updates=S[SKIPPED], first_ns=S[FIRST_NS], heap_bytes=self._heap.read(),
            **more,
        )  # fmt: skip

    def _rate(self) -> float | None:
        for optimizer in self._steps.optimizers()[-1:]:
            groups = optimizer.__dict__.get("param_groups")
            if type(groups) is list and groups and type(groups[0]) is dict:
                given, values = groups[0].get("lr"), self._steps.values
                if values is None or not self._looks.number_on_gpu(given):
                    return self._looks.number(given)
                values.send([given], self._rate_arrived)
                return self._late_rate
        return None

    def _rate_arrived(self, values: list[float]) -> None:
        self._late_rate = values[0] if math.isfinite(values[0]) else None

    def _describe(self) -> None:
        """Record what is trained, and where; on the training thread."""
        device = self._steps.device
        optimizers = self._steps.optimizers()
        # An attribute that a subclass computes, and subclasses of tensors, would run code of the script.
        groups = [group for one in optimizers for group in one.__dict__.get("param_groups") or ()]
        torch: Any = sys.modules["torch"]
        parameters = {id(item): item for group in groups for item in group["params"]}
        plain = [item for item in parameters.values() if self._looks.is_tensor(item)]
        self.put(
            "model", device=str(device), optimizer=type(optimizers[-1]).__name__ if optimizers else "",
            implementation=_implementation(groups[0], device.type) if groups else None,
            parameters=sum(item.numel() for item in plain if item.requires_grad),
            places=[place for one in optimizers if (place := self._places.of(one))],
            main=self._main,
            anomaly=bool(torch.is_anomaly_enabled()),
            strategy=strategy_of(parameters.values(), self._replicated()) if self._steps.ranks else "",
            gpu=_gpu(torch, device) if device.type == "cuda" else None,
        )  # fmt: skip

    def close(self) -> None:
        """Record the last window and the end: when the interpreter exits."""
        if self._closed:
            return
        self._closed = True
        with Dropped():
            if not self.paused and S[TRAINER] == threading.get_ident():
                self._steps.finish()
                self.window()
            self.pause()
            self.put(
                "end",
                step=S[DONE] + S[CORRECTION] + S[PENDING],
                status=self._status[0],
                reason=self._status[1],
            )

    def fail(self, reason: str) -> None:
        """The training has failed with this error."""
        self._status = "failed", reason

    def memory(self) -> None:
        """Record the counters of the CUDA allocator."""
        device = self._steps.device
        if device is None or device.type != "cuda":
            return
        cuda: Any = sys.modules["torch"].cuda
        if "unmeasured" in self._told:
            return
        try:
            found = cuda.memory_stats(device.index)
            free, total = cuda.mem_get_info(device.index)
        except Exception as error:  # an allocator of somebody else may count nothing
            if not ours(error):
                raise
            self._told.add("unmeasured")
            self.put("unmeasured", reason=str(error).partition("\n")[0] or type(error).__name__)
            return
        allocated, peak = (
            found.get("allocated_bytes.all.current", 0),
            found.get("allocated_bytes.all.peak", 0),
        )
        self.put(
            "memory", allocated_bytes=allocated, reserved_bytes=found.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=peak, peak_reserved_bytes=found.get("reserved_bytes.all.peak", 0),
            growth_bytes=peak - allocated, retries=found.get("num_alloc_retries", 0), ooms=found.get("num_ooms", 0),
            free_bytes=free, total_bytes=total, others_bytes=None,
        )  # fmt: skip


def _by_name(times: dict[int, float]) -> dict[str, int]:
    """Nanoseconds by the name of the phase."""
    return {NAMES[phase]: round(spent) for phase, spent in times.items()}


def reason_of(error: Any) -> str:
    """An exception in words, without running code of the script: "ValueError: no more"."""
    kind, given = type(error), getattr(error, "args", ())
    plain = isinstance(kind.__str__, type(object.__str__)) and all(
        type(one) in (str, int, float) for one in given
    )
    return f"{kind.__name__}: {error}" if plain else kind.__name__


def _gpu(torch: Any, device: Any) -> dict[str, Any] | None:
    """What identifies the GPU: the process may see only some of those of the machine, in another order."""
    try:
        found = torch.cuda.get_device_properties(device)
        uuid = getattr(found, "uuid", None)  # from torch 2.5 on
        return {
            "uuid": None if uuid is None else str(uuid), "name": str(found.name),
            "total_bytes": int(found.total_memory), "capability": [int(found.major), int(found.minor)],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }  # fmt: skip
    except Exception as error:
        if not ours(error):
            raise
        return None


def _texts(words: Any) -> list[str]:
    return [word for word in words if type(word) is str] if type(words) is list else []


def _implementation(group: dict[str, Any], device: str) -> str | None:
    """ "fused", "foreach" or "loop" for an optimizer of torch that has a choice; by default foreach on a GPU."""
    if "foreach" not in group:
        return None
    if group.get("fused"):
        return "fused"
    chosen = group["foreach"]
    return "foreach" if chosen or (chosen is None and device == "cuda") else "loop"
