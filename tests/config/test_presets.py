"""Presets, the effective batch and batch sizes by GPU memory: what they set and what overrides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.config import Config, read, to_toml
from ndd_engine.errors import ConfigError


def resolved(*sets: str, file: Path | None = None) -> Config:
    return read(file, ["workload.size=tiny", *sets]).resolve()


def message(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*sets)
    return str(caught.value)


def test_presets_are_as_the_guide_gives_them() -> None:
    fastest, balanced, reproducible = (
        resolved(f"run.preset={name}") for name in ("fastest", "balanced", "reproducible")
    )
    assert (fastest.speed.compile, fastest.speed.cudnn_benchmark, fastest.precision.amp) == (
        "default",
        True,
        "auto",
    )
    assert (balanced.speed.compile, balanced.speed.cudnn_benchmark, balanced.precision.amp) == (
        "off",
        True,
        "auto",
    )
    speed, precision = reproducible.speed, reproducible.precision
    assert (speed.deterministic, speed.cudnn_benchmark, speed.compile) == (True, False, "off")
    assert (precision.amp, precision.tf32) == ("off", False)


def test_a_single_key_beats_a_preset_where_it_is_written_and_above(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\npreset = "reproducible"\n[precision]\namp = "bf16"\n')
    assert resolved(file=file).precision.amp == "bf16"
    assert resolved(file=file).speed.deterministic
    # On the command line the preset is above the file's keys.
    assert resolved("run.preset=balanced", file=file).precision.amp == "auto"
    assert resolved("run.preset=balanced", "precision.amp=fp16", file=file).precision.amp == "fp16"


def test_an_unknown_preset_is_reported() -> None:
    text = message("run.preset=quickest")
    assert "run.preset" in text
    assert "'fastest', 'balanced' or 'reproducible'" in text


def test_a_preset_and_a_key_that_contradict_each_other_are_reported() -> None:
    assert "are mutually exclusive" in message("run.preset=reproducible", "speed.cudnn_benchmark=true")


def test_accumulation_follows_from_the_effective_batch() -> None:
    batch = resolved("batch.effective=64", "batch.micro=8").batch
    assert (batch.micro, batch.accumulation, batch.items) == (8, 8, 64)
    # The profile holds 16 pairs a step: another micro-batch keeps them.
    batch = read(None, ["workload.size=guide", "batch.micro=4"], "summarise").resolve().batch
    assert (batch.micro, batch.accumulation, batch.items) == (4, 4, 16)


def test_what_is_written_higher_decides_between_effective_and_accumulation(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[workload]\nsize = "tiny"\n[batch]\nmicro = 4\neffective = 32\n')
    assert read(file, ["batch.accumulation=2"]).resolve().batch.items == 8
    file.write_text('[workload]\nsize = "tiny"\n[batch]\nmicro = 4\naccumulation = 3\n')
    assert read(file, ["batch.effective=16"]).resolve().batch.accumulation == 4


def test_an_effective_batch_that_does_not_divide_is_reported() -> None:
    assert "micro 12 x accumulation 1 is 12, but batch.effective is 32" in message(
        "batch.micro=12", "batch.effective=32"
    )
    text = message("batch.micro=8", "batch.accumulation=3", "batch.effective=32")
    assert "micro 8 x accumulation 3 is 24, but batch.effective is 32" in text


def test_the_written_file_holds_the_effective_batch_when_the_micro_batch_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    config = resolved("batch.micro=4", "batch.effective=32")
    file.write_text(to_toml(config))
    assert read(file).resolve() == config
    assert read(file, ["batch.micro=16"]).resolve().batch.accumulation == 2


@pytest.mark.parametrize(
    ("memory_gb", "micro"), [(7.6, 128), (11.6, 96), (15.7, 128), (23.6, 192), (139.0, 192)]
)
def test_a_gpu_gets_the_guides_batch_for_its_memory(memory_gb: float, micro: int) -> None:
    draft = read(None, [], "chartext")
    assert draft.resolve("guide", memory_gb).batch.micro == micro
    # An explicit batch size overrides the one for the GPU.
    assert read(None, ["batch.micro=24"], "chartext").resolve("guide", memory_gb).batch.micro == 24


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("loader.prefetch=2", "prefetch needs workers"),
        ("loader.eval_prefetch=2", "set loader.eval_workers to 1 or more"),
        ("loader.eval_persistent=true", "eval_persistent needs workers"),
        ("speed.compile=fast", "'max-autotune'"),
        ("speed.attention=sdpa", "'flash'"),
        ("optimizer.implementation=apex", "'foreach'"),
        ("loader.placement=gpu", "'device'"),
    ],
)
def test_settings_that_cannot_be(key: str, part: str) -> None:
    assert part in message(key)


def test_settings_that_exclude_each_other() -> None:
    assert "does not support workers" in message("loader.placement=device", "loader.workers=2")
    assert "disable one of them" in message(
        "workload.name=antispoof", "workload.augment=true", "loader.cache=true"
    )
    text = message("speed.cuda_graph=true", "speed.compile=reduce-overhead")
    assert "use compile default with cuda_graph" in text


def test_the_effective_batch_counts_all_ranks() -> None:
    config = read(
        None, ["workload.size=tiny", "batch.micro=4", "batch.effective=32", "parallel.ranks=2"], "chartext"
    )
    resolved = config.resolve()
    assert (resolved.batch.accumulation, resolved.items_per_step) == (4, 32)
    text = message("batch.micro=8", "batch.effective=32", "parallel.ranks=3")
    assert "micro 8 x accumulation 1 x ranks 3 is 24, but batch.effective is 32" in text
