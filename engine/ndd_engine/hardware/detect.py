"""Detects the machine: NVML's GPUs, which of them torch sees, which one is chosen, each with its reason."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import psutil

from ndd_engine.errors import MachineError, UsageError
from ndd_engine.text import printable

from .gpus import Gpu, GpuProcess, Host, Machine, VisibleGpus, detect_host, match, names, split_mig

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


# Positions of GPUs in CUDA's order, whether that order is known for certain, and the reason.
Visible = tuple[tuple[int, ...], bool, str]


def visible(entries: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """The GPUs and MIG instances that CUDA makes visible to a program started with `environ`."""
    units = _units(entries)
    names = {entries[unit[0]].name for unit in units}
    by_bus = environ.get(ORDER, "") == "PCI_BUS_ID"
    certain = by_bus or len(units) <= 1 or len(names) == 1
    value = environ.get(VARIABLE)
    if value is None:
        shown = _one_instance(entries, [unit[0] for unit in units])
        if certain:
            return shown, True, f"{VARIABLE} is not set"
        return shown, False, f"{VARIABLE} is not set, and CUDA lists the fastest GPU first"
    said = f"{VARIABLE}={printable(value)}"
    tokens = [token.strip() for token in value.split(",")]
    if tokens[0].startswith(("GPU-", "MIG-")):
        return _by_uuid(entries, units, tokens), True, said
    positions: list[int] = []
    seen: set[int] = set()
    for token in tokens:
        found = re.match(r"[+-]?\d+", token)  # CUDA reads a number and ignores what follows: "1gpu" is 1
        index = int(found.group()) if found else -1
        if index in seen:
            return (), True, f"{said} contains a GPU twice: CUDA shows none"
        if not 0 <= index < len(units):
            break  # CUDA stops at the first invalid index
        seen.add(index)
        positions.append(units[index][0])
    if not certain:
        said += f"; without {ORDER}=PCI_BUS_ID, index 0 is the fastest GPU"
    return _one_instance(entries, positions), certain or not positions, said


def _units(entries: Sequence[Gpu]) -> list[list[int]]:
    """Positions grouped by whole GPU: a GPU with MIG is one unit with its instances."""
    units: dict[object, list[int]] = {}
    for position, entry in enumerate(entries):
        key = entry.nvml_index if entry.nvml_index is not None else ("none", position)
        units.setdefault(key, []).append(position)
    return list(units.values())


def _by_uuid(entries: Sequence[Gpu], units: list[list[int]], tokens: list[str]) -> tuple[int, ...]:
    """GPUs by (a unique prefix of) their UUID; "MIG-GPU-<uuid>/<gpu>/<compute>" is the older form."""
    prefix = tokens[0][:4]
    positions: list[int] = []
    for token in tokens:
        if not token.startswith(prefix):
            break
        if token.startswith("MIG-GPU-"):
            parent = token.removeprefix("MIG-").partition("/")[0]
            matches = [
                place for place, entry in enumerate(entries) if entry.mig and entry.mig_parent == parent
            ]
            matches = [place for place in matches if entries[place].uuid == token] or matches[:1]
        elif prefix == "MIG-":
            matches = [
                place for place, entry in enumerate(entries) if entry.mig and _starts(entry.uuid, token)
            ]
        else:
            # The UUID of a GPU with MIG stands for its first instance.
            firsts = [unit[0] for unit in units]
            matches = [at for at in firsts if _starts(entries[at].mig_parent or entries[at].uuid, token)]
        if len(matches) != 1:
            break
        if matches[0] in positions:
            return ()
        positions.append(matches[0])
    return _one_instance(entries, positions)


def _one_instance(entries: Sequence[Gpu], positions: Sequence[int]) -> tuple[int, ...]:
    """CUDA shows at most one MIG instance, and no other GPUs if it comes first."""
    if positions and entries[positions[0]].mig:
        return (positions[0],)
    return tuple(position for position in positions if not entries[position].mig)


def _starts(uuid: str | None, token: str) -> bool:
    return uuid is not None and uuid.startswith(token)


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
        value = self._ask("count", "nvmlDeviceGetCount")
        return None if value is None else int(value)

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
        return tuple(GpuProcess(pid, used, None) for pid, used in sorted(found.items()))

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


def ask_torch(gpus: tuple[Gpu, ...], environ: Mapping[str, str], torch: Any = None) -> VisibleGpus:
    """Import torch, initialise CUDA and number the GPUs. Never raises; `reason` explains why torch sees none.

    A GPU that torch sees and NVML does not (no NVML on this system) is added with what torch knows about it.
    """
    if torch is None:
        try:
            torch = import_module("torch")
        except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
            return _none(gpus, f"torch cannot be imported: {error}")
    version = str(getattr(torch, "__version__", "?"))
    built = getattr(torch.version, "cuda", None)
    if built is None and getattr(torch.version, "hip", None) is None:
        reason = f"torch build has no CUDA ({version})"
        return _none(gpus, f"{reason} although NVML lists {names(gpus)}" if gpus else reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            seen = [torch.cuda.get_device_properties(index) for index in range(count)]
        except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways
            return _none(gpus, f"torch {version} cannot use CUDA: {error}")
    # Each warning on one line, without the location in torch's source.
    said = tuple(" ".join(str(item.message).partition("(Triggered")[0].split()) for item in caught)
    if seen:
        return _numbered(gpus, seen, built, environ, said)
    if not said and VARIABLE in environ:
        reason = f"{VARIABLE}={environ[VARIABLE]} hides every GPU from torch"
        return _none(gpus, reason, warn=False)
    return _none(gpus, f"torch {version} sees no GPU" + "".join(f": {text}" for text in said[:1]))


def with_free_memory(machine: Machine, torch: Any = None) -> Machine:
    """The machine with the free memory of the chosen GPU from CUDA, if NVML does not report it. Never raises.

    NVML may not report it of virtual GPUs and MIG instances, and may be missing. CUDA's answer creates a context on the
    GPU in this process, whose memory is not free then.
    """
    gpu = machine.chosen
    if gpu is None or gpu.free_bytes is not None:
        return machine
    index = int(machine.device.partition(":")[2])
    try:
        free, total = (torch or import_module("torch")).cuda.mem_get_info(index)
    except Exception as error:  # noqa: BLE001 - a broken driver fails in many ways
        found = gpu.because("memory", f"CUDA does not report it either: {error}")
    else:
        known = {"free_bytes": free, "used_bytes": total - free, "memory_total_bytes": total}
        found = gpu.because("memory", "by CUDA; NVML does not report it", **known)
    gpus = tuple(found if each is gpu else each for each in machine.gpus)
    return replace(machine, gpus=gpus, chosen=found)


def _numbered(
    gpus: tuple[Gpu, ...],
    seen: list[Any],
    built: str | None,
    environ: Mapping[str, str],
    said: tuple[str, ...],
) -> VisibleGpus:
    found = list(gpus)
    order: list[int] = []
    problems = [f"torch warns: {text}" for text in said]
    for index, properties in enumerate(seen):
        known = getattr(properties, "uuid", None)
        uuid = None if known is None else str(known)
        place, why = _place(found, uuid, order, environ.get(VARIABLE, ""))
        if place is None:
            capability = int(properties.major), int(properties.minor)
            found.append(_from_torch(str(properties.name), uuid, int(properties.total_memory), capability))
            place, why = len(found) - 1, "NVML does not list it"
        order.append(place)
        gpu = found[place]
        found[place] = gpu.because("index", why, index=index, cuda_torch=built)
        if gpu.compute_capability is not None and gpu.compute_capability < (7, 0):
            shown = ".".join(map(str, gpu.compute_capability))
            lacks = "no tensor cores, and torch.compile needs 7.0"
            problems.append(f"{gpu.name} has compute capability {shown}: {lacks}")
    for place, gpu in enumerate(found):
        if place not in order:
            shown = f" ({VARIABLE}={environ[VARIABLE]})" if VARIABLE in environ else ""
            found[place] = gpu.because("index", f"torch does not see it{shown}", cuda_torch=built)
    reason = f"torch sees {len(seen)} of {len(found)} GPUs"
    return VisibleGpus(tuple(found), tuple(order), reason, tuple(problems))


def trained_on(
    gpus: Sequence[Gpu], uuid: str | None, name: str, total: int, capability: tuple[int, int], shown: str
) -> Gpu:
    """The GPU that another process trains on, as its torch describes it. shown: its CUDA_VISIBLE_DEVICES, or "".

    One that NVML does not list gets what torch knows about it.
    """
    place, why = _place(gpus, uuid, [], shown)
    if place is None:
        return _from_torch(name, uuid, total, capability)
    return gpus[place].because("index", f"the process trains on it: {why}")


def _place(gpus: Sequence[Gpu], uuid: str | None, taken: Sequence[int], shown: str) -> tuple[int | None, str]:
    """(position in gpus of the GPU with this UUID of torch, the reason). shown: CUDA_VISIBLE_DEVICES, or ""."""
    bare = _bare(uuid)
    if not bare:
        return None, ""
    free = [place for place in range(len(gpus)) if place not in taken]
    for place in free:
        if _bare(gpus[place].uuid) == bare:
            return place, "matched by UUID"
    # With MIG, torch may name the whole GPU: it is the visible instance then, or the first one.
    instances = [place for place in free if gpus[place].mig and _bare(gpus[place].mig_parent) == bare]
    asked = shown.split(",")[0].strip()
    for place in instances:
        if asked.startswith("MIG-") and (gpus[place].uuid or "").startswith(asked):
            return place, f"the MIG instance that {VARIABLE} names"
    if instances:
        return instances[0], "the first MIG instance of the GPU that torch names"
    return None, ""


def _bare(uuid: str | None) -> str | None:
    return None if uuid is None else uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _from_torch(name: str, uuid: str | None, total: int, capability: tuple[int, int]) -> Gpu:
    return Gpu(
        index=None,
        nvml_index=None,
        uuid=None if uuid is None else f"GPU-{uuid}",
        name=name,
        memory_total_bytes=total,
        compute_capability=capability,
        profile=match(name, total),
        reasons={"nvml": "NVML does not list this GPU: its counters are not available"},
    )


def _none(gpus: tuple[Gpu, ...], reason: str, warn: bool = True) -> VisibleGpus:
    """torch sees no GPU. warn: if NVML lists one, because the run would silently use the CPU."""
    hidden = tuple(gpu.because("index", reason) for gpu in gpus)
    return VisibleGpus(hidden, (), reason, (reason,) if gpus and warn else ())


def detect(
    choice: str = "auto",
    use_torch: bool = True,
    *,
    nvml: Nvml | None = None,
    torch: Any = None,
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
) -> Machine:
    """Detect the GPUs and choose the device of a run.

    choice: "auto" (the first visible GPU, else the CPU), "cpu", "cuda", "cuda:N". use_torch: ask torch which GPUs it
    sees, which initialises CUDA in this process (a forked child can then not use it). Otherwise only NVML is queried,
    torch is not imported, and CUDA_VISIBLE_DEVICES is interpreted here. nvml, torch, environ, host: for tests.

    Raises MachineError if the requested GPU does not exist, UsageError for any other choice. A missing or broken driver
    raises nothing.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", choice):
        raise UsageError(f'unknown device "{choice}"; allowed: auto, cpu, cuda, cuda:N')
    variables = os.environ if environ is None else environ
    reasons: dict[str, str] = {}
    own = nvml is None
    nvml = Nvml() if nvml is None else nvml
    try:
        gpus = list_gpus(nvml)
        reasons["nvml"] = _nvml_reason(nvml, gpus)
    finally:
        if own:
            nvml.close()
    if use_torch and choice != "cpu":
        view = ask_torch(gpus, variables, torch)
        reasons["torch"] = view.reason
    else:
        view = _without_torch(gpus, variables)
        reasons["torch"] = "not queried"
    device, chosen, reasons["device"] = _choose(choice, view, reasons["nvml"])
    known = host if host is not None else detect_host()
    return Machine(view.gpus, chosen, device, reasons, known, view.problems)


