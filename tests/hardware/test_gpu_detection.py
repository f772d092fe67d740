"""The right GPU or the CPU is chosen, with a reason that the user can act on; and what `ndd-console gpu` says."""

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
from ndd_console.words.blocks import NamedValues
from ndd_console.words.machine import machine_blocks
from ndd_engine.errors import MachineError, UsageError
from ndd_engine.hardware.detect import Nvml, detect, with_free_memory
from ndd_engine.hardware.gpus import Machine

L4, H200 = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"
MIG_A, MIG_B = "MIG-cccccccc-0000-0000-0000-00000000000a", "MIG-cccccccc-0000-0000-0000-00000000000b"


@pytest.fixture
def pair(fakes: Any) -> Any:
    """An L4 on the first bus and an H200 on the second: CUDA puts the H200 first, NVML the L4."""
    return [
        fakes.gpu(b"NVIDIA L4", L4, 23034 << 20, capability=(8, 9)),
        fakes.gpu("NVIDIA H200", H200, 143771 << 20),
    ]


@pytest.fixture
def divided(fakes: Any) -> Any:
    """An A100 with two MIG instances."""
    name = "NVIDIA A100-SXM4-80GB"
    parts = [fakes.gpu(f"{name} MIG 3g.40gb", uuid, 40 << 30, capability=(8, 0)) for uuid in (MIG_A, MIG_B)]
    return fakes.gpu(name, "GPU-dddddddd", 80 << 30, capability=(8, 0), instances=parts)


def look(library: Any, choice: str = "auto", torch: Any = None, **environ: str) -> Machine:
    return detect(choice, torch is not None, nvml=Nvml(library), torch=torch, environ=environ)


def test_no_driver_here_gives_the_cpu_and_the_reason(monkeypatch: pytest.MonkeyPatch, fakes: Any) -> None:
    library = fakes.nvml()
    library.failing.add("nvmlInit")
    machine = look(library)
    assert (machine.device, machine.chosen, machine.gpus) == ("cpu", None, ())
    assert "nvmlInit failed" in machine.reasons["device"]

    without_gpu = look(fakes.nvml())
    assert without_gpu.device == "cpu" and "no GPU" in without_gpu.reasons["device"]

    class NVMLError_LibraryNotFound(Exception):  # noqa: N801, N818 - pynvml's own name
        pass

    def missing() -> None:
        raise NVMLError_LibraryNotFound

    library = fakes.nvml()
    monkeypatch.setattr(type(library), "nvmlInit", lambda self: missing())
    assert "not found" in look(library).reasons["device"]


def test_torch_order_is_matched_by_uuid(pair: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(*pair), torch=fakes.torch(pair[1], pair[0]))
    assert machine.device == "cuda:0" and machine.chosen is not None
    assert (machine.chosen.name, machine.chosen.nvml_index, machine.chosen.index) == ("NVIDIA H200", 1, 0)
    assert machine.gpus[0].index == 1 and machine.gpus[0].name == "NVIDIA L4"
    assert machine.chosen.profile is not None and machine.chosen.profile.slug == "h200-sxm"
    chosen = machine.chosen
    assert (chosen.driver, chosen.cuda_driver, chosen.cuda_torch) == ("550.54.15", "12.4", "12.6")
    assert look(fakes.nvml(*pair), "cuda:1", fakes.torch(pair[1], pair[0])).chosen == machine.gpus[0]


def test_hidden_gpu_stays_listed(pair: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(*pair), torch=fakes.torch(pair[0]), CUDA_VISIBLE_DEVICES=L4)
    assert machine.chosen is machine.gpus[0] and machine.gpus[1].index is None
    assert machine.gpus[1].reasons["index"]
    with pytest.raises(MachineError, match=r"cuda:1 .*cuda:0"):
        look(fakes.nvml(*pair), "cuda:1", fakes.torch(pair[0]))


@pytest.mark.parametrize(
    ("environ", "chosen", "indices"),
    [
        ({"CUDA_VISIBLE_DEVICES": H200}, "NVIDIA H200", [None, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"}, "NVIDIA H200", [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "NVIDIA H200", [None, 0]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "NVIDIA L4", [0, None]),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "NVIDIA H200", [1, 0]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "NVIDIA L4", [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, None, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, None, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-zzzz"}, None, [None, None]),
    ],
)
def test_visible_devices_without_torch(
    pair: Any, fakes: Any, environ: dict[str, str], chosen: str | None, indices: list[int | None]
) -> None:
    machine = look(fakes.nvml(*pair), **environ)
    assert (machine.chosen.name if machine.chosen else None) == chosen
    assert [gpu.index for gpu in machine.gpus] == indices
    if chosen is None:
        assert machine.device == "cpu" and "CUDA_VISIBLE_DEVICES" in machine.reasons["device"]
        with pytest.raises(MachineError, match="cuda"):
            look(fakes.nvml(*pair), "cuda", **environ)


def test_unlike_gpu_are_not_numbered_by_guess(pair: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(*pair))
    assert machine.device == "cuda:0" and [gpu.index for gpu in machine.gpus] == [None, None]
    assert "fastest" in machine.reasons["device"]


