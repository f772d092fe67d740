"""Runs a module as several ranks on this machine, by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

GRACE_S = 40.0  # torchrun gives ranks 30 s to end


def launch(ranks: int, module: str, *words: object, limit_s: float) -> list[Any]:
    """Run the module with a folder and these arguments; what its ranks wrote into FOLDER/RANK.json, in their order.

    Raises RuntimeError if a rank fails or takes too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory(prefix="ndd-ranks-") as folder, tempfile.TemporaryFile() as log:
        launcher = subprocess.Popen(
            [*command, "-m", module, folder, *map(str, words)], stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_S)
            launcher.kill()
            launcher.wait()
        if launcher.returncode:
            log.seek(0)
            text = log.read().decode("utf-8", "replace")
            raise RuntimeError(f"{ranks} ranks failed ({launcher.returncode}): {text[-2000:]}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def finish(folder: str, found: object) -> NoReturn:
    """Of a rank: write what it found, and end its process, whose end gloo's threads may hold up."""
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
