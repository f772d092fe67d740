"""How a series is split into training and evaluation, and how many windows each part has. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ndd_engine.config.schema import Config

from .problems import KEY, Problems, check_step


@dataclass(frozen=True)
class DataFacts:
    """Sizes and names of a dataset. tokens_per_item: the mean if lengths vary. text: a one-line summary."""

    train_items: int
    eval_items: int
    tokens_per_item: float
    item: str
    token: str
    text: str


@dataclass(frozen=True)
class Parts:
    """A series split in two: the first `train` elements train, the last `evaluation` elements evaluate."""

    train: int
    evaluation: int

    @property
    def total(self) -> int:
        return self.train + self.evaluation


def split(total: int, eval_fraction: float) -> Parts:
    """Keeps the end for evaluation: neighbours in time or text are alike, so a random choice would leak."""
    train = math.floor(total * (1 - eval_fraction))
    return Parts(train, total - train)


def window_count(length: int, span: int, stride: int = 1) -> int:
    """Number of windows of `span` elements, `stride` apart, in `length` elements."""
    return max(0, (length - span) // stride + 1)


@dataclass(frozen=True)
class Layout:
    """How data is cut into items. A window is `sequence` elements of input and one more to predict.

    unit: what an element is called ("character"). whole: what the data is called ("text").
    """

    parts: Parts
    sequence: int
    stride: int
    eval_stride: int
    unit: str
    whole: str

    @property
    def train_items(self) -> int:
        return window_count(self.parts.train, self.sequence + 1, self.stride)

    @property
    def eval_items(self) -> int:
        return window_count(self.parts.evaluation, self.sequence + 1, self.eval_stride)

    @property
    def text(self) -> str:
        return (
            f"{self.train_items:,} windows of {self.sequence:,} per epoch, {self.eval_items:,} for evaluation"
        )

    def facts(self, text: str) -> DataFacts:
        return DataFacts(self.train_items, self.eval_items, self.sequence, "window", self.unit, text)

    def check(self, config: Config, problems: Problems) -> None:
        """Adds a problem unless there is a window for evaluation and one optimizer step for training."""
        parts, units = self.parts, f"{self.unit}s"
        longest = min(parts.train, parts.evaluation) - 1
        allowed = f"at most {longest:,}"
        longer = f"use a longer {self.whole}"
        needed = f"but a window needs {self.sequence + 1:,}"
        if longest < 2:
            message = f"the {self.whole} is too short for a single window: {parts.total:,} {units}"
            problems.add(KEY, message, suggestion=longer)
        elif self.sequence >= parts.total:
            message = f"longer than the {self.whole} of {parts.total:,} {units}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        elif not self.train_items:
            message = f"the training part has {parts.train:,} {units}, {needed}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        else:
            if not self.eval_items:
                message = f"the evaluation part has {parts.evaluation:,} {units}, {needed}"
                fraction = (self.sequence + 1) / parts.total
                if fraction < 0.499:
                    longer = f"or set workload.eval_fraction to {math.ceil(fraction * 1000) / 1000:g}"
                problems.add("batch.sequence", message, self.sequence, allowed, longer)
            check_step(config, self.train_items, "windows", problems)
