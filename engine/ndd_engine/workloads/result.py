"""Reads the attributes of what a factory returned, and collects everything that is missing or wrong."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ndd_engine.errors import LONGEST, shortened
from ndd_engine.text import printable

from .own_module import calling, kind
from .problems import Problems

Parted = nn.Module | Sequence[nn.Module]  # the modules of a sub-phase
NAME_LENGTH = 40  # characters of the name of an item, a token or a part
MOST_NOTES = 100
NEEDED = ("model", "train_data", "loss")


class Reader:
    """Reads the attributes of the factory's result and adds a problem for each wrong one."""

    def __init__(self, value: object, problems: Problems) -> None:
        self.value: Any = SimpleNamespace(**value) if isinstance(value, Mapping) else value
        self.problems, self._type = problems, shortened(type(value).__name__, 80)

    def add(self, name: str, message: str, allowed: str | None = None, suggestion: str | None = None) -> None:
        self.problems.add(name, message, None, allowed, suggestion)

    def get(self, name: str, needed: bool = False, called: bool = False) -> Any:
        """An attribute, or None; adds a problem if it is missing and needed.

        called: a function without arguments may return it.
        """
        with calling(f"reading {name}", where=self.problems.where):
            found = getattr(self.value, name, None)
        if found is None and needed:
            others = [known for known in self._names() if known not in NEEDED]
            close = difflib.get_close_matches(name, others, n=1)
            advice = f"rename {printable(close[0])} to {name}" if close else f"add it: {name}=…"
            message = f"is missing from the {self._type} that the factory returned"
            self.add(name, message, suggestion=advice)
        if called and callable(found):
            with calling(f"{name}()", where=self.problems.where):
                return found()
        return found

    def typed(self, name: str, kinds: type, allowed: str, needed: bool = False, called: bool = False) -> Any:
        """An attribute of this type, or None; adds a problem if it has another."""
        found = self.get(name, needed, called)
        if found is None or isinstance(found, kinds):
            return found
        self.add(name, f"is {kind(found)}", allowed)
        return None

    def model(self) -> nn.Module | None:
        """The model, refused if it could not be trained or resumed; several in a dict become one nn.ModuleDict."""
        if isinstance(several := self.get("model"), dict) and _are_models(several):
            self.value.model = nn.ModuleDict(several)
        allowed = "a torch.nn.Module, or a dict of them"
        found: nn.Module | None = self.typed("model", nn.Module, allowed, needed=True)
        if found is None:
            return None
        if "_parameters" not in vars(found):
            self.add("model", f"{type(found).__name__} does not call super().__init__()")
            return None
        lazy = [name for name, parameter in found.named_parameters() if is_lazy(parameter)]
        if lazy:
            advice = "run one batch through the model in the factory"
            self.add("model", f"the parameter {lazy[0]} has no shape yet (lazy layer)", suggestion=advice)
        elif not any(parameter.requires_grad for parameter in found.parameters()):
            advice = "set requires_grad to True for the parameters to train"
            self.add("model", f"{type(found).__name__} has no trainable parameter", suggestion=advice)
        for name, module in found.named_modules():
            mine, plain = type(module), nn.Module
            if (
                mine.get_extra_state is not plain.get_extra_state
                and mine.set_extra_state is plain.set_extra_state
            ):
                message = f"{name or 'the model'} ({mine.__name__}) defines get_extra_state, but not set_extra_state"
                self.add(
                    "model", message, suggestion="define both: a run could not resume from its checkpoints"
                )
        return found

    def given(self, *names: str) -> list[str]:
        """Those of these parts that the factory returned."""
        return [name for name in names if self.get(name) is not None]

    def check_unknown(self, known: Sequence[str]) -> None:
        """Adds a problem for each unknown name in a dict or SimpleNamespace; other objects may have attributes of
        their own."""
        if type(self.value) is not SimpleNamespace:
            return
        for name in self._names():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                advice = (
                    f"did you mean {close[0]}?" if close else f"remove it; the parts are {', '.join(known)}"
                )
                self.add(
                    printable(name), "is no part of a workload, so it would not be used", suggestion=advice
                )

    def function(
        self, name: str, arguments: tuple[str, ...], needed: bool = False
    ) -> Callable[..., Any] | None:
        """A callable that takes these arguments."""
        found = self.get(name, needed)
        if found is None:
            return None
        call = f"{name}({', '.join(arguments)})"
        if not callable(found):
            self.add(name, f"is {kind(found)}", f"a function {call}")
            return None
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            self.add(name, f"cannot be called as {call}: {error}")
        except ValueError:
            pass  # written in C, without a signature
        return found  # type: ignore[no-any-return]

    def parts(self, model: nn.Module | None) -> Mapping[str, Parted]:
        """Names of sub-phases, each with one or more modules of the model."""
        found: Mapping[str, Parted] = (
            self.typed("parts", Mapping, 'a dict such as {"encoder": model.encoder}') or {}
        )
        inside = set(model.modules()) if model is not None else None
        for name, part in found.items():
            modules = list(part) if isinstance(part, (Sequence, nn.ModuleList)) else [part]
            if not isinstance(name, str) or not all(isinstance(module, nn.Module) for module in modules):
                allowed = "a module of the model, or a list of them"
                self.add(f"parts[{shortened(str(name), 80)}]", "is not a module", allowed=allowed)
            elif not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
                allowed = f"1 to {NAME_LENGTH} printable characters"
                self.add(f"parts[{shortened(name, 80)}]", "this is no name for a phase", allowed=allowed)
            elif inside is not None and not inside.issuperset(modules):
                advice = "use submodules of model, as in model.encoder"
                self.add(f"parts[{printable(name)}]", "is not a part of the model", suggestion=advice)
        return found

    def tokens_per_item(self) -> float:
        found, token = self.get("tokens_per_item"), self.get("token")
        if found is None:
            if token is not None:
                message = f"is missing, but token is set ({token!r})"
                advice = "add the mean number of tokens per item"
                self.add("tokens_per_item", message, suggestion=advice)
            return 1.0
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not number or not math.isfinite(found) or found <= 0:
            self.add("tokens_per_item", f"is {kind(found)}", "a number above 0")
            return 1.0
        return float(found)

    def text(self, name: str, called: bool = False, longest: int = LONGEST) -> str | None:
        """A string, on one line; if `called`, a function without arguments may return it."""
        allowed = f"a string{', or a function without arguments that returns one' * called}"
        found = self.typed(name, str, allowed, called=called)
        if found is None:
            return None
        if len(found) > longest and not called:
            self.add(name, f"has {len(found):,} characters", f"at most {longest}")
        return shortened(found, longest)

    def lines(self, name: str) -> list[str]:
        """A string or strings, or a function without arguments that returns them."""
        allowed = "a list of strings, or a function without arguments that returns one"
        found = self.typed(name, Sequence, allowed, called=True) or ()
        texts = [found] if isinstance(found, str) else found
        if not all(isinstance(text, str) for text in texts):
            self.add(name, "has other items than strings", allowed)
            return []
        return [shortened(text, 1000) for text in texts[:MOST_NOTES]]

    def _names(self) -> list[str]:
        return [name for name in getattr(self.value, "__dict__", ()) if not name.startswith("_")]


def wrong_result(value: object) -> str | None:
    """The type of a factory's result, as text, if it cannot have the parts of a workload; else None."""
    if value is None:
        return "None (is a return statement missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance of it"
    if isinstance(value, nn.Module) and getattr(value, "model", None) is None:
        return "only the model"
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine (it is defined with async def)"
    if isinstance(value, (list, str, bytes, int, float)) or type(value) is tuple:
        return kind(value)
    return None


def _are_models(several: dict[Any, Any]) -> bool:
    names = all(isinstance(name, str) and name.isidentifier() for name in several)
    plain = not any(hasattr(nn.ModuleDict, str(name)) for name in several)
    return bool(several) and names and plain and all(isinstance(item, nn.Module) for item in several.values())
