"""Where training data ends and evaluation begins, and how many windows each part holds. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ndd_engine.config.schema import BatchSection
from ndd_engine.errors import Problem
from ndd_engine.text import printable


@dataclass
class Complaints:
    """Collects every mistake; `where` is the file or option that the configuration came from."""

    where: str
    problems: list[Problem] = field(default_factory=list)

    def add(
        self,
        key: str,
        message: str,
        found: object = None,
        allowed: str | None = None,
        suggestion: str | None = None,
    ) -> None:
        """One mistake; arguments as in Problem. Text from files is made safe for a terminal."""
        shown = None
        if found is not None:
            shown = f'"{printable(found)}"' if isinstance(found, str) else str(found)
        self.problems.append(
            Problem(
                self.where,
                key,
                printable(message),
                shown,
                allowed,
                None if suggestion is None else printable(suggestion),
            )
        )


@dataclass(frozen=True)
class DataFacts:
    """Items of one pass and what they are called. tokens_per_item: a mean where lengths vary. text: one line."""

    train_items: int
    eval_items: int
    tokens_per_item: float
    item: str
    token: str
    text: str


@dataclass(frozen=True)
class Parts:
    """A sequence cut in two: its first `train` elements train, its last `evaluation` elements evaluate."""

    train: int
    evaluation: int

    @property
    def total(self) -> int:
        """Elements of the whole."""
        return self.train + self.evaluation


def split(total: int, eval_fraction: float) -> Parts:
    """The end is kept for evaluation: neighbours in time or text are alike, a random choice would leak."""
    train = math.floor(total * (1 - eval_fraction))
    return Parts(train, total - train)


def window_count(length: int, span: int, stride: int = 1) -> int:
    """Windows of `span` elements whose starts are `stride` apart in `length` elements."""
    return max(0, (length - span) // stride + 1)


@dataclass(frozen=True)
class Layout:
    """How data is cut into items. A window is `sequence` elements of input and one more to predict.

    unit: what the elements are called ("character"); whole: what they make up ("text").
    """

    parts: Parts
    sequence: int
    stride: int
    eval_stride: int
    unit: str
    whole: str

    @property
    def train_items(self) -> int:
        """Windows in the training part."""
        return window_count(self.parts.train, self.sequence + 1, self.stride)

    @property
    def eval_items(self) -> int:
        """Windows in the evaluation part."""
        return window_count(self.parts.evaluation, self.sequence + 1, self.eval_stride)

    def facts(self, text: str) -> DataFacts:
        """As windows of the layout's units."""
        return DataFacts(self.train_items, self.eval_items, self.sequence, "window", self.unit, text)

    def check(self, batch: BatchSection, complaints: Complaints) -> None:
        """Complains when there is not a window for evaluation and not one optimizer step for training."""
        parts, units = self.parts, f"{self.unit}s"
        longest = min(parts.train, parts.evaluation) - 1
        allowed = f"at most {longest:,}" if longest >= 2 else None
        longer = f"give a longer {self.whole}"
        if longest < 2:
            message = f"the {self.whole} is too short for any window: {parts.total:,} {units}"
            complaints.add("workload.data", message, suggestion=longer)
            return
        if self.sequence >= parts.total:
            message = f"longer than the {self.whole} of {parts.total:,} {units}"
            complaints.add("batch.sequence", message, self.sequence, allowed)
            return
        if not self.train_items:
            message = f"the training part has {parts.train:,} {units}, a window needs {self.sequence + 1:,}"
            complaints.add("batch.sequence", message, self.sequence, allowed)
            return
        if not self.eval_items:
            message = (
                f"the evaluation part has {parts.evaluation:,} {units}, a window needs {self.sequence + 1:,}"
            )
            needed = (self.sequence + 1) / parts.total
            advice = (
                f"or a workload.eval_fraction of {math.ceil(needed * 1000) / 1000:g}"
                if needed < 0.499
                else longer
            )
            complaints.add("batch.sequence", message, self.sequence, allowed, advice)
        if self.train_items < batch.items:
            key = "batch.micro" if batch.micro > self.train_items else "batch.accumulation"
            message = (
                f"one optimizer step takes {batch.items:,} windows (micro {batch.micro} x accumulation "
                f"{batch.accumulation}), the training part holds {self.train_items:,}"
            )
            found = batch.micro if key == "batch.micro" else batch.accumulation
            complaints.add(key, message, found, f"micro x accumulation of at most {self.train_items:,}")
