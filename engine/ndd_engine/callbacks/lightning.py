"""The callback for Lightning: `Trainer(…, callbacks=[NddCallback()])`. Needs the extra `lightning`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the package of Lightning 1
    from pytorch_lightning import Callback

from ndd_engine.api.observing import Observation, started
from ndd_engine.api.sources import PathLike
from ndd_watch.frameworks import lightning


class NddCallback(Callback):  # type: ignore[misc]
    """Observes `Trainer.fit`. name: of the run; runs: folder of the runs, as for `ndd_engine.observe`."""

    def __init__(self, name: str | None = None, runs: PathLike | None = None) -> None:
        super().__init__()
        self._name, self._runs = name, runs
        self._observation: Observation | None = None
        self._told: Any = Callback()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the observation."""
        self._observation = observation = started(self._name, self._runs, frameworks=False)
        if observation.path is not None:  # else `ndd-console run` records the same
            self._told = lightning(Callback, observation.put)()
        self._told.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._told.on_train_epoch_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._told.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the observation."""
        if self._observation is not None:
            self._observation.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training has failed."""
        if self._observation is not None:
            self._observation.__exit__(type(exception), exception, None)
