"""Fixtures of the training tests: one thread, a small text, a small disk."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from train_help import IMPORTS, Trainer, Written

from ndd_engine.train import rehearsal

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _short_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch is measured once before a run; test_rehearsal covers the details."""
    if request.module.__name__.rpartition(".")[2] != "test_rehearsal":
        monkeypatch.setattr(rehearsal, "BASELINE_NS", 0)
        monkeypatch.setattr(rehearsal, "SLOW_NS", 0)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 3,000 characters of simple sentences; the same on every machine."""
    draw = random.Random(7)
    who, does, what = (
        ["the cat", "a dog", "nobody"],
        ["sees", "paints", "wants"],
        ["the house", "a boat", "his hat"],
    )
    lines = (f"{' '.join(draw.choices(words)[0] for words in (who, does, what))}.\n" for _ in range(140))
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def trainer(tmp_path: Path, text_file: Path) -> Trainer:
    """Trains tiny runs below `tmp_path`/runs."""
    return Trainer(tmp_path / "runs", text_file)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """written(source) writes a module with a factory of that name, and returns the settings of a run with it.

    What most sources need is imported in its first line.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source: str) -> tuple[str, ...]:
        name = f"written_{next(_numbers)}"  # a module's name can be imported from one file only
        (tmp_path / f"{name}.py").write_text(IMPORTS + source)
        return (f"workload.name={name}:factory", f'workload.path=["{tmp_path}"]')

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many kilobytes; skips the test where mounting is not permitted."""
    mounted: list[Path] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(kilobytes: int) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        options = f"size={kilobytes}k".encode()
        if not hasattr(libc, "mount") or libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options) != 0:
            pytest.skip(f"a small file system cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        libc.umount2(os.fsencode(path), 2)  # MNT_DETACH
