"""An ordinary training loop for `benchmarks.observe`, in a process that the observer entered.

`python observed_loop.py MILLISECONDS WARM_S steps ROUNDS SECONDS` prints one JSON object: what single steps take that
are observed in each way, and what the observer does besides, in so many seconds of the usual observation.
`python observed_loop.py MILLISECONDS WARM_S ends SECONDS` trains for so long, observed, and prints when each step ends.
WARM_S: seconds of observed training before, in which the observer learns what the steps call, and how often to time
their phases.

For `benchmarks.whole_runs` it is a plain script, which knows nothing of whoever observes it:
`python observed_loop.py sized OUTPUT MILLISECONDS` writes the width and the batch whose steps take about so long.
`python observed_loop.py blocks SOCKET WIDTH BATCH WARM [traceml]` trains WARM steps, connects to that Unix socket, and
trains as many steps as each line from there says. It answers each with a line of JSON: the seconds by the clock and of
the processor, and the last loss. traceml: with the two lines that its documentation asks a plain loop for.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# How a step is observed: not at all, without hooks; as a whole; by phase; and again not at all, which shows what such a
# comparison resolves.
KINDS = ("without", "untimed", "timed", "again")


def raw_s() -> float:
    """A clock that nothing adjusts, and that the observer does not read."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


class Loop:
    """The model and its loader. width: of the layers; batch: items of a step; around: the context of each step."""

    around: Any = nullcontext

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.width, self.batch = width, batch
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = TensorDataset(torch.randn(64 * batch, 64), torch.randn(64 * batch, 1))
        self.loader = DataLoader(data, batch_size=batch)
        self.iterator: Any = None
        self._batches = self._endless()
        self.loss: Any = None

    def _endless(self) -> Iterator[Any]:
        while True:
            self.iterator = iter(self.loader)
            yield from self.iterator

    def train(self, steps: int) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        for _ in range(steps):
            x, y = next(self._batches)
            with self.around(self.model):
                self.optimizer.zero_grad()
                self.loss = ((self.model(x) - y) ** 2).mean()
                self.loss.backward()
                self.optimizer.step()
        return (time.perf_counter() - begin) / steps


def sized(step_s: float) -> Loop:
    """A loop whose steps take about so long on this machine."""
    width, batch = 128, 8
    while True:
        loop = Loop(width, batch)
        loop.train(20)
        found = loop.train(20)
        if found >= step_s or batch >= 1 << 14:
            return loop
        # The cost of a step grows more slowly than its batch while operators are small.
        batch = min(max(int(batch * min(step_s / found, 4)), batch + 8), 1 << 14)
        width = min(width * 2, 1024) if found < step_s / 4 else width


def write_sized(output: str, milliseconds: str) -> None:
    loop = sized(float(milliseconds) / 1e3)
    found = {"width": loop.width, "batch": loop.batch, "step_s": loop.train(50)}
    Path(output).write_text(json.dumps(found))


def blocks(address: str, width: str, batch: str, warm: str, traceml: str = "") -> None:
    loop = Loop(int(width), int(batch))
    if traceml:
        import traceml_ai

        traceml_ai.init(mode="auto")
        loop.around = traceml_ai.trace_step
    loop.train(int(warm))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as asked:
            print("ready", file=asked, flush=True)
            for line in asked:
                used, steps = time.process_time(), int(line)
                wall_s = loop.train(steps) * steps
                body = {"wall_s": wall_s, "used_s": time.process_time() - used, "loss": loop.loss.item()}
                print(json.dumps(body), file=asked, flush=True)


