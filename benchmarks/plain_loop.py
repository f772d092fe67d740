"""A plain training script for `benchmarks.whole_runs`, which knows nothing of whoever observes it.

`python plain_loop.py OUTPUT WIDTH BATCH WARM STEPS [traceml]` trains WARM + STEPS steps and writes the seconds of the
last STEPS as JSON. traceml: with the two lines that traceml's documentation asks a plain loop for.
`python plain_loop.py OUTPUT MILLISECONDS` writes the width and the batch whose steps take about so long.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

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
    if words[4:] == ["traceml"]:
        import traceml_ai

        traceml_ai.init(mode="auto")
        loop.around = traceml_ai.trace_step
    loop.train(warm)
    used = time.process_time()
    wall_s = loop.train(steps) * steps
    body = {"wall_s": wall_s, "used_s": time.process_time() - used, "loss": loop.loss.item()}
    Path(output).write_text(json.dumps(body))


if __name__ == "__main__":
    main()
