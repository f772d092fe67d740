"""The written TOML reads back to the same configuration; the shorter one has only what differs from the defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ndd_engine.config import WORKLOADS, Config, changed_toml, read, to_toml
from ndd_engine.config.workload_sections import SECTIONS

# What a user may type as text: everything that TOML can hold, and that is not refused.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
POSITIVE = st.floats(1e-12, 1e6, allow_nan=False)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in Config.model_fields.items():
        annotation = info.annotation
        if name == "workload":
            yield from ((name, model) for model in SECTIONS.values())
        else:
            assert annotation is not None
            yield name, annotation


def reread(written: Config | str, path: Path) -> Config:
    path.write_text(written if isinstance(written, str) else to_toml(written), encoding="utf-8")
    return read(path).resolve()


CONFIGURATIONS = st.fixed_dictionaries({
    "run": st.fixed_dictionaries({
        "epochs": st.just(3), "seed": st.integers(0, 2**63 - 1), "max_steps": st.none() | st.integers(1, 10**12),
    }),
    "workload": st.fixed_dictionaries(
        {"name": st.just("chartext"), "data": TEXT}, optional={"size": st.sampled_from(["tiny", "mini", "guide"])}
    ),
    "optimizer": st.fixed_dictionaries({
        "lr": POSITIVE, "weight_decay": st.floats(0, 10),
        "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
        "implementation": st.sampled_from(["auto", "fused", "foreach", "loop"]),
    }),
    "loader": st.fixed_dictionaries({"workers": st.just(0)})
    | st.fixed_dictionaries({"workers": st.integers(1, 8), "prefetch": st.none() | st.integers(1, 8)}),
    "precision": st.fixed_dictionaries({"tf32": st.booleans()}),
})  # fmt: skip


@given(CONFIGURATIONS)
def test_what_is_written_reads_back_equal(tmp_path: Path, values: dict[str, Any]) -> None:
    config = Config.model_validate(values)
    again = reread(config, tmp_path / "run.toml")
    if "size" not in values["workload"]:
        # A file without a size leaves it to the workload's default; everything else is as written.
        again = again.model_copy(update={"workload": again.workload.model_copy(update={"size": None})})
    assert again == config


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


# Only what differs.


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("batch.micro=8", "batch.accumulation=3", "speed.compile=default"),
        ("run.preset=fastest", "precision.tf32=false"),
        ("batch.effective=64", "batch.micro=16", "run.max_steps=7"),
    ],
)
def test_the_file_gives_the_same_configuration(workload: str, sets: tuple[str, ...], tmp_path: Path) -> None:
    draft = read(None, sets, workload)
    for size in [None, *draft.sizes]:
        wanted = draft.resolve(size)
        text = changed_toml(wanted, "Heading.", {"batch.micro": "because it fits"})
        assert reread(text, tmp_path / "new.toml") == wanted, text
        assert text.startswith("# Heading.") and "it fits" in text
        assert len(text.splitlines()) < 30
        assert "refresh_hz" not in text and "[checkpoint]" not in text


def test_defaults_are_named_and_unchanged_keys_are_left_out(tmp_path: Path) -> None:
    text = changed_toml(read(None, ["optimizer.lr=0.5", "workload.size=tiny"], "chartext").resolve())
    assert set(tomli.loads(text)) == {"workload", "optimizer"}
    assert "# default: " in text


def test_paths_below_the_working_directory_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("text " * 100)
    (tmp_path / "code").mkdir()
    sets = [f'workload.data="{tmp_path / "mine.txt"}"', "workload.size=tiny", "log.trace=trace.json"]
    text = changed_toml(read(None, sets, "chartext").resolve())
    assert tomli.loads(text)["workload"]["data"] == "mine.txt"
    assert tomli.loads(text)["log"]["trace"] == "trace.json"
    assert str(tmp_path) not in text


def test_your_own_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    config = tmp_path / "code" / "mine.toml"
    config.write_text(
        '[workload]\nname = "my.nets:factory"\n[workload.options]\nwidth = 3\n[run]\nepochs = 2\n'
    )
    wanted = read(config).resolve()
    text = changed_toml(wanted)
    table = tomli.loads(text)
    assert table["workload"] == {"name": "my.nets:factory", "path": ["code"], "options": {"width": 3}}
    assert table["run"] == {"epochs": 2}
    found = reread(text, tmp_path / "new.toml")
    assert found.model_copy(update={"workload": wanted.workload}) == wanted


def test_reasons_keep_keys_at_their_default() -> None:
    config = read(None, ["workload.size=tiny"], "chartext").resolve()
    text = changed_toml(config, reasons={"speed.compile": "0.5x, slower"})
    assert tomli.loads(text)["speed"] == {"compile": "off"} and "# 0.5x, slower" in text
