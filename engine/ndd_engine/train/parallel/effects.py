"""What of the section [parallel] is in effect, read back from the process group and from DDP's and FSDP2's objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ndd_engine.config.parallel_section import ParallelSection
from ndd_engine.text import counted
from ndd_engine.train.checkpoint_state import is_sharded

from .strategy import DTYPES, Ddp, Fsdp2, Strategy

# (key without its section, what is applied, how that was verified)
Effect = tuple[str, object, str]
_OF_DDP = ("bucket_mb", "compress", "find_unused")
_OF_FSDP2 = ("reshard", "param_dtype", "reduce_dtype")
_MIB = 2**20


def effects(strategy: Strategy, section: ParallelSection, watched_s: float) -> Iterator[Effect]:
    """Every setting of the section. watched_s: after how many seconds this rank's hang watch compares the ranks."""
    yield "ranks", dist.get_world_size(), f"read back from the process group ({dist.get_backend()})"
    yield from _of_ddp(strategy, section) if isinstance(strategy, Ddp) else _of_fsdp2(strategy)
    unused, name = (_OF_FSDP2, "ddp") if isinstance(strategy, Ddp) else (_OF_DDP, "fsdp2")
    for key in unused:
        yield key, "off", f'parallel.strategy = "{name}" does not use it'
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    how = "no launcher that restarts ranks started this one"
    if restarts is not None:
        how = "read back from the launcher (TORCHELASTIC_MAX_RESTARTS)"
    yield "restarts", int(restarts or 0), how
    yield "hang_s", watched_s, "read back from the thread that watches the steps of this rank"


def _of_ddp(strategy: Ddp, section: ParallelSection) -> Iterator[Effect]:
    assert strategy.ddp is not None
    said: dict[str, Any] = strategy.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    where = "read back from DistributedDataParallel"
    parameters = counted(sum(item.requires_grad for item in strategy.module.parameters()), "parameter")
    yield "strategy", "ddp", f"DistributedDataParallel exchanges the gradients of {parameters}"
    size = said["bucket_cap_bytes"]  # a whole number of bytes
    yield "bucket_mb", section.bucket_mb if size == int(section.bucket_mb * _MIB) else size / _MIB, where
    hook = str(said.get("comm_hook") or "")
    exchanged = next((name for name in DTYPES if f"{name}_compress" in hook), "off")
    yield "compress", exchanged, f"{where}: {f'its hook is {hook}' if hook else 'it has no hook'}"
    yield "find_unused", bool(said["find_unused_parameters"]), where


def _of_fsdp2(strategy: Strategy) -> Iterator[Effect]:
    parameters = list(strategy.module.parameters())
    sharded = sum(map(is_sharded, parameters))
    applied = "fsdp2" if isinstance(strategy, Fsdp2) and sharded == len(parameters) else "off"
    yield "strategy", applied, f"{sharded} of {counted(len(parameters), 'parameter')} are sharded (DTensor)"
    modules: list[Any] = [item for item in strategy.module.modules() if hasattr(item, "_get_fsdp_state")]
    groups = [group for item in modules for group in _groups(item)]
    of = f"read back from the {counted(len(groups), 'group')} that FSDP2 gathers and reduces"
    root = set(_groups(strategy.module))
    layers = [group for group in groups if group not in root]
    freed = bool(layers) and all(group.post_forward_mesh_info is not None for group in layers)
    alone = "; there is only one, which is always kept until backward" if not layers else ""
    yield "reshard", freed, of + alone
    shards = [item for group in groups for item in group.fsdp_params]
    gathered = {item.param_dtype or item.orig_dtype for item in shards}
    reduced = {item.reduce_dtype or item.param_dtype or item.orig_dtype for item in shards}
    for key, dtypes in (("param_dtype", gathered), ("reduce_dtype", reduced)):
        yield key, _names(dtypes), of


def _groups(module: Any) -> list[Any]:
    """What FSDP2 gathers and reduces together in a module that it shards."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return groups


def _names(dtypes: set[torch.dtype]) -> str:
    """The dtypes as in the configuration; those that it lacks by torch's names."""
    short = {dtype: name for name, dtype in DTYPES.items()}
    return ", ".join(sorted(short.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes))
