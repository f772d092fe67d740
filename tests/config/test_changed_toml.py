"""New configuration files: only what differs from the defaults, with reasons and relative paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from ndd_engine.config import WORKLOADS, changed_toml, read
from ndd_engine.config.schema import Config


def again(text: str, path: Path) -> Config:
    path.write_text(text)
    return read(path).resolve()


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
        assert again(text, tmp_path / "new.toml") == wanted, text
        assert text.startswith("# Heading.") and "because it fits" in text
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
    found = again(text, tmp_path / "new.toml")
    assert found.model_copy(update={"workload": wanted.workload}) == wanted


def test_reasons_keep_keys_at_their_default() -> None:
    config = read(None, ["workload.size=tiny"], "chartext").resolve()
    text = changed_toml(config, reasons={"speed.compile": "0.5x, slower"})
    assert tomli.loads(text)["speed"] == {"compile": "off"} and "# 0.5x, slower" in text
