"""What a framework knows and no hook on torch can see: the length of the run, epochs, evaluations and logged values.

A probe hears the events that Hugging Face's Trainer and Lightning tell their callbacks; nothing is added to those.
Whatever fails in it, the training continues; where a name of the framework has changed, the hooks on torch stay. Steps
are counted by the hooks; a framework says only how many an earlier process has done.
"""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType
from typing import Any, Callable

from .apart import Contained, Dropped, module_of, os, ours
from .probes import Probes

Put = Callable[..., None]
Hook = Callable[..., Any]
# Calls back with the numbers among some values, once they are known.
Known = Callable[[dict[str, Any], Callable[[dict[str, float]], None]], None]
_TRANSFORMERS = "transformers.trainer_callback"
_LIGHTNING = ("lightning.pytorch.trainer.call", "pytorch_lightning.trainer.call")
# As many epochs mean that the steps end the training.
_ENDLESS = 1 << 31
# Packages whose tensors and numbers are read.
_NUMBERS = ("torch", "numpy")
# Speeds and counters that Hugging Face's Trainer adds to metrics.
_NOT_METRICS = ("_runtime", "_per_second", "_preparation_time", "_jit_compilation_time")


class Wishes:
    """What the console asks of a framework at the end of a step: to save a checkpoint, to evaluate."""

    saves = evaluates = False

    def __bool__(self) -> bool:
        return self.saves or self.evaluates


class Frameworks:
    """put(kind, **body) records; "evaluated" tells that an evaluation is over.

    Its end is not seen otherwise where the next epoch reads its first batch before the model trains again.
    """

    def __init__(self, put: Put, known: Known, wishes: Wishes, probes: Probes) -> None:
        self._put, self._known, self._wishes, self._probes = put, known, wishes, probes
        self._modules_heard: set[str] = set()

    def look(self) -> None:
        """Hear the frameworks that the script has imported by now."""
        for name, event_of, kind in (
            (_TRANSFORMERS, _event_of_transformers, hugging_face),
            *((name, _event_of_lightning, lightning) for name in _LIGHTNING),
        ):
            module = sys.modules.get(name)
            if name not in self._modules_heard and type(module) is ModuleType:
                self._modules_heard.add(name)
                found = vars(module).get("CallbackHandler", module)  # somebody's own module may have the name
                function = vars(found).get("call_event" if name == _TRANSFORMERS else "_call_callback_hooks")
                if function is not None:
                    told = kind(object, self._put, self._known, self._wishes)()
                    self._hear(function, event_of, told)

    def _hear(self, function: Any, event_of: Callable[[dict[str, Any]], Any], told: Any) -> None:
        def begins(_probe: Any, zero: int) -> int:
            try:
                name, given, more = event_of(sys._getframe(1).f_locals)
                hook = getattr(type(told), name, None)
                if hook is not None:
                    hook(told, *given, **more)
                if self._wishes and name == told.obeys_at:
                    told.obey(*given)
            except Exception as error:
                if not ours(error):
                    raise
            return zero

        self._probes.put(function, begins, None, False)


