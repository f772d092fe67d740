"""Reads what a factory returned: its parts, how it trains in its own way, and everything that is missing or wrong."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ndd_engine.batches import map_tensors
from ndd_engine.config.schema import Config, OptimizerSection, ScheduleSection
from ndd_engine.diagnose.finding import CAUSES
from ndd_engine.errors import LONGEST, TrainingError, shortened
from ndd_engine.text import printable

from .interface import Settings, calling, kind
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

    def alternatives(self) -> dict[str, tuple[str, str]]:
        """A dict from causes of findings to (setting, what it does)."""
        allowed = "a dict from a cause of docs/diagnosis.md to (a setting such as workload.options.pad=full, a text)"
        found = self.typed("alternatives", dict, allowed) or {}
        wrong = [
            cause
            for cause, pair in found.items()
            if cause not in CAUSES
            or not (isinstance(pair, (list, tuple)) and len(pair) == 2)
            or not (all(isinstance(one, str) for one in pair) and "=" in pair[0])
        ]
        if wrong:
            self.add("alternatives", f"has an entry that is none: {wrong[0]!r}", allowed)
            return {}
        return {cause: (setting, shortened(text, 1000)) for cause, (setting, text) in found.items()}

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


STEP, EPOCH, EVALUATION = "step", "epoch", "evaluation"
_EVERY = (STEP, EPOCH, EVALUATION)
_OPTIMIZERS = "a torch.optim.Optimizer, or a dict or list of them"
_SCHEDULERS = "a scheduler of torch.optim.lr_scheduler, or a list of them"
# Keys of [optimizer] that the training loop itself uses.
_OF_THE_LOOP = frozenset({"set_to_none"})


@runtime_checkable
class Stateful(Protocol):
    """An object whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of torch.optim.lr_scheduler, and after what it steps: "step", "epoch" or "evaluation"."""

    scheduler: Any
    every: str


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler's `step` needs the value of a metric."""
    return isinstance(scheduler, ReduceLROnPlateau)


@dataclass
class TrainingParts:
    """The parts of a workload that replace or extend the training loop's own; the defaults of all other workloads.

    where: file and line of the factory. optimizers: None for the configured one; by name, "" for one that was returned
    by itself; empty if the step updates the parameters itself. lr: the learning rate of a step, called as
    lr(step, total_steps). step, eval_step, state, on_step, on_evaluate, on_checkpoint, samples: the factory's
    functions. stateful: objects to checkpoint.
    """

    where: str = ""
    optimizers: dict[str, Optimizer] | None = None
    schedulers: tuple[Scheduler, ...] = ()
    lr: Callable[[int, int], Any] | None = None
    step: Callable[..., Any] | None = None
    eval_step: Callable[..., Any] | None = None
    state: Callable[..., Any] | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    on_step: Callable[..., Any] | None = None
    on_evaluate: Callable[..., Any] | None = None
    on_checkpoint: Callable[..., Any] | None = None
    samples: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self._first = {name: copy.deepcopy(thing.state_dict()) for name, thing in self._things()}
        self._handles: list[Any] = []

    def reset(self) -> None:
        """Put the optimizers, schedulers and stateful objects back to the state in which the factory returned them."""
        for name, thing in self._things():
            thing.load_state_dict(copy.deepcopy(self._first[name]))

    def watch(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call these around every `step` of the optimizers, instead of those of an earlier call."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            handle
            for optimizer in (self.optimizers or {}).values()
            for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
        ]

    def copied(self, known: dict[int, Any]) -> TrainingParts:
        """The same parts for a copy of the model; without schedulers. known: id of a parameter -> its copy."""
        if self.optimizers is None:
            return self
        made = {name: copy.deepcopy(optimizer, known) for name, optimizer in self.optimizers.items()}
        return replace(self, optimizers=made, schedulers=(), stateful={})

    def _things(self) -> list[tuple[str, Any]]:
        return [
            *((f"optimizer {name}", optimizer) for name, optimizer in (self.optimizers or {}).items()),
            *((f"scheduler {index}", item.scheduler) for index, item in enumerate(self.schedulers)),
            *((f"stateful {name}", thing) for name, thing in self.stateful.items()),
        ]


class Carry:
    """State that a model carries from batch to batch (truncated backpropagation through time).

    value: the state after the last batch, detached; None before the first one.
    """

    def __init__(self, workload: Any) -> None:
        self._workload, self._parts = workload, workload.training
        self.value: Any = None

    def forward(self, model: Any, batch: Any) -> Any:
        """The workload's forward. With `state`, it also receives and returns the state."""
        return self.call("forward", self._workload.forward, model, batch)

    def call(self, name: str, function: Callable[..., Any], model: Any, batch: Any) -> Any:
        """Call `function` like forward. Raises TrainingError if it does not return (output, state)."""
        if self._parts.state is None:
            return function(model, batch)
        self.begin(batch)
        found = function(model, batch, self.value)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            message = f"with state, {name} has to return (output, state); it returned {kind(found)}"
            raise TrainingError(f"{self._parts.where}: {message}")
        output, self.value = found[0], detached(found[1])
        return output

    def begin(self, batch: Any) -> None:
        """Create the state before the first batch of an epoch or evaluation."""
        if self.value is None and self._parts.state is not None:
            self.value = self._parts.state(batch)


