"""Watches the cores while steps are timed: other processes on them make a predicted step time too long."""

from __future__ import annotations

from types import TracebackType

import torch

from ndd_engine.hardware.host import detect_host
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.events import SampleEvent
from ndd_engine.record.figures import mean_core_use
from ndd_engine.record.snapshot import CoreUse

# Seconds between two samples: timing a single micro-batch takes about half a second.
PERIOD_S = 0.2


class CoreWatch:
    """Samples the CPU use of this process and of others inside `with`."""

    def __init__(self) -> None:
        self._host = detect_host()
        self._samples: list[SampleEvent] = []
        self._sampler = Sampler(None, self._samples.append, PERIOD_S, host=self._host)

    def __enter__(self) -> CoreWatch:
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._samples.append(self._sampler.read_once())
        self._sampler.stop()

    @property
    def use(self) -> CoreUse | None:
        """The mean use of the cores, in cores; None if it could not be read."""
        return mean_core_use(self._host.usable_cpus, self._samples)


def disturbed(use: CoreUse | None, on_gpu: bool) -> CoreUse | None:
    """`use` if other processes took cores that the steps wanted; None otherwise, or if it is unknown.

    The rule is that of the finding `neighbour-cores`. on_gpu: one core launches the kernels, whatever the threads.
    """
    if use is None or not use.shared or not use.full:
        return None
    return use if use.lacks(1 if on_gpu else torch.get_num_threads()) else None
