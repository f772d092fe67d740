"""A plain training script for `benchmarks.whole_runs`, which knows nothing of whoever observes it.

`python plain_loop.py SOCKET WIDTH BATCH WARM [traceml]` trains WARM steps, connects to that Unix socket, and trains as
many steps as each line from there says. It answers each with a line of JSON: the seconds by the clock and of the
processor, and the last loss. traceml: with the two lines that traceml's documentation asks a plain loop for.
`python plain_loop.py OUTPUT MILLISECONDS` writes the width and the batch whose steps take about so long.
"""

from __future__ import annotations

import json
import socket
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
    width, batch, warm = map(int, words[:3])
    loop = Loop(width, batch)
    if words[3:] == ["traceml"]:
        import traceml_ai

        traceml_ai.init(mode="auto")
        loop.around = traceml_ai.trace_step
    loop.train(warm)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(output)
        with connection.makefile("rw") as asked:
            print("ready", file=asked, flush=True)
            for line in asked:
                used, steps = time.process_time(), int(line)
                wall_s = loop.train(steps) * steps
                body = {"wall_s": wall_s, "used_s": time.process_time() - used, "loss": loop.loss.item()}
                print(json.dumps(body), file=asked, flush=True)


if __name__ == "__main__":
    main()
