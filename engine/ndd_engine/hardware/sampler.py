"""The thread that samples the counters of GPU and host during a run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ndd_engine.record.event import GPU_KEYS
from ndd_engine.record.events import SampleEvent

from .counters import SLOW_EVERY, HostCounters, Json
from .detect import COUNTERS, MemoryReading, Nvml
from .gpus import Gpu, GpuProcess, Host, detect_host

# Counters that are read every SLOW_EVERY samples.
SLOW = ("power_limit_w", "sm_clock_max_mhz", "pcie_rx_bytes_s", "pcie_tx_bytes_s")
# Seconds to the first sample of a run, so that a screen shows figures soon.
_FIRST_S = 0.25


class Sampler:
    """Calls `sink` with a SampleEvent every `period_s` seconds, in its own daemon thread.

    Never raises: a counter that cannot be read is null; `errors` counts failures, `last_error` has the latest and
    `reasons` the reason per counter. Without a GPU or NVML the sample's `gpu` is null.

    GPU counters (GPU_KEYS) come from NVML. memory_others_bytes: memory used by other processes, null if the driver
    does not report it per process. processes: number of other processes. throttle: list of reasons. On a MIG instance
    temperature, power, clocks and PCIe are of the whole GPU. PCIe, limits and free disk space are read every fifth
    sample.

    Host counters (HOST_KEYS). cpu_percent: relative to the usable CPU (the quota, or the cores of the
    affinity, listed in cpu_per_core). process_cpu_percent: relative to one core, with child processes, also those that
    have ended. ranks_cpu_percent: the same of the other ranks on this host, null if there are none. rss_bytes: of the
    process that trains; workers, workers_rss_bytes: its child processes. Shared pages count in every process.
    workers_private_bytes: without them; workers_shared_bytes: pages of the parent that none of them has written since
    the fork. Both are read less often, and null between.
    neighbours: the busiest other processes; stoppable is true for those of this user that are no system processes.
    cpu_throttled: share of time throttled by the cgroup quota (0..1).
    """

    def __init__(
        self,
        gpu: Gpu | None,
        sink: Callable[[SampleEvent], None],
        period_s: float = 1.0,
        run_dir: Path | None = None,
        nvml: Nvml | None = None,
        host: Host | None = None,
        ranks: Sequence[int] = (),
        pid: int | None = None,
    ) -> None:
        """ranks: process ids of the other ranks of this run on this host, which are not "others". pid: of the first
        process of the run; this one by default.
        """
        self._gpu, self._sink, self._period_s = gpu, sink, max(period_s, 0.01)
        self._nvml = nvml if nvml is not None else Nvml()
        self._own_nvml = nvml is None
        self._handle: Any = None
        self._whole: Any = None
        self._pid: int | None = os.getpid() if pid is None else pid
        # Whether another process of this run uses the GPU.
        self._used = False
        self._slow: Json = {}
        self._count = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.errors = 0
        self.last_error: str | None = None
        self._host_reasons: dict[str, str] = {}
        self._counters: HostCounters | None = None
        with self._guarded("host"):  # without counters the samples are null
            known = host if host is not None else detect_host()
            self._counters = HostCounters(known, run_dir, self._note, ranks, pid)
            self._counters.read(fresh=True)  # what the first rates are counted from
        self._find_gpu()

    @property
    def reasons(self) -> dict[str, str]:
        """Counter -> why it is null."""
        reasons = {**self._nvml.reasons, **self._host_reasons}
        if self._gpu is not None and self._nvml.reason:
            reasons["gpu"] = self._nvml.reason
        return reasons

    def follow(self, pid: int | None, gpu: Gpu | None) -> None:
        """From now on another process trains, on this GPU; None before it is known, and on the CPU."""
        with self._lock:
            if self._counters is not None and pid != self._pid:
                self._counters.follow(pid)
            self._pid = pid
            self._gpu, self._used, self._handle, self._whole = gpu, gpu is not None, None, None
            self._slow, self._count = {}, 0
            self._find_gpu()

    @property
    def followed(self) -> tuple[int | None, Gpu | None]:
        """(id of the process that trains, its GPU)."""
        return self._pid, self._gpu

    def start(self) -> None:
        """Start sampling; no effect if it is already running."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping.clear()
        if self._handle is None:  # stop() closed it
            self._find_gpu()
        self._thread = threading.Thread(target=self._run, name="ndd-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop sampling and wait for the thread, up to the timeout (it may hang in a driver or network disk)."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._thread = None
        with self._guarded("stop"):
            if self._own_nvml:
                self._nvml.close()
                self._handle = self._whole = None

    def read_once(self) -> SampleEvent:
        """Take a sample now, with a new search for child processes. Rates are since the previous sample or start."""
        return self._read(fresh=True)

    def _run(self) -> None:
        due = time.monotonic() + min(self._period_s, _FIRST_S)
        while not self._stopping.wait(max(due - time.monotonic(), 0.0)):
            with self._guarded("sink"):  # one that fails must not end the samples
                self._sink(self._read(fresh=False))
            due = max(due + self._period_s, time.monotonic())

    def _read(self, fresh: bool) -> SampleEvent:
        with self._lock:  # read_once may meet the thread
            host: Json = {}
            gpu: Json | None = None
            with self._guarded("host"):
                if self._counters is not None:
                    host = self._counters.read(fresh)
            with self._guarded("gpu"):
                gpu = self._read_gpu()
            return SampleEvent(gpu=gpu, host=host)

    def _note(self, signal: str, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{signal}: {type(error).__name__}: {error}"
        self._host_reasons[signal] = str(error) or type(error).__name__

    @contextmanager
    def _guarded(self, signal: str) -> Iterator[None]:
        """The observer never raises: an error is noted."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._note(signal, error)

    def _find_gpu(self) -> None:
        gpu = self._gpu
        with self._guarded("gpu"):
            if gpu is None or gpu.uuid is None or not self._nvml.open():
                return
            self._handle = self._nvml.handle_by_uuid(gpu.uuid)
            if self._handle is None and gpu.nvml_index is not None and not gpu.mig:
                self._handle = self._nvml.handle(gpu.nvml_index)
            self._whole = self._handle
            if gpu.mig and gpu.mig_parent is not None:
                self._whole = self._nvml.handle_by_uuid(gpu.mig_parent)

    def _read_gpu(self) -> Json | None:
        if self._handle is None:
            return None
        nvml, handle, whole = self._nvml, self._handle, self._whole
        body: Json = dict.fromkeys(GPU_KEYS)
        util = nvml.utilization(handle)
        if util is not None:
            body["util_percent"], body["mem_util_percent"] = util
        memory, processes = nvml.memory(handle), nvml.processes(handle)
        if memory is not None:
            body["memory_used_bytes"] = memory.used_bytes
            body["memory_free_bytes"] = memory.free_bytes
            body["memory_total_bytes"] = memory.total_bytes
        body.update(self._others(memory, processes))
        if whole is not None:
            body["throttle"] = nvml.throttle(whole)
            if self._count % SLOW_EVERY == 0:
                self._slow = {name: nvml.counter(name, whole) for name in SLOW}
            body |= self._slow | {name: nvml.counter(name, whole) for name in COUNTERS if name not in SLOW}
        self._count += 1
        return body

    def _others(self, memory: MemoryReading | None, processes: tuple[GpuProcess, ...] | None) -> Json:
        """Processes and memory of others on the GPU; null if unknown."""
        if processes is None:
            return {}
        ours = {os.getpid()} if self._counters is None else self._counters.family
        mine = [process for process in processes if process.pid in ours]
        if not mine and (self._used or _holds_a_gpu()):
            # A process of this run uses the GPU but is not listed: in a container the driver may report other process
            # ids, and this run is one of those that it lists.
            why = "the driver does not list the process of this run (container?)"
            self._nvml.reasons.update(processes=why, memory_others_bytes=why)
            return {}
        self._nvml.reasons.pop("processes", None)
        body: Json = {"processes": len(processes) - len(mine)}
        sizes = [process.used_bytes for process in mine]
        if memory is not None:
            if None in sizes:
                self._nvml.reasons["memory_others_bytes"] = "the driver does not report memory per process"
            else:
                self._nvml.reasons.pop("memory_others_bytes", None)
                body["memory_others_bytes"] = max(memory.used_bytes - sum(size or 0 for size in sizes), 0)
        return body


def _holds_a_gpu() -> bool:
    """Whether torch has initialised CUDA in this process; does not import torch."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())
