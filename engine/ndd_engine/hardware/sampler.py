"""The thread that reads the counters of the card and the host while a run trains, and never disturbs it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndd_engine.record.events import SampleEvent

from .counters import SLOW_EVERY, Json, LinuxCounters
from .counters_psutil import PsutilCounters
from .gpu import Gpu
from .host import Host, detect_host
from .nvml import GpuProcess, MemoryReading, Nvml

GPU_KEYS = (
    "util_percent",
    "mem_util_percent",
    "memory_used_bytes",
    "memory_free_bytes",
    "memory_total_bytes",
    "memory_others_bytes",
    "temperature_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "mem_clock_mhz",
    "throttle",
    "pcie_rx_bytes_s",
    "pcie_tx_bytes_s",
    "processes",
)
# Seconds to the first sample of a run, so that a screen does not wait a whole period for figures.
_FIRST_S = 0.25


class Sampler:
    """Calls `sink` with a SampleEvent every `period_s` seconds, from a daemon thread of its own.

    Nothing here raises: a signal that cannot be read is null, the error is counted in `errors`, told by
    `last_error`, and `reasons` says it for each signal. card None, or no NVML: the sample's card is null.

    A card's counters are those of NVML: memory_others_bytes is what is used on the card and not by this
    process and its children (null when the driver hides who uses what), processes counts the others,
    throttle is a list of words. On a MIG instance temperature, power, clocks and PCIe are of the whole
    card. PCIe, the limits and the disk's free space are read at every fifth sample and kept in between. The
    host's are in counters.HOST_KEYS: cpu_percent is of what this process may use (the quota, or the cores
    of its affinity, which cpu_per_core lists), process_cpu_percent is of one core, with the children;
    resident memory counts pages that processes share in each of them. neighbours: the busiest other processes (see
    hardware.neighbours); cpu_throttled: share of time in which the control group's quota held its processes up.
    """

    def __init__(
        self,
        card: Gpu | None,
        sink: Callable[[SampleEvent], None],
        period_s: float = 1.0,
        run_dir: Path | None = None,
        nvml: Nvml | None = None,
        host: Host | None = None,
    ) -> None:
        self._card, self._sink, self._period_s = card, sink, max(period_s, 0.01)
        self._nvml = nvml if nvml is not None else Nvml()
        self._own_nvml = nvml is None
        self._handle: Any = None
        self._whole: Any = None
        self._slow: Json = {}
        self._count = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.errors = 0
        self.last_error: str | None = None
        self._host_reasons: dict[str, str] = {}
        self._counters: LinuxCounters | PsutilCounters | None = None
        try:
            known = host if host is not None else detect_host()
            kind = LinuxCounters if sys.platform == "linux" else PsutilCounters
            self._counters = kind(known, run_dir, self._note)
            self._counters.read(fresh=True)  # what the first rates are counted from
        except Exception as error:  # noqa: BLE001 - without counters the samples are null
            self._note("host", error)
        self._guard_find()

    @property
    def reasons(self) -> dict[str, str]:
        """Why a signal is null: signal -> words."""
        reasons = {**self._nvml.reasons, **self._host_reasons}
        if self._card is not None and self._nvml.reason:
            reasons["card"] = self._nvml.reason
        return reasons

    def start(self) -> None:
        """Begin sampling; a sampler that runs goes on."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping.clear()
        if self._handle is None:  # stop() closed it
            self._guard_find()
        self._thread = threading.Thread(target=self._run, name="ndd-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End sampling and wait for the thread; one that hangs in a driver or network disk is left."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._thread = None
        try:
            if self._counters is not None:
                self._counters.close()
            if self._own_nvml:
                self._nvml.close()
                self._handle = self._whole = None
        except Exception as error:  # noqa: BLE001 - stopping never fails
            self._note("stop", error)

    def read_once(self) -> SampleEvent:
        """One sample, now, with the children searched for. Rates are since the sample before (or start)."""
        return self._read(fresh=True)

    def _run(self) -> None:
        due = time.monotonic() + min(self._period_s, _FIRST_S)
        while not self._stopping.wait(max(due - time.monotonic(), 0.0)):
            try:
                self._sink(self._read(fresh=False))
            except Exception as error:  # noqa: BLE001 - a sink that fails must not end the samples
                self._note("sink", error)
            due = max(due + self._period_s, time.monotonic())

    def _read(self, fresh: bool) -> SampleEvent:
        with self._lock:  # read_once may meet the thread
            host: Json = {}
            card: Json | None = None
            try:
                if self._counters is not None:
                    host = self._counters.read(fresh)
            except Exception as error:  # noqa: BLE001 - the observer never raises
                self._note("host", error)
            try:
                card = self._read_gpu()
            except Exception as error:  # noqa: BLE001 - the observer never raises
                self._note("card", error)
            return SampleEvent(card=card, host=host)

    def _note(self, signal: str, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{signal}: {type(error).__name__}: {error}"
        self._host_reasons[signal] = str(error) or type(error).__name__

    def _guard_find(self) -> None:
        try:
            self._find_gpu()
        except Exception as error:  # noqa: BLE001 - a broken driver must not stop a run
            self._note("card", error)

    def _find_gpu(self) -> None:
        card = self._card
        if card is None or card.uuid is None or not self._nvml.open():
            return
        self._handle = self._nvml.handle_by_uuid(card.uuid)
        if self._handle is None and card.nvml_index is not None and not card.mig:
            self._handle = self._nvml.handle(card.nvml_index)
        self._whole = self._handle
        if card.mig and card.mig_parent is not None:
            self._whole = self._nvml.handle_by_uuid(card.mig_parent)

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
            body["temperature_c"] = nvml.temperature_c(whole)
            body["power_w"] = nvml.power_w(whole)
            body["sm_clock_mhz"] = nvml.sm_clock_mhz(whole)
            body["mem_clock_mhz"] = nvml.mem_clock_mhz(whole)
            body["throttle"] = nvml.throttle(whole)
            if self._count % SLOW_EVERY == 0:
                self._slow = {
                    "power_limit_w": nvml.power_limit_w(whole),
                    "sm_clock_max_mhz": nvml.sm_clock_max_mhz(whole),
                    "pcie_rx_bytes_s": nvml.pcie_bytes_s(whole, "rx"),
                    "pcie_tx_bytes_s": nvml.pcie_bytes_s(whole, "tx"),
                }
            body.update(self._slow)
        self._count += 1
        return body

    def _others(self, memory: MemoryReading | None, processes: tuple[GpuProcess, ...] | None) -> Json:
        """What is on the card and not ours; null where that cannot be told."""
        if processes is None:
            return {}
        ours = {os.getpid(), *(self._counters.children if self._counters is not None else ())}
        mine = [process for process in processes if process.pid in ours]
        if not mine and _holds_a_gpu():
            # We are on the card and not in the list: a container, where the driver counts in other process
            # ids.
            self._nvml.reasons["memory_others_bytes"] = "the driver does not show this process (container?)"
            return {}
        body: Json = {"processes": len(processes) - len(mine)}
        sizes = [process.used_bytes for process in mine]
        if memory is not None:
            if None in sizes:
                self._nvml.reasons["memory_others_bytes"] = "the driver hides the memory of each process"
            else:
                self._nvml.reasons.pop("memory_others_bytes", None)
                body["memory_others_bytes"] = max(memory.used_bytes - sum(size or 0 for size in sizes), 0)
        return body


def _holds_a_gpu() -> bool:
    """Whether torch in this process has opened a card; asks without importing it."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())
