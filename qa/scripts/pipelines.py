"""Trains from a pipeline whose workers are slow in a planted way, and whose functions measure their own time.

    python pipelines.py NAME LEVEL METHOD SECONDS

LEVEL 0 is the innocent twin: the same pipeline with little to do, before a training that takes long. Each worker writes
the seconds of its functions into the folder TRUTH of the environment when it ends.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import multiprocessing.util
import os
import random
import re
import socket
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

now = time.perf_counter
SPENT: dict[str, float] = {}
WORDS = " ".join(f"word{number}, and ({number * 7}) more;" for number in range(40))


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds up the time of a function under the name of it; a class is that of its calls."""
    name = function.__qualname__.removesuffix(".__call__").removesuffix(".forward")

    def around(*given: Any) -> Any:
        begin = now()
        try:
            return function(*given)
        finally:
            SPENT[name] = SPENT.get(name, 0.0) + now() - begin

    return around


@timed
def light(index: int) -> Any:
    """What every item needs besides."""
    x = torch.arange(12_000, dtype=torch.float32) * (index % 7)
    return (x.sqrt() + x)[:64].clone()


class Items(Dataset[Any]):
    """level: how much each item has to do."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        begin = now()
        item = self.item(index)
        SPENT["ALL"] = SPENT.get("ALL", 0.0) + now() - begin
        return item

    def item(self, index: int) -> Any:
        for _ in range(self.level):
            self.work(index)
        return light(index)

    def work(self, index: int) -> Any:
        """What is planted."""


class Decode(Items):
    blob = zlib.compress(bytes(number * number % 9 for number in range(120_000)))

    @timed
    def work(self, index: int) -> Any:
        return torch.frombuffer(bytearray(zlib.decompress(self.blob)), dtype=torch.uint8).float() / 255


class Regex(Items):
    @timed
    def work(self, index: int) -> Any:
        return [hash(word) & 255 for word in re.findall(r"\w+|[^\w\s]", WORDS)]


class Archive(Items):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        with zipfile.ZipFile("planted.zip", "w") as archive:
            for number in range(200):
                archive.writestr(f"{number}", b"x" * 500)

    @timed
    def work(self, index: int) -> Any:
        with zipfile.ZipFile("planted.zip") as archive:
            return archive.read(f"{index % 200}")


class Rows(Items):
    text = "\n".join(f"{number},{number * 3},{number / 7:.4f},name{number}" for number in range(300))

    @timed
    def work(self, index: int) -> Any:
        return [float(row[2]) for row in csv.reader(io.StringIO(self.text))]


class Documents(Items):
    text = json.dumps({"a": list(range(1500)), "b": [{"x": number} for number in range(300)]})

    @timed
    def work(self, index: int) -> Any:
        return json.loads(self.text)["a"]


class Crop(Items):
    rows = tuple([(x * y) % 7 for x in range(60)] for y in range(60))

    @timed
    def work(self, index: int) -> Any:
        at, kept = index % 20, []
        for row in self.rows[at : at + 25]:
            for value in row[at : at + 25]:
                value = value * 2 - 1
                kept.append(value if value > 0 else 0)
        return kept


class Locked(Items):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lock = torch.multiprocessing.get_context(METHOD).Lock()

    @timed
    def work(self, index: int) -> Any:
        with self.lock:
            time.sleep(0.001)


class Sleeps(Items):
    @timed
    def work(self, index: int) -> Any:
        time.sleep(0.001)


class Stored(Items):
    """Its file is dropped from memory before each read, so that reading waits for storage."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        with Path("planted.bin").open("wb") as file:
            file.write(os.urandom(1 << 20) * 32)
            os.fsync(file.fileno())

    @timed
    def work(self, index: int) -> Any:
        with Path("planted.bin").open("rb", buffering=0) as file:
            at = random.randrange(31) << 20
            os.posix_fadvise(file.fileno(), at, 1 << 20, os.POSIX_FADV_DONTNEED)
            file.seek(at)
            return file.read(1 << 19)


