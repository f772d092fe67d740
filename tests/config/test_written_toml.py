"""The written TOML reads back to the same configuration and explains every key; none of it needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ndd_engine.config import Config, read, to_toml
from ndd_engine.config.workload_sections import SECTIONS, Section

# What a user may type as text: everything that TOML can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
POSITIVE = st.floats(1e-12, 1e6, allow_nan=False)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in Config.model_fields.items():
        annotation = info.annotation
        if name == "workload":
            yield from ((name, model) for model in SECTIONS.values())
        else:
            assert annotation is not None
            yield name, annotation


def reread(config: Config, path: Path, **more: object) -> Config:
    path.write_text(to_toml(config, **more), encoding="utf-8")  # type: ignore[arg-type]
    return read(path).resolve()


@given(
    data=TEXT,
    lr=POSITIVE,
    decay=st.floats(0, 10),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    seed=st.integers(0, 2**63 - 1),
    max_steps=st.none() | st.integers(1, 10**12),
    workers=st.integers(0, 8),
    prefetch=st.none() | st.integers(1, 8),
    implementation=st.sampled_from(["auto", "fused", "foreach", "loop"]),
    tf32=st.booleans(),
    size=st.none() | st.sampled_from(["tiny", "mini", "guide"]),
)
def test_what_is_written_reads_back_equal(
    tmp_path: Path,
    data: str,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    seed: int,
    max_steps: int | None,
    workers: int,
    prefetch: int | None,
    implementation: str,
    tf32: bool,
    size: str | None,
) -> None:
    workload = {"name": "chartext", "data": data}
    config = Config.model_validate(
        {
            "run": {"epochs": 3, "seed": seed, "max_steps": max_steps},
            "workload": workload if size is None else {**workload, "size": size},
            "optimizer": {
                "lr": lr,
                "weight_decay": decay,
                "betas": list(betas),
                "implementation": implementation,
            },
            "loader": {"workers": workers, "prefetch": prefetch if workers else None},
            "precision": {"tf32": tf32},
        }
    )
    again = reread(config, tmp_path / "run.toml")
    if size is None:
        # A file without a size leaves it to the workload's default; everything else is as written.
        again = again.model_copy(update={"workload": again.workload.model_copy(update={"size": None})})
    assert again == config


@given(
    hidden=st.lists(st.integers(1, 4096), min_size=1, max_size=6), rate=POSITIVE, dropout=st.floats(0, 0.99)
)
def test_the_other_workload_reads_back_equal(
    tmp_path: Path, hidden: list[int], rate: float, dropout: float
) -> None:
    section = {"name": "eeg", "size": "large", "hidden": hidden, "sample_rate": rate, "dropout": dropout}
    config = Config.model_validate({"run": {"epochs": 1}, "workload": section})
    assert reread(config, tmp_path / "run.toml") == config


def test_heading_reasons_and_unset_values_are_comments() -> None:
    config = read(None, ["workload.size=tiny", "run.max_steps=7"]).resolve()
    text = to_toml(config, "First line.\n\nThird line.", {"batch.micro": "it fits"})
    assert text.startswith("# First line.\n")
    assert "# Third line." in text
    assert "# it fits" in text
    assert tomli.loads(text)["batch"]["micro"] == 16 and "name" not in tomli.loads(text)["run"]


def test_every_key_is_written_as_a_value_or_as_a_comment() -> None:
    config = read(None, ["workload.size=tiny"]).resolve()
    text = to_toml(config)
    for section, model in sections():
        if section == "workload" and model is not type(config.workload):
            continue
        assert f"[{section}]" in text
        for key in model.model_fields:
            assert f"\n{key} = " in text or f"# {key} is not set: " in text


def test_a_configuration_is_frozen_and_refuses_unknown_keys() -> None:
    config = read(None, ["workload.size=tiny"]).resolve()
    with pytest.raises(ValueError, match="frozen"):
        config.batch.micro = 3
    assert all(issubclass(model, Section) for _, model in sections())
