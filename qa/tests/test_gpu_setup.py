"""`make gpu` sets up an environment, and never replaces a torch with CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from qa.gpu import setup
from qa.gpu.setup import environment

NONE: list[Any] = [None, None, False, "ModuleNotFoundError: No module named 'torch'", ""]
CPU: list[Any] = ["2.13.0+cpu", None, False, "", "/venv/torch"]
CUDA: list[Any] = ["2.13.0+cu130", "13.0", True, "", "/opt/packages/torch"]
OLD: list[Any] = ["2.4.0+cu121", "12.1", True, "", "/opt/packages/torch"]


@dataclass
class Pip:
    """Stands in for subprocess.run: what was run, and the torch that each Python imports."""

    inner: list[Any]
    outer: list[Any]
    ran: list[list[str]] = field(default_factory=list)

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in command]
        if command[1] == "-c":
            found = self.outer if command[0] == sys.executable else self.inner
            return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(found)}\n", "")
        self.ran.append(command)
        if "venv" in command:
            venv = Path(command[-1])
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").touch()
            (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        if "uninstall" in command:
            self.inner = self.outer
        elif self.torch_of(command):
            self.inner = CUDA
        return subprocess.CompletedProcess(command, 0, "", "")

    @staticmethod
    def torch_of(command: list[str]) -> bool:
        """Whether it installs torch."""
        return "uninstall" not in command and any(word.startswith("torch") for word in command[4:])

    @property
    def installs(self) -> list[list[str]]:
        return [command for command in self.ran if self.torch_of(command)]


@pytest.mark.parametrize(
    ("inner", "outer", "index", "options"),
    [
        (NONE, NONE, None, set()),
        (CPU, CPU, None, {"--force-reinstall"}),
        (CPU, NONE, None, {"--force-reinstall"}),
        (NONE, OLD, None, set()),  # too old to count
        (NONE, CUDA, "https://example.org/cu126", {"--index-url", "https://example.org/cu126"}),
    ],
)
def test_torch_is_installed_where_none_can_be_used(
    tmp_path: Path, inner: list[Any], outer: list[Any], index: str | None, options: set[str]
) -> None:
    pip = Pip(inner, outer)
    how = setup.prepare(tmp_path / "venv", index, run=pip)
    (torch,) = pip.installs
    assert {"--force-reinstall", "--index-url", "https://example.org/cu126"} & {*torch} == options
    assert (index or "default") in how
    assert any(word.endswith("[dev]") for word in pip.ran[-1])
    # A second call finds everything there.
    pip.ran.clear()
    assert setup.prepare(tmp_path / "venv", index, run=pip) == how
    assert pip.ran == []


def test_a_torch_with_cuda_is_never_replaced(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    pip = Pip(CUDA, NONE)
    setup.prepare(venv, run=pip)
    assert pip.installs == []
    limits = (venv / "constraints.txt").read_text().splitlines()
    assert [line for line in limits if line.startswith("torch==")] == ["torch==2.13.0+cu130"]


@pytest.mark.parametrize("inner", [NONE, CPU])
def test_the_torch_of_this_python_is_used_from_where_it_is(tmp_path: Path, inner: list[Any]) -> None:
    venv = tmp_path / "venv"
    pip = Pip(inner, CUDA)
    setup.prepare(venv, run=pip)
    (pth,) = venv.rglob("*.pth")
    assert pth.read_text().strip() == "/opt/packages"
    removed = [command for command in pip.ran if "uninstall" in command]
    assert len(removed) == (inner is CPU), "a torch without CUDA in the environment would be imported first"
    assert pip.installs == []


def test_gpus_are_found_without_installing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, proc, tools = tmp_path / "dev", tmp_path / "proc", tmp_path / "bin"
    for folder in (devices, proc, tools):
        folder.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "nvidia-smi" in setup.no_gpu(devices, proc)
    smi = tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'it could not communicate with the driver'\nexit 9\n")
    smi.chmod(0o755)
    assert "could not communicate" in setup.no_gpu(devices, proc)
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A10 (UUID: GPU-1)'\n")
    assert setup.no_gpu(devices, proc) == ""
    smi.unlink()
    (devices / "nvidiactl").touch()
    assert setup.no_gpu(devices, proc) == ""


@pytest.mark.long
@pytest.mark.skipif(not setup.no_gpu(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_there_is_one_message_and_exit_status_3(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    for arguments in (["benchmarks.gpu.setup", str(venv), "--quick"], ["benchmarks.gpu"]):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment(),
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        assert done.stdout == "" and "NVIDIA GPU" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [], "nothing is installed on a machine that cannot use it"