def detached(state: Any) -> Any:
    """The same state without its graph."""
    return map_tensors(state, Tensor.detach)


def read_training(reader: Reader, model: nn.Module | None, config: Config, better: str) -> TrainingParts:
    """The training parts of a factory's result; adds a problem for each wrong one."""
    step = reader.function("step", ("batch", "train"))
    state = reader.function("state", ("batch",))
    optimizers = _optimizers(reader, model, by_hand=step is not None)
    return TrainingParts(
        where=reader.problems.where,
        optimizers=optimizers,
        schedulers=_schedulers(reader, optimizers, config, better),
        lr=_rate(reader),
        step=step,
        eval_step=reader.function("eval_step", ("model", "batch", "state") if state else ("model", "batch")),
        state=state,
        stateful=_stateful(reader),
        on_step=reader.function("on_step", ("train",)),
        on_evaluate=reader.function("on_evaluate", ("metrics", "train")),
        on_checkpoint=reader.function("on_checkpoint", ("path", "train")),
        samples=reader.function("samples", ("model",)),
    )


def check_conflicts(reader: Reader, parts: TrainingParts, config: Config, settings: Settings) -> None:
    """Adds a problem for each part or setting that another part leaves without effect."""
    if parts.step is not None:
        _of_own_step(reader, parts, config)
    elif parts.eval_step is not None and (names := reader.given("metric", "weight")):
        for name in names:
            reader.add(
                name, "is not used with eval_step, which returns the values itself", suggestion="remove it"
            )
    if parts.optimizers is not None:
        for key in settings.optimizer.unread(_OF_THE_LOOP):
            advice = f"read it in the factory as settings.optimizer.{key}, or remove it"
            _unused(reader, config.optimizer, f"optimizer.{key}", "its own optimizer", advice)
    rates = [name for name, part in (("lr", parts.lr), ("scheduler", parts.schedulers)) if part]
    if len(rates) == 2:
        reader.add(
            "lr", "is not used with scheduler, which sets the learning rate", suggestion="remove one of them"
        )
    if parts.optimizers == {} and not rates:
        rates = ["no optimizer"]
    for key in settings.schedule.unread() if rates else ():
        advice = f"read it in the factory as settings.schedule.{key}, or remove it"
        _unused(reader, config.schedule, f"schedule.{key}", rates[0], advice)


def _unused(
    reader: Reader, section: OptimizerSection | ScheduleSection, key: str, instead: str, advice: str
) -> None:
    value = getattr(section, key.partition(".")[2])
    message = f"is not used, because the factory returns {instead}"
    reader.problems.add(key, message, value, suggestion=advice)


def _of_own_step(reader: Reader, parts: TrainingParts, config: Config) -> None:
    unused = ("forward", "loss", "metric") if parts.eval_step is not None else ()
    for name in reader.given(*unused):
        reader.add(name, "is not used with step and eval_step", suggestion="remove it, or remove eval_step")
    if parts.eval_step is None and not reader.given("loss"):
        advice = "add eval_step(model, batch), which returns values, or loss(output, batch) for the usual evaluation"
        reader.add(
            "eval_step", "is missing: with step and without loss, nothing can be evaluated", None, advice
        )
    problems, batch = reader.problems, config.batch
    if batch.accumulation > 1:
        message = "is not used, because the factory returns its own step, which receives one batch per optimizer step"
        advice = f"set batch.micro to {batch.items}, and split the batch in the step if it does not fit"
        problems.add("batch.accumulation", message, batch.accumulation, "1", advice)
    if config.speed.compile != "off":
        message = "is not used, because the factory returns its own step, which calls its modules itself"
        advice = "compile them in the factory: module.compile()"
        problems.add("speed.compile", message, config.speed.compile, '"off"', advice)


def _optimizers(reader: Reader, model: nn.Module | None, by_hand: bool) -> dict[str, Optimizer] | None:
    found = reader.get("optimizer")
    if found is None:
        return None
    if isinstance(found, Optimizer):
        named: dict[str, Any] = {"": found}
    elif isinstance(found, Mapping):
        named = {str(name): value for name, value in found.items()}
    elif isinstance(found, Sequence) and not isinstance(found, str):
        named = {str(index): value for index, value in enumerate(found)}
    else:
        reader.add("optimizer", f"is {kind(found)}", _OPTIMIZERS)
        return None
    if not named and not by_hand:
        reader.add(
            "optimizer", "is empty, so nothing would be trained", _OPTIMIZERS, "return a step that updates"
        )
    for name, value in named.items():
        shown = f"optimizer[{printable(name)[:40]}]" if name else "optimizer"
        if not isinstance(value, Optimizer):
            reader.add(shown, f"is {kind(value)}", "a torch.optim.Optimizer")
            return None
        if isinstance(value, LBFGS) and not by_hand:
            advice = "return a step that calls optimizer.step(closure)"
            reader.add(shown, "LBFGS evaluates the model several times in one step", suggestion=advice)
    if model is not None:
        _check_parameters(reader, model, named, by_hand)
    return named


