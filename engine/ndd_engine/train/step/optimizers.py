"""All optimizers of a run as one, with their schedules, gradient clipping and mixed precision."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ndd_engine.batches import tensors
from ndd_engine.config.schema import Config, OptimizerSection, ScheduleSection
from ndd_engine.errors import TrainingError, UsageError
from ndd_engine.workloads.interface import kind
from ndd_engine.workloads.result import TrainingParts, takes_metric

if TYPE_CHECKING:
    pass


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`; returns the norm before, a scalar on the device.

    Sharded gradients (DTensor) are measured by all ranks together, with one exchange; all ranks must call it.
    """
    parameters = list(parameters)
    gradients = [item.grad for item in parameters if item.grad is not None]
    if not any(hasattr(item, "full_tensor") for item in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = torch.nn.utils.get_total_norm(gradients)
    # Read now, not where it is recorded: not every rank records.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@dataclass
class Precision:
    """Precision of the forward pass. autocast: None for fp32. scaler: None without loss scaling."""

    name: str
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None


def set_tf32(on: bool) -> None:
    """Turn TF32 on or off in cuBLAS and cuDNN, through the older of torch's two APIs.

    It sets the newer switches (`fp32_precision`, torch 2.9) as well. The other way round, torch raises an error where
    anything reads the older ones: `torch.backends.cudnn.flags`, torch.compile (pytorch issue 166387), the workload.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def make_precision(config: Config, device: torch.device) -> Precision:
    """Mixed precision for the device; also sets torch's TF32 switches on a GPU."""
    amp, tf32 = config.precision.amp, config.precision.tf32
    gpu = device.type == "cuda"
    recent = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    if amp == "auto":
        # bf16 is emulated below compute capability 8.0; fp16 with loss scaling is faster there.
        amp = "bf16" if recent else "fp16" if gpu else "off"
    if gpu:
        set_tf32(tf32)
    if amp == "off":
        return Precision("tf32" if tf32 and recent else "fp32", None, None)
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
    return Precision(amp, torch.autocast(device.type, dtype=dtype), scaler)


# Parameters of fewer elements on average are updated by one thread; see one_thread_suffices.
_FEW_ELEMENTS = 2**10
_NORMS = (
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase,
)  # fmt: skip


def make_optimizer(
    config: OptimizerSection,
    model: nn.Module,
    device: torch.device,
    capturable: bool = False,
    compiles: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters, in the configured implementation; see decay_groups.

    capturable: the step will be captured in a CUDA graph, so the learning rate is a tensor on the device. compiles:
    torch.compile is in use.
    Raises RuntimeError from torch if the configured implementation is not available.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = config.implementation
    if kind == "auto":
        plain = all(parameter.is_floating_point() for parameter in parameters)
        # torch's fused SGD does not take sharded parameters.
        sharded = config.name == "sgd" and any(hasattr(parameter, "full_tensor") for parameter in parameters)
        kind = "fused" if device.type in ("cuda", "cpu") and plain and not sharded else "foreach"
    groups = decay_groups(model) if config.decay == "weights" else parameters
    common: dict[str, Any] = {
        "lr": torch.tensor(config.lr, device=device) if capturable else config.lr,
        "weight_decay": config.weight_decay,
        "fused": kind == "fused",
        "foreach": kind == "foreach",
    }
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    make: Any = kinds[config.name] if compiles else _without_compiler(kinds[config.name])
    if config.name == "sgd":
        return make(groups, momentum=config.momentum, **common)  # type: ignore[no-any-return]
    betas = (config.betas[0], config.betas[1])
    return make(groups, betas=betas, eps=config.eps, capturable=capturable, **common)  # type: ignore[no-any-return]


def one_thread_suffices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step should use a single thread: a fused optimizer of small parameters on a CPU.

    The fused step splits every parameter among all threads, whatever its size, and waits for all of them. For small
    parameters this saves almost nothing, and costs milliseconds where other processes use the cores.
    """
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    parameters = [item for group in groups for item in group["params"]]
    if not parameters or any(item.device.type != "cpu" for item in parameters):
        return False
    elements: int = sum(item.numel() for item in parameters)
    return elements < _FEW_ELEMENTS * len(parameters)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: the weights, and without decay what has less than two dimensions or belongs to a norm.

    One group if the model has only one of the two kinds.
    """
    of_norms = {
        id(item) for part in model.modules() if isinstance(part, _NORMS) for item in part.parameters()
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [item for item in parameters if item.ndim >= 2 and id(item) not in of_norms]
    decayed = {id(item) for item in weights}
    spared = [item for item in parameters if id(item) not in decayed]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@functools.cache
def _without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The optimizer with the same methods, but without the wrappers that import torch.compile (over a second).

    The wrappers only tell the compiler what not to trace.
    """
    names = ("state_dict", "load_state_dict", "zero_grad", "add_param_group")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def learning_rate(step: int, total_steps: int, lr: float, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step `step` (0-based); depends on nothing else, so a resume needs no state."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return lr
    span = max(total_steps - schedule.warmup_steps, 1)
    share = min((step - schedule.warmup_steps) / span, 1.0)
    return schedule.min_lr + (lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * share))


# Options that schedulers change.
_SCHEDULED = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)


class Optimizers:
    """The optimizers of a run by name; "" for a single one.

    lr: the learning rate of the first parameter group; None without an optimizer and without a function.
    """

    def __init__(
        self,
        parts: TrainingParts,
        config: Config,
        model: nn.Module,
        device: torch.device,
        total_steps: int,
        graphed: bool = False,
    ) -> None:
        """graphed: the step will be captured in a CUDA graph."""
        self._parts, self._config, self._total_steps = parts, config, total_steps
        self._model, self._device, self._graphed = model, device, graphed
        self.from_factory = parts.optimizers is not None
        self.by_name: dict[str, Optimizer] = {}
        self._alone = False
        if parts.optimizers is None:
            compiles = config.speed.compile != "off"
            made = make_optimizer(config.optimizer, self._model, self._device, self._graphed, compiles)
            self.by_name = {"": made}
            self._alone = one_thread_suffices(made)
        else:
            self.by_name = dict(parts.optimizers)
        # Also moves state that an optimizer created in the factory to the parameters' device.
        parts.reset()
        self._first = {name: _options(optimizer) for name, optimizer in self.by_name.items()}
        self._rate: float | None = None
        self._set: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    @property
    def lr(self) -> float | None:
        if self._set is not None:
            return self._set  # a tensor on the device would have to be read back
        groups = self.param_groups
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else self._rate

    @property
    def returned(self) -> Any:
        """The optimizer, or several by name."""
        return self.by_name.get("", self.by_name)

    def chosen(self, which: Any) -> list[tuple[str, Optimizer]]:
        """(name, optimizer) of the one with this name, of this one, or of all for None. Raises TrainingError."""
        if which is None:
            if not self.by_name:
                raise TrainingError(
                    f"{self._parts.where}: the factory returned no optimizer that could update"
                )
            return list(self.by_name.items())
        for name, optimizer in self.by_name.items():
            if which is optimizer or (isinstance(which, (str, int)) and str(which) == name):
                return [(name, optimizer)]
        what = repr(which) if isinstance(which, (str, int)) else kind(which)
        names = ", ".join(name or "the only one" for name in self.by_name) or "none"
        message = f"{what} is no optimizer that the factory returned; its optimizers: {names}"
        raise TrainingError(f"{self._parts.where}: {message}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def unscale(self, scaler: torch.amp.GradScaler, chosen: Iterable[tuple[str, Optimizer]]) -> None:
        """Divide the gradients by the loss scale, once per optimizer and step."""
        for _, optimizer in chosen:
            scaler.unscale_(optimizer)

    def step(self, scaler: torch.amp.GradScaler | None, chosen: Iterable[tuple[str, Optimizer]]) -> None:
        threads = torch.get_num_threads() if self._alone else 1
        if threads > 1:
            torch.set_num_threads(1)
        try:
            for _, optimizer in chosen:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)

    # Learning rates.

    def set_rate(self, step: int) -> None:
        """Set the learning rate of optimizer step `step` (0-based), if a function or the configuration sets it.

        Raises TrainingError if the factory's function returns no learning rate.
        """
        parts, schedule = self._parts, self._config.schedule
        if parts.lr is not None:
            lr = self._checked(parts.lr(step, self._total_steps), step)
            self._rate = lr
            self._write(lr, step)
        elif self.from_factory:
            if parts.schedulers or (schedule.kind == "constant" and not schedule.warmup_steps):
                return
            for name, optimizer in self.by_name.items():
                for group, first in zip(optimizer.param_groups, self._first[name], strict=False):
                    if "lr" in first:
                        _fill(group, learning_rate(step, self._total_steps, float(first["lr"]), schedule))
        elif not parts.schedulers:
            base = self._config.optimizer.lr
            self._write(learning_rate(step, self._total_steps, base, schedule), step)

    def _checked(self, found: Any, step: int) -> float:
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not 0 <= value < math.inf:
            shown = f"{value:g}" if isinstance(found, (int, float, Tensor)) else kind(found)
            message = f"lr({step}) returned {shown}, not a learning rate of at least 0"
            raise TrainingError(f"{self._parts.where}: {message}")
        return value

    def _write(self, lr: float, step: int) -> None:
        if lr == self._set and step > 0:
            return
        self._set = lr
        for group in self.param_groups:
            _fill(group, lr)

    def ended(self, when: str, metric: float | None = None) -> None:
        """After a step, an epoch or an evaluation that the configuration asks for: step its schedulers.

        metric: the first one of the evaluation.
        """
        for item in self._parts.schedulers:
            if item.every == when:
                item.scheduler.step(*([metric] if takes_metric(item.scheduler) else []))

    # Memory and checkpoints.

    def bytes(self) -> int:
        """Bytes of the state of all optimizers; 0 before the first step."""
        states = (optimizer.state for optimizer in self.by_name.values())
        return sum(local_bytes(tensor) for state in states for tensor in tensors(dict(state)))

    def moment_bytes(self) -> int:
        """As the function of this name. Optimizers of a factory are tried on tensors without memory; 0 if they fail."""
        if self.from_factory:
            return sum(map(_state_bytes, self.by_name.values()))
        return moment_bytes(self._config.optimizer, self._model)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: "optimizer", and for a factory's optimizers also their options and schedulers."""
        if not self.from_factory:
            return {"optimizer": self.by_name[""].state_dict(), **self._scheduler_state()}
        states = {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}
        found: dict[str, Any] = {"optimizer": states.get("", states)}
        return {**found, "optimizer_options": self._first, **self._scheduler_state()}

    def _scheduler_state(self) -> dict[str, Any]:
        states = [item.scheduler.state_dict() for item in self._parts.schedulers]
        return {"schedulers": states} if states else {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises ValueError or KeyError if it belongs to other optimizers."""
        if self.from_factory:
            self._load_own(state)
        else:
            self._load_made(state["optimizer"])
        schedulers = state.get("schedulers", [])
        if len(schedulers) != len(self._parts.schedulers):
            raise ValueError(
                f"it has {len(schedulers)} schedulers, the factory returns {len(self._parts.schedulers)}"
            )
        for item, saved in zip(self._parts.schedulers, schedulers, strict=True):
            item.scheduler.load_state_dict(copy.deepcopy(saved))
        self._set = None if self.from_factory else self.lr

    def _load_made(self, saved: dict[str, Any]) -> None:
        if "param_groups" not in saved:
            raise ValueError("it has several optimizers, or none")
        optimizer = self.by_name[""]
        for before, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            if ("betas" in before) != ("betas" in group):
                raise ValueError(f"its optimizer is not {self._config.optimizer.name}")
            # Options come from the configuration, which a resume may change, not from the checkpoint.
            before.update({key: value for key, value in group.items() if key != "params"})
        optimizer.load_state_dict(saved)

    def _load_own(self, state: dict[str, Any]) -> None:
        saved = state["optimizer"]
        saved = {"": saved} if "param_groups" in saved else saved
        if saved.keys() != self.by_name.keys():
            names = ", ".join(name or "one without a name" for name in saved) or "none"
            raise ValueError(f"its optimizers are {names}")
        for name, optimizer in self.by_name.items():
            optimizer.load_state_dict(saved[name])
            # What the factory sets otherwise than when the run began takes effect; the rest is as it was left.
            before = state.get("optimizer_options", {}).get(name, self._first[name])
            for group, was, now in zip(optimizer.param_groups, before, self._first[name], strict=True):
                changed = {key: value for key, value in now.items() if key in was and was[key] != value}
                if self._parts.schedulers and (both := sorted(_SCHEDULED & changed.keys())):
                    was_now = f"{both[0]} was {was[both[0]]}, now {changed[both[0]]}"
                    raise UsageError(
                        f"a scheduler continues with the values of the checkpoint, but {was_now}"
                    )
                group.update(changed)


def moment_bytes(section: OptimizerSection, model: nn.Module) -> int:
    """Bytes of optimizer state after the first step: two moments for Adam, momentum for SGD."""
    moments = 2 if section.name != "sgd" else int(section.momentum > 0)
    return moments * sum(local_bytes(item) for item in model.parameters() if item.requires_grad)


@torch.no_grad()
def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a sharded one (DTensor), of this rank's part."""
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local()).nbytes


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group that are plain values."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params" and isinstance(value, (bool, int, float, str, tuple, Tensor))
            if not isinstance(value, Tensor) or value.numel() == 1
        }
        for group in optimizer.param_groups
    ]


def _fill(group: dict[str, Any], lr: float) -> None:
    if isinstance(group.get("lr"), Tensor):
        group["lr"].fill_(lr)  # a captured graph reads it from here
    else:
        group["lr"] = lr


def _state_bytes(optimizer: Optimizer) -> int:
    known: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fake = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            fake.grad = torch.empty_like(fake)
            known[id(parameter)] = fake
    try:
        copied = copy.deepcopy(optimizer, known)
        copied.state.clear()
        for group in copied.param_groups:
            group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
        copied.step()
    except Exception:  # noqa: BLE001  an optimizer of the user's own may do anything
        return 0
    return sum(tensor.nbytes for tensor in tensors(dict(copied.state)))
