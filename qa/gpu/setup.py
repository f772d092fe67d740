"""`python -m qa.gpu.setup VENV [options]`: install what `make gpu` needs, then run it.

Needs only the standard library. An installed torch with CUDA is never replaced: that of the environment itself is kept,
and that of this Python is used from where it is. Otherwise pip installs torch, from --torch-index if that is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Only the standard library is imported, so that a package that is missing is a message and not a traceback.
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
_IMPORTS = """
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
EXIT_USAGE, EXIT_NO_GPU, EXIT_INTERRUPTED = 2, 3, 130
LEAST_TORCH = (2, 6)
# Environment variables for the command: when it began (Unix time), and how torch was set up.
BEGAN, HOW = "NDD_GPU_BEGAN", "NDD_GPU_SETUP"
INDEX = "https://download.pytorch.org/whl/cu126"
# Printed by a Python about its torch, as JSON; a torch that cannot be imported is no torch.
_TORCH = """
import json, sys
try:
    import torch
    seen = torch.cuda.is_available()
    why = "" if seen or torch.version.cuda is None else "torch.cuda.is_available() is false"
    if why:
        try:
            torch.cuda.init()
        except Exception as error:
            why = str(error).strip().splitlines()[0]
    print(json.dumps([torch.__version__, torch.version.cuda, seen, why, torch.__path__[0]]))
except Exception as error:
    print(json.dumps([None, None, False, type(error).__name__ + ": " + str(error), ""]))
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Torch:
    """The torch of a Python.

    version, cuda: None without one. seen: whether it sees a GPU; why: why not. place: its folder.
    """

    version: str | None
    cuda: str | None
    seen: bool
    why: str
    place: str

    @property
    def usable(self) -> bool:
        """Whether it has CUDA and is new enough; it may still see no GPU."""
        return self.version is not None and self.cuda is not None and numbers(self.version) >= LEAST_TORCH


def options(about: str | None, program: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `make gpu`, in ARGS, and of `python -m benchmarks.gpu`."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument(
        "--quick", action="store_true", help="15 minutes instead of 60, with fewer and rougher figures"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="only this part; may be repeated"
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="time limit, without installing (default: 3600, with installing; 900 with --quick)",
    )
    parser.add_argument(
        "-o",
        dest="output",
        type=_markdown,
        metavar="FILE",
        help="the Markdown file (default: gpu-DATE-TIME.md); one of JSON is written beside it",
    )
    parser.add_argument("--torch-index", metavar="URL", help=f"install torch from here, such as {INDEX}")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="only check that the command works, with the smallest sizes on the CPU",
    )
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def _markdown(text: str) -> Path:
    if text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} is the name of the file of JSON; name the Markdown file")
    return Path(text)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the command, or why it cannot run."""
    given = options(__doc__, "make gpu ARGS=…", argv[1:])
    venv = Path(argv[0]).absolute()
    began = time.time()
    if not given.cpu and (why := no_gpu()):
        say(f"make gpu needs an NVIDIA GPU: {why}")
        return EXIT_NO_GPU
    try:
        how = prepare(venv, given.torch_index)
    except subprocess.CalledProcessError as error:
        say(f"installing failed with status {error.returncode}: {' '.join(map(str, error.cmd))}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to continue installing")
        return EXIT_INTERRUPTED
    os.environ.update({BEGAN: str(began), HOW: how})
    python = str(python_of(venv))
    command = [python, "-m", "benchmarks.gpu", *argv[1:]]
    os.execv(python, command)
    return 0  # never reached


