"""The run configuration: typed schema, TOML in and out. Imports no torch."""

from .loading import DEFAULT_WORKLOAD, Draft, read
from .schema import WORKLOADS, Config
from .writing import to_toml

__all__ = ["DEFAULT_WORKLOAD", "WORKLOADS", "Config", "Draft", "read", "to_toml"]
