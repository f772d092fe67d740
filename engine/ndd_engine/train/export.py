"""Writes the weights of a checkpoint to a file that plain torch or safetensors loads."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndd_engine.errors import CheckpointError, UsageError, said, shortened
from ndd_engine.files import replaces, replacing, unwritable, write_problem
from ndd_engine.processes import undisturbed
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable

from .checkpoint import CheckpointStore, Saved, best_of
from .checkpoint_state import aliases

# Suffix of the file -> its format.
FORMATS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
NEEDS_SAFETENSORS = (
    "needs the package safetensors: pip install 'ndd-console[safetensors]', or write a .pt file"
)
# What torch.compile puts into the names of the parameters of a module that it wraps.
_COMPILED = "_orig_mod."

State = Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """What was written.

    saved: the checkpoint. module: name of the exported part, "" for the whole model. tensors, parameters: their
    number, and the number of their elements. tied: name -> name of the same tensor in the file (safetensors only).
    renamed: number of names without the prefixes of torch.compile. bytes: size of the file.
    """

    saved: Saved
    path: Path
    module: str
    tensors: int
    parameters: int
    tied: Mapping[str, str]
    renamed: int
    bytes: int


def export(
    run: RunDir, path: Path, checkpoint: str = "latest", module: str | None = None, force: bool = False
) -> Exported:
    """Write the weights of a checkpoint: "latest", "best", or a step or file name such as "1200".

    path: ends in .safetensors, .pt, .pth or .bin; force: replace an existing file. module: only this module of the
    model ("encoder"), or an object that the factory returned as stateful ("ema"). The file is written completely or
    not at all. Raises UsageError, CheckpointError.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"-o {printable(str(path))}: unknown format; allowed: {', '.join(FORMATS)}")
    if kind == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise UsageError(f"-o {printable(str(path))} {NEEDS_SAFETENSORS}")
    if not force and replaces(path):
        raise UsageError(f"-o {printable(str(path))} exists; add --force to replace it")
    if (why := write_problem(path)) is not None:
        raise UsageError(f"-o {printable(str(path))}: {why}")
    store = CheckpointStore(run.checkpoints, keep=0)
    saved = choose(run, store, checkpoint)
    weights, renamed = without_compiler(_chosen(store.load(saved, only=("model", "stateful")), module))
    about = {"run": run.name, "step": str(saved.step), "checkpoint": saved.path.name}
    tied: dict[str, str] = {}
    if kind == "safetensors":
        kept, tied = _storable(weights)
        about |= {"format": "pt", **({"module": module} if module else {}), **tied}
        _write_safetensors(path, kept, about)
    else:
        _write_torch(path, weights)
    tensors = [value for key, value in weights.items() if isinstance(value, Tensor) and key not in tied]
    parameters = sum(value.numel() for value in tensors)
    length = path.stat().st_size if path.is_file() else 0
    return Exported(saved, path, module or "", len(tensors), parameters, tied, renamed, length)


def choose(run: RunDir, store: CheckpointStore, wanted: str) -> Saved:
    """The checkpoint "latest", "best", of a step, or with a file name. Raises CheckpointError, UsageError."""
    every = store.all()
    if not every:
        raise CheckpointError(
            f"run {printable(run.name)} has no checkpoint in {printable(str(store.folder))}"
        )
    if wanted == "latest":
        return every[-1]
    if wanted == "best":
        best = best_of(every, load_state(run).lower_is_better)
        if best is None:
            raise UsageError(
                f"run {printable(run.name)} has no checkpoint with an evaluation; use --checkpoint latest or a step"
            )
        return best
    for saved in every:
        if wanted in (str(saved.step), saved.path.name, saved.path.stem):
            return saved
    there = ", ".join(str(saved.step) for saved in every)
    raise UsageError(
        f"--checkpoint {printable(wanted)}: there is no such checkpoint; allowed: latest, best, or a step ({there})"
    )


