"""Reads tensors that torch.distributed.checkpoint wrote, whole or in shards, without a process group and NumPy."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ndd_engine.errors import CheckpointError, shortened
from ndd_engine.text import printable

from .checkpoint_tree import Like, Place, is_sharded, local

METADATA = ".metadata"  # the name that torch.distributed.checkpoint gives its index

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


class _IndexUnpickler(pickle.Unpickler):
    """Loads the index only if it consists of what torch.distributed.checkpoint writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an index")


class Reader(FileSystemReader):
    """Reads a folder without running code from it, and no file outside it. names: the files that it may read."""

    def __init__(self, folder: Path, names: frozenset[str]) -> None:
        super().__init__(folder)
        self._folder, self._names = folder, names

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index. Raises CheckpointError."""
        path = self._folder / METADATA
        shown = printable(str(path))
        with path.open("rb") as file:
            try:
                found = _IndexUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  a pickle can raise anything
                text = f"is not an index of tensors ({shortened(str(error), 100)}), so it is not loaded"
                raise CheckpointError(f"{shown} {text}") from None
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{shown} is not an index of tensors")
        for stored in found.storage_data.values():
            outside = shortened(str(getattr(stored, "relative_path", None)), 100)
            if getattr(stored, "relative_path", None) not in self._names:
                raise CheckpointError(f"{shown} refers to {outside}, which is not part of the checkpoint")
            if getattr(stored, "transform_descriptors", None):
                raise CheckpointError(f"{shown} refers to transformed data, which is not supported")
        found.storage_meta = StorageMeta()
        return found


def read_tensors(
    folder: Path, names: frozenset[str], places: Collection[Place], like: Like | None
) -> dict[str, Tensor]:
    """The tensors of these places by name, on the CPU; in shards on the device of `like`. Raises CheckpointError."""
    reader = Reader(folder, names)
    index = reader.read_metadata()
    targets: dict[str, Tensor] = {}
    for place in places:
        if place.name in targets:
            continue
        saved = index.state_dict_metadata.get(place.name)
        if not isinstance(saved, TensorStorageMetadata):
            text = f"has no tensor {shortened(place.name, 120)}"
            raise CheckpointError(f"{printable(str(folder / METADATA))} {text}")
        template = None if like is None else like(place.path, saved.size)
        targets[place.name] = empty(saved.size, saved.properties.dtype, place.stride, template)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index, True)
    reader.set_up_storage_reader(index, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    _complete(folder, plan.items, targets)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return targets


def _complete(folder: Path, items: Iterable[ReadItem], targets: dict[str, Tensor]) -> None:
    """Refuse an index that leaves parts of a tensor as they are in memory."""
    elements: Counter[str] = Counter()
    for item in items:
        if item.type is not LoadItemType.TENSOR:
            text = f"does not store {shortened(item.dest_index.fqn, 120)} as a tensor"
            raise CheckpointError(f"{printable(str(folder / METADATA))} {text}")
        elements[item.dest_index.fqn] += math.prod(item.lengths)
    for name, target in targets.items():
        if elements[name] != local(target).numel():
            text = f"has only a part of {shortened(name, 120)}"
            raise CheckpointError(f"{printable(str(folder / METADATA))} {text}")


def empty(
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


def copy_shard(source: Tensor, target: Tensor) -> None:
    """Copy this process's part of a whole tensor."""
    if is_sharded(target):
        (chunk,) = target.__create_chunk_list__()  # type: ignore[attr-defined]
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            # The offset of an empty shard is not always within the tensor.
            source = source.narrow(dim, min(offset, source.shape[dim]) if length else 0, length)
    local(target).copy_(source)