def test_mig_instances_stand_for_their_gpu(divided: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(divided))
    assert [gpu.uuid for gpu in machine.gpus] == [MIG_A, MIG_B]
    first = machine.gpus[0]
    assert first.mig and (first.mig_profile, first.mig_parent) == ("3g.40gb", "GPU-dddddddd")
    assert first.memory_total_bytes == 40 << 30 and "whole GPU" in first.reasons["profile"]
    assert machine.chosen is first and machine.gpus[1].index is None
    second = look(fakes.nvml(divided), CUDA_VISIBLE_DEVICES=MIG_B)
    assert second.chosen is second.gpus[1]


@pytest.mark.parametrize("answers", ["instance", "whole gpu"])
def test_torch_on_mig(divided: Any, fakes: Any, answers: str) -> None:
    """CUDA may name the instance or the whole GPU."""
    torch = fakes.torch(divided.instances[1] if answers == "instance" else divided)
    machine = look(fakes.nvml(divided), torch=torch, CUDA_VISIBLE_DEVICES=MIG_B)
    assert machine.chosen is machine.gpus[1] and machine.device == "cuda:0"


def test_mig_on_without_instance_cannot_be_used(fakes: Any) -> None:
    machine = look(fakes.nvml(fakes.gpu("NVIDIA A100-SXM4-80GB", "GPU-d", 80 << 30, instances=[])))
    assert machine.device == "cpu" and "no instance" in machine.gpus[0].reasons["mig"]


def test_torch_without_cuda_is_a_warning_where_a_gpu_is(pair: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(pair[0]), torch=fakes.torch(cuda=None))
    (problem,) = machine.problems
    assert machine.device == "cpu" and machine.reasons["device"] == problem
    assert "2.13.0+cpu" in problem and "NVIDIA L4" in problem
    assert look(fakes.nvml(), torch=fakes.torch(cuda=None)).problems == ()
    with pytest.raises(MachineError, match="NVIDIA L4"):
        look(fakes.nvml(pair[0]), "cuda", fakes.torch(cuda=None))


def test_torch_that_fails_is_a_warning(pair: Any, fakes: Any) -> None:
    torch = fakes.torch(pair[0])

    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: unknown error")

    torch.cuda.get_device_properties = fail
    machine = look(fakes.nvml(pair[0]), torch=torch)
    assert machine.device == "cpu" and "unknown error" in machine.problems[0]


def test_gpu_that_only_torch_sees(pair: Any, fakes: Any) -> None:
    library = fakes.nvml()
    library.failing.add("nvmlInit")
    machine = look(library, torch=fakes.torch(pair[1]))
    assert machine.device == "cuda:0" and machine.chosen is not None
    assert machine.chosen.nvml_index is None and "NVML" in machine.chosen.reasons["nvml"]


@pytest.mark.parametrize("absent", ["memory", "all of NVML"])
def test_free_memory_that_nvml_does_not_report_is_that_of_cuda(pair: Any, fakes: Any, absent: str) -> None:
    library, torch = fakes.nvml(*pair), fakes.torch(*pair)
    library.failing.add("nvmlDeviceGetMemoryInfo" if absent == "memory" else "nvmlInit")
    torch.cuda.mem_get_info = lambda index: ((9 - index) << 30, 20 << 30)  # torch.cuda.mem_get_info(device)
    machine = look(library, "cuda:1", torch)
    assert machine.free_bytes is None
    found = with_free_memory(machine, torch)
    assert found.free_bytes == 8 << 30 and found.chosen in found.gpus and found.chosen is not None
    assert "CUDA" in found.chosen.reasons["memory"]

    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    torch.cuda.mem_get_info = fail
    assert with_free_memory(machine, torch).free_bytes is None


def test_free_memory_that_nvml_reports_needs_no_context(pair: Any, fakes: Any) -> None:
    machine = look(fakes.nvml(*pair), torch=fakes.torch(*pair))
    assert with_free_memory(machine, None) is machine


@pytest.mark.parametrize("survives", range(0, 36, 3))
def test_driver_that_breaks_midway_never_raises(pair: Any, fakes: Any, survives: int) -> None:
    library = fakes.nvml(*pair)
    library.survives = survives
    machine = look(library)
    assert machine.device in ("cpu", "cuda:0")
    json.dumps(machine.to_dict(), allow_nan=False)


def test_choices(pair: Any, fakes: Any) -> None:
    assert look(fakes.nvml(*pair), "cpu").device == "cpu"
    with pytest.raises(UsageError, match="tpu"):
        look(fakes.nvml(*pair), "tpu")
    with pytest.raises(MachineError, match="no GPU"):
        look(fakes.nvml(), "cuda:3")


def test_event_form_is_json(divided: Any, fakes: Any) -> None:
    divided.instances[0].processes = [(1, None), (4_000_000, 5 << 30)]
    body = json.loads(json.dumps(look(fakes.nvml(divided)).gpus[0].to_dict()))
    assert body["compute_capability"] == [8, 0] and body["profile"]["slug"] == "a100-80gb-sxm"
    assert body["processes"][1] == {"pid": 4_000_000, "used_bytes": 5 << 30, "name": None}


# `ndd-console gpu`.


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
    assert isinstance(first_facts, NamedValues) and isinstance(odd_facts, NamedValues)
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