def _event_of_transformers(given: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    more = {name: given["kwargs"][name] for name in ("logs", "metrics") if name in given["kwargs"]}
    return given["event"], (given["args"], given["state"], given["control"]), more


def _event_of_lightning(given: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return given["hook_name"], (given["trainer"], None), {}


def _safe(hook: Callable[..., None]) -> Hook:
    """The method of a callback, whose errors are dropped."""

    @wraps(hook)
    def call(*given: Any, **more: Any) -> None:
        with Dropped():
            hook(*given, **more)

    return call


def numbers(found: Any) -> dict[str, float]:
    """The values that are finite numbers, by name."""
    values: dict[str, float] = {}
    for name, value in dict(found or {}).items():
        if not isinstance(value, (int, float)) and module_of(type(value)).partition(".")[0] not in _NUMBERS:
            continue  # its conversion could be code of the script
        with Dropped():
            number = float(value)
            if number == number and abs(number) != float("inf"):
                values[str(name)] = number
    return values


def first(metrics: dict[str, float], name: Any) -> dict[str, float]:
    """The metrics with this one before the others: it decides which evaluation is the best."""
    return {**{one: metrics[one] for one in (name,) if one in metrics}, **metrics}


def hugging_face(base: type, put: Put, known: Known, wishes: Wishes) -> type:
    """A TrainerCallback that records and obeys. base: transformers' TrainerCallback."""

    class NddCallback(base):  # type: ignore[misc]
        """Records the length of the run, epochs, evaluations and logged values."""

        obeys_at = "on_step_end"

        def __reduce__(self) -> Any:
            return base, ()  # in another process, this one records nothing

        @_safe
        def obey(self, args: Any, state: Any, control: Any) -> None:
            """Have the Trainer save and evaluate at the end of this step, as it does of its own accord."""
            saves, does = wishes.saves, wishes.evaluates and evaluates(args)
            wishes.saves = wishes.evaluates = False
            control.should_save, control.should_evaluate = (
                control.should_save or saves,
                control.should_evaluate or does,
            )
            for what in ["saves a checkpoint"] * saves + ["evaluates"] * does:
                put("note", text=f"on request, the Trainer {what} after step {state.global_step:,}")

        @_safe
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            epochs = int(state.num_train_epochs)
            put(
                "totals", framework="transformers", earlier=int(state.global_step), total_steps=int(state.max_steps),
                epochs=epochs if epochs < _ENDLESS else 0,
                obeys=["checkpoint", *["evaluate"] * evaluates(args)],
            )  # fmt: skip

        @_safe
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # A fraction after a resume within an epoch.
            put("epoch", epoch=int((state.epoch or 0) + 1e-6))

        @_safe
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logged = {k: v for k, v in dict(logs or {}).items() if k != "epoch"}
            known(logged, lambda values: put("scalars", values=values))

        @_safe
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            put("evaluated")
            best = getattr(args, "metric_for_best_model", None) or "loss"
            best = best if best.startswith("eval_") else f"eval_{best}"
            greater = getattr(args, "greater_is_better", None)

            def record(values: dict[str, float]) -> None:
                put(
                    "evaluation", seconds=values.get("eval_runtime"), lower=None if greater is None else not greater,
                    metrics=first({k: v for k, v in values.items() if not k.endswith(_NOT_METRICS)}, best),
                )  # fmt: skip

            known({k: v for k, v in dict(metrics or {}).items() if k != "epoch"}, record)

    return NddCallback


def lightning(base: type, put: Put, known: Known, wishes: Wishes) -> type:
    """A Callback that records and obeys. base: Lightning's Callback."""

    class NddCallback(base):  # type: ignore[misc]
        """Records the length of the run, epochs, evaluations and logged values."""

        obeys_at = "on_train_batch_end"

        def __init__(self) -> None:
            super().__init__()
            # What was logged when the validation began, and the results of the last one.
            self.before: dict[str, Any] = {}
            self.results: dict[str, Any] = {}

        def __reduce__(self) -> Any:
            return base, ()  # in another process, this one records nothing

        @_safe
        def obey(self, trainer: Any, *_: Any) -> None:
            """Save a checkpoint beside those of the script. An error of it does not end the training."""
            if trainer.fit_loop._should_accumulate():
                return
            wishes.saves = wishes.evaluates = False
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
            path = os.path.join(folder, f"requested-step={trainer.global_step}.ckpt")
            try:
                trainer.save_checkpoint(path)
            except Exception as error:  # noqa: BLE001
                put("warning", text=f"no checkpoint: {type(error).__name__}: {error}")
            else:
                put("note", text=f"checkpoint on request: {path}")

        @_safe
        def on_train_start(self, trainer: Any, module: Any) -> None:
            total: Any = 0
            with Contained():  # unknown if the accumulation changes between epochs
                total = trainer.estimated_stepping_batches
            epochs = trainer.max_epochs
            put(
                "totals", framework="lightning", earlier=_batches(trainer),
                total_steps=int(total) if 0 < total < float("inf") else 0,
                epochs=int(epochs) if epochs and epochs > 0 else 0, obeys=["checkpoint"],
            )  # fmt: skip

        @_safe
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            put("epoch", epoch=int(trainer.current_epoch))

        @_safe
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            # As Lightning's own callbacks decide; after each micro-batch of a step, so only at its end.
            if trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
                # Results of the last validation stay among them.
                logged = {k: v for k, v in trainer.logged_metrics.items() if self.results.get(k) is not v}
                known(logged, lambda values: put("scalars", values=values) if values else None)

        @_safe
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.before = dict(trainer.callback_metrics)

        @_safe
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            put("evaluated")
            before, self.before = self.before, {}
            if trainer.sanity_checking:
                return
            # The metrics of the training are among them.
            new = {k: v for k, v in trainer.callback_metrics.items() if before.get(k) is not v}
            self.results = new
            kept = getattr(trainer, "checkpoint_callback", None)
            name, mode = getattr(kept, "monitor", None), getattr(kept, "mode", None)

            def record(metrics: dict[str, float]) -> None:
                lower = mode == "min" if name in metrics else None
                best = name if name in metrics else next((one for one in metrics if "loss" in one), None)
                put("evaluation", lower=lower, metrics=first(metrics, best))
                put("scalars", values=metrics)

            known(new, record)

    return NddCallback


def evaluates(args: Any) -> bool:
    """Whether a Trainer with these arguments evaluates while it trains. Without that, it may have no data for it."""
    given = getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", None)
    return str(getattr(given, "value", given)) not in ("no", "None")


def _batches(trainer: Any) -> int:
    """Batches after which an optimizer stepped; `global_step` counts each of several optimizers."""
    try:
        return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
    except AttributeError:
        return int(trainer.global_step)
