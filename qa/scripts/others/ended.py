"""What the scripts of this folder print when they have ended: how much they have trained, by their own count.

`python ended.py SCRIPT [ARGUMENTS]` trains a script and counts the steps of its optimizers. It prints the number of the
optimizer that stepped most often, as its last line; 0 for a script that has none.
"""

from __future__ import annotations

import atexit
import hashlib
import runpy
import sys
from collections import Counter
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


def ended(model: nn.Module, steps: int, items: int, loss: float) -> None:
    """One line: optimizer steps, items of all of them, the last loss and a hash of the weights."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(str(value.tolist()).encode())
    print(f"ENDED steps={steps} items={items} loss={loss!r} weights={digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    counts: Counter[int] = Counter()

    def count(optimizer: Any, _given: Any, _options: Any) -> None:
        counts[id(optimizer)] += 1

    register_optimizer_step_post_hook(count)
    atexit.register(lambda: print(f"ENDED steps={max(counts.values(), default=0)}", flush=True))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
