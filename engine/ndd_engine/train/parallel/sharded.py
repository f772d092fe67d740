"""The checkpoints of a run with several ranks: each rank writes its part into one folder, and reads only its part.

What is written does not depend on how the model was distributed: it is loaded by any number of ranks, replicated (DDP)
or sharded (FSDP2), and by a single process. The tensors are in the format of torch.distributed.checkpoint (DCP).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ndd_engine.errors import UsageError, shortened
from ndd_engine.files import PATIENCE_S, replacing, sync_folder
from ndd_engine.train.checkpoint import CheckpointStore, Saved, Slot, own_format, verify_file
from ndd_engine.train.checkpoint_folder import (
    MANIFEST,
    PLAIN,
    digest_of,
    explained,
    manifest,
    rank_file,
    read,
    remove,
    temporary,
    verify,
)
from ndd_engine.train.checkpoint_shards import METADATA, copy_shard, empty
from ndd_engine.train.checkpoint_tree import Like, aliases, is_sharded, mapped, split
from ndd_engine.train.checkpoint_tree import Path as StatePath
from ndd_engine.train.random_state import seeded_random_state

from .world import Exchange

if TYPE_CHECKING:
    from ndd_engine.train.step.stepper import Stepper

# What every rank has of its own: its random generators, and the state that the model carries from batch to batch.
PER_RANK = frozenset({"random", "carried"})
# What only rank 0 writes. A factory's own objects may differ between ranks, and so may the moments at which they copied
# the state of a sampler or a stream.
OF_FIRST = ("stateful.", "position.")
_Files = dict[str, tuple[int, str]]


class ShardedStore(CheckpointStore):
    """The checkpoints of one run with several ranks. All ranks call each method together and get the same result.

    An error of one rank is raised by all of them. Waiting for the slowest rank counts as time in a collective, so the
    group's timeout must be longer than writing a checkpoint takes. All ranks need the same folder on a file system
    that they share.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        group: dist.ProcessGroup,
        device: torch.device,
        like: Like | None = None,
        per_rank: Collection[str] = PER_RANK,
    ) -> None:
        """group: all ranks, on the CPU (gloo). device: of this rank's model. like: see `placed_like`; None if nothing
        is sharded. per_rank: keys of the state that are not the same on all ranks.
        """
        super().__init__(folder, keep)
        self._ranks = Exchange(group)
        self._device, self._like, self._per_rank = device, like, frozenset(per_rank)
        if self._ranks.leads:
            self.clean()

    def all(self) -> list[Saved]:
        """See CheckpointStore."""
        return self._ranks.from_first(super().all)

    def damaged(self) -> list[str]:
        """See CheckpointStore."""
        return self._ranks.from_first(super().damaged)

    def save(self, step: int, state: dict[str, Any], metric: float | None, best_is_lower: bool) -> Saved:
        """Write a checkpoint and delete those no longer kept. Raises OSError and then leaves the disk unchanged.

        Tensors of the model and the optimizers that are not sharded must be equal on all ranks: each is written by one
        of them. The rest of the state is that of rank 0, except for the keys in `per_rank`. The error names the rank,
        the file and the reason.
        """
        ranks, begun = self._ranks, None
        own = {key: value for key, value in state.items() if key in self._per_rank}
        tree, places, tensors = split({key: value for key, value in state.items() if key not in own})
        try:
            slot, begun, tied = ranks.from_first(lambda: self._begin(step, tensors))
            places = [place._replace(name=tied.get(place.name, place.name)) for place in places]
            tensors = {name: value for name, value in tensors.items() if name not in tied}
            writer, planner = _Writer(begun), _Planner()
            plans = ranks.from_all(lambda: _plan(begun, planner, writer, tensors, ranks.leads))
            index = Metadata({})

            def agree() -> list[SavePlan]:
                nonlocal index
                agreed, index = planner.create_global_plan(plans)
                _same_tensors(index, tensors)
                return writer.prepare_global_plan(agreed)

            plan = ranks.to_each(agree)
            parts = ranks.from_all(lambda: _write(begun, ranks.rank, plan, planner, writer, own))
            plain = {"format": 1, "ranks": ranks.size, "tree": tree, "places": list(map(tuple, places))}

            def finish() -> Saved:
                with _naming(begun / METADATA):
                    writer.finish(index, [results for results, _ in parts])
                files = {name: entry for _, written in parts for name, entry in written.items()}
                count, sha256 = _finish(begun, files, plain)
                if os.path.lexists(slot.path):
                    remove(slot.path)  # of no checkpoint: a crash left it
                begun.rename(slot.path)
                sync_folder(self.folder)
                return self.commit(slot, count, sha256, metric, best_is_lower)

            return ranks.from_first(finish)
        except BaseException:
            if ranks.leads:
                self.clean()
            raise

    def _begin(self, step: int, tensors: Mapping[str, Tensor]) -> tuple[Slot, Path, dict[str, str]]:
        for name in tensors:
            if name.startswith("stateful.") and is_sharded(tensors[name]):
                text = "is sharded, and stateful objects are saved from rank 0 alone"
                raise UsageError(f'{shortened(name, 120)} {text}: set parallel.strategy = "ddp"')
        slot = self.slot(step, "")
        self.clean()
        begun = temporary(slot.path)
        begun.mkdir()
        return slot, begun, aliases(tensors)

    def load(self, saved: Saved, only: Collection[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint of any number of ranks, or of a single process. Raises CheckpointError, UsageError.

        Each rank computes the checksums of a share of the files, and reads its shards. "ranks" is the number of ranks
        that wrote it. A rank that had none of its own state gets new random generators, derived from seed, step and
        rank, and None for the other keys.
        """
        self._ranks.from_all(lambda: self._verified(saved))
        found: dict[str, Any] = {}
        self._ranks.from_all(lambda: found.update(self._read(saved, only)))
        return found

    def _verified(self, saved: Saved) -> None:
        if saved.folder:
            verify(saved.path, saved.bytes, saved.sha256, self._ranks.rank, self._ranks.size)
        elif self._ranks.leads:
            verify_file(saved)

    def _read(self, saved: Saved, only: Collection[str] | None) -> dict[str, Any]:
        rank = self._ranks.rank
        if only is not None:
            only = {"format", "seed", "step", *only}
        if saved.folder:
            names = frozenset(path.name for path in saved.path.iterdir()) - {MANIFEST}
            found = read(saved.path, names, rank, only, self._like)
        else:
            with explained(saved.path):
                whole = torch.load(saved.path, map_location="cpu", weights_only=True, mmap=True)
                found = _placed(whole, self._like) | {"ranks": 1}
        own_format(saved, found)
        if rank >= found["ranks"]:
            # Of a single process, these keys are those of rank 0; no key, no state of that kind.
            found |= {key: None for key in self._per_rank if key in found or saved.folder}
            if "random" in self._per_rank:
                text = f"{found.get('seed')} {saved.step} {rank}"
                seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
                found["random"] = seeded_random_state(seed, self._device)
        return found


class _Planner(DefaultSavePlanner):
    """Plans a flat dict of tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class _Writer(FileSystemWriter):
    """Writes one file for each rank, synced to the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)

    def storage_meta(self) -> StorageMeta | None:
        """No path, which would be that of a temporary folder."""
        return StorageMeta()


def _plan(
    folder: Path, planner: _Planner, writer: _Writer, tensors: dict[str, Tensor], leads: bool
) -> SavePlan:
    """What this rank could write: its shards, and all tensors that are not sharded."""
    if not folder.is_dir():
        text = "not found; checkpoints need a folder that all ranks share"
        raise FileNotFoundError(2, text, str(folder.parent))
    planner.set_up_planner(tensors, writer.storage_meta(), leads)
    writer.set_up_storage_writer(leads)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # A tensor with less rows than there are ranks leaves some of them with an empty shard.
    items = [
        item for item in plan.items if item.tensor_data is None or _elements(item.tensor_data.chunk.sizes)
    ]
    if not leads:
        items = [item for item in items if not item.index.fqn.startswith(OF_FIRST)]
    return dataclasses.replace(plan, items=items)


def _elements(sizes: torch.Size) -> int:
    return math.prod(sizes)


def _same_tensors(index: Metadata, tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(index.state_dict_metadata.keys() ^ tensors.keys()):
        raise UsageError(f"{shortened(name, 120)} is not in the state of all ranks, so it cannot be saved")


def _write(
    folder: Path, rank: int, plan: SavePlan, planner: _Planner, writer: _Writer, own: dict[str, Any]
) -> tuple[list[WriteResult], _Files]:
    """Write this rank's files; returns what the index needs, and their sizes and checksums. Raises OSError."""
    if own:
        path = folder / rank_file(rank)
        with _naming(path):
            _save(own, path)
    prefix = f"__{rank}_"
    with _naming(folder / f"{prefix}0.distcp"):
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
    files = [
        path for path in folder.iterdir() if path.name.startswith(prefix) or path.name == rank_file(rank)
    ]
    return results, {path.name: digest_of(path) for path in files}


def _finish(folder: Path, files: _Files, plain: dict[str, Any]) -> tuple[int, str]:
    """Write the rest of the folder; returns the bytes of all files, and the SHA-256 of the manifest."""
    with _naming(folder / PLAIN):
        _save(plain, folder / PLAIN)
    files = files | {name: digest_of(folder / name) for name in (PLAIN, METADATA)}
    content = manifest(files)
    with replacing(folder / MANIFEST, PATIENCE_S) as file:
        file.write(content)
    sync_folder(folder)
    total = sum(count for count, _ in files.values()) + len(content)
    return total, hashlib.sha256(content).hexdigest()


def _save(value: Any, path: Path) -> None:
    with replacing(path, PATIENCE_S) as file:
        torch.save(value, file)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise the OSError behind torch's own errors, with the path."""
    try:
        yield
    except Exception as error:
        seen: BaseException | None = error
        while seen is not None and not isinstance(seen, OSError):
            seen = seen.__cause__ or seen.__context__
        if seen is None:
            raise
        raise OSError(seen.errno, seen.strerror, str(path)) from error


def placed_like(stepper: Stepper) -> Like:
    """Where the tensors of a checkpoint belong in the model and the optimizers of a stepper, see Like.

    The state of an optimizer that made no step yet is sharded as its parameters are.
    """
    state: dict[str, Any] = {}
    parameters: dict[str, list[nn.Parameter]] = {}

    def like(path: StatePath, size: torch.Size) -> Tensor | None:
        if not state:
            state.update(stepper.state())
            for name, optimizer in stepper.optimizer.by_name.items():
                parameters[name] = [item for group in optimizer.param_groups for item in group["params"]]
        if (parameter := _parameter(path, parameters)) is not None and is_sharded(parameter):
            if parameter.shape == size:
                return parameter
            if math.prod(size) > 1 and not is_sharded(_found(state, path)):
                name = shortened(".".join(map(str, path)), 120)
                text = "has another shape than its parameter, so it cannot be sharded"
                raise UsageError(f'{name} {text}; resume with parallel.strategy = "ddp"')
        found = _found(state, path)
        return found if is_sharded(found) and found.shape == size else None

    return like


def _found(state: Any, path: StatePath) -> Any:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _parameter(path: StatePath, parameters: Mapping[str, Sequence[nn.Parameter]]) -> nn.Parameter | None:
    """The parameter that a value of an optimizer's state belongs to: optimizer.state.3.exp_avg belongs to the fourth.

    parameters: those of each optimizer, in the order of its groups.
    """
    if path[0] != "optimizer":
        return None
    name, rest = ("", path[1:]) if "" in parameters else (path[1], path[2:])
    own = parameters.get(name, ())
    if len(rest) < 3 or rest[0] != "state" or not isinstance(rest[1], int):
        return None
    return own[rest[1]] if 0 <= rest[1] < len(own) else None


def _placed(whole: dict[str, Any], like: Like | None) -> dict[str, Any]:
    """The state of a mapped file in memory, with the shards of this rank instead of what `like` shards."""
    tree, places, tensors = split(whole)
    tied = aliases(tensors)
    copies: dict[str, Tensor] = {}
    for place in places:
        if place.name not in tied:
            source = tensors[place.name]
            template = None if like is None else like(place.path, source.shape)
            copies[place.name] = empty(source.shape, source.dtype, place.stride, template)
            copy_shard(source, copies[place.name])
    by_path = {place.path: copies[tied.get(place.name, place.name)] for place in places}

    def leaf(value: Any, path: StatePath) -> Any:
        return by_path[path] if path in by_path else value.clone() if isinstance(value, Tensor) else value

    found: dict[str, Any] = mapped(tree, leaf)
    return found
