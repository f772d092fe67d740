"""The steps after which an evaluation or a checkpoint is due."""

from __future__ import annotations

from ndd_engine.config.schema import CheckpointSection, Config, EvaluateSection
from ndd_engine.text import counted

# Steps of a run that ends after a number of passes of unknown length.
UNKNOWN_STEPS = 1 << 62

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

    def in_words(self, section: Periodic, name: str, last: int) -> str:
        """The interval of a section's setting as it applies to this run. last: the run's last step."""
        value = getattr(section, name)
        if not value:
            return "off"
        if name == "every_minutes":
            return "by the age of the newest checkpoint, compared between steps"
        if name == "every_steps":
            steps, text = value, f"every {_many(value, 'step')}"
        elif self._steps_per_epoch:
            steps = value * self._steps_per_epoch
            text = f"every {_many(steps, 'step')}: {counted(value, 'epoch')} of {self._steps_per_epoch:,}"
        else:
            return f"at the end of every {_many(value, 'pass')} over the data"
        return text if steps <= last else f"{text}; the run ends before, at step {last:,}"

    def _periods(self, section: Periodic) -> list[int]:
        """The section's periods in steps, without those that are off."""
        every = (section.every_steps, section.every_epochs * self._steps_per_epoch)
        return [steps for steps in every if steps]


def _many(count: int, word: str) -> str:
    return word if count == 1 else counted(count, word)
