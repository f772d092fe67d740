"""Trains a script and counts the steps of its optimizers: `python counted.py SCRIPT [ARGUMENTS]`.

Prints the number of the optimizer that stepped most often, as its last line; 0 for a script that has none.
"""

from __future__ import annotations

import atexit
import runpy
import sys
from collections import Counter
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

counts: Counter[int] = Counter()


def count(optimizer: Any, _given: Any, _options: Any) -> None:
    counts[id(optimizer)] += 1


register_optimizer_step_post_hook(count)
atexit.register(lambda: print(f"ENDED steps={max(counts.values(), default=0)}", flush=True))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
