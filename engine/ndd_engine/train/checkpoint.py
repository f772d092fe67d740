"""Checkpoints: everything a run needs to resume bit for bit, and export of the weights.

A checkpoint is a folder, written by one process or by several ranks, so that a crash never destroys a good one. It is
loaded by any number of ranks, replicated (DDP) or sharded (FSDP2):

    step-00001200/
        manifest.json       step, time and metric; size and SHA-256 of every other file
        .metadata           index of the entries (torch.distributed.checkpoint)
        __0_0.distcp        entries that rank 0 wrote: its tensors and shards, and all that is not a tensor

The folder is written under a temporary name, synced and renamed: what a crash leaves is recognised by its name.
Weights are exported to a file that plain torch or safetensors loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import pickle
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ndd_engine.errors import CheckpointError, UsageError, said, shortened
from ndd_engine.files import (
    PATIENCE_S,
    open_regular,
    replaces,
    replacing,
    sync_folder,
    unwritable,
    write_problem,
)
from ndd_engine.processes import limit_of, undisturbed
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable, size

from .checkpoint_state import Like, TensorPlace, aliases, is_sharded, mapped, seeded_random_state, split

if TYPE_CHECKING:
    from .parallel.world import Exchange

FORMAT = 1
MANIFEST = "manifest.json"
# Bytes of a manifest: some hundred thousand ranks.
_MOST_MANIFEST = 1 << 26
# The entry with all that is not a tensor.
STATE = "state"
# What every rank has of its own: its random generators, and the state that the model carries from batch to batch.
PER_RANK = frozenset({"random", "carried"})
# What only rank 0 writes. A factory's own objects may differ between ranks, and so may the moments at which they copied
# the state of a sampler or a stream.
OF_FIRST = frozenset({"stateful", "position"})
T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, by its manifest. metric: the headline metric of the evaluation at its step.

    path: its folder; files: name -> size in bytes and SHA-256 of every file but the manifest.
    """

    path: Path
    step: int
    t: float
    metric: float | None
    files: Mapping[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(count for count, _ in self.files.values())


def last_good(saved: Saved | None) -> str:
    """For a message: the newest checkpoint."""
    return (
        "there is no checkpoint"
        if saved is None
        else f"the last good checkpoint is step {saved.step:,} ({saved.path.name})"
    )


def unwritten(error: OSError, step: int, folder: Path) -> str:
    """Why the checkpoint of a step could not be written."""
    reason = limit_of(error) or error.strerror or said(error)
    where = printable(str(folder))
    return (
        f"cannot write the checkpoint of step {step:,} to {where}: {reason} ({size(free_space(folder))} free)"
    )


def rank_entry(rank: int) -> str:
    """The name of the entry of what belongs to one rank."""
    return f"rank.{rank}"


class _Alone:
    """What Exchange is for several ranks."""

    rank, size, leads = 0, 1, True

    def from_first(self, work: Callable[[], T]) -> T:
        return work()

    def from_all(self, work: Callable[[], T]) -> list[T]:
        return [work()]

    def to_each(self, work: Callable[[], Sequence[T]]) -> T:
        return work()[0]


class CheckpointStore:
    """The checkpoints of one run. Several ranks call each method together, and get the same result.

    An error of one rank is raised by all of them. Waiting for the slowest rank counts as time in a collective, so the
    group's timeout must be longer than writing a checkpoint takes. All ranks need the same folder on a file system
    that they share.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: Exchange | None = None,
        device: torch.device | None = None,
        like: Like | None = None,
    ) -> None:
        """device: of this rank's model. like: see `placed_like`; None if nothing is sharded."""
        self.folder = folder
        self.keep = keep
        self._ranks = ranks or _Alone()
        self._device, self._like = device or torch.device("cpu"), like

    def all(self) -> list[Saved]:
        """All complete checkpoints, oldest first. Folders without a valid manifest are ignored, see `damaged`.

        The order is that of writing, not of steps: a run that returned to an earlier step continues from there.
        """
        return self._ranks.from_first(self._every)

    def _every(self) -> list[Saved]:
        found = [saved for saved in map(_described, self._folders()) if saved is not None]
        # A crash may leave two of the same step: the newer one counts.
        newest = {saved.step: saved for saved in sorted(found, key=lambda saved: saved.t)}
        return sorted(newest.values(), key=lambda saved: (saved.t, saved.step))

    def damaged(self) -> list[str]:
        """Names of the folders without a valid manifest."""
        return self._ranks.from_first(
            lambda: [path.name for path in self._folders() if _described(path) is None]
        )

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, step: int, state: dict[str, Any], metric: float | None, best_is_lower: bool) -> Saved:
        """Write a checkpoint and delete those no longer kept. Raises OSError and then leaves the disk unchanged.

        With several ranks, tensors of the model and the optimizers that are not sharded must be equal on all of them:
        each is written by one. The rest of the state is that of rank 0, except for PER_RANK. The error names the rank,
        the file and the reason.
        """
        from .checkpoint_tensors import EntryWriter

        ranks = self._ranks
        of_rank = {key: value for key, value in state.items() if key in PER_RANK}
        others = PER_RANK if ranks.leads else PER_RANK | OF_FIRST
        tree, places, tensors = split({key: value for key, value in state.items() if key not in others})
        try:
            begun, tied = ranks.from_first(lambda: self._begin(tensors))
            places = [place._replace(name=tied.get(place.name, place.name)) for place in places]
            entries: dict[str, Any] = {name: value for name, value in tensors.items() if name not in tied}
            entries[rank_entry(ranks.rank)] = of_rank
            if ranks.leads:
                entries[STATE] = {"ranks": ranks.size, "tree": tree, "places": list(map(tuple, places))}
            writer = EntryWriter(begun, ranks.rank, entries)
            plans = ranks.from_all(writer.plan)
            plan = ranks.to_each(lambda: writer.agree(plans))
            parts = ranks.from_all(lambda: (writer.write(plan), _checksum(writer.path)))

            def finish() -> Saved:
                writer.finish([results for results, _ in parts], places)
                files = {file.name: entry for _, (file, entry) in parts}
                return self._finish(begun, step, files, metric, best_is_lower)

            return ranks.from_first(finish)
        except BaseException:
            self.clean()
            raise

    def _begin(self, tensors: Mapping[str, Tensor]) -> tuple[Path, dict[str, str]]:
        """A folder under a temporary name, and the tensors that are others under a second name, see `aliases`."""
        for name, value in tensors.items():
            if name.startswith("stateful.") and is_sharded(value):
                text = "is sharded, and stateful objects are saved from rank 0 alone"
                raise UsageError(f'{shortened(name, 120)} {text}: set parallel.strategy = "ddp"')
        self.folder.mkdir(exist_ok=True)  # never recreates a deleted run folder
        self.clean()
        begun = self.folder / _temporary_name()
        begun.mkdir()
        return begun, aliases(tensors)

    def _finish(
        self,
        begun: Path,
        step: int,
        files: dict[str, tuple[int, str]],
        metric: float | None,
        best_is_lower: bool,
    ) -> Saved:
        """Write the manifest, give the folder its name, and delete checkpoints that are no longer kept."""
        from .checkpoint_tensors import INDEX

        every = self._every()
        earlier = next((saved.path for saved in every if saved.step == step), None)
        path = self.folder / f"step-{step:08d}"
        if path == earlier:
            path = path.with_suffix(".again")  # the earlier one of this step stays valid until this one is
        # Clocks can go backwards and differ between hosts; the order of writing must not.
        t = max([time.time(), *(saved.t + 1e-3 for saved in every)])
        if metric is not None and not math.isfinite(metric):
            metric = None  # NaN compares with nothing
        files[INDEX] = _checksum(begun / INDEX)[1]
        saved = Saved(path, step, t, metric, files)
        body = {"format": FORMAT, "step": step, "t": t, "metric": metric, "files": files}
        with replacing(begun / MANIFEST, PATIENCE_S) as file:
            file.write(json.dumps({**body, "sha256": _seal(body)}, indent=1).encode())
        if os.path.lexists(path):
            _remove(path)  # of no valid checkpoint
        begun.rename(path)
        sync_folder(self.folder)
        if earlier is not None:
            _remove(earlier)
        every = self._every()
        best = best_of(every, best_is_lower)
        for other in every[: -self.keep]:
            if other != best:
                _remove(other.path)
        self.clean()
        return saved

    def load(self, saved: Saved, only: Collection[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint; only: nothing but these keys. Raises CheckpointError with the file and what is wrong.

        Each rank computes the checksums of a share of the files, and reads its shards. "ranks" is the number of ranks
        that wrote it. A rank that had none of its own state gets new random generators, derived from seed, step and
        rank, and None for the other keys.
        """
        self._ranks.from_all(lambda: _verify(saved, self._ranks.rank, self._ranks.size))
        found: dict[str, Any] = {}
        self._ranks.from_all(lambda: found.update(self._read(saved, only)))
        return found

    def _read(self, saved: Saved, only: Collection[str] | None) -> dict[str, Any]:
        from .checkpoint_tensors import EntryReader

        rank = self._ranks.rank
        wanted = None if only is None else {"seed", *only}
        with _explained(saved.path):
            reader = EntryReader(saved.path, frozenset(saved.files))
            (plain,) = reader.values(STATE)
            tree, places, ranks = plain["tree"], plain["places"], int(plain["ranks"])
            places = [TensorPlace(tuple(path), str(name), stride) for path, name, stride in places]
            places = [place for place in places if wanted is None or place.path[0] in wanted]
            tensors = reader.tensors(places, self._like)
            of_rank = reader.values(rank_entry(rank))[0] if rank < ranks else dict.fromkeys(PER_RANK)
        by_path = {place.path: tensors[place.name] for place in places}
        found: dict[str, Any] = mapped(tree, lambda value, path: by_path.get(path, value)) | of_rank
        if rank >= ranks:
            text = f"{found.get('seed')} {saved.step} {rank}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
            found["random"] = seeded_random_state(seed, self._device)
        wanted_state = {key: value for key, value in found.items() if wanted is None or key in wanted}
        return {**wanted_state, "ranks": ranks}

    def clean(self) -> None:
        """Delete what a crash left while it was written or deleted. Only for processes that write checkpoints."""
        for stale in self.folder.glob("*.tmp") if self._ranks.leads else ():
            _remove(stale)


def best_of(every: Sequence[Saved], lower: bool) -> Saved | None:
    """The checkpoint with the best metric; None if none has one."""
    judged = [saved for saved in every if saved.metric is not None]
    return (min if lower else max)(judged, key=lambda saved: saved.metric or 0.0, default=None)


def newest_good(store: CheckpointStore, step: int | None = None) -> tuple[Saved, dict[str, Any]]:
    """The newest checkpoint, or the one of `step`, with its state.

    Raises CheckpointError if there is none or if it is damaged; the message then names the previous good one.
    """
    every = store.all()
    names = ", ".join(shortened(name, 40) for name in store.damaged()[:5])
    damaged = f" ({names} is damaged)" if names else ""
    if step is not None:
        chosen = [saved for saved in every if saved.step == step]
        if not chosen:
            there = ", ".join(str(saved.step) for saved in every) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step:,}; available: {there}{damaged}")
        return chosen[0], store.load(chosen[0])
    if not every:
        folder = printable(str(store.folder))
        raise CheckpointError(f"{folder} contains no checkpoint{damaged}; start a new run")
    try:
        return every[-1], store.load(every[-1])
    except CheckpointError as error:
        for earlier in reversed(every[:-1]):
            try:
                store.load(earlier)
            except CheckpointError:
                continue
            advice = f"the previous checkpoint is good: add --from-step {earlier.step}"
            raise CheckpointError(f"{error}; {advice}") from None
        raise CheckpointError(f"{error}; there is no other good checkpoint") from None


def free_space(folder: Path) -> int | None:
    """Free bytes for this user on the folder's disk, or None if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def _described(folder: Path) -> Saved | None:
    """The checkpoint in a folder, by its manifest; None if that is damaged."""
    try:
        with os.fdopen(open_regular(folder / MANIFEST), "rb") as file:
            body = json.loads(file.read(_MOST_MANIFEST))
        if body.pop("sha256") != _seal(body) or body["format"] != FORMAT:
            return None
        step, t, metric = int(body["step"]), float(body["t"]), body["metric"]
        files = {str(name): (int(count), str(sha256)) for name, (count, sha256) in body["files"].items()}
        stem = f"step-{step:08d}"
        saved = Saved(folder, step, t, None if metric is None else float(metric), files)
        return saved if folder.name in (stem, f"{stem}.again") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _seal(body: Mapping[str, Any]) -> str:
    """The checksum of a manifest's own content."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> tuple[Path, tuple[int, str]]:
    """The path of a regular file, with its size in bytes and SHA-256. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        count = os.fstat(file.fileno()).st_size
        return path, (count, hashlib.file_digest(file, "sha256").hexdigest())


def _verify(saved: Saved, part: int, parts: int) -> None:
    """Raise CheckpointError, which names the file, unless the folder contains what its manifest says.

    part, parts: compute the checksums of this share of the files only; sizes and names are always compared.
    """
    folder = saved.path
    with _explained(folder):
        present = {entry.name for entry in folder.iterdir()} - {MANIFEST}
        for name in sorted(saved.files.keys() - present):
            raise CheckpointError(f"{printable(str(folder / name))} is missing")
        for name in sorted(present - saved.files.keys()):
            text = "does not belong to the checkpoint; move it away"
            raise CheckpointError(f"{shortened(str(folder / name))} {text}")
        for number, (name, (count, sha256)) in enumerate(sorted(saved.files.items())):
            path = folder / name
            shown = printable(str(path))
            actual = path.stat().st_size
            if actual != count:
                sizes = f"{size(actual)} instead of {size(count)}"
                raise CheckpointError(f"{shown} is damaged: its size is {sizes}")
            with _explained(path):
                if number % parts == part and _checksum(path)[1][1] != sha256:
                    raise CheckpointError(f"{shown} is damaged: its contents do not match the checksum")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise CheckpointError with the path and what is wrong with it, for whatever reading it raises."""
    shown = printable(str(path))
    try:
        yield
    except (CheckpointError, UsageError):
        raise
    except FileNotFoundError as error:
        inside = error.filename if error.filename and Path(error.filename).parent == path else path
        raise CheckpointError(f"{printable(str(inside))} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {shown}: {error.strerror or said(error)}") from None
    except pickle.UnpicklingError:
        text = "contains more than tensors and plain values, so it is not loaded"
        raise CheckpointError(f"{shown} {text}") from None
    except Exception as error:  # noqa: BLE001  torch's reader does not limit what it raises
        raise CheckpointError(f"{shown} is damaged: {said(error)}") from None


def _temporary_name() -> str:
    """A new name by which what a crash leaves is recognised."""
    return f".checkpoint.{secrets.token_hex(6)}.tmp"


def _remove(path: Path) -> None:
    """Delete a folder or file. Its name goes first, so that a crash leaves no half checkpoint. Errors are ignored."""
    with contextlib.suppress(OSError):
        if not path.name.endswith(".tmp"):
            path = path.rename(path.with_name(_temporary_name()))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
