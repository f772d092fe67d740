"""Writes and reads the entries of a checkpoint, in the format of torch.distributed.checkpoint (DCP).

An entry is a tensor, or values that torch.save stores. All ranks write together, and each reads what it needs. Reading
runs no code from the files, unlike `dcp.load`, and needs neither a process group nor NumPy. Importing this module takes
time: torch.distributed.tensor comes with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ndd_engine.errors import CheckpointError, UsageError, shortened
from ndd_engine.processes import undisturbed
from ndd_engine.text import printable

from .checkpoint_state import Like, TensorPlace, is_sharded, local

INDEX = ".metadata"  # the name that DCP gives it
# Entries, as DCP's planners take them when they flatten nothing.
_FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}

# The index of a checkpoint is a pickle, which could run any code: these are all the names that it may refer to.
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)  # fmt: skip


def file_of(rank: int) -> str:
    """The name that DCP gives to the file of a rank."""
    return f"__{rank}_0.distcp"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise the OSError behind torch's own errors, with the path; or the immediate stop, which can come any time."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while isinstance(cause, Exception) and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise cause from None


class EntryWriter:
    """A rank's part in writing a folder. Every rank calls `plan` and `write`, and rank 0 also `agree` and `finish`."""

    def __init__(self, folder: Path, rank: int, entries: Mapping[str, Any]) -> None:
        self.path = folder / file_of(rank)
        self._folder, self._rank, self._entries = folder, rank, dict(entries)
        self._planner = DefaultSavePlanner(**_FLAT)
        self._writer = _Writer(folder, sync_files=True)
        self._index = Metadata({})

    def plan(self) -> SavePlan:
        """What this rank could write: its shards, and all tensors that are not sharded. Raises OSError."""
        if not self._folder.is_dir():
            text = "not found; checkpoints need a folder that all ranks share"
            raise FileNotFoundError(2, text, str(self._folder.parent))
        self._planner.set_up_planner(self._entries, StorageMeta(), self._rank == 0)
        self._writer.set_up_storage_writer(self._rank == 0)
        plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        # A tensor with less rows than there are ranks leaves some of them with an empty shard.
        items = [
            item for item in plan.items if item.tensor_data is None or 0 not in item.tensor_data.chunk.sizes
        ]
        return dataclasses.replace(plan, items=items)

    def agree(self, plans: list[SavePlan]) -> list[SavePlan]:
        """What each rank writes, so that every tensor is written once. Raises UsageError."""
        agreed, self._index = self._planner.create_global_plan(plans)
        for name, kind in self._index.state_dict_metadata.items():
            if isinstance(kind, TensorStorageMetadata) and name not in self._entries:
                text = "is not in the state of all ranks, so it cannot be saved"
                raise UsageError(f"{shortened(name, 120)} {text}")
        return self._writer.prepare_global_plan(agreed)

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Write this rank's file, synced to the disk; returns what the index needs. Raises OSError."""
        with naming(self.path):
            final = self._planner.finish_plan(plan)
            return undisturbed(lambda: self._writer.write_data(final, self._planner).wait())

    def finish(self, results: list[list[WriteResult]], places: Sequence[TensorPlace]) -> None:
        """Write the index. Raises OSError. places: those of the tensors, for DCP's own tools."""
        self._index.planner_data = {
            place.name: place.path
            for place in places
            if all(isinstance(key, (str, int)) for key in place.path)
        }
        with naming(self._folder / INDEX):
            self._writer.finish(self._index, results)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """No path, which would be that of a temporary folder."""
        return StorageMeta()


class _IndexUnpickler(pickle.Unpickler):
    """Loads the index only if it consists of what DCP writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an index")


class EntryReader(FileSystemReader):
    """Reads a folder without running code from it, and no file outside it. Raises CheckpointError.

    names: the files that it may read. entries: the name of every entry, and what it is.
    """

    def __init__(self, folder: Path, names: frozenset[str]) -> None:
        super().__init__(folder)
        self._path, self._names = folder / INDEX, names
        self._shown = printable(str(self._path))
        self._index = self.read_metadata()
        self.entries: Mapping[str, object] = self._index.state_dict_metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index."""
        with self._path.open("rb") as file:
            try:
                found = _IndexUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  a pickle can raise anything
                text = f"is not an index of tensors ({shortened(str(error), 100)}), so it is not loaded"
                raise CheckpointError(f"{self._shown} {text}") from None
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{self._shown} is not an index of tensors")
        for stored in found.storage_data.values():
            outside = shortened(str(getattr(stored, "relative_path", None)), 100)
            if getattr(stored, "relative_path", None) not in self._names:
                raise CheckpointError(
                    f"{self._shown} refers to {outside}, which is not part of the checkpoint"
                )
            if getattr(stored, "transform_descriptors", None):
                raise CheckpointError(f"{self._shown} refers to transformed data, which is not supported")
        found.storage_meta = StorageMeta()
        return found

    def tensors(self, places: Sequence[TensorPlace], like: Like | None) -> dict[str, Tensor]:
        """The tensors of these places by name, on the CPU; in shards on the device of `like`."""
        targets: dict[str, Tensor] = {}
        for place in places:
            if place.name in targets:
                continue
            saved = self.entries.get(place.name)
            if not isinstance(saved, TensorStorageMetadata):
                raise CheckpointError(f"{self._shown} has no tensor {shortened(place.name, 120)}")
            template = None if like is None else like(place.path, saved.size)
            targets[place.name] = _empty(saved.size, saved.properties.dtype, place.stride, template)
        items = self._read(targets)
        elements: Counter[str] = Counter()
        for item in items:
            elements[item.dest_index.fqn] += math.prod(item.lengths)
        for name, target in targets.items():
            if elements[name] != local(target).numel():
                raise CheckpointError(f"{self._shown} has only a part of {shortened(name, 120)}")
        return targets

    def values(self, *names: str) -> list[Any]:
        """What the entries of these names contain, which are no tensors."""
        found: dict[str, Any] = dict.fromkeys(names)
        self._read(found)
        return [found[name] for name in names]

    def _read(self, targets: dict[str, Any]) -> list[ReadItem]:
        """Read into the tensors, and the values in the place of None; returns the parts that were read."""
        planner = _LoadPlanner(**_FLAT)
        planner.set_up_planner(targets, self._index, True)
        self.set_up_storage_reader(self._index, True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        for item in plan.items:
            if (item.type is LoadItemType.TENSOR) is not isinstance(targets[item.dest_index.fqn], Tensor):
                name = shortened(item.dest_index.fqn, 120)
                raise CheckpointError(f"{self._shown} stores {name} as something else")
        self.read_data(planner.finish_plan(plan), planner).wait()
        return plan.items


class _LoadPlanner(DefaultLoadPlanner):
    """Loads values without running code from them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = loaded


def _empty(
    shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None, template: Tensor | None
) -> Tensor:
    """Memory for a tensor: on the CPU, or sharded like the template, which has the same shape."""
    if template is not None and is_sharded(template):
        from torch.distributed.tensor import DTensor

        assert isinstance(template, DTensor)
        return DTensor.from_local(
            torch.empty_like(local(template.detach()), dtype=dtype),
            template.device_mesh, template.placements,
            run_check=False, shape=template.shape, stride=template.stride(),
        )  # fmt: skip
    if stride is not None:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.empty(shape, dtype=dtype)
