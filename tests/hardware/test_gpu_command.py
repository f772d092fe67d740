"""`ndd-console gpu`: one document or readable text, at once, and safe for the terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from tests.waiting import LIMIT_S

from ndd_console.cli import gpu as command
from ndd_console.render.text import lines
from ndd_console.words.blocks import Facts
from ndd_console.words.machine import machine_blocks
from ndd_engine.hardware.detect import Nvml, detect


def test_json_is_one_document() -> None:
    result = CliRunner().invoke(command.gpu, ["--json"])
    body = json.loads(result.stdout)
    assert result.exit_code == 0 and body["device"] and body["host"]["usable_cpus"] > 0
    assert set(body) == {"device", "chosen", "gpus", "host", "reasons", "problems"}


@pytest.mark.long
def test_without_a_gpu_torch_is_not_imported() -> None:
    code = (
        "import sys, json\n"
        "import ndd_engine.hardware.detect as engine\n"
        "engine.Nvml.open = lambda self: (setattr(self, 'reason', 'no NVIDIA driver: tested'), False)[1]\n"
        "from ndd_console.cli.gpu import gpu\n"
        "gpu([], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "tested" in done.stdout


def test_gpu_is_described_with_its_reasons(fakes: Any) -> None:
    first = fakes.gpu("NVIDIA H200", "GPU-b", 143771 << 20, used=20 << 30, processes=[(4_000_000, 19 << 30)])
    odd = fakes.gpu("NVIDIA Odd\x1b[31mCard", "GPU-c", 8 << 30)
    machine = detect("auto", nvml=Nvml(fakes.nvml(first, odd)), torch=fakes.torch(first), environ={})
    first_facts, odd_facts, _ = machine_blocks(machine)
    assert isinstance(first_facts, Facts) and isinstance(odd_facts, Facts)
    facts = dict(first_facts.rows)
    assert facts["GPU"] == "NVIDIA H200" and "550.54.15" in facts["driver"]
    assert re.findall("[0-9.]+", facts["memory"])[:2] == ["140", "120"]
    assert "bf16 989" in facts["peak"]
    assert re.findall("[0-9.]+", facts["in use"]) == ["20.0", "4000000", "19.0"]
    assert machine.gpus[1].reasons["index"] in dict(odd_facts.rows)["device"]
    text = "\n".join(lines(machine_blocks(machine)))
    assert "\x1b" not in text and "\\x1b[31m" in text


def test_gpu_ask_torch(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch knows its numbering: it is queried if there is a GPU."""
    gpu = fakes.gpu("NVIDIA L4", "GPU-b", 23034 << 20, capability=(8, 9))
    asked: list[bool] = []

    def fake_detect(choice: str = "auto", use_torch: bool = True) -> Any:
        asked.append(use_torch)
        return detect(choice, use_torch, nvml=Nvml(fakes.nvml(gpu)), torch=fakes.torch(gpu), environ={})

    monkeypatch.setattr(command, "detect", fake_detect)
    result = CliRunner().invoke(command.gpu)
    assert result.exit_code == 0 and asked == [False, True] and "cuda:0" in result.stdout
