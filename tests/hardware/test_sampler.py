"""The sampler reports correct values, and survives errors of the driver."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import until

from ndd_engine.hardware.counters import HostCounters
from ndd_engine.hardware.detect import Nvml, list_gpus
from ndd_engine.hardware.gpus import Gpu, detect_host
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.event import GPU_KEYS, HOST_KEYS
from ndd_engine.record.events import SampleEvent, parse

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
UUID = "GPU-bbbbbbbb-0000-0000-0000-000000000002"


def ignore(event: SampleEvent) -> None: ...


def test_this_machine_without_a_gpu(tmp_path: Path) -> None:
    sampler = Sampler(None, ignore, run_dir=tmp_path)
    time.sleep(0.1)
    sample = sampler.read_once()
    sampler.stop()
    host = sample.host
    assert sample.gpu is None and tuple(host) == HOST_KEYS and sampler.errors == 0
    assert 0 <= host["cpu_percent"] <= 100 and all(0 <= core <= 100 for core in host["cpu_per_core"])
    assert host["rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < host["memory_available_bytes"] <= psutil.virtual_memory().total
    assert host["disk_free_bytes"] > 0
    assert parse(sample.to_json(1.0)) == (1.0, sample)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_first_child_is_seen_soon() -> None:
    """`ndd-console run` starts its script after the first sample. In a process without other children."""
    words = """
import subprocess, sys, time
from ndd_engine.hardware.counters import HostCounters
from ndd_engine.hardware.gpus import detect_host
counters = HostCounters(detect_host(), None, print)
counters.read()
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
    begin = time.monotonic()
    while not (found := counters.read()["workers"]) and time.monotonic() - begin < 60:
        time.sleep(0.1)
    print(found)
    child.kill()
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.long
def test_memory_and_workers_are_those_of_the_process_that_trains() -> None:
    """`ndd-console run` trains in another process, and the CPU time of all belongs to the run."""
    words = "import subprocess, sys; held = bytearray(200 << 20)"
    words += "; c = subprocess.Popen([sys.executable, '-c', 'input()'])"
    sampler = Sampler(None, ignore)
    sampler.follow(None, None)
    assert sampler.read_once().host["rss_bytes"] is None
    command = [sys.executable, "-c", f"{words}; print(flush=True); c.wait()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        sampler.follow(child.pid, None)
        host = sampler.read_once().host
        child.communicate()
    time.sleep(0.1)
    gone = sampler.read_once().host
    assert host["rss_bytes"] > 200 << 20 and host["workers"] == 1 and host["workers_rss_bytes"] < 100 << 20
    # A launcher may start it again.
    assert gone["rss_bytes"] is None and gone["process_cpu_percent"] is not None


@pytest.mark.long
@linux
def test_children_that_have_ended_were_part_of_the_run() -> None:
    """Workers of a short epoch live for less than the time from one sample to the next."""
    sampler = Sampler(None, ignore)
    time.sleep(0.1)
    sampler.read_once()
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-c", "for _ in range(20_000_000): pass"], check=True)
    percent = sampler.read_once().host["process_cpu_percent"]
    elapsed, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    sampler.stop()
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert percent * elapsed / 100 > 0.7 * spent


@linux
def test_available_memory_and_share_of_a_quota_are_the_groups(
    tree: Callable[[dict[str, str]], Path],
) -> None:
    job = {
        "cpu.max": "50000 100000\n", "cpu.stat": "usage_usec 1000000\nuser_usec 1\n", "memory.max": f"{4 << 30}\n",
        "memory.current": f"{3 << 30}\n", "memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
    }  # fmt: skip
    root = tree(
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            **{f"sys/fs/cgroup/job/{name}": text for name, text in job.items()},
        }
    )
    counters = HostCounters(detect_host(root, 64), None, lambda *_: None, root=root)
    counters.read()
    time.sleep(0.2)
    (root / "sys/fs/cgroup/job/cpu.stat").write_text("usage_usec 1050000\nuser_usec 1\n")
    body = counters.read()
    assert body["memory_available_bytes"] == 2 << 30 and body["memory_limit_bytes"] == 4 << 30
    assert 0 < body["cpu_percent"] <= 50.5  # 0.05 s in 0.2 s or more, of half a core


@pytest.fixture
def library(fakes: Any) -> Any:
    gpu = fakes.gpu("NVIDIA H200", UUID, 143771 << 20, used=20 << 30)
    gpu.processes = [(os.getpid(), 8 << 30), (4_000_000, 11 << 30)]
    gpu.bits = 0x1 | 0x2 | 0x4 | 0x20
    return fakes.nvml(gpu)


def h200(library: Any) -> Gpu:
    return list_gpus(Nvml(library))[0]


def test_gpu_counters(library: Any) -> None:
    sampler = Sampler(h200(library), ignore, nvml=Nvml(library))
    gpu = sampler.read_once().gpu
    assert gpu is not None and tuple(gpu) == GPU_KEYS and None not in gpu.values()
    assert (gpu["util_percent"], gpu["temperature_c"], gpu["power_w"]) == (63, 55, 312.5)
    assert gpu["memory_others_bytes"] == 12 << 30 and gpu["processes"] == 1
    assert gpu["throttle"] == ["power cap", "thermal"]
    assert gpu["pcie_rx_bytes_s"] == 2 * gpu["pcie_tx_bytes_s"]
    json.dumps(gpu)


