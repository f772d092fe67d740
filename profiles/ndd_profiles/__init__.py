"""Facts as TOML: GPUs, built-in workloads, presets and claims."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import tomli


def read(folder: str, name: str) -> dict[str, Any]:
    """The profile `folder`/`name`.toml. Raises FileNotFoundError when there is none."""
    return tomli.loads((files(__name__) / folder / f"{name}.toml").read_text(encoding="utf-8"))


def names(folder: str) -> Iterator[str]:
    """The names of the profiles in `folder`, sorted."""
    for entry in sorted(files(__name__).joinpath(folder).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            yield entry.name.removesuffix(".toml")
