"""Which model size "auto" becomes, on machines of any speed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ndd_engine.config import Config, read
from ndd_engine.train import rehearsal as autosize
from ndd_engine.train.rehearsal import choose_size

CPU = torch.device("cpu")
TOLD: list[str] = []


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """Steps per second by (size, threads) of the machine that is pretended; a size that is not in it fails the test."""
    table: dict[tuple[str, int], float] = {}

    def measure(config: Config, *_: object) -> float:
        return table[str(config.workload.size), torch.get_num_threads()]

    monkeypatch.setattr(autosize, "steps_per_second", measure)
    return table


def test_the_largest_size_that_is_fast_enough_is_taken(speeds: dict[tuple[str, int], float]) -> None:
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): 20.0, ("medium", 1): 3.0})
    choice = choose_size(read(), CPU, TOLD.append)
    assert choice.size == "small"
    # What is measured alone is 1.3 times as fast as the run: 20 and 3 steps/s.
    assert re.findall(r"[\d.]+", choice.reason) == ["15", "2.3", "5"]


@pytest.mark.parametrize("rate", [4.0, 5.1, 6.49, 6.5, 6.51, 7.0, 64.9])
def test_the_figure_shown_decides(speeds: dict[tuple[str, int], float], rate: float) -> None:
    torch.set_num_threads(1)
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): rate, ("medium", 1): 0.1})
    choice = choose_size(read(), CPU, TOLD.append)
    shown = re.search(r"small(?:, about)? ([0-9.]+)", choice.reason)
    assert shown is not None, choice.reason
    assert (float(shown[1]) >= 5) == (choice.size == "small"), choice.reason


def test_a_machine_slow_for_every_size_takes_the_smallest(speeds: dict[tuple[str, int], float]) -> None:
    speeds.update({("tiny", 1): 0.5})
    assert choose_size(read(), CPU, TOLD.append).size == "tiny"


def test_a_hopeless_size_is_not_tried(speeds: dict[tuple[str, int], float]) -> None:
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): 7.0})  # trying medium would fail
    choice = choose_size(read(), CPU, TOLD.append)
    assert choice.size == "small"
    assert "(medium 0.8" in choice.reason and "predicted" in choice.reason


def test_one_thread_is_taken_where_two_are_slower(speeds: dict[tuple[str, int], float]) -> None:
    torch.set_num_threads(2)
    speeds.update({("tiny", 2): 1.2, ("tiny", 1): 100.0, ("mini", 1): 9.0, ("small", 1): 3.0})
    choice = choose_size(read(), CPU, TOLD.append)
    assert (choice.size, choice.threads) == ("mini", 1)
    assert torch.get_num_threads() == 1


def test_threads_that_the_user_named_stay(speeds: dict[tuple[str, int], float]) -> None:
    torch.set_num_threads(2)
    speeds.update({("tiny", 2): 1.2})
    choice = choose_size(read(None, ["run.threads=2"]), CPU, TOLD.append)
    assert (choice.size, choice.threads) == ("tiny", None)
    assert torch.get_num_threads() == 2


def test_a_size_that_the_data_cannot_feed_is_not_in_question(
    speeds: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a short text. " * 150)  # 2100 characters: enough for windows of 64, not of 128
    speeds.update({("tiny", 1): 1e9, ("mini", 1): 1e9, ("small", 1): 1e9, ("medium", 1): 1e9})
    assert choose_size(read(None, [f"workload.data={text}"]), CPU, TOLD.append).size == "tiny"


def test_a_size_is_really_measured() -> None:
    told: list[str] = []
    draft = read(None, ["run.threads=1"])
    choice = choose_size(draft, CPU, told.append)
    assert choice.size in draft.auto["candidates"]
    assert any("tiny" in text for text in told)


def test_sizes_and_threads_of_an_own_workload_are_measured_too(
    speeds: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    (tmp_path / "sized.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        "def factory(settings):\n"
        "    model = nn.Linear(3, settings.option('width', 1))\n"
        "    data = TensorDataset(torch.rand(settings.option('items', 1000), 3))\n"
        "    return dict(model=model, train_data=data, loss=lambda output, batch: output.square().mean())\n"
    )
    file = tmp_path / "sized.toml"
    file.write_text(
        "[workload]\nname = 'sized:factory'\nsize = 'auto'\n[run]\nepochs = 1\n[batch]\nmicro = 2\n"
        "[sizes.small.workload.options]\nwidth = 2\n[sizes.large.workload.options]\nwidth = 4\n"
        "[auto]\ncandidates = ['small', 'large']\ngpu_size = 'large'\nmin_steps_per_second = 5\n"
        "probe = { options = { items = 9 } }\n"
    )
    torch.set_num_threads(2)
    speeds.update({("small", 2): 1.2, ("small", 1): 100.0, ("large", 1): 50.0})
    choice = choose_size(read(file), CPU, TOLD.append)
    assert (choice.size, choice.threads) == ("large", 1)