def no_gpu(devices: Path = Path("/dev"), proc: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Why this machine has no NVIDIA GPU, "" if it seems to have one. Installs and imports nothing."""
    known = proc.is_dir() and any(proc.iterdir())
    if known or (devices / "nvidiactl").exists() or (devices / "dxg").exists():
        return ""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "there is no NVIDIA driver (no /dev/nvidiactl, and nvidia-smi is not installed)"
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    if done.returncode == 0 and "GPU " in done.stdout:
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"nvidia-smi reports: {lines[0] if lines else 'nothing'}"


def environment() -> dict[str, str]:
    """The variables of all processes of this command: they import this tree."""
    places = [*map(str, PLACES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}


def unmet(python: str, limit_s: float = LIMIT_S) -> str:
    """What this Python lacks, in one line; "" if nothing. It imports everything, and uses the GPU for a moment."""
    command = [python, "-W", "ignore", "-c", _IMPORTS, *NEEDED]
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


def unusable(python: str) -> str:
    """Why torch of this Python cannot use a GPU, "" if it can."""
    found = torch_of(python)
    if found.version is None:
        return f"torch cannot be imported ({found.why})"
    again = f"make gpu ARGS='--torch-index {INDEX}'"
    if found.cuda is None:
        why = "is built without CUDA; remove the environment, and install one with CUDA"
    elif not found.seen:
        why = f"for CUDA {found.cuda} sees none ({found.why}); for an older driver remove the environment, and run"
    else:
        return ""
    return f"torch {found.version} {why}: {again}"


def prepare(venv: Path, index: str | None = None, run: Run = subprocess.run) -> str:
    """Create or update the environment; returns how torch was set up. Raises subprocess.CalledProcessError."""
    python, stamp = python_of(venv), venv / ".gpu"
    if not python.exists():
        say(f"creating {venv.name}")
        run([sys.executable, "-m", "venv", str(venv)], check=True)
    inputs = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    if stamp.exists() and stamp.stat().st_mtime >= max(path.stat().st_mtime for path in inputs):
        return stamp.read_text("utf-8").strip()
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    found, how = torch_of(str(python), run), "the torch of the environment was kept"
    if not found.usable:
        outer = torch_of(sys.executable, run)
        if outer.usable and index is None:
            say(f"using the installed torch {outer.version} for CUDA {outer.cuda}")
            if found.version is not None:  # it would be imported first
                run([*pip[:3], "uninstall", "--quiet", "--yes", "torch"], check=True)
            borrow(venv, Path(outer.place).parent)
            how = "the installed torch was used"
        else:
            say("installing torch with CUDA; this downloads some gigabytes")
            # An index for another CUDA version need not have the version that the tests use.
            exact = (
                ["--index-url", index, "torch>=2.6"] if index else ["--constraint", str(inputs[1]), "torch"]
            )
            # Without this, a CPU build in the environment would satisfy the requirement.
            again = ["--force-reinstall"] if found.version is not None else []
            run([*pip, *again, *exact], check=True)
            how = f"torch was installed from {index or 'the default index'}"
        found = torch_of(str(python), run)
    say("installing the dependencies and the development tools")
    limits = venv / "constraints.txt"
    limits.write_text(constraints(inputs[1].read_text("utf-8"), found.version), "utf-8")
    run([*pip, "--constraint", str(limits), "--editable", f"{ROOT}[dev]"], check=True)
    kept = torch_of(str(python), run)
    if kept.version != found.version:
        say(f"warning: pip replaced torch {found.version} by {kept.version}")
    stamp.write_text(how, "utf-8")
    return how


def torch_of(python: str, run: Run = subprocess.run) -> Torch:
    """The torch that a Python imports."""
    try:
        done = run([python, "-c", _TORCH], capture_output=True, text=True, timeout=180, check=False)
        return Torch(*json.loads(done.stdout.strip().splitlines()[-1]))
    except (OSError, ValueError, IndexError, TypeError, subprocess.TimeoutExpired) as error:
        return Torch(None, None, False, f"{type(error).__name__}: {error}", "")


def borrow(venv: Path, packages: Path) -> None:
    """Let the environment import what is installed in another folder, after its own packages; pip then sees it, too."""
    for own in venv.glob("lib*/python3*/site-packages"):
        (own / "ndd-gpu-torch.pth").write_text(f"{packages}\n", "utf-8")


def constraints(text: str, torch: str | None) -> str:
    """The constraints with the version of torch that is installed, so that pip never replaces it."""
    lines = [line for line in text.splitlines() if not line.replace(" ", "").startswith("torch==")]
    return "\n".join([*lines, *([f"torch=={torch}"] if torch else [])]) + "\n"


def numbers(version: str) -> tuple[int, int]:
    """(major, minor) of "2.13.0+cu130"; (0, 0) if it is not a version."""
    head = version.split("+")[0].split(".")
    try:
        return int(head[0]), int(head[1])
    except (ValueError, IndexError):
        return 0, 0


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def python_of(venv: Path) -> Path:
    """Its Python."""
    return venv / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
