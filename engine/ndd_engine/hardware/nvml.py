"""Access to NVML through pynvml: every getter returns a value or None, and stores the reason for None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# Bits of NVML's clock event reasons that mean throttling. Idle (0x1), application clocks (0x2) and display clocks
# (0x100) do not.
THROTTLE = (
    (0x4, "power cap"),
    (0x8, "hw slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal"),
    (0x40, "hw thermal"),
    (0x80, "power brake"),
)

# Counter -> (NVML function, its further argument, conversion of NVML's mW and KB).
COUNTERS: dict[str, tuple[str, tuple[int, ...], Callable[[int], float]]] = {
    "temperature_c": ("nvmlDeviceGetTemperature", (0,), int),  # NVML_TEMPERATURE_GPU
    "power_w": ("nvmlDeviceGetPowerUsage", (), lambda milliwatts: milliwatts / 1000),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", (), lambda milliwatts: milliwatts / 1000),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (1,), int),  # NVML_CLOCK_SM
    "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (1,), int),
    "mem_clock_mhz": ("nvmlDeviceGetClockInfo", (2,), int),  # NVML_CLOCK_MEM
    "pcie_rx_bytes_s": (
        "nvmlDeviceGetPcieThroughput",
        (1,),
        lambda kilobytes: int(kilobytes) * 1024,
    ),  # to the GPU
    "pcie_tx_bytes_s": ("nvmlDeviceGetPcieThroughput", (0,), lambda kilobytes: int(kilobytes) * 1024),
}

_OPENING = {
    "LibraryNotFound": "no NVIDIA driver: NVML library not found",
    "DriverNotLoaded": "NVML library found, but the NVIDIA driver is not loaded",
    "LibRmVersionMismatch": "the versions of NVIDIA driver and NVML library do not match (reload the driver)",
    "NoPermission": "no permission to use the NVIDIA driver",
}


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a GPU in bytes. used_bytes excludes the driver's own memory if the driver reports it separately."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. used_bytes: None if the driver does not report it."""

    pid: int
    used_bytes: int | None


class Nvml:
    """An NVML session. A failed call returns None and stores its reason in `reasons[signal]`. Not thread-safe.

    library: a module with pynvml's functions, for tests.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._opened = False
        self.reason = ""
        self.reasons: dict[str, str] = {}

    def open(self) -> bool:
        """Load and initialise NVML; safe to call twice. Returns False and sets `reason` if that fails."""
        if self._opened:
            return True
        try:
            if self._library is None:
                self._library = import_module("pynvml")
            self._library.nvmlInit()
        except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways and must not stop us
            kind = type(error).__name__.removeprefix("NVMLError_")
            self.reason = _OPENING.get(kind, f"NVML failed to start: {_words(error)}")
            return False
        self._opened, self.reason = True, ""
        return True

    def close(self) -> None:
        """Shut NVML down; NVML counts references, so other users are not affected."""
        if self._opened:
            self._opened = False
            self._ask("shutdown", "nvmlShutdown")

    def driver_version(self) -> str | None:
        """Version of the driver, such as "550.54.15"."""
        return _text(self._ask("driver_version", "nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> str | None:
        """Latest CUDA version that the driver supports, such as "12.4"."""
        value = self._ask("cuda_version", "nvmlSystemGetCudaDriverVersion_v2")
        return None if value is None else f"{value // 1000}.{value % 1000 // 10}"

    def count(self) -> int | None:
        """Number of GPUs without MIG instances."""
        return _whole(self._ask("count", "nvmlDeviceGetCount"))

    def handle(self, index: int) -> Any:
        """Handle of the GPU at `index` in PCI bus order."""
        return self._ask("handle", "nvmlDeviceGetHandleByIndex", index)

    def handle_by_uuid(self, uuid: str) -> Any:
        """Handle of a GPU ("GPU-…") or a MIG instance ("MIG-…")."""
        return self._ask("handle", "nvmlDeviceGetHandleByUUID", uuid)

    def uuid(self, handle: Any) -> str | None:
        """UUID with its prefix "GPU-" or "MIG-"."""
        return _text(self._ask("uuid", "nvmlDeviceGetUUID", handle))

    def name(self, handle: Any) -> str | None:
        """Name of the GPU as reported by the driver."""
        return _text(self._ask("name", "nvmlDeviceGetName", handle))

    def compute_capability(self, handle: Any) -> tuple[int, int] | None:
        """(major, minor)."""
        value = self._ask("compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
        return None if value is None else (int(value[0]), int(value[1]))

    def mig_instances(self, handle: Any) -> tuple[Any, ...] | None:
        """Handles of the GPU's MIG instances; None if MIG is off or not supported."""
        mode = self._ask("mig", "nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        slots = self._ask("mig", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        found = (
            self._ask("mig", "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in range(slots)
        )
        return tuple(instance for instance in found if instance is not None)

    def memory(self, handle: Any) -> MemoryReading | None:
        """Current memory use of the GPU."""
        version = getattr(self._library, "nvmlMemory_v2", None)
        value = None
        if version is not None:  # v2 separates the driver's reserved memory; drivers before 510 lack it
            value = self._ask("memory", "nvmlDeviceGetMemoryInfo", handle, version)
        if value is None:
            value = self._ask("memory", "nvmlDeviceGetMemoryInfo", handle)
        return None if value is None else MemoryReading(int(value.total), int(value.free), int(value.used))

    def utilization(self, handle: Any) -> tuple[int, int] | None:
        """(GPU, memory) utilization in percent over NVML's last sample period."""
        value = self._ask("util_percent", "nvmlDeviceGetUtilizationRates", handle)
        return None if value is None else (int(value.gpu), int(value.memory))

    def counter(self, name: str, handle: Any) -> float | None:
        """Current value of one of COUNTERS; those of PCIe block for about 20 ms each."""
        function, selector, unit = COUNTERS[name]
        value = self._ask(name, function, handle, *selector)
        return None if value is None else unit(value)

    def throttle(self, handle: Any) -> list[str] | None:
        """Throttle reasons; empty if the GPU is not throttled."""
        bits = self._ask("throttle", "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # the name before driver 535
            bits = self._ask("throttle", "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if bits is None else [word for bit, word in THROTTLE if bits & bit]

    def processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """The processes that compute on the GPU, each once; None if the driver does not report them.

        Those that only draw, as a desktop does, are left out: they take memory, which NVML counts as used, and no time.
        """
        computing = self._ask("processes", "nvmlDeviceGetComputeRunningProcesses", handle)
        if computing is None:
            return None
        found: dict[int, int | None] = {}
        for entry in computing:
            known = [used for used in (entry.usedGpuMemory, found.get(entry.pid)) if used is not None]
            found[entry.pid] = max(known, default=None)
        return tuple(GpuProcess(pid, used) for pid, used in sorted(found.items()))

    def _ask(self, signal: str, function: str, *arguments: Any) -> Any:
        """Call an NVML function; on failure store the reason under `signal` and return None."""
        try:
            value = getattr(self._library, function)(*arguments)
        except Exception as error:  # noqa: BLE001 - NVMLError, a missing function, ctypes: "not available"
            self.reasons[signal] = _words(error)
            return None
        self.reasons.pop(signal, None)
        return value


def _words(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return "not supported by this version of pynvml"
    return str(error) or type(error).__name__


def _text(value: Any) -> str | None:
    """NVML's strings are bytes in old bindings."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
