"""The highest memory of a training run at any batch, replayed from the traces of two small ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from . import lines
from .allocator import Rules
from .trace import Family, Trace

Json = dict[str, Any]
# glibc hands out memory in multiples of this, with torch's alignment of 64 bytes.
HOST_GRANULE = 64
ONE, MANY = "one", "many"


@dataclass(frozen=True)
class Items:
    """All items of training and evaluation. kept_bytes: as tensors that are kept, None where they differ from epoch to
    epoch and cannot be; gathers: they are such tensors already, in the memory of the process. joined: by a function of
    the workload's, which works on the host: items of different lengths."""

    kept_bytes: int | None
    gathers: bool
    joined: bool = False

    @property
    def places(self) -> bool:
        """Whether `loader.placement` can put them on a card without further ado."""
        return self.gathers or (self.kept_bytes is not None and not self.joined)

    def beside(self, on_gpu: bool, placement: str, cache: bool) -> int:
        """Bytes that the loader's settings keep in the memory that is predicted, beside what a probe has seen."""
        if on_gpu:
            return (self.kept_bytes or 0) if placement == "device" else 0
        keeps = cache or placement == "device"
        return (self.kept_bytes or 0) if keeps and not self.gathers else 0


@dataclass(frozen=True)
class Memory:
    """What a training run of one model takes, by its micro-batch.

    on: "card", then the allocator's rules apply, or "host". outside_bytes: beside what a step allocates: on a card
    the context and other libraries, on the host the process with the program, the model and the data. source: where
    the traces come from, in words. caveat: why the prediction is no promise although the traces line up; "" for none.
    heap: on the host, what the process was seen to hold beyond all that, as (micro-batch, bytes): its heap has holes.
    """

    family: Family
    on: Literal["card", "host"]
    outside_bytes: int
    source: str
    rules: Rules = field(default_factory=Rules)
    caveat: str = ""
    heap: tuple[tuple[int, int], ...] = ()

    def peak(self, micro: int, accumulation: int = 1) -> int:
        """Predicted bytes at the peak, as the card or the process shows them."""
        trace = self._trace(micro, accumulation)
        inside = trace.peak(HOST_GRANULE) if self.on == "host" else trace.on_gpu(self.rules).peak_reserved
        return self.outside_bytes + inside + self.heap_bytes(micro)

    def heap_bytes(self, micro: int) -> int:
        """What the heap of the process holds beyond what is in use at the peak; 0 on a card."""
        if not self.heap:
            return 0
        places, values = zip(*self.heap, strict=True)
        return round(lines.at(micro, places, values))

    @property
    def promised(self) -> bool:
        """Whether the prediction holds; else it is a guess, to be measured."""
        return self.family.aligned and not self.caveat

    @property
    def why_not(self) -> str:
        """Why it is no promise; "" where it is."""
        if self.caveat:
            return self.caveat
        if self.family.aligned:
            return ""
        return f"the steps of the two probes differ: {self.family.loose} large requests have no partner"

    def _trace(self, micro: int, accumulation: int) -> Trace:
        return self.family.trace(micro).until(ONE if accumulation == 1 else MANY)

    def to_dict(self) -> Json:
        """As JSON takes it."""
        family = self.family
        body = {
            "at": family.at,
            "events": family.first.events,
            "labels": family.first.labels,
            "marks": family.first.marks,
            "lines": family.lines,
            "aligned": family.aligned,
            "loose": family.loose,
        }
        return {
            "family": body,
            "on": self.on,
            "outside_bytes": self.outside_bytes,
            "source": self.source,
            "rules": asdict(self.rules),
            "caveat": self.caveat,
            "heap": self.heap,
        }

    @classmethod
    def from_dict(cls, body: Json) -> Memory:
        """The reverse of to_dict."""
        known = body["family"]
        events = tuple((key, size) for key, size in known["events"])
        trace = Trace(events, tuple(known["labels"]), dict(known["marks"]))
        lines = tuple((start, slope) for start, slope in known["lines"])
        at = (known["at"][0], known["at"][1])
        family = Family(at, trace, lines, known["aligned"], known["loose"])
        heap = tuple((micro, size) for micro, size in body["heap"])
        rules = Rules(**body["rules"])
        return cls(family, body["on"], body["outside_bytes"], body["source"], rules, body["caveat"], heap)
