"""Traces made here, in the format of torch.profiler: one method for each kind of event, with times in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from tests.rocm import rename

MAIN, ENGINE = 10, 11


class Made:
    """A trace, made in the names of CUDA and written in those of `vendor`: one of `tests.rocm.VENDORS`."""

    vendor: ClassVar[str] = "CUDA"

    def __init__(self, gpus: int = 1, **top: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._top = {"deviceProperties": [{"id": index, "name": "Test GPU"} for index in range(gpus)], **top}
        self._id = 0

    def host(
        self, name: str, begin: float, length: float, thread: int = MAIN, cat: str = "cpu_op", **args: Any
    ) -> None:
        self._add(name, cat, begin, length, 900, thread, args)

    def named(self, name: str, begin: float, length: float, thread: int = MAIN) -> None:
        self.host(name, begin, length, thread, "user_annotation")

    def call(self, name: str, begin: float, length: float, thread: int = MAIN) -> int:
        """A runtime call; returns its correlation id."""
        self._id += 1
        self.host("cuda" + name, begin, length, thread, "cuda_runtime", correlation=self._id)
        return self._id

    def gpu(
        self, name: str, begin: float, length: float, correlation: int = 0, stream: int = 7, device: int = 0,
        cat: str = "kernel", **args: Any,
    ) -> None:  # fmt: skip
        args |= {"device": device, "stream": stream}
        self._add(
            name,
            cat,
            begin,
            length,
            device,
            stream,
            args | ({"correlation": correlation} if correlation else {}),
        )

    def kernel(
        self, begin: float, length: float, name: str = "gemm", thread: int = MAIN, before: float = 0.05
    ) -> None:
        """A kernel that was launched right before."""
        self.gpu(name, begin, length, self.call("LaunchKernel", begin - before, 0.005, thread))

    def write(self, folder: Path, name: str = "made.json") -> Path:
        path = folder / name
        rename(self.events, self.vendor)
        path.write_text(json.dumps({**self._top, "traceEvents": self.events}))
        return path

    def _add(
        self,
        name: str,
        cat: str,
        begin: float,
        length: float,
        process: int,
        thread: int,
        args: dict[str, Any],
    ) -> None:
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": process, "tid": thread, "ts": 5e6 + 1000 * begin,
            "dur": 1000 * length, "args": args,
        })  # fmt: skip