def _check_parameters(reader: Reader, model: nn.Module, named: dict[str, Optimizer], by_hand: bool) -> None:
    """Adds a problem for parameters that would not be saved, or not be trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    held = [
        item for optimizer in named.values() for group in optimizer.param_groups for item in group["params"]
    ]
    if foreign := sum(id(parameter) not in names for parameter in held):
        message = f"holds {foreign:,} parameters that are not in the model, so they would be neither moved nor saved"
        advice = 'return several models as one: {"model": {"generator": g, "discriminator": d}}'
        reader.add("optimizer", message, suggestion=advice)
    known = {id(parameter) for parameter in held}
    missing = [names[id(item)] for item in model.parameters() if item.requires_grad and id(item) not in known]
    if missing and not by_hand:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        message = f"has not all trainable parameters: {shortened(missing[0], 80)}{more} would not be trained"
        reader.add("optimizer", message, suggestion="add them, or call requires_grad_(False) on them")


def _schedulers(
    reader: Reader, optimizers: dict[str, Optimizer] | None, config: Config, better: str
) -> tuple[Scheduler, ...]:
    found, every = reader.get("scheduler"), reader.get("scheduler_every")
    if found is None:
        if every is not None:
            reader.add(
                "scheduler_every", "is not used without scheduler", suggestion="remove it, or add scheduler"
            )
        return ()
    values = list(found.values()) if isinstance(found, Mapping) else found
    values = values if isinstance(values, (list, tuple)) else [values]
    if every is not None and every not in _EVERY:
        reader.problems.add(
            "scheduler_every", "is no period of a scheduler", every, '"step", "epoch" or "evaluation"'
        )
        return ()
    out = []
    for value in values:
        methods = ("step", "state_dict", "load_state_dict")
        if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in methods):
            reader.add("scheduler", f"is {kind(value)}", _SCHEDULERS)
            continue
        by_metric = takes_metric(value)
        its = getattr(value, "optimizer", None)
        if not any(its is optimizer for optimizer in (optimizers or {}).values()):
            advice = "return the optimizer that it was created with as optimizer"
            reader.add(
                "scheduler", "belongs to an optimizer that the factory does not return", suggestion=advice
            )
        out.append(Scheduler(value, every or (EVALUATION if by_metric else STEP)))
        if by_metric:
            _check_plateau(reader, value, every, config, better)
    after = any(item.every == EVALUATION for item in out)
    if after and not (config.evaluate.every_steps or config.evaluate.every_epochs):
        advice = "set evaluate.every_epochs or evaluate.every_steps"
        reader.add(
            "scheduler", "steps after evaluations, but no evaluations are configured", suggestion=advice
        )
    return tuple(out)


def _check_plateau(reader: Reader, value: Any, every: str | None, config: Config, better: str) -> None:
    if every not in (None, EVALUATION):
        message = f"{kind(value)} needs a metric, which only an evaluation has"
        reader.problems.add("scheduler_every", message, every, f'"{EVALUATION}"')
    wanted = config.evaluate.mode or {"lower": "min", "higher": "max"}.get(better, "min")
    if value.mode != wanted:
        message = f'has mode "{value.mode}", but the metric improves as "{wanted}"'
        advice = "change its mode, or the part better, or evaluate.mode"
        reader.add("scheduler", message, suggestion=advice)


def _rate(reader: Reader) -> Callable[[int, int], Any] | None:
    """The factory's lr as a function of (step, total_steps)."""
    found = reader.get("lr")
    if found is None:
        return None
    allowed = "a function lr(step) or lr(step, total_steps) that returns the learning rate"
    if not callable(found):
        reader.add("lr", f"is {kind(found)}", allowed)
        return None
    function: Callable[..., Any] = found
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        reader.function("lr", ("step", "total_steps"))
        return function
    except ValueError:
        pass  # written in C, without a signature
    return lambda step, _total: function(step)


def _stateful(reader: Reader) -> Mapping[str, Stateful]:
    found = reader.typed("stateful", Mapping, 'a dict such as {"average": average}') or {}
    for name, thing in found.items():
        if not isinstance(thing, Stateful) or isinstance(thing, type):
            allowed = "an object with state_dict() and load_state_dict(state)"
            reader.add(f"stateful[{shortened(str(name), 40)}]", f"is {kind(thing)}", allowed)
            return {}
        with calling(f"state_dict() of stateful[{name}]", where=reader.problems.where):
            thing.state_dict()
    return {str(name): thing for name, thing in found.items()}
