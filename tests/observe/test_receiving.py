"""What the process that trains does with batches of loader workers: a real loader, with probes as a script has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from ndd_watch.probes import Probes
from ndd_watch.receiving import Receiving


class Uneven(Dataset[torch.Tensor]):
    """Every second item, which one of two workers makes, is slow."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0 if index % 2 else 0.1)
        return torch.full((1000,), float(index))


@pytest.fixture
def probes() -> Iterator[Probes]:
    made = Probes()
    yield made
    made.remove()


@pytest.mark.long
def test_batches_that_are_ready_wait_behind_an_earlier_one(probes: Probes) -> None:
    receiving = Receiving(lambda: True)
    receiving.install(probes)
    for workers, waits in ((2, True), (1, False)):
        loader = DataLoader(Uneven(), 1, num_workers=workers, multiprocessing_context="fork")
        assert [int(batch[0, 0]) for batch in loader] == list(range(8))
        found = receiving.take()
        assert found["batches"] == 8
        assert found["receive_ns"] > 0
        assert found["pin_ns"] == 0
        # One worker makes the batches in their order.
        assert (found["behind_ns"] > 0) is waits
    assert receiving.take() == {}


@pytest.mark.long
def test_where_the_training_does_not_wait_nothing_is_counted(probes: Probes) -> None:
    receiving = Receiving(lambda: False)
    receiving.install(probes)
    list(DataLoader(Uneven(), 4, num_workers=1, multiprocessing_context="fork"))
    assert receiving.take() == {}


def test_a_batch_is_pinned_once_whatever_is_in_it(probes: Probes) -> None:
    receiving = Receiving(lambda: True)
    receiving.install(probes)
    begun, ended = threading.Event(), threading.Event()

    def pins() -> None:
        begun.wait()
        pin_memory({"words": ["one", "two"], "more": ("three", 4)})
        ended.set()

    pinner = threading.Thread(target=pins)
    pinner.start()
    from torch.utils.data import dataloader

    class Given:
        """What torch's function of an iterator reads of it."""

        _timeout, _pin_memory = 1, True

        def __init__(self) -> None:
            self._tasks_outstanding, self._task_info, self._in_order = 1, {3: (0,)}, True
            self._pin_memory_thread = pinner

        def _try_get_data(self, timeout: float) -> tuple[bool, str]:
            begun.set()
            ended.wait()
            return True, "batch"

    assert dataloader._MultiProcessingDataLoaderIter._get_data(Given()) == "batch"  # type: ignore[arg-type]
    pinner.join()
    found = receiving.take()
    assert found["batches"] == 1
    assert found["pin_ns"] > 0
    assert found["receive_ns"] == 0  # it came through no pipe
    pin_memory(["four"])  # of another thread
    assert receiving.take() == {}


def test_an_iterator_of_another_make_is_left_alone(probes: Probes) -> None:
    receiving = Receiving(lambda: True)
    receiving.install(probes)
    from torch.utils.data import dataloader

    odd = SimpleNamespace(_timeout=1, _try_get_data=lambda timeout: (True, 7))
    assert dataloader._MultiProcessingDataLoaderIter._get_data(odd) == 7  # type: ignore[arg-type]
    assert receiving.take()["behind_ns"] == 0


def _made(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.stack(one) if torch.is_tensor(one[0]) else torch.tensor(one) for one in rows]


def test_a_function_that_uses_torch_within_a_comprehension_only_can_be_timed(probes: Probes) -> None:
    """Before Python 3.12 a comprehension has a code of its own, with the names that it uses."""
    ended = list[int]()
    assert probes.put(_made, None, lambda _probe, zero: ended.append(1) or zero, False)
    assert _made([[1, 2]])[0].tolist() == [1, 2] and ended == [1]