def without_compiler(state: State) -> tuple[OrderedDict[str, Any], int]:
    """The state without torch.compile's prefixes, and the number of changed names. Raises UsageError if two collide."""
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        plain = name.replace(_COMPILED, "")
        if plain in found:
            names = f"{shortened(plain, 100)} with and without the prefix {_COMPILED}"
            raise UsageError(f"the checkpoint contains {names}, so the names of the weights are ambiguous")
        found[plain] = value
    versions = getattr(state, "_metadata", None)  # of the modules, for their own conversions
    if isinstance(versions, Mapping):
        cleaned = {
            key.replace(_COMPILED, "").removesuffix("._orig_mod"): each for key, each in versions.items()
        }
        found._metadata = OrderedDict(cleaned)  # type: ignore[attr-defined]
    return found, sum(_COMPILED in name for name in state)


def _chosen(checkpoint: Mapping[str, Any], wanted: str | None) -> State:
    """The state of the model, of one of its modules, or of a stateful object of the factory, by name."""
    model: State = checkpoint["model"]
    if wanted is None:
        return model
    objects = checkpoint.get("stateful") or {}
    if _has_tensors(objects.get(wanted)):
        return _averaged(objects[wanted])
    plain, _ = without_compiler(model)
    part = {
        name.removeprefix(f"{wanted}."): value
        for name, value in plain.items()
        if name.startswith(f"{wanted}.")
    }
    if not part:
        modules = dict.fromkeys(name.partition(".")[0] for name in plain if "." in name)
        allowed = (*modules, *(name for name, state in objects.items() if _has_tensors(state)))
        text = f"--module {printable(wanted)}: there is no such module"
        raise UsageError(
            f"{text}; allowed: {', '.join(map(printable, allowed)) or 'none'}, or a module in one of them"
        )
    return part


def _has_tensors(state: object) -> bool:
    return isinstance(state, Mapping) and any(isinstance(value, Tensor) for value in state.values())


def _averaged(state: State) -> State:
    """The weights in the state of a torch.optim.swa_utils.AveragedModel; any other state as it is."""
    if "n_averaged" not in state or not all(
        name == "n_averaged" or name.startswith("module.") for name in state
    ):
        return state
    return {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}


def _storable(state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous tensors without shared memory, and name -> stored name of each tied one. Raises UsageError.

    This is how safetensors.torch.save_model stores tied tensors, so that load_model restores them.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            what = f"{shortened(name, 100)} is a {shortened(type(value).__name__, 80)}, not a tensor"
            raise UsageError(f"{what}, which a safetensors file cannot contain; write a .pt file")
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            what = f"{shortened(name, 100)} is a sparse, quantized or nested tensor"
            raise UsageError(f"{what}, which a safetensors file cannot contain; write a .pt file")
    tied = aliases(state)
    kept: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, value in ((name, value.detach()) for name, value in state.items() if name not in tied):
        storage = value.untyped_storage().data_ptr()
        shared = bool(storage) and storage in memory  # another part of the same memory
        memory.add(storage)
        kept[name] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    return kept, tied


def _write_safetensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    try:
        safetensors = importlib.import_module("safetensors.torch")
        content: bytes = safetensors.save(tensors, metadata=about)
    except Exception as error:  # noqa: BLE001  a broken installation, a dtype that the format lacks
        raise UsageError(f"cannot write safetensors: {said(error)}; write a .pt file") from None
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"-o {unwritable(path, error)}") from None


def _write_torch(path: Path, state: State) -> None:
    try:
        with replacing(path) as file:
            undisturbed(lambda: torch.save(state, file))
    except OSError as error:
        raise UsageError(f"-o {unwritable(path, error)}") from None
    except RuntimeError as error:  # torch's own error on top of one from the file
        cause = error.__context__ if isinstance(error.__context__, OSError) else None
        raise UsageError(
            f"-o {unwritable(path, cause)}"
            if cause
            else f"cannot write {printable(str(path))}: {said(error)}"
        ) from None