def equal_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that ranks could use, "cuda:0" first: those like it, in torch's order, without MIG instances.

    [] without GPUs, or if the run's device is another than the first.
    """
    if machine.chosen is None or machine.device != "cuda:0":
        return []
    numbered = {gpu.index: gpu for gpu in machine.gpus if gpu.index is not None and not gpu.mig}
    found: list[Gpu] = []
    while (gpu := numbered.get(len(found))) is not None and gpu.name == machine.chosen.name:
        found.append(gpu)
    return found


def list_gpus(nvml: Nvml) -> tuple[Gpu, ...]:
    """NVML's GPUs in PCI bus order, with MIG instances in place of the GPU that they divide. Never raises."""
    if not nvml.open():
        return ()
    driver, cuda = nvml.driver_version(), nvml.cuda_version()
    gpus: list[Gpu] = []
    for index in range(nvml.count() or 0):
        handle = nvml.handle(index)
        if handle is None:
            unknown = Gpu(None, index, None, f"GPU {index}", None, None, driver, cuda)
            gpus.append(unknown.because("gpu", nvml.reasons.get("handle", "")))
            continue
        instances = nvml.mig_instances(handle)
        whole = _read_gpu(nvml, handle, index, driver, cuda)
        if instances is None:
            gpus.append(whole)
        elif not instances:
            why = "MIG is enabled but has no instance: CUDA cannot use this GPU"
            gpus.append(whole.because("mig", why))
        else:
            gpus.extend(_instance(nvml, instance, whole) for instance in instances)
    return tuple(gpus)


