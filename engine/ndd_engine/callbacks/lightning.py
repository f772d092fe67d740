"""The callback for Lightning: `Trainer(…, callbacks=[NddCallback()])`. Needs the extra `lightning`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the package of Lightning 1
    from pytorch_lightning import Callback

from ndd_engine.api.observing import ObservedCallback
from ndd_engine.api.sources import PathLike
from ndd_watch.frameworks import lightning


class NddCallback(Callback):  # type: ignore[misc]
    """Observes `Trainer.fit`. name: of the run; runs: folder of the runs, as for `ndd_engine.observe`."""

    def __init__(self, name: str | None = None, runs: PathLike | None = None) -> None:
        super().__init__()
        self._observed = ObservedCallback(Callback, lightning, name, runs)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the observation."""
        self._observed.begin(getattr(trainer, "is_global_zero", True))
        self._observed.callback.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._observed.callback.on_train_epoch_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:
        self._observed.callback.on_train_batch_end(trainer, pl_module, *more)
        if self._observed.wishes:
            self._observed.callback.obey(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._observed.callback.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._observed.callback.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the observation."""
        self._observed.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training has failed."""
        self._observed.end(exception)
