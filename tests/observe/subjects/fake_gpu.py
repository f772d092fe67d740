"""A GPU that only its clock exists of: work is queued, and done one after the other while the host goes on.

`Gpu.install` has torch and the observer of this process take it for the device of the training. Timing events, queries
and streams behave as `torch.cuda.Event` and `torch.cuda.Stream` are documented to.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

# As torch's `_CudaDeviceProperties` has it: without a prefix.
UUID = "aaaaaaaa-0000-0000-0000-000000000001"


class Gpu:
    def __init__(self) -> None:
        self.free_at = 0
        self.stream: Any = "first"
        # Which GPU of the machine works; the others have nothing to do.
        self.index = 0
        self.capturing = False
        self.waits = 0

    @property
    def now(self) -> int:
        return time.perf_counter_ns()

    def run(self, ms: float) -> None:
        """Queue a kernel. A queue of 100 ms is full: the host waits."""
        while self.free_at - self.now > 100e6:
            time.sleep(0.001)
        self.free_at = max(self.free_at, self.now) + int(ms * 1e6)

    def wait(self, *_: Any) -> None:
        """Synchronise."""
        self.waits += 1
        while self.free_at > self.now:
            time.sleep(0.0005)

    def install(self) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing, self.at, self.stream, self.index = enable_timing, 0, None, -1

            def record(self, stream: Any = None) -> None:
                if gpu.capturing:
                    raise RuntimeError("recorded while a graph is captured")
                index, self.stream = (gpu.index, gpu.stream) if stream is None else stream
                if self.index not in (-1, index):
                    raise RuntimeError("Event device does not match recording stream's device")
                self.index = index
                self.at = max(gpu.free_at, gpu.now) if index == gpu.index else gpu.now

            def query(self) -> bool:
                if gpu.capturing:
                    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
                return gpu.now >= self.at

            def synchronize(self) -> None:
                raise AssertionError("the observer waits")

            def elapsed_time(self, end: Any) -> float:
                places = (self.index, self.stream), (end.index, end.stream)
                if not (self.timing and end.timing and places[0] == places[1]):
                    raise RuntimeError("CUDA error: invalid resource handle")
                assert end.query()
                return float(end.at - self.at) / 1e6

        cuda: Any = torch.cuda
        cuda.Event = Event

        def current_stream(device: Any = None) -> Any:
            index = None if device is None else device.index
            return gpu.index if index is None else index, gpu.stream

        cuda.current_stream = current_stream
        cuda.is_current_stream_capturing = lambda: gpu.capturing
        cuda.synchronize, cuda.is_initialized = gpu.wait, lambda: True
        cuda.memory_stats = lambda device=None: {
            "allocated_bytes.all.current": 100,
            "allocated_bytes.all.peak": 300,
        }
        cuda.mem_get_info = lambda device=None: (700, 1000)
        cuda.get_device_properties = lambda device=None: SimpleNamespace(
            uuid=UUID, name="NVIDIA L4", total_memory=1000, major=8, minor=9
        )
        empty = torch.empty
        torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)  # type: ignore[assignment]
        observer: Any = sys.modules["_ndd_watch.install"].observer  # type: ignore[attr-defined]
        observer.looks.device = lambda tensor: torch.device("cuda", gpu.index)
        observer.looks.on_host = lambda tensor: None
        observer.looks.number_on_gpu = lambda value: isinstance(value, torch.Tensor) and value.numel() == 1
        sys.modules["_ndd_watch.blocking"].on_host = lambda tensor: False  # type: ignore[attr-defined]
        # All tensors are on the CPU here: what `copy=True` makes stands for a copy to the GPU.
        observer.looks.copied = lambda tensor, found: found is not tensor and found.dtype == tensor.dtype


class Work(torch.autograd.Function):
    """A kernel in the forward pass, and one in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Any, gpu: Gpu, forward_ms: float, backward_ms: float) -> Any:
        context.gpu, context.ms = gpu, backward_ms
        gpu.run(forward_ms)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        context.gpu.run(context.ms)
        return gradients[0], None, None, None