def test_another_process_of_the_run_decides_which_gpu_is_sampled(fakes: Any) -> None:
    library = fakes.nvml(
        fakes.gpu("NVIDIA L4", "GPU-a", 23 << 30), fakes.gpu("NVIDIA H200", "GPU-b", 141 << 30)
    )
    sampler = Sampler(None, ignore, nvml=Nvml(library))
    assert sampler.read_once().gpu is None
    second = list_gpus(Nvml(library))[1]
    sampler.follow(None, second)
    gpu = sampler.read_once().gpu
    assert gpu is not None and gpu["memory_total_bytes"] == 141 << 30
    sampler.follow(None, None)
    assert sampler.read_once().gpu is None


def test_a_run_in_a_container_is_not_its_own_neighbour(fakes: Any) -> None:
    """The driver lists ids of the host; this process and the script have others."""
    fake = fakes.gpu("NVIDIA L4", "GPU-a", 23 << 30, processes=[(4_000_000, 2 << 30)])
    library = fakes.nvml(fake)
    sampler = Sampler(None, ignore, nvml=Nvml(library))
    sampler.follow(None, list_gpus(Nvml(library))[0])
    gpu = sampler.read_once().gpu
    assert gpu is not None and gpu["processes"] is None and gpu["memory_others_bytes"] is None
    assert "container" in sampler.reasons["processes"]
    # Where the ids are those of this process, the other one is a neighbour.
    fake.processes.append((os.getpid(), 1 << 30))
    gpu = sampler.read_once().gpu
    assert gpu is not None and gpu["processes"] == 1 and "processes" not in sampler.reasons


def test_hidden_process_memory_is_null_not_zero(library: Any) -> None:
    library.gpus[0].processes = [(os.getpid(), None), (4_000_000, None)]
    sampler = Sampler(h200(library), ignore, nvml=Nvml(library))
    gpu = sampler.read_once().gpu
    assert gpu is not None and gpu["memory_others_bytes"] is None and gpu["processes"] == 1
    assert "per process" in sampler.reasons["memory_others_bytes"]
    library.failing.add("nvmlDeviceGetComputeRunningProcesses")
    gpu = sampler.read_once().gpu
    assert gpu is not None and gpu["processes"] is None and gpu["memory_used_bytes"] == 20 << 30


def test_mig_has_its_own_memory_and_its_gpu_power(fakes: Any) -> None:
    part = fakes.gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG-c", 40 << 30, used=3 << 30)
    whole = fakes.gpu("NVIDIA A100-SXM4-80GB", "GPU-d", 80 << 30, instances=[part])
    library = fakes.nvml(whole)
    library.failing.add("nvmlDeviceGetUtilizationRates")
    gpu = Sampler(h200(library), ignore, nvml=Nvml(library)).read_once().gpu
    assert gpu is not None and gpu["util_percent"] is None
    assert (gpu["memory_total_bytes"], gpu["power_w"]) == (40 << 30, 312.5)


def test_a_driver_that_dies_leaves_nulls_and_the_host(library: Any) -> None:
    seen: list[SampleEvent] = []
    sampler = Sampler(h200(library), seen.append, period_s=0.05, nvml=Nvml(library))
    sampler.start()
    until(lambda: seen)
    library.survives = 0
    count = len(seen)
    until(lambda: len(seen) > count + 2)
    sampler.stop()
    last = seen[-1]
    assert last.gpu is not None and last.gpu["temperature_c"] is None and last.gpu["util_percent"] is None
    assert last.host["rss_bytes"] > 0 and "failed" in sampler.reasons["temperature_c"]


def test_a_sink_that_fails_is_counted_and_sampling_goes_on() -> None:
    calls: list[int] = []

    def sink(event: SampleEvent) -> None:
        calls.append(1)
        raise OSError("disk full")

    sampler = Sampler(None, sink, period_s=0.03)
    sampler.start()
    until(lambda: len(calls) >= 3)
    sampler.stop()
    assert sampler.errors >= 3 and sampler.last_error is not None and "disk full" in sampler.last_error
    stopped = len(calls)
    time.sleep(0.1)
    assert len(calls) == stopped


def test_a_sampler_can_start_again(library: Any) -> None:
    seen: list[SampleEvent] = []
    sampler = Sampler(h200(library), seen.append, period_s=0.05, nvml=Nvml(library))
    sampler.start()
    sampler.start()
    until(lambda: seen)
    sampler.stop()
    sampler.stop()
    count = len(seen)
    sampler.start()
    until(lambda: len(seen) > count)
    sampler.stop()
    assert seen[-1].gpu is not None


def test_without_driver_the_gpu_is_null(library: Any, fakes: Any) -> None:
    absent = fakes.nvml()
    absent.failing.add("nvmlInit")
    sampler = Sampler(h200(library), ignore, nvml=Nvml(absent))
    assert sampler.read_once().gpu is None and "nvmlInit failed" in sampler.reasons["gpu"]


@pytest.mark.parametrize(
    ("line", "swapped"), [("VmSwap:\t    2048 kB\n", 2 << 20), ("VmSwap:\t0 kB\n", 0), ("", None)]
)
def test_memory_in_swap_is_that_of_the_process_that_trains(
    tmp_path: Path, line: str, swapped: int | None
) -> None:
    status = tmp_path / "proc" / str(os.getpid()) / "status"
    status.parent.mkdir(parents=True)
    status.write_text(f"Name:\tpython\nVmRSS:\t  9 kB\n{line}Threads:\t1\n")
    counters = HostCounters(detect_host(tmp_path, 8), None, lambda *_: None, root=tmp_path)
    assert counters.read()["swap_bytes"] == swapped
    counters.follow(None)
    assert counters.read()["swap_bytes"] is None
