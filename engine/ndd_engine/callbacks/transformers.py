"""The callback for Hugging Face's Trainer: `Trainer(…, callbacks=[NddCallback()])`. Needs the extra `transformers`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ndd_engine.api.observing import Observation, started
from ndd_engine.api.sources import PathLike
from ndd_watch.frameworks import hugging_face


class NddCallback(TrainerCallback):  # type: ignore[misc]
    """Observes `Trainer.train`. name: of the run; runs: folder of the runs, as for `ndd_engine.observe`."""

    def __init__(self, name: str | None = None, runs: PathLike | None = None) -> None:
        self._name, self._runs = name, runs
        self._observation: Observation | None = None
        self._told: Any = TrainerCallback()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the observation."""
        self._observation = observation = started(self._name, self._runs, frameworks=False)
        if observation.path is not None:  # else `ndd-console run` records the same
            self._told = hugging_face(TrainerCallback, observation.put)()
        self._told.on_train_begin(args, state, control, **more)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._told.on_epoch_begin(args, state, control, **more)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._told.on_log(args, state, control, **more)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._told.on_evaluate(args, state, control, **more)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the observation."""
        if self._observation is not None:
            self._observation.close()
