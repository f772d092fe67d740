"""Lines of a file as numbers, in batches of about as many words."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

Row = tuple[list[int], int]


class Texts(Dataset[Row]):
    def __init__(self, path: str) -> None:
        file = Path(path)
        if not file.exists():
            words = random.Random(0)
            lines = (
                " ".join(f"w{words.randrange(3000)}" for _ in range(words.randint(5, 60)))
                for _ in range(1500)
            )
            file.write_text("\n".join(lines))
        self.lines = file.read_text().splitlines()
        self.lengths = [len(line.split()) for line in self.lines]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Row:
        words = self.lines[index].split()
        numbers = [sum(ord(sign) * 31**place for place, sign in enumerate(word)) % 500 for word in words]
        return numbers, index % 4

    def collate(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        longest = max(len(words) for words, _ in rows)
        padded = [words + [0] * (longest - len(words)) for words, _ in rows]
        return torch.tensor(padded), torch.tensor([label for _, label in rows])


class Buckets(Sampler[list[int]]):
    def __init__(self, lengths: Sequence[int], words: int) -> None:
        self.lengths, self.words = lengths, words

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda index: self.lengths[index] + random.random())
        batches: list[list[int]] = []
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) + 1) * self.lengths[index] > self.words:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
        random.shuffle(batches)
        yield from batches
