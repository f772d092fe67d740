"""Starts a module as several ranks on this machine, by torchrun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

GRACE_S = 40.0  # torchrun gives ranks 30 s to end


def launch(ranks: int, module: str, *words: object, limit_s: float) -> None:
    """Run the module with these arguments. Raises RuntimeError if a rank fails or takes too long."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "-m", module, *map(str, words),
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
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
