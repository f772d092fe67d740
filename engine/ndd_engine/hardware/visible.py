"""Interprets CUDA_VISIBLE_DEVICES without CUDA: which GPUs a program sees, and in which order.

Follows the CUDA C programming guide (environment variables) and the MIG user guide, as does
torch.cuda._parse_visible_devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndd_engine.text import printable

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class Entry:
    """A GPU or MIG instance: NVML index of the whole GPU, UUIDs and name."""

    nvml_index: int | None
    uuid: str | None
    name: str
    mig: bool = False
    mig_parent: str | None = None


@dataclass(frozen=True, slots=True)
class Visible:
    """positions: indices of the entries in CUDA's order. certain: whether that order is known for certain."""

    positions: tuple[int, ...]
    certain: bool
    reason: str


def visible(entries: Sequence[Entry], environ: Mapping[str, str]) -> Visible:
    """The entries that CUDA makes visible to a program started with `environ`."""
    units = _units(entries)
    names = {entries[unit[0]].name for unit in units}
    by_bus = environ.get(ORDER, "") == "PCI_BUS_ID"
    certain = by_bus or len(units) <= 1 or len(names) == 1
    value = environ.get(VARIABLE)
    if value is None:
        shown = _one_instance(entries, [unit[0] for unit in units])
        if certain:
            return Visible(shown, True, f"{VARIABLE} is not set")
        return Visible(shown, False, f"{VARIABLE} is not set, and CUDA lists the fastest GPU first")
    said = f"{VARIABLE}={printable(value)}"
    tokens = [token.strip() for token in value.split(",")]
    if tokens[0].startswith(("GPU-", "MIG-")):
        return Visible(_by_uuid(entries, units, tokens), True, said)
    positions: list[int] = []
    seen: set[int] = set()
    for token in tokens:
        found = re.match(r"[+-]?\d+", token)  # CUDA reads a number and ignores what follows: "1gpu" is 1
        index = int(found.group()) if found else -1
        if index in seen:
            return Visible((), True, f"{said} contains a GPU twice: CUDA shows none")
        if not 0 <= index < len(units):
            break  # CUDA stops at the first invalid index
        seen.add(index)
        positions.append(units[index][0])
    if not certain:
        said += f"; without {ORDER}=PCI_BUS_ID, index 0 is the fastest GPU"
    return Visible(_one_instance(entries, positions), certain or not positions, said)


def _units(entries: Sequence[Entry]) -> list[list[int]]:
    """Positions grouped by whole GPU: a GPU with MIG is one unit with its instances."""
    units: dict[object, list[int]] = {}
    for position, entry in enumerate(entries):
        key = entry.nvml_index if entry.nvml_index is not None else ("none", position)
        units.setdefault(key, []).append(position)
    return list(units.values())


def _by_uuid(entries: Sequence[Entry], units: list[list[int]], tokens: list[str]) -> tuple[int, ...]:
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


def _one_instance(entries: Sequence[Entry], positions: Sequence[int]) -> tuple[int, ...]:
    """CUDA shows at most one MIG instance, and no other GPUs if it comes first."""
    if positions and entries[positions[0]].mig:
        return (positions[0],)
    return tuple(position for position in positions if not entries[position].mig)


def _starts(uuid: str | None, token: str) -> bool:
    return uuid is not None and uuid.startswith(token)
