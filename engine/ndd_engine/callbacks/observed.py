"""What the callbacks share: an observation from the beginning of each training to its end, which never raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndd_engine.api.observing import Observation, started
from ndd_engine.api.sources import PathLike
from ndd_watch.exceptions import Contained
from ndd_watch.frameworks import Known, Put, Wishes


class Observed:
    """base: the framework's class of callbacks. make: returns the class of one that records with given functions.

    told: the callback that records; outside an observation one that does nothing. A second training gets the name with
    a number. A copy in another process observes on its own.
    """

    def __init__(
        self,
        base: type,
        make: Callable[[type, Put, Known, Wishes], type],
        name: str | None,
        runs: PathLike | None,
    ) -> None:
        self._base, self._make, self._name, self._runs = base, make, name, runs
        self._observation: Observation | None = None
        self._trainings = 0
        self.told: Any = base()
        self.wishes = Wishes()

    def begin(self, leads: bool) -> None:
        """A training begins. leads: whether this is the process of rank 0."""
        self.end()  # of a training that raised an error
        if not leads:
            return
        with Contained():
            self._trainings += 1
            later = self._name is not None and self._trainings > 1
            name = f"{self._name}-{self._trainings}" if later else self._name
            self._observation = observation = started(name, self._runs, frameworks=False)
            if observation.path is not None:  # else `ndd-console run` records the same
                self.wishes = observation.wishes
                self.told = self._make(self._base, observation.told, observation.known, self.wishes)()

    def end(self, error: BaseException | None = None) -> None:
        """The training has ended. error: that has ended it."""
        observation, self._observation = self._observation, None
        with Contained():
            self.told = self._base()
            if observation is not None:
                observation.__exit__(type(error) if error is not None else None, error, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_observation": None, "told": self._base()}
