"""A plain training script for `benchmarks.whole_runs`, which knows nothing of whoever observes it.

`python plain_loop.py OUTPUT WIDTH BATCH WARM STEPS [traceml]` trains WARM + STEPS steps and writes the seconds of the
last STEPS as JSON. traceml: with the two lines that traceml's documentation asks a plain loop for.
`python plain_loop.py OUTPUT MILLISECONDS` writes the width and the batch whose steps take about so long.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from observed_loop import Loop, sized


def main() -> None:
    """Train, and write."""
    output, *words = sys.argv[1:]
    torch.set_num_threads(1)
    if len(words) == 1:
        loop = sized(float(words[0]) / 1e3)
        found = {"width": loop.width, "batch": loop.batch, "step_s": loop.train(50)}
        Path(output).write_text(json.dumps(found))
        return
    width, batch, warm, steps = map(int, words[:4])
    loop = Loop(width, batch)
    step: Any = contextlib.nullcontext
    if words[4:] == ["traceml"]:
        import traceml_ai

        traceml_ai.init(mode="auto")
        step = traceml_ai.trace_step
    model, optimizer, done = loop.model, loop.optimizer, 0
    begin = used = 0.0
    while done < warm + steps:
        for x, y in loop.loader:
            with step(model):
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
            done += 1
            if done == warm:
                begin, used = time.perf_counter(), time.process_time()
            if done == warm + steps:
                break
    body = {"wall_s": time.perf_counter() - begin, "used_s": time.process_time() - used, "loss": loss.item()}
    Path(output).write_text(json.dumps(body))


if __name__ == "__main__":
    main()
