"""Which value wins: the command line beats the file, the file beats the size, the size beats the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.config import read, to_toml
from ndd_engine.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_nothing_written_is_the_default_workload_with_its_profile() -> None:
    draft = read()
    assert draft.workload == "chartext"
    assert draft.size == "auto"
    config = draft.resolve()
    assert config.run.epochs == 25
    assert config.clip.max_norm == 1.0
    # "auto" is decided later; until then the smallest candidate stands in, so that everything can be checked.
    assert config.workload.size == "tiny"


def test_the_defaults_of_another_workload_are_its_own() -> None:
    config = read(workload="eeg").resolve()
    assert (config.workload.name, config.batch.micro, config.optimizer.lr) == ("eeg", 1024, 0.01)
    assert config.clip.max_norm == 0.0


def test_a_size_beats_the_defaults() -> None:
    config = read(None, ["workload.size=mini"]).resolve()
    assert (config.workload.width, config.batch.sequence, config.optimizer.lr) == (96, 128, 2e-3)


def test_the_file_beats_the_size_it_names(toml: Path) -> None:
    toml.write_text('[workload]\nname = "chartext"\nsize = "mini"\nwidth = 64\n[batch]\nmicro = 5\n')
    config = read(toml).resolve()
    assert (config.workload.width, config.batch.micro) == (64, 5)
    # What the file does not say comes from the size.
    assert (config.workload.heads, config.batch.sequence) == (4, 128)


def test_the_command_line_beats_the_file_and_the_size(toml: Path) -> None:
    toml.write_text('[workload]\nsize = "mini"\n[batch]\nmicro = 5\n[optimizer]\nlr = 0.5\n')
    config = read(toml, ["batch.micro=7", "optimizer.lr=0.25"]).resolve()
    assert (config.batch.micro, config.optimizer.lr, config.batch.sequence) == (7, 0.25, 128)


def test_a_size_on_the_command_line_beats_what_the_file_says(toml: Path) -> None:
    toml.write_text(
        '[workload]\nsize = "mini"\nwidth = 64\nlayers = 3\n[optimizer]\nlr = 0.5\nweight_decay = 0.2\n'
    )
    config = read(toml, ["workload.size=tiny"]).resolve()
    assert (config.workload.size, config.workload.width, config.workload.layers) == ("tiny", 32, 2)
    assert config.optimizer.lr == 3e-3
    # The size says nothing of it, so the file still counts.
    assert config.optimizer.weight_decay == 0.2


def test_a_value_beside_the_size_on_the_command_line_beats_it(toml: Path) -> None:
    toml.write_text("[optimizer]\nlr = 0.5\n")
    config = read(toml, ["workload.size=tiny", "workload.width=48", "batch.micro=3"]).resolve()
    assert (config.workload.width, config.batch.micro, config.optimizer.lr) == (48, 3, 3e-3)


def test_the_measured_size_is_filled_in_below_the_file(toml: Path) -> None:
    toml.write_text("[batch]\nmicro = 5\n")
    config = read(toml).resolve("small")
    assert (config.workload.size, config.workload.layers, config.batch.micro) == ("small", 4, 5)


def test_overrides_are_command_line_values(toml: Path) -> None:
    toml.write_text('[run]\nmax_steps = 5\nname = "filed"\n')
    draft = read(toml, ["run.seed=9"], overrides={"run": {"max_steps": 3}})
    config = draft.resolve()
    assert (config.run.max_steps, config.run.seed, config.run.name) == (3, 9, "filed")


def test_a_workload_on_the_command_line_beats_the_file(toml: Path) -> None:
    toml.write_text('[workload]\nname = "chartext"\nsize = "tiny"\n')
    with pytest.raises(ConfigError) as caught:
        read(toml, workload="eeg").resolve()
    # The size of another workload is an error, reported with its line.
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (f"{toml} line 3", "workload.size")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run.seed=12", 12),
        ("run.name=abc", "abc"),
        ('run.name="abc"', "abc"),
        (" run . name = abc ", "abc"),
        ("workload.data=/tmp/some file.txt", "/tmp/some file.txt"),
        ("workload.data=a=b.txt", "a=b.txt"),
        ("loader.pin_memory=true", True),
        ("optimizer.betas=[0.8, 0.9]", [0.8, 0.9]),
        ('run.name="none"', "none"),
        ("loader.prefetch=none", None),
    ],
)
def test_set_reads_toml_values_and_bare_words(text: str, found: object) -> None:
    section, key = (part.strip() for part in text.partition("=")[0].split("."))
    assert getattr(getattr(read(None, [text]).resolve(), section), key) == found


def test_none_takes_back_what_the_file_sets(toml: Path) -> None:
    toml.write_text("[loader]\nworkers = 2\nprefetch = 4\n")
    loader = read(toml, ["loader.workers=0", "loader.prefetch=none"]).resolve().loader
    assert (loader.workers, loader.prefetch) == (0, None)


def test_none_is_no_value_where_there_has_to_be_one() -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, ["optimizer.name=none"]).resolve()
    assert "optimizer.name" in str(caught.value)


def test_the_last_of_two_sets_of_one_key_counts() -> None:
    assert read(None, ["batch.micro=2", "batch.micro=3"]).resolve().batch.micro == 3


def test_auto_names_sizes_that_exist() -> None:
    auto = read().auto
    assert {auto["gpu_size"], *auto["candidates"]} <= set(read().sizes)


SIZES = """
[workload]
name = "mine:factory"
size = "{size}"
[sizes.small]
workload = {{ options = {{ width = 8, items = 50 }} }}
batch = {{ micro = 4 }}
[sizes.large]
workload.options.width = 64
[auto]
candidates = ["small", "{candidate}"]
gpu_size = "large"
min_steps_per_second = 2
probe = {{ options = {{ items = 9 }} }}
[run]
epochs = 1
"""


def test_a_file_names_sizes_of_an_own_workload(toml: Path) -> None:
    toml.write_text(SIZES.format(size="auto", candidate="large"))
    draft = read(toml, ["batch.micro=5"])
    assert draft.sizes == ("small", "large") and draft.auto["gpu_size"] == "large"
    small, large = draft.resolve("small"), draft.resolve("large")
    assert (small.workload.options, small.batch.micro) == ({"width": 8, "items": 50}, 5)
    assert (large.workload.size, large.workload.options) == ("large", {"width": 64})
    assert draft.resolve("small", few=True).workload.options == {"width": 8, "items": 9}
    assert read(toml, ["workload.size=small"]).resolve().batch.micro == 4
    # A recorded configuration has the values and the name, and no sizes to choose from.
    toml.write_text(to_toml(small))
    assert read(toml).resolve() == small


@pytest.mark.parametrize(
    ("size", "candidate", "named"),
    [("medium", "large", "small, large, auto"), ("auto", "huge", "[sizes.huge]")],
)
def test_mistakes_in_sizes_are_told(toml: Path, size: str, candidate: str, named: str) -> None:
    toml.write_text(SIZES.format(size=size, candidate=candidate))
    with pytest.raises(ConfigError) as caught:
        read(toml).resolve()
    assert named in str(caught.value)


def test_an_own_workload_without_sizes_has_none_to_choose(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[sizes.NAME\]"):
        read(None, ["workload.size=auto", "run.epochs=1"], "mine:factory").resolve()
    toml.write_text("[workload]\nname = 'eeg'\n[sizes.small]\nbatch.micro = 4\n")
    with pytest.raises(ConfigError, match="sizes"):
        read(toml).resolve()