def _read_gpu(nvml: Nvml, handle: Any, index: int, driver: str | None, cuda: str | None) -> Gpu:
    name, memory = nvml.name(handle), nvml.memory(handle)
    total = memory.total_bytes if memory is not None else None
    processes = nvml.processes(handle)
    named = (replace(item, name=_process_name(item.pid)) for item in processes or ())
    profile = match(name, total) if name is not None else None
    gpu = Gpu(
        index=None,
        nvml_index=index,
        uuid=nvml.uuid(handle),
        name=name if name is not None else f"GPU {index}",
        memory_total_bytes=total,
        compute_capability=nvml.compute_capability(handle),
        driver=driver,
        cuda_driver=cuda,
        profile=profile,
        processes=tuple(named) if processes is not None else None,
        free_bytes=memory.free_bytes if memory is not None else None,
        used_bytes=memory.used_bytes if memory is not None else None,
    )
    wanted = ("name", "uuid", "memory", "compute_capability", "processes", "driver_version")
    reasons = {key: nvml.reasons[key] for key in wanted if key in nvml.reasons}
    if profile is None:
        reasons["profile"] = "no published figures for this GPU"
    elif profile.note is not None:
        reasons["profile"] = profile.note
    return replace(gpu, reasons=reasons)


def _instance(nvml: Nvml, handle: Any, whole: Gpu) -> Gpu:
    """A MIG instance; values that it does not report are those of the whole GPU."""
    gpu = _read_gpu(nvml, handle, whole.nvml_index or 0, whole.driver, whole.cuda_driver)
    name = gpu.name if "name" not in gpu.reasons else f"{whole.name} MIG"
    profile = gpu.profile or match(f"{whole.name} MIG unknown", None)
    reasons = dict(gpu.reasons)
    if profile is not None:
        reasons["profile"] = profile.note or ""
    return replace(
        gpu,
        name=name,
        nvml_index=whole.nvml_index,
        compute_capability=gpu.compute_capability or whole.compute_capability,
        mig=True,
        mig_parent=whole.uuid,
        mig_profile=split_mig(name)[1],
        profile=profile,
        reasons=reasons,
    )


