"""The library of ndd-console: trains, times, records, diagnoses. It has no user interface.

The public Python API is what `__all__` lists; see docs/python-api.md. Names are imported on first use, so that
`import ndd_engine` is fast and imports no torch.

    from ndd_engine import find_bottlenecks, run_training

    result = run_training({"run": {"max_steps": 200}}, workload="chartext")
    for finding in find_bottlenecks(result.snapshot):
        print(finding.title)
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.observing import Observation, observe
    from .api.training_api import (
        MemoryPrediction,
        Record,
        Result,
        find_bottlenecks,
        open_run,
        predict_memory,
        run_training,
        run_trial,
    )
    from .config import Config
    from .diagnose.finding import Change, Evidence, Finding
    from .errors import ConfigError, MachineError, NddError, TrainingError, UsageError
    from .record.events import (
        BaselineEvent,
        EndEvent,
        Event,
        FindingEvent,
        FunctionsEvent,
        KernelsEvent,
        LoaderEvent,
        MarkEvent,
        MemoryEvent,
        RunEvent,
        SampleEvent,
        SettingEvent,
        StacksEvent,
        StageEvent,
        TrialEvent,
        WindowEvent,
        WorkEvent,
    )
    from .record.snapshot import Snapshot

__all__ = [
    "BaselineEvent", "Change", "Config", "ConfigError", "EndEvent", "Event", "Evidence", "Finding",
    "FindingEvent", "FunctionsEvent", "KernelsEvent", "LoaderEvent", "MachineError", "MarkEvent", "MemoryEvent",
    "MemoryPrediction", "NddError", "Observation", "Record", "Result", "RunEvent", "SampleEvent",
    "SettingEvent", "Snapshot", "StacksEvent", "StageEvent", "TrainingError", "TrialEvent", "UsageError",
    "WindowEvent", "WorkEvent", "__version__", "find_bottlenecks", "observe", "open_run", "predict_memory",
    "run_training", "run_trial",
]  # fmt: skip
# Where each name is defined, if not among the events.
_MODULES = {
    "api.observing": ("Observation", "observe"),
    "api.training_api": (
        "MemoryPrediction",
        "Record",
        "Result",
        "find_bottlenecks",
        "open_run",
        "predict_memory",
        "run_training",
        "run_trial",
    ),
    "config": ("Config",),
    "diagnose.finding": ("Change", "Evidence", "Finding"),
    "errors": ("ConfigError", "MachineError", "NddError", "TrainingError", "UsageError"),
    "record.snapshot": ("Snapshot",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# torch warns on first use that numpy is missing; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sys.platform == "win32":
        raise ImportError("ndd_engine needs Linux or macOS (it uses POSIX file locks); on Windows, use WSL2")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'record.events')}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
