"""The callback for Hugging Face's Trainer: `Trainer(…, callbacks=[NddCallback()])`. Needs the extra `transformers`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ndd_engine.api.observing import ObservedCallback
from ndd_engine.api.sources import PathLike
from ndd_watch.frameworks import hugging_face


class NddCallback(TrainerCallback):  # type: ignore[misc]
    """Observes `Trainer.train`. name: of the run; runs: folder of the runs, as for `ndd_engine.observe`."""

    def __init__(self, name: str | None = None, runs: PathLike | None = None) -> None:
        self._observed = ObservedCallback(TrainerCallback, hugging_face, name, runs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the observation."""
        self._observed.begin(getattr(state, "is_world_process_zero", True))
        self._observed.callback.on_train_begin(args, state, control, **more)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._observed.callback.on_epoch_begin(args, state, control, **more)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save a checkpoint, or evaluate, if the console asks for it."""
        if self._observed.wishes:
            self._observed.callback.obey(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._observed.callback.on_log(args, state, control, **more)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._observed.callback.on_evaluate(args, state, control, **more)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the observation."""
        self._observed.end()
