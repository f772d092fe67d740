"""What `python -m benchmarks.gpu` needs of this Python: imported before anything runs, which also warms CUDA up.

Needs only the standard library, so that a package that is missing is a message and not a traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of this tree are measured, not those that may be installed.
PLACES = (ROOT, ROOT / "engine", ROOT / "tui", ROOT / "profiles")
# What all parts import, and the package that it comes from. What only some parts need is with those, see `parts`.
NEEDED = {
    "torch": "torch", "psutil": "psutil", "pynvml": "nvidia-ml-py", "pydantic": "pydantic", "tomli": "tomli",
    "tomlkit": "tomlkit",
}  # fmt: skip
# The first import from a cold disk, and the first use of cuBLAS and cuDNN, take minutes on some machines. That counts
# as part of the time limit of the command, but a short limit does not end it.
LIMIT_S = 180.0
# Prints a line before and after each import: what it was doing when it crashed or hung is then known.
_PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    print("ndd: import", name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        print("ndd: failed", name, type(error).__name__ + ": " + (str(error).splitlines() or [""])[0], flush=True)
print("ndd: imported", flush=True)
if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
    torch = sys.modules["torch"]
    images = torch.ones(8, 8, 32, 32, device="cuda", requires_grad=True)
    torch.nn.Conv2d(8, 8, 3).cuda()(images).sum().backward()
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        square = torch.ones(512, 512, device="cuda", dtype=kind)
        (square @ square).sum().item()
"""


def environment() -> dict[str, str]:
    """The variables of all processes of this command: they import this tree."""
    places = [*map(str, PLACES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}


def unmet(python: str, limit_s: float = LIMIT_S) -> str:
    """What this Python lacks, in one line; "" if nothing. It imports everything, and uses the GPU for a moment."""
    command = [python, "-W", "ignore", "-c", _PROBE, *NEEDED]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False,
            env=environment(),
        )  # fmt: skip
        printed, how = done.stdout, f"ended with status {done.returncode}"
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired as error:
        printed, how = (error.stdout or b"").decode("utf-8", "replace"), f"did not end within {limit_s:.0f} s"
    # Modules print what they like; these lines are ours.
    ours = [line.split(" ", 3)[1:] for line in printed.splitlines() if line.startswith("ndd: ")]
    begun = [words[1] for words in ours if words[0] == "import"]
    failed = {words[1]: words[2] for words in ours if words[0] == "failed"}
    # A warm-up that fails is for the part "machine" to report.
    if ["imported"] not in ours:
        if not begun:
            return f"Python {how} before it imported anything"
        failed[begun[-1]] = f"Python {how}"
    missing = [name for name, why in failed.items() if why.endswith(f"No module named {name!r}")]
    listed = [f"{name} cannot be imported ({why})" for name, why in failed.items() if name not in missing]
    if missing:
        listed.insert(0, f"not installed: {', '.join(NEEDED[name] for name in missing)}")
    return "; ".join(listed)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)
