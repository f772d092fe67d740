"""What a factory may use: `from ndd_engine.workloads import Settings`. docs/own-model.md describes each name.

The built-in workloads use these names and nothing else of the engine. They are imported on first use: data can be read
without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import GatherItems, MeanLoss, build_checked, full_precision, overlapping_segments
    from .interface import DataFacts, Settings
    from .problems import (
        ErrorList,
        Problems,
        files_below,
        is_folder,
        json_strings,
        numbered_lines,
        read_text,
        read_texts,
    )
    from .series import SeriesLayout, segment_count, split

__all__ = [
    "DataFacts",
    "ErrorList",
    "GatherItems",
    "MeanLoss",
    "Problems",
    "SeriesLayout",
    "Settings",
    "build_checked",
    "files_below",
    "full_precision",
    "is_folder",
    "json_strings",
    "numbered_lines",
    "overlapping_segments",
    "read_text",
    "read_texts",
    "segment_count",
    "split",
]  # fmt: skip
_MODULES = {
    "base": ("GatherItems", "MeanLoss", "build_checked", "full_precision", "overlapping_segments"),
    "interface": ("DataFacts", "Settings"),
    "series": ("SeriesLayout", "split", "segment_count"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'problems')}"), name)
    globals()[name] = found
    return found