def _process_name(pid: int) -> str | None:
    """The name of a process; None for one of another container or user."""
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError, ValueError):
        return None


def _nvml_reason(nvml: Nvml, gpus: Sequence[Gpu]) -> str:
    if nvml.reason:
        return nvml.reason
    driver = f"NVIDIA driver {nvml.driver_version() or 'of unknown version'}"
    if gpus:
        return f"{driver} lists {names(gpus)}"
    why = nvml.reasons.get("count")
    return f"{driver} cannot list its GPUs: {why}" if why else f"{driver} is loaded but lists no GPU"


def _without_torch(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> VisibleGpus:
    """What torch would see, judged by NVML and the environment alone."""
    usable = [
        place for place, gpu in enumerate(gpus) if "mig" not in gpu.reasons and "gpu" not in gpu.reasons
    ]
    positions, certain, reason = visible([gpus[place] for place in usable], environ)
    order = tuple(usable[position] for position in positions)
    marked = []
    for place, gpu in enumerate(gpus):
        index = None
        if place not in order:
            why = f"hidden: {reason}" if place in usable else "CUDA cannot use it"
        elif certain:
            index, why = order.index(place), f"by {reason}; torch was not queried"
        else:
            why = f"torch's number is unknown until torch is queried: {reason}"
        marked.append(gpu.because("index", why, index=index))
    return VisibleGpus(tuple(marked), order, reason, certain=certain)


def _choose(choice: str, view: VisibleGpus, nvml_reason: str) -> tuple[str, Gpu | None, str]:
    """(device, GPU, reason). Raises MachineError if the requested GPU does not exist."""
    if choice == "cpu":
        return "cpu", None, "the CPU was requested"
    if not view.gpus:
        missing = nvml_reason
    elif not view.order:
        missing = view.reason if view.problems else f"{names(view.gpus)} cannot be used: {view.reason}"
    else:
        missing = ""
    wanted = int(choice.partition(":")[2] or 0)
    if not missing and wanted < len(view.order):
        gpu = view.gpus[view.order[wanted]]
        why = f"{choice} was requested" if choice != "auto" else "the first visible GPU"
        if not view.certain:
            why += f"; torch decides which GPU that is: {view.reason}"
        return f"cuda:{wanted}", gpu, why
    if choice == "auto":
        return "cpu", None, missing
    there = ", ".join(f"cuda:{place} {view.gpus[at].name}" for place, at in enumerate(view.order))
    raise MachineError(
        f"{choice} is not available: {missing or 'this machine has ' + there}; use device auto or cpu"
    )