def measure() -> None:
    """Measure, and print."""
    what = sys.argv[3]
    milliseconds, warm_s, count = (float(sys.argv[place]) for place in (1, 2, 4))
    step_s = milliseconds / 1e3
    loop = sized(step_s)
    observer: Any = sys.modules["_ndd_watch.install"].observer
    loop.train(round(warm_s / step_s))
    body: dict[str, Any] = {"step_s": loop.train(20)}
    if what == "ends":
        body["ends"] = _ends(loop, observer, count)
    else:
        body["every"] = observer.steps.every
        generator = random.Random(0)
        hooks, every = Switch(observer), observer.steps.every
        body["steps"] = [_steps(loop, observer, hooks, every, generator) for _ in range(int(count))]
        body["step_s"] = median(each["without"][0] for each in body["steps"]) / 1e9
        hooks.put(True, True)
        body["besides"] = _besides(loop, observer, float(sys.argv[5]))
    print(json.dumps(body))


class Switch:
    """Takes the observer's probes out of torch's functions for a step, and puts them back.

    Raises RuntimeError if there are none: nothing would be measured.
    """

    def __init__(self, observer: Any) -> None:
        self._probes = observer.hooks.probes
        if not self._probes._changed:
            raise RuntimeError("nothing is hooked")

    def put(self, on: bool, timed: bool = False) -> None:
        """Put the probes in place, or take them out; the same assignments on both sides.

        timed: also those that a step needs that is timed by phase.
        """
        for one in self._probes._changed:
            function: Any = one.function()
            function.__code__ = one.before if not on else one.ours if timed else one.resting


def _steps(
    loop: Loop, observer: Any, hooks: Switch, every: int, generator: random.Random
) -> dict[str, tuple[int, int]]:
    """One step of each kind, in random order: nanoseconds, and nanoseconds of the processor.

    every: one of so many steps is usually timed by phase.
    """
    found = {}
    for kind in generator.sample(KINDS, len(KINDS)):
        hooks.put(_observe(observer, kind, every), kind == "timed")
        begin, used = time.perf_counter_ns(), time.thread_time_ns()
        loop.train(1)
        found[kind] = time.perf_counter_ns() - begin, time.thread_time_ns() - used
    return found


def _observe(observer: Any, kind: str, every: int) -> bool:
    """Have the next step observed in this way, whatever the observer would choose. Returns whether with hooks."""
    clock: Any = sys.modules["_ndd_watch.clock"]
    steps, state, me = observer.steps, clock.S, get_ident()
    observed = kind in ("untimed", "timed")
    state[clock.LAST], state[clock.CURRENT] = clock.now(), clock.OTHER
    state[clock.TRAINER] = me if observed else -1
    state[clock.TIMED] = me if kind == "timed" else 0 if kind == "untimed" else -1
    steps.every, steps.skip = every, 2 * (kind == "untimed")
    (observer.emitter.resume if observed else observer.emitter.pause)()
    return observed


def _besides(loop: Loop, observer: Any, seconds: float) -> float:
    """The share of the time that ends of windows and closer looks take, as a user has them."""
    clock: Any = sys.modules["_ndd_watch.clock"]
    state, me = clock.S, get_ident()
    state[clock.LAST], state[clock.CURRENT] = clock.now(), clock.OTHER
    state[clock.TRAINER] = state[clock.TIMED] = me
    observer.steps.skip = 0
    observer.emitter.resume()
    sometimes, spent = observer.steps._sometimes, [0]

    def timed(t: int) -> None:
        begin = time.thread_time_ns()
        sometimes(t)
        spent[0] += time.thread_time_ns() - begin

    observer.steps._sometimes = timed
    begin = time.perf_counter_ns()
    while time.perf_counter_ns() - begin < seconds * 1e9:
        loop.train(1)
    return spent[0] / (time.perf_counter_ns() - begin)


def _ends(loop: Loop, observer: Any, seconds: float) -> dict[int, float]:
    """Train for so long; the number of each step, as the observer counts them, and when it ended."""
    found: dict[int, float] = {}
    end_s = raw_s() + seconds
    while raw_s() < end_s:
        loop.train(1)
        found[observer.steps.done] = raw_s()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain: Any = {"sized": write_sized, "blocks": blocks}.get(sys.argv[1])
    plain(*sys.argv[2:]) if plain else measure()
