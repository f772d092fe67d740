"""Which value wins: command line, file, base of the file, size, preset, defaults; and what follows from the batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ndd_engine.config import Config, read, to_toml
from ndd_engine.errors import ConfigError, Problem


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_nothing_written_is_the_default_workload_with_its_profile() -> None:
    draft = read()
    assert (draft.workload, draft.size, draft.resolve().run.epochs) == ("chartext", "auto", 25)
    # "auto" is decided later; until then the smallest candidate stands in, so that everything can be checked.
    assert draft.resolve().workload.size == "tiny"
    assert draft.resolve("small").workload.layers == 4


MINI = '[workload]\nsize = "mini"\n'


@pytest.mark.parametrize(
    ("file", "sets", "expected"),
    [
        # A size beats the defaults, and a file beats the size that it names.
        ("", "workload.size=mini", {"workload.width": 96, "batch.sequence": 128, "optimizer.lr": 2e-3}),
        (f"{MINI}width = 64", "", {"workload.width": 64, "workload.heads": 4, "batch.sequence": 128}),
        # The command line beats both.
        (
            f"{MINI}[batch]\nmicro = 5\n[optimizer]\nlr = 0.5", "batch.micro=7 optimizer.lr=0.25",
            {"batch.micro": 7, "optimizer.lr": 0.25, "batch.sequence": 128},
        ),
        # So does a size on the command line, in what the size says.
        (
            f"{MINI}width = 64\nlayers = 3\n[optimizer]\nlr = 0.5\nweight_decay = 0.2", "workload.size=tiny",
            {"workload.width": 32, "workload.layers": 2, "optimizer.lr": 3e-3, "optimizer.weight_decay": 0.2},
        ),
        # A value beside that size beats it.
        (
            "[optimizer]\nlr = 0.5", "workload.size=tiny workload.width=48 batch.micro=3",
            {"workload.width": 48, "batch.micro": 3, "optimizer.lr": 3e-3},
        ),
        ("", "batch.micro=2 batch.micro=3", {"batch.micro": 3}),
        # None takes back what the file sets.
        (
            "[loader]\nworkers = 2\nprefetch = 4", "loader.workers=0 loader.prefetch=none",
            {"loader.workers": 0, "loader.prefetch": None},
        ),
    ],
)  # fmt: skip
def test_the_command_line_beats_the_file_and_the_size(
    toml: Path, file: str, sets: str, expected: dict[str, object]
) -> None:
    toml.write_text(file)
    assert values(read(toml, sets.split()).resolve(), expected) == expected


def values(config: Config, names: Iterable[str]) -> dict[str, object]:
    sections = config.model_dump()
    return {name: sections[name.partition(".")[0]][name.partition(".")[2]] for name in names}


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


# Presets, batches and GPU memory.


def resolved(*sets: str, file: Path | None = None) -> Config:
    return read(file, ["workload.size=tiny", *sets]).resolve()


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
    # It counts all ranks.
    config = resolved("batch.micro=4", "batch.effective=32", "parallel.ranks=2")
    assert (config.batch.accumulation, config.items_per_step) == (4, 32)


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
    ("workload", "memory_gb", "expected"),
    [
        ("chartext", 7.6, {"batch.micro": 96}),
        ("chartext", 15.7, {"batch.micro": 128}),
        ("chartext", 139.0, {"batch.micro": 192}),
        (
            "summarise", 7.6,
            {"batch.micro": 4, "workload.hidden": 224, "batch.sequence": 512, "workload.target": 150},
        ),
        (
            "summarise", 23.6,
            {"batch.micro": 8, "workload.hidden": 256, "batch.sequence": 768, "workload.target": 192},
        ),
    ],
)  # fmt: skip
def test_a_gpu_gets_the_guides_settings_for_its_memory(
    workload: str, memory_gb: float, expected: dict[str, object]
) -> None:
    draft = read(None, [], workload)
    assert values(draft.resolve("guide", memory_gb), expected) == expected
    # An explicit batch size overrides the one for the GPU.
    assert read(None, ["batch.micro=2"], workload).resolve("guide", memory_gb).batch.micro == 2
    micros = [draft.resolve("guide", gb).batch.micro for gb in range(4, 141, 4)]
    assert micros == sorted(micros)


# A file on top of another one.


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


def mistakes_of(path: Path) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        read(path).resolve()
    return caught.value.problems


def test_later_files_override_earlier_ones_key_by_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        root='[workload]\nname = "antispoof"\n[run]\nepochs = 3\nseed = 7\n[optimizer]\nlr = 0.1\n',
        base='extends = "root.toml"\n[optimizer]\nlr = 0.2\nweight_decay = 0.5\n',
        run='extends = "base.toml"\n[run]\nepochs = 9\n',
    )
    config = read(tmp_path / "run.toml", ("optimizer.weight_decay=0.25",)).resolve()
    assert (config.workload.name, config.run.epochs, config.run.seed) == ("antispoof", 9, 7)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.2, 0.25)
    assert "extends" not in to_toml(config)
    assert read(tmp_path / "x.toml", text=to_toml(config)).resolve() == config


def test_the_path_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path, base="[run]\nepochs = 4\n")
    write(tmp_path / "a", middle='extends = "../base.toml"\n')
    write(tmp_path / "a" / "b", run='extends = "../middle.toml"\n')
    monkeypatch.chdir(tmp_path / "a")
    assert read(Path("b/run.toml")).resolve().run.epochs == 4
    write(tmp_path / "a" / "b", run=f'extends = "{tmp_path}/base.toml"\n')
    assert read(Path("b/run.toml")).resolve().run.epochs == 4


def test_an_explicit_key_of_a_file_wins_over_the_size_of_its_base_and_the_reverse(tmp_path: Path) -> None:
    write(
        tmp_path,
        base='[workload]\nsize = "small"\nwidth = 24\n',
        run='extends = "base.toml"\n[workload]\nsize = "tiny"\n',
    )
    tiny = read(None, ("workload.size=tiny",)).resolve()
    config = read(tmp_path / "run.toml").resolve()
    assert config.workload.size == "tiny"
    assert config.workload.width == tiny.workload.width  # type: ignore[union-attr]
    write(tmp_path, run='extends = "base.toml"\n[workload]\nwidth = 40\n')
    assert read(tmp_path / "run.toml").resolve().workload.width == 40  # type: ignore[union-attr]


def test_accumulation_replaces_the_effective_batch_of_a_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="[batch]\nmicro = 8\neffective = 64\n",
        run='extends = "base.toml"\n[batch]\naccumulation = 2\n',
    )
    batch = read(tmp_path / "run.toml").resolve().batch
    assert (batch.items, batch.effective) == (16, None)


def test_a_mistake_names_the_file_and_the_line_that_has_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="# base\n[batch]\nmicro = 0\n[run]\nsead = 1\n",
        run='extends = "base.toml"\n[optimizer]\nlr = "much"\n',
    )
    base, run = tmp_path / "base.toml", tmp_path / "run.toml"
    assert {problem.key: problem.where for problem in mistakes_of(run)} == {
        "batch.micro": f"{base} line 3",
        "run.sead": f"{base} line 5",
        "optimizer.lr": f"{run} line 3",
    }
    write(tmp_path, base="[batch]\nmicro = 8\nmicro = 9\n")
    assert mistakes_of(run)[0].where == str(base)


def test_cycles_are_refused_with_the_chain(tmp_path: Path) -> None:
    write(tmp_path, a='extends = "b.toml"\n', b='\n# c\nextends = "c.toml"\n', c='extends = "./b.toml"\n')
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    (found,) = mistakes_of(a)
    assert found.where == f"{c} line 1" and f"{a} -> {b} -> {c} -> {b}" in str(found)
    write(tmp_path, a='extends = "a.toml"\n')
    assert f"{a} -> {a}" in str(mistakes_of(a)[0])


@pytest.mark.parametrize("value", ['["base.toml", "other.toml"]', "3", "true", '""'])
def test_only_the_path_of_one_file_is_allowed(tmp_path: Path, value: str) -> None:
    write(tmp_path, base="", other="", run=f"# mine\nextends = {value}\n")
    (found,) = mistakes_of(tmp_path / "run.toml")
    assert (found.where, found.key) == (f"{tmp_path / 'run.toml'} line 2", "extends")


def test_a_missing_base_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, run='extends = "nowhere.toml"\n')
    (found,) = mistakes_of(tmp_path / "run.toml")
    assert found.where == f"{tmp_path / 'run.toml'} line 1"
    assert str(tmp_path / "nowhere.toml") in str(found)


@pytest.mark.parametrize("text", ['[run]\nextends = "base.toml"\n', 'extend = "base.toml"\n'])
def test_extends_in_a_section_or_misspelt_gets_a_suggestion(tmp_path: Path, text: str) -> None:
    write(tmp_path, base="", run=text)
    (found, *_) = mistakes_of(tmp_path / "run.toml")
    assert "extends" in f"{found.message} {found.suggestion}"


def test_an_own_module_is_also_found_beside_the_base(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base='[workload]\nname = "mine:factory"\n[run]\nepochs = 1\n')
    write(tmp_path / "sub", run='extends = "../base.toml"\n')
    path = read(tmp_path / "sub" / "run.toml").resolve().workload.path  # type: ignore[union-attr]
    assert path[:2] == [str(tmp_path / "sub"), str(tmp_path)]
