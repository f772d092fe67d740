"""`extends`: a file on top of another one, and errors that name the file that has the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.config import read, to_toml
from ndd_engine.errors import ConfigError, Problem


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


def mistakes(path: Path) -> tuple[Problem, ...]:
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
    assert {problem.key: problem.where for problem in mistakes(run)} == {
        "batch.micro": f"{base} line 3",
        "run.sead": f"{base} line 5",
        "optimizer.lr": f"{run} line 3",
    }
    write(tmp_path, base="[batch]\nmicro = 8\nmicro = 9\n")
    assert mistakes(run)[0].where == str(base)


def test_cycles_are_refused_with_the_chain(tmp_path: Path) -> None:
    write(tmp_path, a='extends = "b.toml"\n', b='\n# c\nextends = "c.toml"\n', c='extends = "./b.toml"\n')
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    (found,) = mistakes(a)
    assert found.where == f"{c} line 1" and f"{a} -> {b} -> {c} -> {b}" in str(found)
    write(tmp_path, a='extends = "a.toml"\n')
    assert f"{a} -> {a}" in str(mistakes(a)[0])


@pytest.mark.parametrize("value", ['["base.toml", "other.toml"]', "3", "true", '""'])
def test_only_the_path_of_one_file_is_allowed(tmp_path: Path, value: str) -> None:
    write(tmp_path, base="", other="", run=f"# mine\nextends = {value}\n")
    (found,) = mistakes(tmp_path / "run.toml")
    assert (found.where, found.key) == (f"{tmp_path / 'run.toml'} line 2", "extends")


def test_a_missing_base_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, run='extends = "nowhere.toml"\n')
    (found,) = mistakes(tmp_path / "run.toml")
    assert found.where == f"{tmp_path / 'run.toml'} line 1"
    assert str(tmp_path / "nowhere.toml") in str(found)


@pytest.mark.parametrize("text", ['[run]\nextends = "base.toml"\n', 'extend = "base.toml"\n'])
def test_extends_in_a_section_or_misspelt_gets_a_suggestion(tmp_path: Path, text: str) -> None:
    write(tmp_path, base="", run=text)
    (found, *_) = mistakes(tmp_path / "run.toml")
    assert "extends" in f"{found.message} {found.suggestion}"


def test_an_own_module_is_also_found_beside_the_base(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base='[workload]\nname = "mine:factory"\n[run]\nepochs = 1\n')
    write(tmp_path / "sub", run='extends = "../base.toml"\n')
    path = read(tmp_path / "sub" / "run.toml").resolve().workload.path  # type: ignore[union-attr]
    assert path[:2] == [str(tmp_path / "sub"), str(tmp_path)]