class Pickled(Items):
    def item(self, index: int) -> Any:
        return [{f"k{number}": float(index + number) for number in range(300 * self.level)}, light(index)]


class Shared(Items):
    """Its items cost nothing: a batch of them is copied into shared memory where it is joined."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.x = torch.ones(60_000 * level + 64)

    def item(self, index: int) -> Any:
        return self.x


class Touched(Items):
    @timed
    def work(self, index: int) -> Any:
        memory = mmap.mmap(-1, 1 << 21)
        for at in range(0, 1 << 21, 4096):
            memory[at] = 1
        memory.close()


class Uneven(Items):
    def item(self, index: int) -> Any:
        worker = get_worker_info()
        if worker is not None and worker.id == 0:
            for _ in range(self.level):
                self.work(index)
        return light(index)

    @timed
    def work(self, index: int) -> Any:
        time.sleep(0.002)


class Sort:
    @timed
    def __call__(self, x: Any) -> Any:
        return x.sort()[0]


class Root:
    @timed
    def __call__(self, x: Any) -> Any:
        return x.abs().sqrt() + x.sin()


class Double(nn.Module):
    @timed
    def forward(self, x: Any) -> Any:
        return x * 2


class Composed(Items):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.x = torch.rand(8000 * max(level, 1), generator=torch.Generator().manual_seed(0))
        self.transforms = [Root(), Sort(), Double()]

    def item(self, index: int) -> Any:
        x = self.x + index
        for transform in self.transforms:
            x = transform(x)
        return x[:64].clone()


class Remote(Items):
    """Another process answers after a while, as over a network."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        server = socket.create_server(("127.0.0.1", 0))
        self.port = server.getsockname()[1]
        threading.Thread(target=_serve, args=(server,), daemon=True).start()

    @timed
    def work(self, index: int) -> Any:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"x")
            return connection.recv(64)


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.recv(1)
        time.sleep(0.002)
        connection.sendall(b"y" * 64)


KINDS: dict[str, type[Items]] = {
    "decode": Decode, "regex": Regex, "archive": Archive, "rows": Rows, "documents": Documents, "crop": Crop,
    "lock": Locked, "sleep": Sleeps, "storage": Stored, "pickles": Pickled, "shared": Shared, "touch": Touched,
    "uneven": Uneven, "compose": Composed, "remote": Remote,
}  # fmt: skip
METHOD = sys.argv[3] if len(sys.argv) > 3 else "fork"


def joined(batch: list[Any]) -> Any:
    """Tensors are stacked; anything else stays a list."""
    begin = now()
    found = default_collate(batch) if isinstance(batch[0], torch.Tensor) else batch
    for name, spent in (("ALL", now() - begin), ("joined", now() - begin)):
        SPENT[name] = SPENT.get(name, 0.0) + spent
    return found


def tells(_worker: int) -> None:
    """The worker writes what it has measured when it ends."""
    path = Path(os.environ["TRUTH"], f"truth-{os.getpid()}.json")
    multiprocessing.util.Finalize(None, lambda: path.write_text(json.dumps(SPENT)), exitpriority=1)


def main(name: str, level: int, method: str, seconds: float) -> None:
    """Train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    heavy = torch.rand(600, 600)
    loader = DataLoader(
        KINDS[name](level), 8, num_workers=2, collate_fn=joined, worker_init_fn=tells,
        multiprocessing_context=method,
    )  # fmt: skip
    until = now() + seconds
    for batch in loader:
        x = batch if isinstance(batch, torch.Tensor) else torch.stack([item[1] for item in batch])
        for _ in range(0 if level else 12):
            heavy @ heavy
        optimizer.zero_grad()
        model(x[:, :64]).mean().backward()
        optimizer.step()
        if now() > until:
            break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
