"""A series of samples or characters, cut into segments. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .interface import DataFacts, Settings


def split(total: int, eval_fraction: float) -> tuple[int, int]:
    """Elements to train on and, after them, to evaluate on: neighbours in time or text are alike, so a random choice
    would leak."""
    train = math.floor(total * (1 - eval_fraction))
    return train, total - train


def segment_count(length: int, span: int, stride: int = 1) -> int:
    """Number of segments of `span` elements, `stride` apart, in `length` elements."""
    return max(0, (length - span) // stride + 1)


@dataclass(frozen=True)
class SeriesLayout:
    """How a series is cut into segments: `sequence` elements of input and one more to predict.

    train, evaluation: elements. unit: what an element is called ("character"). whole: what the series is called.
    """

    train: int
    evaluation: int
    sequence: int
    stride: int
    eval_stride: int
    unit: str
    whole: str

    @property
    def train_items(self) -> int:
        return segment_count(self.train, self.sequence + 1, self.stride)

    @property
    def eval_items(self) -> int:
        return segment_count(self.evaluation, self.sequence + 1, self.eval_stride)

    def facts(self, what: str) -> DataFacts:
        """what: the size of the whole series, as text."""
        segments = f"{self.train_items:,} segments of {self.sequence:,} per epoch"
        text = f"{what}, {segments}, {self.eval_items:,} for evaluation"
        return DataFacts(self.train_items, self.eval_items, self.sequence, "segment", self.unit, text)

    def check(self, settings: Settings) -> None:
        """Adds a problem unless there is a segment for evaluation and one optimizer step for training."""
        problems, units = settings.problems, f"{self.unit}s"
        longest, total = min(self.train, self.evaluation) - 1, self.train + self.evaluation
        allowed, longer = f"at most {longest:,}", f"use a longer {self.whole}"
        needed = f"but a segment needs {self.sequence + 1:,}"
        if longest < 2:
            message = f"the {self.whole} is too short for a single segment: {total:,} {units}"
            problems.add(problems.key, message, suggestion=longer)
        elif self.sequence >= total:
            message = f"longer than the {self.whole} of {total:,} {units}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        elif not self.train_items:
            message = f"the training part has {self.train:,} {units}, {needed}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        else:
            if not self.eval_items:
                message = f"the evaluation part has {self.evaluation:,} {units}, {needed}"
                fraction = (self.sequence + 1) / total
                if fraction < 0.499:
                    longer = f"or set workload.eval_fraction to {math.ceil(fraction * 1000) / 1000:g}"
                problems.add("batch.sequence", message, self.sequence, allowed, longer)
            settings.check_items(self.train_items, "segments")
