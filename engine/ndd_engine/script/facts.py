"""Turns the observer's records of a process into the events of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ndd_engine.hardware.gpu import Gpu, Machine
from ndd_engine.hardware.torch_gpus import trained_on
from ndd_engine.measure.compiling import compile_marks
from ndd_engine.record.events import (
    PHASES,
    Event,
    FunctionsEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    ScalarsEvent,
    StacksEvent,
    WindowEvent,
)
from ndd_engine.text import counted, number, printable

from .command import Command
from .records import Line

# Section of a run's configuration that only scripts have.
SECTION = "script"
# Of so few steps, the first ones are not seen whole.
FEW_STEPS = 3
_LOADER = ("workers", "pin_memory", "prefetch", "persistent")


@dataclass
class Facts:
    """What is known of one observed process.

    step: optimizer steps so far; earlier: those of earlier processes, of the same rank or as a framework says that has
    resumed the training. ended: (status, reason) that it wrote. gpu: that it trains on; None for the CPU, and before it
    has told.
    """

    name: str
    command: Command
    machine: Machine
    pid: int = 0
    step: int = 0
    ended: tuple[str, str] | None = None
    earlier: int = 0
    gpu: Gpu | None = None
    _process: Line = field(default_factory=dict)
    _model: Line = field(default_factory=dict)
    _loader: Line = field(default_factory=dict)
    _outside: dict[str, list[str]] = field(default_factory=dict)
    _micro: int = 0
    _total_steps: int = 0
    _epochs: int = 0
    _obeys: list[str] = field(default_factory=list)
    _epoch: int = 0
    _epoch_begin: int = 0
    _items: int = 0
    _told: bool = False
    _skipped: int = 0
    _phases: set[str] = field(default_factory=set)

    def take(self, line: Line) -> Iterator[Event]:
        """The events of a line. Raises KeyError, TypeError or ValueError for a line of another format."""
        kind = line["type"]
        if kind == "process":
            if self.pid:  # a launcher has started this rank again
                self.earlier, self.ended, self._skipped = self.step, None, 0
            self._process, self.pid = line, int(line["pid"])
        elif kind == "model":
            self.gpu, self._model = self._trained_on(line), line
            if self._told:  # on another device than before
                yield self._run()
        elif kind == "loader":
            self._loader = line
            if self._told:  # another loader than before
                yield self._run()
        elif kind == "window":
            yield from self._window(line)
        elif kind == "stacks":
            frames = [
                [str(phase), str(file), int(at), str(name), int(count), int(file != "?")]
                for phase, file, at, name, _, count in line["frames"]
            ]
            yield StacksEvent(self.step_of(line), int(line["looks"]), frames)
        elif kind == "profile" and (line["functions"] or line.get("waits")):
            functions = [
                [str(file), int(at), str(name), *map(int, rest), str(caller), str(phase)]
                for file, at, name, *rest, caller, phase in line["functions"]
            ]
            waits = [
                [str(file), int(at), str(name), str(method), *map(int, rest)]
                for file, at, name, method, *rest in line.get("waits", ())
            ]
            phases = {str(name): int(ns) for name, ns in (line.get("phases") or {}).items()}
            yield FunctionsEvent(self.step_of(line), int(line["ns"]), functions, waits, phases)
        elif kind == "memory":
            counters = {key: value for key, value in line.items() if key not in ("v", "type", "t")}
            yield MemoryEvent(**counters)
        elif kind in ("totals", "epoch", "scalars", "evaluation"):
            yield from self._of_framework(kind, line)
        elif kind in ("note", "warning"):
            yield MarkEvent(kind, self.earlier + int(line["done"]), printable(str(line["text"])))
        elif kind == "untimed":
            reason = printable(str(line["reason"]))
            yield MarkEvent("warning", self.step, f"steps are not timed on the GPU: {reason}")
        elif kind == "unread":
            reason = printable(str(line["reason"]))
            yield MarkEvent(
                "warning", self.step, f"losses and other values on the GPU are not read: {reason}"
            )
        elif kind == "unmeasured":
            reason = printable(str(line["reason"]))
            yield MarkEvent("warning", self.step, f"the memory of the GPU is not measured: {reason}")
        elif kind == "source":
            yield self._source(line)
        elif kind == "outside":
            self._outside = {key: list(map(str, line[key])) for key in ("places", "hosts")}
            if self._told:
                yield self._run()
        elif kind == "unseen":
            names = ", ".join(printable(str(name)) for name in line["functions"])
            text = f"not timed, since {printable(str(line['reason']))}: {names}"
            yield MarkEvent("note", self.step, text)
        elif kind == "unobserved":
            reason = printable(str(line["reason"]))
            yield MarkEvent(
                "warning", self.step, f"the observation ended at step {number(self.step)}: {reason}"
            )
        elif kind == "compiled":
            yield from compile_marks(line, self.step_of(line))
        elif kind == "end":
            self.ended = str(line["status"]), printable(str(line["reason"]))

    @property
    def host(self) -> str:
        """The host that it runs on; "" before it has told."""
        return str(self._process.get("host") or "")

    @property
    def device(self) -> str:
        """The device that it trains on; "" before it has told."""
        return str(self._model.get("device") or "")

    def _trained_on(self, model: Line) -> Gpu | None:
        if not str(model["device"]).startswith("cuda"):
            return None
        known = model.get("gpu")
        if known is None:  # torch did not say
            return self.machine.gpus[0] if len(self.machine.gpus) == 1 else None
        major, minor = known["capability"]
        return trained_on(
            self.machine.gpus, known["uuid"], printable(str(known["name"])), int(known["total_bytes"]),
            (int(major), int(minor)), str(known["visible"] or ""),
        )  # fmt: skip

    @property
    def not_seen(self) -> list[str]:
        """What could not be observed of the steps, in words."""
        if self.step <= FEW_STEPS:
            return []
        lacking = [phase for phase in ("forward", "backward") if phase not in self._phases]
        found = []
        if lacking:
            found.append(
                f"not seen in the optimizer steps: {' and '.join(lacking)} (compiled, scripted, or without modules of "
                f"torch); {'its' if len(lacking) == 1 else 'their'} time is part of other phases"
            )
        if not self._items:
            found.append(
                "items/s: not counted, since no tensor with a size was seen in the input of the model"
            )
        return found

    @property
    def shares(self) -> bool:
        """Whether it trains together with others: a step of all of them is one step."""
        return self._ranks > 1

    @property
    def _ranks(self) -> int:
        """The number of ranks that exchange data; 1 for a process that trains alone."""
        return int(self._process.get("ranks") or 1) if self._process.get("exchanges") else 1

    @property
    def _strategy(self) -> str:
        return str(self._model.get("strategy") or "")

    def step_of(self, line: Line) -> int:
        """The step of a line that the observer has counted."""
        return self.earlier + int(line["step"])

    def _window(self, line: Line) -> Iterator[Event]:
        shape, steps = line.get("shape"), int(line["steps"])
        if shape:
            self._micro = int(shape[0])
        elif not self._micro:  # no call of the model was seen yet
            self._micro = int(self._loader.get("batch_size") or 0)
        micro_steps = int(line["micro_steps"])
        # Ranks that share a model by DDP or FSDP read batches of their own, of the same size unless the script is odd.
        items = self._micro * micro_steps * (self._ranks if self._strategy else 1)
        known = bool(self._items)
        if steps:
            self._items = round(items / steps)
        if not self._told or (self._items and not known):
            self._told = True
            yield replace(self._run(), resumed_step=self.earlier or None)
        self.step = step = self.step_of(line)
        loss, at = line.get("loss"), self.earlier + int(line.get("loss_step") or line["step"])
        phases = {
            str(name): _phase(body)
            for name, body in line["phases"].items()
            if str(name).partition("/")[0] in PHASES
        }
        self._phases |= phases.keys()
        yield WindowEvent(
            step=step, epoch=self._epoch, epoch_step=max(step - self._epoch_begin, 0), steps=steps,
            micro_steps=micro_steps, items=items, tokens=0,
            wall_ns=int(line["wall_ns"]), step_p50_ns=line["step_p50_ns"], step_p95_ns=line["step_p95_ns"],
            step_max_ns=line["step_max_ns"], phases=phases, loss=loss,
            last_loss=None if loss is None else (at, float(loss)),
            device_steps=int(line.get("device_steps") or 0), lr=line.get("lr"), gc_ns=line.get("gc_ns"),
            gc_count=line.get("gc_count"), gc_max_ns=line.get("gc_max_ns"), profiled=bool(line.get("profiled")),
            heap_bytes=line.get("heap_bytes"),
        )  # fmt: skip
        skipped = int(line.get("skipped_updates") or 0)
        if skipped > self._skipped:
            times = counted(skipped, "update")
            yield MarkEvent(
                "note", step, f"the gradient scaler has skipped {times} because of infinite gradients"
            )
            self._skipped = skipped

    def _run(self) -> RunEvent:
        process, model, machine = self._process, self._model, self.machine
        device = str(model.get("device") or "cpu")
        gpu = self.gpu
        versions = {"python": str(process.get("python", "")), "torch": str(process.get("torch", ""))}
        optimizer = printable(str(model.get("optimizer") or ""))
        return RunEvent(
            name=self.name, workload=self.command.title,
            config=self._seen(),
            pid=self.pid, host=self.host or socket.gethostname(), device=device,
            device_name=machine.host.cpu if device == "cpu" else gpu.name if gpu is not None else device,
            gpu=None if gpu is None else gpu.to_dict(), versions=versions,
            parameters=int(model.get("parameters") or 0),
            precision="", item="item", token=None, tokens_per_item=0, items_per_step=self._items, items_per_epoch=0,
            steps_per_epoch=0, epochs=self._epochs, total_steps=self._total_steps, model=optimizer,
            data=self.command.text,
            threads=process.get("threads"), usable_cores=machine.host.usable_cpus,
        )  # fmt: skip

    def _seen(self) -> dict[str, Any]:
        """The settings that were seen, named as those of our own runs."""
        found: dict[str, Any] = {SECTION: self.command.to_dict()}
        if loader := self._loader:
            found["loader"] = {name: loader.get(name) for name in _LOADER}
            found[SECTION] |= {"loader": loader.get("place"), "dataset": loader.get("dataset")}
            found[SECTION]["by_item"] = loader.get("by_item") is True
        if places := self._model.get("places"):
            found[SECTION]["optimizer"] = places[0]
            found[SECTION] |= {"optimizers": places} if places[1:] else {}
        if (main := self._model.get("main")) is not None:
            found[SECTION]["main"] = main
        if self._outside:
            found[SECTION]["outside"] = self._outside
        if self._obeys:
            found[SECTION]["obeys"] = self._obeys
        if self._model.get("anomaly"):
            found[SECTION]["anomaly"] = True
        if self._ranks > 1:
            found["parallel"] = {"ranks": self._ranks, "strategy": self._strategy}
        if (kind := self._model.get("implementation")) is not None:
            found["optimizer"] = {"implementation": kind}
        return found

    def _of_framework(self, kind: str, line: Line) -> Iterator[Event]:
        """What a framework says, or the script itself, which counts its steps as it likes."""
        done = line.get("done")
        if kind == "totals":
            if done is not None:
                self.earlier = max(self.earlier, int(line["earlier"]) - int(done))
            self._obeys = [str(action) for action in line.get("obeys", ())]
            total, self._epochs = int(line["total_steps"]), int(line["epochs"])
            if total and done is not None:
                total += self.earlier + int(done) - int(line["earlier"])
            self._total_steps = total
            if self._told:
                yield self._run()
            return
        step = int(line["step"]) if done is None else self.earlier + int(done)
        if kind == "epoch":
            self._epoch, self._epoch_begin = int(line["epoch"]), step
        elif kind == "scalars":
            yield ScalarsEvent(step, {str(name): float(value) for name, value in line["values"].items()})
        elif metrics := {str(name): float(value) for name, value in line["metrics"].items()}:
            shown = ", ".join(f"{printable(name)} {number(value, 4)}" for name, value in metrics.items())
            lower = line.get("lower")
            if lower is None:
                lower = "loss" in next(iter(metrics))
            data: dict[str, Any] = {"metrics": metrics, "better": "lower" if lower else "higher"}
            if line.get("seconds") is not None:
                data["seconds"] = float(line["seconds"])
            yield MarkEvent("evaluation", step, shown, data)

    def _source(self, line: Line) -> MarkEvent:
        where = f"{printable(str(line['function']))} ({printable(str(line['file']))}:{int(line['line'])})"
        text = f"batches are made by {where}"
        if not line.get("timed"):
            text += "; it cannot be timed by itself, so its time is part of other"
        return MarkEvent("note", self.step, text)


def _phase(body: Any) -> dict[str, Any]:
    return {key: body[key] for key in ("host_ns", "p50_ns", "p95_ns", "max_ns", "device_ns") if key in body}
