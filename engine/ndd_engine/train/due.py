"""The steps after which an evaluation or a checkpoint is due."""

from __future__ import annotations

from ndd_engine.config.schema import CheckpointSection, Config, EvaluateSection

Periodic = EvaluateSection | CheckpointSection


class Due:
    """Answers from the configuration; times are in optimizer steps.

    steps_per_epoch: 0 if the ends of passes are not known beforehand.
    """

    def __init__(self, config: Config, steps_per_epoch: int) -> None:
        self._sections: tuple[Periodic, ...] = (config.evaluate, config.checkpoint)
        self._steps_per_epoch = steps_per_epoch

    def next(self, step: int, last: int) -> int:
        """The next step after which something is due, or the last one; the loop compares only this number."""
        periods = [every for section in self._sections for every in self._periods(section)]
        return min([last, *((step // every + 1) * every for every in periods)])

    def at(self, section: Periodic, step: int, passes: int = 0) -> bool:
        """Whether the section asks for something after this step, or after so many passes."""
        if passes and section.every_epochs and passes % section.every_epochs == 0:
            return True
        return any(step % every == 0 for every in self._periods(section))

    def _periods(self, section: Periodic) -> list[int]:
        """The section's periods in steps, without those that are off."""
        every = (section.every_steps, section.every_epochs * self._steps_per_epoch)
        return [steps for steps in every if steps]
