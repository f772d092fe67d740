"""What a framework knows and no hook can see: the length of the run, its epochs, its evaluations and what it logs.

Nothing is imported for it: a callback is added once the script has imported Hugging Face's Trainer or Lightning itself.
Every callback lets the training go on, whatever fails in it; where a name of the framework has changed, the hooks on
torch remain.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable

Put = Callable[..., None]
_LIGHTNING = (
    "lightning.pytorch.trainer.connectors.callback_connector",
    "pytorch_lightning.trainer.connectors.callback_connector",
)


def attach(put: Put, when_imported: Callable[[str, Callable[[Any], Any]], None]) -> None:
    """put(kind, **body) records; when_imported(name, then) calls then(module) once a module has been imported."""
    when_imported("transformers.trainer", lambda module: _guarded(_transformers, module, put))
    for name in _LIGHTNING:
        when_imported(name, lambda module: _guarded(_lightning, module, put))


def _guarded(work: Callable[..., None], *given: Any) -> None:
    with contextlib.suppress(Exception):
        work(*given)


def numbers(found: Any) -> dict[str, float]:
    """The values that are finite numbers, by name."""
    values: dict[str, float] = {}
    for name, value in dict(found or {}).items():
        with contextlib.suppress(Exception):
            number = float(value)
            if number == number and abs(number) != float("inf"):
                values[str(name)] = number
    return values


def hugging_face(base: type, put: Put) -> type:
    """A TrainerCallback that records. base: transformers' TrainerCallback."""

    class NddCallback(base):  # type: ignore[misc]
        """Records the length of the run, epochs, evaluations and logged values."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            def told() -> None:
                put(
                    "totals", framework="transformers", total_steps=int(state.max_steps),
                    epochs=int(state.num_train_epochs),
                )  # fmt: skip

            _guarded(told)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _guarded(lambda: put("epoch", step=int(state.global_step), epoch=round(state.epoch or 0)))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            _guarded(lambda: put("scalars", step=int(state.global_step), values=numbers(logs)))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            _guarded(lambda: put("evaluation", step=int(state.global_step), metrics=numbers(metrics)))

    return NddCallback


def lightning(base: type, put: Put) -> type:
    """A Callback that records. base: Lightning's Callback."""

    class NddCallback(base):  # type: ignore[misc]
        """Records the length of the run, epochs, evaluations and logged values."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            def told() -> None:
                total, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
                put(
                    "totals", framework="lightning", total_steps=int(total) if 0 < total < float("inf") else 0,
                    epochs=int(epochs) if epochs and epochs > 0 else 0,
                )  # fmt: skip

            _guarded(told)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            _guarded(lambda: put("epoch", step=int(trainer.global_step), epoch=int(trainer.current_epoch)))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            def told() -> None:
                if not trainer.sanity_checking:
                    metrics = numbers(trainer.callback_metrics)
                    put("evaluation", step=int(trainer.global_step), metrics=metrics)

            _guarded(told)

    return NddCallback


def _transformers(module: Any, put: Put) -> None:
    module.DEFAULT_CALLBACKS.append(hugging_face(module.TrainerCallback, put))


def _lightning(module: Any, put: Put) -> None:
    package = module.__name__.split(".trainer.")[0]
    callback = lightning(sys.modules[f"{package}.callbacks"].Callback, put)
    original = module._load_external_callbacks

    def load(group: str) -> list[Any]:
        return [*original(group), *([callback()] if group.endswith("callbacks_factory") else [])]

    module._load_external_callbacks = load
