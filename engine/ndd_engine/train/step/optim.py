"""The optimizer and the learning rate as configured."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import nn

from ndd_engine.config.schema import OptimizerSection, ScheduleSection

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
