"""Makes each function of the observer fail that a hook can reach, in a fork of an observed process, and trains there.

A first fork counts the calls of all functions; so a new one is tried as well. Prints the loss, the number of steps and
the output as a JSON object: of a fork in which nothing fails, and of each function. Arguments: from which call on they
fail, and which part of the functions, of how many.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # once, instead of in each fork
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
# Of trials, and functions that hold the guard themselves: what they raise has nobody to go to but the script.
ELSEWHERE = (
    "changes", "switches", "caching", "trying.Script", "trying.given", "trying.spawned", "trying._peak",
    "trying._workers", "trying.begin", "trying.give_up", "trying.before_start", "trying._switch", "whose",
    "outside.begin", "outside._found", "outside._hear", "apart.of_script", "apart.without_our_frames",
    "apart.Contained",
)  # fmt: skip
ENTRIES = {
    "DeviceClock.mark",
    "Observer.audit",
    "Observer.forked",
    "Observer.ended",
    "Observer.give_up",
    "Steps.failed",
    "Recorder._collected",
    "HeardLines._called",
    "HeardLines._heard",
}
RAISE = """
def raises(*args, **kwargs):
    _planted{number}.append(1)
    if len(_planted{number}) < {call}:
        return _original{number}(*args, **kwargs)
    raise RuntimeError("planted")
"""
NEVER = 10**9


def get_batch(x: Any, y: Any, step: int) -> Any:
    return x[step % 8 :: 8], y[step % 8 :: 8]


def train() -> tuple[str, int]:
    """A loop that reaches most hooks: own batches, then a loader, an evaluation, clipping, a scaler, and saving.

    It asks for captures, as the console does.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    count = 0

    def step(a: Any, b: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    memory = sys.modules["_ndd_watch.clock"].S  # type: ignore[attr-defined]
    asked: int = sys.modules["_ndd_watch.mapped"].CAPTURES  # type: ignore[attr-defined]
    for number in range(40):
        memory[asked] += 1
        loss = step(*get_batch(x, y, number))
        count += 1
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = step(a, b)
        count += 1
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    count += 1
    torch.save(model.state_dict(), io.BytesIO())
    return float(loss.detach()).hex(), count


def functions() -> Iterator[tuple[str, Any]]:
    """All functions of the observer, by name."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("_ndd_watch.") and name.rpartition(".")[2] not in ELSEWHERE:
            for key, value in list(vars(module).items()):
                if f"{name}.{key}".partition(".")[2] in ELSEWHERE:
                    continue
                if isinstance(value, type) and value.__module__ == name:
                    for inner in vars(value).values():
                        inner = getattr(inner, "__func__", getattr(inner, "fget", inner))
                        if isinstance(inner, types.FunctionType) and inner.__module__ == name:
                            yield f"{name}:{inner.__qualname__}", inner
                elif isinstance(value, types.FunctionType) and value.__module__ == name:
                    yield f"{name}:{value.__qualname__}", value


def plant(function: Any, call: int, number: int = 0) -> list[int]:
    """Have a function raise from this call on; the list grows with each call. number: of the function."""
    names, planted = function.__globals__, []
    code = function.__code__
    original = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    made: dict[str, Any] = {}
    exec(compile(RAISE.format(call=call, number=number), code.co_filename, "exec"), made)
    names[f"_planted{number}"], names[f"_original{number}"] = planted, original
    function.__code__ = made["raises"].__code__.replace(co_freevars=code.co_freevars)
    function.__defaults__ = function.__kwdefaults__ = None
    return planted


def forked(work: Callable[[], Any]) -> Any:
    """What this tells in a fork; None if the fork dies."""
    read, write = os.pipe()
    if not os.fork():
        os.close(read)
        told = json.dumps(work()).encode()
        with os.fdopen(write, "wb") as file:
            file.write(told)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.wait()
    return json.loads(text) if text else None


def trained(function: Any, call: int) -> dict[str, Any]:
    """The training in which this function fails; None: none of them."""
    planted = plant(function, call) if function is not None else []
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            loss, steps = train()
        except BaseException as error:  # noqa: BLE001
            loss, steps = f"{type(error).__name__}: {error}", -1
    return {"hit": len(planted) >= call, "loss": loss, "steps": steps, "errors": errors.getvalue()}


def counted(chosen: list[tuple[str, Any]]) -> list[int]:
    """How often each of the functions is called."""
    calls = [plant(function, NEVER, number) for number, (_, function) in enumerate(chosen)]
    train()
    return [len(each) for each in calls]


def main() -> None:
    call, part, parts = map(int, sys.argv[1:])
    chosen = [(name, function) for name, function in functions() if name.partition(":")[2] not in ENTRIES][
        part::parts
    ]
    calls = forked(lambda: counted(chosen))
    reached = [one for one, count in zip(chosen, calls, strict=True) if count >= call]
    for name, function in [("", None), *reached]:
        told = forked(lambda function=function: trained(function, call)) or {"died": True}
        print(json.dumps({"function": name, **told}), flush=True)


if __name__ == "__main__":
    main()
