"""Presets, the effective batch and batch sizes by GPU memory: what they set and what overrides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.config import Config, read, to_toml
from ndd_engine.config.workload_sections import SummariseSection


def resolved(*sets: str, file: Path | None = None) -> Config:
    return read(file, ["workload.size=tiny", *sets]).resolve()


def test_presets_are_as_the_guide_gives_them() -> None:
    fastest, balanced, reproducible = (
        resolved(f"run.preset={name}") for name in ("fastest", "balanced", "reproducible")
    )
    assert (fastest.speed.compile, balanced.speed.compile) == ("default", "off")
    for preset in (fastest, balanced):
        assert preset.speed.cudnn_benchmark and preset.precision.amp == "auto"
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


def test_the_written_file_holds_the_effective_batch_when_the_micro_batch_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    config = resolved("batch.micro=4", "batch.effective=32")
    file.write_text(to_toml(config))
    assert read(file).resolve() == config
    assert read(file, ["batch.micro=16"]).resolve().batch.accumulation == 2


@pytest.mark.parametrize(
    ("memory_gb", "micro"), [(7.6, 96), (11.6, 96), (15.7, 128), (23.6, 192), (139.0, 192)]
)
def test_a_gpu_gets_the_guides_batch_for_its_memory(memory_gb: float, micro: int) -> None:
    draft = read(None, [], "chartext")
    assert draft.resolve("guide", memory_gb).batch.micro == micro
    # An explicit batch size overrides the one for the GPU.
    assert read(None, ["batch.micro=24"], "chartext").resolve("guide", memory_gb).batch.micro == 24


@pytest.mark.parametrize(
    ("memory_gb", "micro", "hidden", "limits", "workers"),
    [(7.6, 4, 224, (512, 150), 2), (11.6, 4, 256, (768, 192), 0), (23.6, 8, 256, (768, 192), 0)],
)
def test_a_gpu_gets_the_guides_summariser_for_its_memory(
    memory_gb: float, micro: int, hidden: int, limits: tuple[int, int], workers: int
) -> None:
    config = read(None, [], "summarise").resolve("guide", memory_gb)
    workload = config.workload
    assert isinstance(workload, SummariseSection)
    assert (config.batch.micro, workload.hidden, config.loader.workers) == (micro, hidden, workers)
    assert (config.batch.sequence, workload.target) == limits
    assert config.batch.items == 16 and workload.beam == 4
    # Explicit keys override those for the GPU.
    assert read(None, ["batch.micro=2"], "summarise").resolve("guide", memory_gb).batch.micro == 2


@pytest.mark.parametrize("workload", ["chartext", "summarise"])
def test_more_memory_never_gets_a_smaller_batch(workload: str) -> None:
    micros = [read(None, [], workload).resolve("guide", gb).batch.micro for gb in range(4, 141)]
    assert micros == sorted(micros)


def test_the_guides_evaluation_of_summaries_is_three_keys() -> None:
    sets = ["workload.size=guide", "evaluate.every_steps=500", "workload.summaries=100", "workload.beam=4"]
    config = read(None, sets, "summarise").resolve()
    assert isinstance(config.workload, SummariseSection)
    assert (config.evaluate.every_steps, config.workload.summaries, config.workload.beam) == (500, 100, 4)


def test_the_effective_batch_counts_all_ranks() -> None:
    config = resolved("batch.micro=4", "batch.effective=32", "parallel.ranks=2")
    assert (config.batch.accumulation, config.items_per_step) == (4, 32)
