"""Talks with the console: writes the events of the record, and obeys requests.

Events go into the memory that others can read, see `mapped`. Each line has the fields of an event of the record, see
ndd_engine.record.events. Two of them are completed by the reader, who sees the rows of the steps and the machine: a
window has its parts in `timed`, and the event of the run lacks what only the console knows.

The console asks for a pause, a checkpoint, an evaluation, a profiler capture, or a look at what the process keeps by
writing integers into that memory. The process compares them once a window, and obeys at the end of a step. While
nothing is asked for, nothing of this is in a step.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable

from . import FOLDER, clock
from .apart import Dropped, os, ours, threading, time
from .clock import CURRENT, DONE, LAST, NAMES, TRAINER, S, memory, now, rest
from .frameworks import Wishes
from .looks import Looks, Places, class_name, groups_of
from .loops import Passes
from .mapped import (
    AT,
    CORRECTION,
    FIRST_NS,
    HOLDER,
    MICRO,
    NATIVE,
    PAUSED,
    PENDING,
    REQUEST,
    STARTS,
    let_read,
    resident,
)
from .receiving import Receiving
from .steps import Steps
from .waits import strategy_of
from .window_facts import WindowFacts

# From one look to the next during a pause.
POLL_S = 0.05


class RequestHandler:
    """capture, look: called for a profiler capture, for a look at what the process keeps. wishes: of a framework."""

    def __init__(
        self, steps: Steps, capture: Callable[[], None], look: Callable[[], None], wishes: Wishes
    ) -> None:
        self._steps, self._capture, self._look, self._wishes = steps, capture, look, wishes
        self._done = [0] * REQUEST

    def look(self) -> None:
        """At the end of a window: is there a new request?"""
        if self._steps.gate is None and S[AT : AT + REQUEST].tolist() != self._done:
            self._steps.gate = self._obey

    def _obey(self, _done: int = 0) -> None:
        """At the end of each step, until the request is obeyed."""
        asked, before = S[AT : AT + REQUEST].tolist(), self._done
        if S[DONE] < asked[0] or self._steps.studying:
            return
        self._done, self._steps.gate = asked, None
        _, holder, *once = asked
        capture, checkpoint, evaluate, look = (new != old for new, old in zip(once, before[2:]))
        if capture:
            self._capture()
        if look:
            self._look()
            # What it takes is in no step.
            t = now()
            rest[S[CURRENT]] += t - S[LAST]
            S[LAST] = t
        self._wishes.saves |= checkpoint
        self._wishes.evaluates |= evaluate
        if holder:
            self._pause(holder)

    def _pause(self, holder: int) -> None:
        """Wait until the console lets the training continue, or has disappeared. Signals arrive meanwhile."""
        self._steps.end_window()
        S[PAUSED] = 1
        try:
            while S[HOLDER] == holder and lives(holder):
                time.sleep(POLL_S)
        finally:
            clock.skip()  # the pause is in no step and in no window
            S[PAUSED] = 0


def lives(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended and was not waited for does not."""
    try:
        if sys.platform == "linux":
            os.readlink(f"/proc/{pid}/exe")
        else:
            os.getpgid(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it belongs to another user
        return True
    return True


# The script may clear its environment before it trains.
FOLDER_AT_START = os.environ.get(FOLDER, "")
# Of a loader, what is recorded as its settings; the rest describes the script.
_LOADER = ("workers", "pin_memory", "prefetch", "persistent", "in_order", "fetch")
# Micro-steps at the beginning whose items are counted later.
FEW = 8


class Emitter:
    """The record of this process. replicated: whether there is a DistributedDataParallel.

    opened: others can read it; before that, its lines are kept.
    """

    def __init__(
        self,
        steps: Steps,
        looks: Looks,
        places: Places,
        passes: Passes,
        receiving: Receiving,
        replicated: Callable[[], bool],
    ) -> None:
        self._steps, self._looks, self._places, self._replicated = steps, looks, places, replicated
        self._passes = passes
        self.facts = WindowFacts(steps.garbage, steps.finite, receiving)
        self.opened = self.paused = self._closed = False
        self._early: list[tuple[str, dict[str, Any]]] = []
        # Fields of the run's event that are known, parts of its configuration, and whether they were recorded so.
        self._run: dict[str, Any] = {
            "device": "", "model": "", "items_per_step": 0, "epochs": 0, "total_steps": 0,
        }  # fmt: skip
        self._config: dict[str, dict[str, Any]] = {"script": {}}
        self._recorded = False
        # Steps of an earlier process, as a framework says that has resumed the training.
        self._earlier = 0
        self._epoch = self._epoch_begin = 0
        # Of the last window: the steps until its end, the processor time and the micro-steps.
        self._shown = self._cpu = self._micro = 0
        # Items of a micro-step: the first size of the model's input, or else the loader's. Ranks that read some.
        self._items, self._batch, self._readers = 0, 0, 1
        # Micro-steps before that was known, at the beginning.
        self._unknown = 0
        # Tokens of an item, 0 where it has none; None before that is known.
        self._tokens: int | None = None
        self._first_ns = self._starts = 0
        # Python forgets it before a short script's model is described at its exit.
        self._main = getattr(sys.modules.get("__main__"), "__file__", None)
        self._status = ("done", "")
        # The device on which the model was described.
        self._described: Any = None
        # Values on a GPU, as they were a window ago.
        self._late: dict[str, float | None] = {}

    def open(self, place: dict[str, Any]) -> None:
        """Begin, with the lines that were kept. place: see `waits.place`. Raises OSError."""
        folder, rank = os.environ.get(FOLDER) or FOLDER_AT_START, os.environ.get("RANK")
        memory.attach(folder, f"rank-{rank}" if rank is not None and rank.isdigit() else f"pid-{os.getpid()}")
        torch: Any = sys.modules["torch"]
        S[NATIVE] = threading.get_native_id()
        self.opened = True
        if place["exchanges"]:
            self._config["parallel"] = {**place, "strategy": ""}
        self.know(
            pid=os.getpid(), host=os.uname().nodename, threads=torch.get_num_threads(),
            versions={"python": sys.version.split()[0], "torch": str(torch.__version__)},
        )  # fmt: skip
        early, self._early = self._early, []
        for kind, body in early:
            self.put(kind, **body)
        self._record_run()
        self._cpu = time.process_time_ns()
        if not place["exchanges"]:  # what ranks share on GPUs may need another choice
            let_read(os.environ.get("NDD_WATCH_TRACER", ""))

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return int(max(S[DONE] + S[CORRECTION] + S[PENDING], 0)) + self._earlier

    def put(self, kind: str, /, **body: Any) -> None:
        """Record an event."""
        if not self.opened:
            self._early.append((kind, body))
            return
        self._record_run()
        memory.put(kind, body)

    def mark(self, kind: str, text: str, step: int | None = None, /, **data: Any) -> None:
        """Record an occurrence. step: optimizer steps then, if not now."""
        self.put("mark", kind=kind, step=self.step if step is None else step, text=text, data=data)

    # The run.

    def know(self, **fields: Any) -> None:
        """Fields of the run's event."""
        self._run.update(fields)
        self._recorded = False

    def script(self, **found: Any) -> None:
        """What the configuration of the run says of the script."""
        self._config["script"].update(found)
        self._recorded = False

    def look_in(self, fact: str, file: str) -> None:
        """Have the console look for the line of a fact in a file, which has the training loop.

        "keeps": graphs of earlier steps are kept; "carries": one is carried to the next step; "hooks", "handlers",
        "parameters": many of them are added; "state": that of an optimizer has grown.
        """
        if fact not in self._config["script"]:
            self.script(**{fact: [file, 0]})

    def loader(self, settings: dict[str, Any]) -> None:
        """The training reads a loader with these settings and its place, see `Places`."""
        self._config["loader"] = {name: settings[name] for name in _LOADER}
        self._batch = settings["batch_size"] or 0
        self.script(
            loader=settings["place"], dataset=settings["dataset"], by_item=settings["by_item"],
            items=settings["items"], sampler=settings["sampler"], reads=settings["reads"], objects=settings["objects"],
            augments=settings["augments"],
        )  # fmt: skip

    def _record_run(self) -> None:
        """Record the run, if it is another one than before."""
        if self._recorded:
            return
        self._recorded = True
        memory.put("run", {
            "name": "", "workload": "", "config": self._config, "device_name": "", "gpu": None, "parameters": 0,
            "precision": "", "item": "item", "token": None, "tokens_per_item": 0, "items_per_epoch": 0,
            "steps_per_epoch": 0, "data": "", "resumed_step": self._earlier or None, **self._run,
        })  # fmt: skip

    def say(self, kind: str, done: int | None = None, step: int | None = None, **body: Any) -> None:
        """What a framework says, after `done` steps of this process, or the script itself, which counts as it likes."""
        step = step if done is None else self._earlier + done
        if kind == "totals":
            total, earlier = body["total_steps"], body.get("earlier", 0)
            if done is not None:
                self._earlier = max(self._earlier, earlier - done)
                total += self._earlier + done - earlier if total else 0
            self.know(total_steps=total, epochs=body["epochs"])
            if "obeys" in body:
                self.script(obeys=body["obeys"])
        elif kind in ("note", "warning"):
            self.mark(kind, body["text"], step)
        elif kind == "epoch":
            self._epoch, self._epoch_begin = int(body["epoch"]), step or 0
        elif kind == "scalars":
            self.put(
                "scalars", step=step, values={name: float(value) for name, value in body["values"].items()}
            )
        elif metrics := {str(name): float(value) for name, value in body["metrics"].items()}:
            lower, seconds = body.get("lower"), body.get("seconds")
            lower = "loss" in next(iter(metrics)) if lower is None else lower
            data: dict[str, Any] = {"metrics": metrics, "better": "lower" if lower else "higher"}
            if seconds is not None:
                data["seconds"] = float(seconds)
            self.mark(
                "evaluation",
                ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),
                step,
                **data,
            )

    # Windows.

    def resume(self) -> None:
        """Observe garbage collections."""
        self.paused = False
        self._steps.garbage.begin()

    def pause(self) -> None:
        """Observe nothing more."""
        self.paused = True
        self._steps.garbage.end()

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
        newest, shape = steps.loss, steps.shape
        if steps.gate is None:  # a trial reads them itself
            steps.loss = steps.shape = None
        micro = max(S[MICRO] - self._micro, 0)
        self._micro += micro
        first, self._first_ns = S[FIRST_NS] - self._first_ns, S[FIRST_NS]
        passes, self._starts = S[STARTS] - self._starts, S[STARTS]
        step = self.step - self._earlier
        count, self._shown = max(step - self._shown, 0), step
        self._items = self._passes.full(shape[0], self._items) if shape else self._items or self._batch
        if self._items and count and not self._run["items_per_step"]:
            self.know(items_per_step=round(self._items * micro * self._readers / count))
        if steps.model != self._run["model"]:  # the first call of a model is over before anything is observed
            self.know(model=steps.model)
        if shape:
            self._know_tokens(shape)
        counted = self._passes.counted(micro, shape[0] if shape else None)
        items = self._items_of(micro) if counted is None else counted * self._readers
        timed = {
            "end": S[DONE], "shown": step, "rest": rest,
            "device": [(key, _by_name(found)) for key, found in clock.gpu.take()],
            "outside": _by_name(clock.gpu.outside()), "first_ns": first,
        }  # fmt: skip
        cpu, before = time.process_time_ns(), self._cpu
        if steps.ranks:
            timed |= {"cpu_ns": cpu - before, "rss_bytes": resident()}
        self._cpu = cpu
        profiled, steps.profiled = steps.profiled, False
        values_failed = "" if steps.values is None else steps.values.failed
        for kind, text, data in self.facts.marks(device=clock.gpu.failed, values=values_failed):
            self.mark(kind, text, **data)
        if (kept := steps.graphs.steps(S[DONE])) and steps.caller is not None:
            self.look_in("keeps", steps.caller.co_filename)
        step += self._earlier
        fields = self.facts.fields(
            step=step, epoch=self._epoch, epoch_step=max(step - self._epoch_begin, 0), steps=count, micro_steps=micro,
            items=items, tokens_per_item=self._tokens or 0,
            losses=[] if newest is None else [(newest[0] + 1 + self._earlier, newest[1])], lr=_read(self._rate),
            loss_scale=_read(self._scale), grad_norm=steps.grad_norm, profiled=profiled, kept_steps=kept, passes=passes,
            earlier=self._earlier,
        )  # fmt: skip
        losses = [(before + 1 + self._earlier, value) for before, value in steps.milestone_losses.items()]
        steps.milestone_losses.clear()
        self.put("window", **fields, **steps.take(), wall_ns=wall, milestone_losses=losses, timed=timed)

    def _know_tokens(self, shape: tuple[int, ...]) -> None:
        """Items are whole numbers in rows. Where rows differ in length, their sum is not known."""
        each = shape[1] if len(shape) == 2 and shape[1] > 1 and self._steps.whole_numbers else 0
        if self._tokens is None or (self._tokens and each != self._tokens):
            self._tokens = each if self._tokens is None else 0
            self.know(token="token" if self._tokens else None, tokens_per_item=self._tokens)

    def _items_of(self, micro: int) -> int:
        """Items of the micro-steps of a window."""
        if not self._items:
            self._unknown += micro
            return 0
        # The model is known at its second call. Where it takes longer to know the items, it is not by chance.
        before, self._unknown = self._unknown * (self._unknown <= FEW), 0
        found = self._items * (micro + before) - self._passes.lacked(self._items)
        return max(found, 0) * self._readers

    def _rate(self) -> float | None:
        for optimizer in self._steps.optimizers()[-1:]:
            for group in groups_of(optimizer)[:1]:
                return self._value(group.get("lr"), "lr")
        return None

    def _scale(self) -> float | None:
        return self._value(self._steps.finite.scale, "scale")

    def _value(self, given: Any, name: str) -> float | None:
        """A number of the script, at the end of a window; that of a tensor on a GPU arrives until the next one."""
        values = self._steps.values
        if values is None or not self._looks.number_on_gpu(given):
            return self._looks.number(given)

        def arrived(read: list[float]) -> None:
            self._late[name] = read[0] if math.isfinite(read[0]) else None

        values.send([given], arrived)
        return self._late.get(name)

    def _describe(self) -> None:
        """Record what is trained, and where; on the training thread."""
        device = self._steps.device
        optimizers = self._steps.optimizers()
        # An attribute that a subclass computes, and subclasses of tensors, would run code of the script.
        groups = [group for one in optimizers for group in groups_of(one)]
        torch: Any = sys.modules["torch"]
        parameters = {id(item): item for group in groups for item in group["params"]}
        plain = [item for item in parameters.values() if self._looks.is_tensor(item)]
        strategy = strategy_of(parameters.values(), self._replicated()) if self._steps.ranks else ""
        if "parallel" in self._config:
            self._config["parallel"]["strategy"] = strategy
            # Ranks that share a model read batches of their own, of the same size unless the script is odd.
            self._readers = self._config["parallel"]["ranks"] if strategy else 1
        if optimizers:
            self._config["optimizer"] = {"name": class_name(type(optimizers[-1]))}
        implementation = _read(lambda: _implementation(groups[0], device.type)) if groups else None
        if implementation is not None:
            self._config["optimizer"]["implementation"] = implementation
        if places := [place for one in optimizers if (place := self._places.of(one))]:
            self.script(optimizer=places[0], **({"optimizers": places} if places[1:] else {}))
        self._config["speed"] = {"cudnn_benchmark": bool(torch._C._get_cudnn_benchmark())}
        if torch.is_anomaly_enabled():
            self.script(anomaly=True)
        if any(len(self._looks.shape(item) or ()) == 4 for item in plain):
            self.script(convolutions=True)
        if self._main is not None:
            self.script(main=self._main)
        self.know(
            device=str(device),
            parameters=_read(lambda: self._looks.updated_elements(plain)) or 0,
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
                if not self._steps.backwards:
                    self._steps.garbage.drop_after(S[LAST])
                    clock.leave_out_rest()
                self.window()
            self.pause()
            status, reason = self._status
            self.put("end", status=status, reason=reason, step=self.step, exit_status=int(status == "failed"))

    def fail(self, reason: str) -> None:
        """The training has failed with this error."""
        self._status = "failed", reason

    def memory(self) -> None:
        """Record the counters of the CUDA allocator."""
        if (counters := self.facts.memory(self._steps.device)) is not None:
            self.put("memory", **counters)


def _read(look: Callable[[], Any]) -> Any:
    """What a look at values of the script finds; None if one is not as torch makes it: that costs this field only."""
    with Dropped():
        return look()
    return None


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


def _implementation(group: dict[str, Any], device: str) -> str | None:
    """ "fused", "foreach" or "loop" for an optimizer of torch that has a choice; by default foreach on a GPU."""
    if "foreach" not in group:
        return None
    if group.get("fused") is True:
        return "fused"
    chosen = group["foreach"]
    return "foreach" if chosen is True or (chosen is None and device == "cuda") else "loop"
