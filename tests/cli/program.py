"""The program without a terminal: as a process of its own, or in this process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from importlib.resources import files
from pathlib import Path

from ndd_console.__main__ import status_of
from tests import forked

# A tiny step and no end in sight.
ENDLESS = ("--set", "workload.size=tiny", "--set", "run.epochs=100000", "--set", "run.threads=1")


def environment(**extra: str) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", **extra}  # as in terminals: one server
    for name in ("NDD_RUNS", "NO_COLOR"):
        if name not in extra:
            env.pop(name, None)
    return env


def run(*arguments: str, folder: Path, timeout: float = 90, **extra: str) -> subprocess.CompletedProcess[str]:
    """The finished program, with `folder` as its runs folder and working directory."""
    return forked.run(
        ["--runs", str(folder / "runs"), *arguments],
        timeout,
        cwd=folder,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
    )


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, for what starts no process and no training."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = status_of(["--runs", str(folder / "runs"), *arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def refused(*arguments: str, folder: Path) -> str:
    """The error of a mistake: exit status 2 without a traceback or output, and nothing is written."""
    before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    done = call(*arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before
    return done.stderr


def start(*arguments: str, folder: Path, group: bool = False) -> subprocess.Popen[str]:
    """The running program. group: in a process group of its own, as a shell starts it."""
    return forked.Popen(
        ["--runs", str(folder / "runs"), *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=group,
    )


def capture_fails(folder: Path) -> tuple[str, ...]:
    """A workload whose first process fails as a capture of a CUDA graph does, after a checkpoint: the command."""
    text = files("ndd_console.cli").joinpath("example_workload.py").read_text("utf-8")
    fails = """
        if index % 100 == 77 and not Path("failed").exists():
            Path("failed").touch()
            raise CaptureError("the CUDA graph cannot be captured: planted")
"""
    marker = "    def __getitem__(self, index: int) -> tuple[Tensor, int]:\n"
    imports = "from pathlib import Path\nfrom ndd_engine.errors import CaptureError\n"
    (folder / "planted.py").write_text(
        imports + text.replace("from __future__", "# ").replace(marker, marker + fails)
    )
    sets = ("run.threads=1", "speed.cuda_graph=true", "checkpoint.every_steps=1", "batch.micro=8")
    options = (word for one in sets for word in ("--set", one))
    return "train", "--workload", "planted:factory", "--run", "one", "--max-steps", "30", *options
