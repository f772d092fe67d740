"""Texts and recordings for the workload tests; real data only where NDD_TEST_DATA points."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_help import module, own  # noqa: F401  fixtures of the tests of own workloads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def sentences() -> str:
    """About 20,000 characters of simple sentences; the same on every machine."""
    draw = random.Random(7)  # random() is stable across Python versions, and choices uses only that
    who = ["the cat", "a dog", "our neighbour", "the old man", "nobody"]
    does = ["sees", "paints", "carries", "forgets", "wants"]
    what = ["the house", "a small boat", "his hat", "seven apples", "the green door"]
    lines = (f"{' '.join(draw.choices(words)[0] for words in (who, does, what))}.\n" for _ in range(600))
    return "".join(lines)


@pytest.fixture
def text_file(tmp_path: Path, sentences: str) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text(sentences, "utf-8")
    return path


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data."""
    folder = os.environ.get("NDD_TEST_DATA")
    if not folder:
        pytest.skip("NDD_TEST_DATA does not name the folder of real data (text/, eeg/)")
    return Path(folder)
