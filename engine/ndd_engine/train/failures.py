"""Explains a training failure in one message: the step, the cause, what filled the memory, what to change."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass

import torch

from ndd_engine.config.schema import Config
from ndd_engine.errors import (
    DoesNotFitError,
    NddError,
    OutOfMemoryError,
    message_of,
    said,
    shortened,
    text_of,
)
from ndd_engine.measure import memory as memory_history
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.measure.process_watch import DIED
from ndd_engine.processes import limit_of
from ndd_engine.text import duration, size
from ndd_engine.workloads import interface

from .step.stepper import Stepper

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))")


@dataclass(frozen=True)
class Failure:
    """A failure with its message.

    kind: oom, worker, killed (a worker, probably by the kernel's out-of-memory killer) or error. where: of an error in
    the code of a user's own workload, its file and line.
    """

    kind: str
    text: str
    where: str | None = None

    @property
    def of_memory(self) -> bool:
        """Whether memory ran out, as far as is known."""
        return self.kind in ("oom", "killed")


def explain(
    error: BaseException, step: int, phase: str, config: Config, device: torch.device, stepper: Stepper | None
) -> Failure:
    """Explain an error in optimizer step `step` (counted from 1)."""
    between = phase in ("evaluate", "checkpoint")  # these follow a step
    place = f"at step {step - 1 if between else step:,} in {phase}"
    if is_out_of_memory(error):
        return Failure("oom", out_of_memory(error, place, config, device, stepper))
    text = text_of(error)
    if isinstance(error, RuntimeError) and (found := DIED.match(text)):
        return _worker(found, place, config.loader.workers)
    if "DataLoader timed out" in text:
        late = f"the loader workers returned no batch within {duration(config.loader.timeout_s)} {place}"
        return Failure("worker", f"{late}; look for a blocked read, or raise loader.timeout_s")
    if (limit := limit_of(error)) is not None:
        return Failure("error", f"{limit}, {place}", interface.place(error))
    kind, message = said(error).split(": ", 1)
    if isinstance(error, OSError) and error.filename:
        message = f"{shortened(str(error.filename))}: {error.strerror}"
    return Failure("error", f"{kind} {place}: {message}", interface.place(error))


def unstable(stepper: Stepper) -> str:
    """What to change after a loss or a parameter became NaN or infinite."""
    advice = "try a lower optimizer.lr, or clip.max_norm = 1.0"
    return advice if stepper.precision.scaler is None else f'{advice} or precision.amp = "bf16"'


def kind_and_text(error: BaseException) -> tuple[str, str]:
    """(kind, text) of the error that ended a helper process. kind: "oom" or "failed"."""
    if isinstance(error, NddError):
        # The cause is an error in the user's own code.
        of_memory = isinstance(error, (OutOfMemoryError, DoesNotFitError)) or is_out_of_memory(
            error.__cause__
        )
        return ("oom" if of_memory else "failed"), message_of(error)
    where = interface.place(error)
    text = limit_of(error) or said(error)
    return ("oom" if is_out_of_memory(error) else "failed"), text + (f" ({where})" if where else "")


def unprepared(error: BaseException, stage: str) -> str:
    """The message for an error before the first step; stage: what was being done."""
    if (limit := limit_of(error)) is not None:
        return f"{limit}, while {stage}"
    kind, message = said(error).split(": ", 1)
    return f"{'out of memory' if is_out_of_memory(error) else kind} while {stage}: {message}"


def out_of_memory(
    error: BaseException, place: str, config: Config, device: torch.device, stepper: Stepper | None
) -> str:
    """The message: what was asked for, and what filled the memory."""
    found = _ASKED.search(str(error))
    asked = re.sub("([KMGT])B", r"\1iB", found[1].replace("bytes", "B")) if found else None
    if asked and asked.endswith(" B"):
        asked = size(float(asked.removesuffix(" B")))
    parts = [f"out of memory on {device} {place}" + (f": tried to allocate {asked}" if asked else "")]
    filled: list[str] = []
    with contextlib.suppress(RuntimeError):  # an error of the driver can make every later call fail
        filled = _filled(config, device, stepper)
    if filled:
        parts.append("filled by " + ", ".join(filled))
    if snapshot := memory_history.out_of_memory(error):
        parts.append(snapshot)
    return "; ".join(parts)


def less_memory(config: Config) -> str:
    """What needs less memory with the same effective batch, as command-line options."""
    batch = config.batch
    smaller = next((micro for micro in range(batch.micro - 1, 0, -1) if batch.items % micro == 0), None)
    budget = ""
    if config.memory.budget is None and not config.speed.cuda_graph:
        budget = "; or compute activations again in backward: --set memory.budget=auto"
    if smaller is None:
        advice = f"reduce batch.sequence ({batch.sequence}) or use a smaller model"
        return f"the micro-batch is already 1: {advice}{budget}"
    return (
        f"the next smaller micro-batch with the same effective batch of {batch.items:,}: "
        f"--set batch.micro={smaller} --set batch.accumulation={batch.items // smaller}{budget}"
    )


def _filled(config: Config, device: torch.device, stepper: Stepper | None) -> list[str]:
    if stepper is None:
        return []
    parameters = stepper.parameters
    known = {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer": stepper.optimizer.bytes(),
    }
    filled = [f"{name} {size(count)}" for name, count in known.items()]
    batch = config.batch
    shape = f"micro-batch {batch.micro} x sequence {batch.sequence}"
    if device.type == "cuda":
        activations = torch.cuda.max_memory_allocated(device) - sum(known.values())
        filled.append(f"activations of {shape} {size(max(activations, 0))}")
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        filled.append(f"context and other processes {size(max(others, 0))} of {size(total)}")
    else:
        filled.append(f"the rest is activations of {shape}")
    return filled


def _worker(found: re.Match[str], place: str, workers: int) -> Failure:
    pids, name, status = found[1].strip(), (found[2] or "").strip(), found[3]
    who = f"loader worker {pids}"
    memory = "(often {} by the kernel because memory ran out)"
    fewer = f"fewer workers need less memory: --set loader.workers={max(workers // 2, 0)}"
    alone = "its error shows without workers: --set loader.workers=0"
    if status:
        how = f"exited with status {status} (os._exit, sys.exit or a crash in native code)"
        return Failure("worker", f"{who} {how} {place}; {alone}")
    if not name:
        return Failure("worker", f"{who} died without a message {memory.format('killed')} {place}; {fewer}")
    if name in ("Killed", "SIGKILL"):
        return Failure("killed", f"{who} was killed by SIGKILL {memory.format('sent')} {place}; {fewer}")
    name = next((known.name for known in signal.Signals if signal.strsignal(known) == name), name)
    advice = f"/dev/shm may be full; {fewer}" if name == "SIGBUS" else alone
    return Failure("worker", f"{who} was killed by {name} {place}; {advice}")
