"""`make gpu` sets up an environment, and never replaces a torch with CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qa.gpu import setup
from qa.gpu.needs import ROOT

PYTHON = sys.executable


def environment() -> dict[str, str]:
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@dataclass
class Pip:
    """Stands in for subprocess.run: what was run, and the torch that each Python imports."""

    inner: list[Any]
    outer: list[Any]
    installs: list[Any] | None = None
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
        elif self.installs is not None and any(word.startswith("torch") for word in command):
            self.inner = self.installs
        return subprocess.CompletedProcess(command, 0, "", "")

    def installing_torch(self) -> list[list[str]]:
        return [command for command in self.ran if any(word.startswith("torch") for word in command[4:])]


NONE: list[Any] = [None, None, False, "ModuleNotFoundError: No module named 'torch'", ""]
CPU: list[Any] = ["2.13.0+cpu", None, False, "", "/venv/torch"]
CUDA: list[Any] = ["2.13.0+cu130", "13.0", True, "", "/opt/packages/torch"]
OLD: list[Any] = ["2.4.0+cu121", "12.1", True, "", "/opt/packages/torch"]


def test_a_fresh_machine_gets_torch_and_the_development_tools(tmp_path: Path) -> None:
    pip = Pip(NONE, NONE, installs=CUDA)
    how = setup.prepare(tmp_path / "venv", run=pip)
    assert "installed from the default index" in how
    (torch,) = pip.installing_torch()
    assert "--index-url" not in torch and "--force-reinstall" not in torch
    assert any(word.endswith("[dev]") for word in pip.ran[-1])
    # A second call finds everything there.
    pip.ran.clear()
    assert setup.prepare(tmp_path / "venv", run=pip) == how
    assert pip.ran == []


def test_a_torch_with_cuda_is_never_replaced(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    pip = Pip(CUDA, NONE)
    assert "kept" in setup.prepare(venv, run=pip)
    assert pip.installing_torch() == []
    limits = (venv / "constraints.txt").read_text()
    assert "torch==2.13.0+cu130" in limits, "pip has to be told to keep it"
    assert "torch==2.13.0\n" not in limits
    assert "textual==" in limits


@pytest.mark.parametrize("inner", [NONE, CPU])
def test_the_torch_of_this_python_is_used_from_where_it_is(tmp_path: Path, inner: list[Any]) -> None:
    venv = tmp_path / "venv"
    pip = Pip(inner, CUDA)
    assert setup.prepare(venv, run=pip) == "the installed torch was used"
    (pth,) = venv.rglob("*.pth")
    assert pth.read_text().strip() == "/opt/packages"
    removed = [command for command in pip.ran if "uninstall" in command]
    assert len(removed) == (inner is CPU), "a torch without CUDA in the environment would be imported first"
    assert all("install" not in command for command in pip.installing_torch())


@pytest.mark.parametrize(("inner", "outer"), [(CPU, CPU), (CPU, NONE), (NONE, OLD)])
def test_a_torch_without_cuda_or_too_old_does_not_count(
    tmp_path: Path, inner: list[Any], outer: list[Any]
) -> None:
    pip = Pip(inner, outer, installs=CUDA)
    setup.prepare(tmp_path / "venv", run=pip)
    (torch,) = pip.installing_torch()
    assert ("--force-reinstall" in torch) == (inner is CPU)


def test_an_index_for_another_cuda_is_passed_on(tmp_path: Path) -> None:
    pip = Pip(NONE, CUDA, installs=CUDA)
    how = setup.prepare(tmp_path / "venv", "https://example.org/cu126", run=pip)
    (torch,) = pip.installing_torch()
    assert torch[torch.index("--index-url") + 1] == "https://example.org/cu126"
    assert "https://example.org/cu126" in how


def test_gpus_are_found_without_installing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, proc, tools = tmp_path / "dev", tmp_path / "proc", tmp_path / "bin"
    for folder in (devices, proc, tools):
        folder.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "nvidia-smi is not installed" in setup.no_gpu(devices, proc)
    smi = tools / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n"
    )
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
            [PYTHON, "-m", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=120,
        )
        assert done.returncode == 3, done.stderr
        assert done.stdout == ""
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("make gpu needs an NVIDIA GPU: ")
    assert not venv.exists(), "nothing is installed on a machine that cannot use it"
    assert not list(tmp_path.glob("*.md"))
