"""The run configuration: typed schema, TOML in and out. Imports no torch."""

from .loading import Draft, anywhere, read
from .schema import Config
from .workload_sections import DEFAULT_WORKLOAD, OWN, WORKLOADS, kind
from .writing import changed_toml, to_toml

__all__ = [
    "DEFAULT_WORKLOAD",
    "OWN",
    "WORKLOADS",
    "Config",
    "Draft",
    "anywhere",
    "changed_toml",
    "kind",
    "read",
    "to_toml",
]
