"""Which changes one process switches between, and the interval of their blocks."""

from __future__ import annotations

import math
import random

import pytest

from ndd_engine.config import Config
from ndd_engine.trial.outcome import differences
from ndd_engine.trial.toggles import FIRST_LOOK, METHOD, OneProcess, can_switch, trimmed


def config(**sections: dict[str, object]) -> Config:
    return Config.model_validate({"workload": {"name": "chartext"}, "run": {"epochs": 1}} | sections)


def switches(base: Config, change: Config) -> bool:
    return can_switch((base, change), differences(base, change))


@pytest.mark.parametrize(
    "section",
    [
        {"loader": {"workers": 2, "prefetch": 4}},
        {"loader": {"pin_memory": True}},
        {"loader": {"non_blocking": False}},
        {"loader": {"fetch": "item"}},
        {"precision": {"amp": "bf16", "tf32": False}},
        {"speed": {"attention": "math"}},
        {"run": {"epochs": 1, "threads": 1}},
        {"run": {"epochs": 1, "gc_every_steps": 100}},
        {"log": {"every_steps": 1, "window_s": 0.0}},
    ],
)
def test_what_needs_no_new_model_is_switched(section: dict[str, dict[str, object]]) -> None:
    assert switches(config(), config(**section))
    assert switches(config(**section), config())


@pytest.mark.parametrize(
    "section",
    [
        {"batch": {"micro": 8}},
        {"optimizer": {"implementation": "loop"}},
        {"speed": {"compile": "default"}},
        {"speed": {"channels_last": True}},
        {"speed": {"cudnn_benchmark": True}},
        {"loader": {"cache": True}},
        {"loader": {"placement": "device"}},
        {"checkpoint": {"every_steps": 10}},
        {"evaluate": {"every_steps": 10}},
        {"log": {"kernels_every": 10}},
        {"loader": {"workers": 2}, "batch": {"micro": 8}},
    ],
)
def test_everything_else_takes_processes_of_its_own(section: dict[str, dict[str, object]]) -> None:
    assert not switches(config(), config(**section))


def test_compiled_code_and_encoded_data_stay_what_they_are() -> None:
    compiled = {"speed": {"compile": "default"}}
    assert not switches(config(**compiled), config(**compiled, precision={"amp": "bf16"}))
    assert switches(config(**compiled), config(**compiled, loader={"workers": 2}))
    cached = {"loader": {"cache": True}}
    assert not switches(config(**cached), config(loader={"cache": True, "pin_memory": True}))
    assert switches(config(**cached), config(**cached, precision={"amp": "bf16"}))


def blocks(values: list[float]) -> OneProcess:
    found = OneProcess()
    for value in values:
        found.add(value)
    return found


def test_the_interval_covers_with_heavy_tails() -> None:
    source = random.Random(7)
    inside = widths = 0.0
    for _ in range(600):
        values = [0.03 + source.gauss(0, 0.02) * (10 if source.random() < 0.05 else 1) for _ in range(30)]
        found = trimmed(values)
        inside += found.low <= math.exp(0.03) <= found.high
        widths += math.log(found.high / found.low) / 2 / 600
    assert 0.92 <= inside / 600 <= 0.985
    # The plain mean has a standard deviation of 0.0089, so its interval reaches 0.018 on average.
    assert widths < 0.013


def test_a_disturbed_block_does_not_decide() -> None:
    quiet = [0.001 * (-1) ** number for number in range(19)]
    assert blocks([*quiet, 1.5]).last() == "no difference"
    found = blocks([*quiet, 1.5]).estimate()
    assert found is not None and found.method == METHOD and found.pairs == 0 and found.blocks == 20


def test_it_looks_rarely_and_not_too_early() -> None:
    found = OneProcess()
    looks = []
    for number in range(1, 101):
        found.add(0.001 * (-1) ** number)
        if found.early() is not None:
            looks.append(number)
    assert looks[0] == FIRST_LOOK and len(looks) <= 6
    assert blocks([0.2 + 0.01 * (-1) ** number for number in range(FIRST_LOOK)]).early() == "faster"
    assert blocks([0.2] * (FIRST_LOOK - 1)).early() is None
