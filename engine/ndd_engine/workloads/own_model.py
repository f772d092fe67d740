"""Reads the model that a factory returned, and refuses one that could not be trained or resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from .own_result import Reader


def read_model(reader: Reader) -> nn.Module | None:
    """The model; several in a dict become one nn.ModuleDict."""
    if isinstance(several := reader.get("model"), dict) and _are_models(several):
        reader.value.model = nn.ModuleDict(several)
    allowed = "a torch.nn.Module, or a dict of them"
    found: nn.Module | None = reader.typed("model", nn.Module, allowed, needed=True)
    if found is None:
        return None
    if "_parameters" not in vars(found):
        reader.add("model", f"{type(found).__name__} does not call super().__init__()")
        return None
    lazy = [name for name, parameter in found.named_parameters() if is_lazy(parameter)]
    if lazy:
        advice = "run one batch through the model in the factory"
        reader.add("model", f"the parameter {lazy[0]} has no shape yet (lazy layer)", suggestion=advice)
    elif not any(parameter.requires_grad for parameter in found.parameters()):
        advice = "set requires_grad to True for the parameters to train"
        reader.add("model", f"{type(found).__name__} has no trainable parameter", suggestion=advice)
    for name, module in found.named_modules():
        mine, plain = type(module), nn.Module
        if (
            mine.get_extra_state is not plain.get_extra_state
            and mine.set_extra_state is plain.set_extra_state
        ):
            message = (
                f"{name or 'the model'} ({mine.__name__}) defines get_extra_state, but not set_extra_state"
            )
            reader.add(
                "model", message, suggestion="define both: a run could not resume from its checkpoints"
            )
    return found


def _are_models(several: dict[Any, Any]) -> bool:
    names = all(isinstance(name, str) and name.isidentifier() for name in several)
    plain = not any(hasattr(nn.ModuleDict, str(name)) for name in several)
    return bool(several) and names and plain and all(isinstance(item, nn.Module) for item in several.values())
