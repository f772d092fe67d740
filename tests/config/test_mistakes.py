"""All mistakes in a configuration are reported at once, with location, value found and allowed values."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ndd_engine.config import read
from ndd_engine.errors import EXIT_USAGE, ConfigError, Problem


def problems(path: Path | None = None, sets: tuple[str, ...] = ()) -> tuple[Problem, ...]:
    """The mistakes that reading and resolving finds; fails when there are none."""
    with pytest.raises(ConfigError) as caught:
        read(path, sets).resolve()
    assert caught.value.exit_status == EXIT_USAGE
    assert caught.value.problems
    return caught.value.problems


def only(path: Path | None = None, sets: tuple[str, ...] = ()) -> Problem:
    """The only mistake."""
    (found,) = problems(path, sets)
    return found


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


@pytest.mark.parametrize(
    ("item", "key", "meant"),
    [
        ("batch.mikro=4", "batch.mikro", "micro"),
        ("bacth.micro=4", "bacth", "batch"),
        ("workload.nmae=4", "workload.nmae", "name"),
        ("optimizer.warmup_steps=4", "optimizer.warmup_steps", "[schedule]"),
        ("workload.hidden=[3]", "workload.hidden", ""),  # a key of another workload
    ],
)
def test_an_unknown_key_suggests_another(item: str, key: str, meant: str) -> None:
    found = only(sets=(item,))
    assert (found.where, found.key) == ("--set", key)
    assert meant in f"{found.message} {found.suggestion}"


@pytest.mark.parametrize(
    ("item", "allowed"),
    [
        ("optimizer.name=adamm", "'adamw'"),
        ("optimizer.name=none", "'adamw'"),
        ("run.preset=quickest", "'balanced'"),
        ("speed.compile=fast", "'max-autotune'"),
        ("speed.attention=sdpa", "'flash'"),
        ("optimizer.implementation=apex", "'foreach'"),
        ("loader.placement=gpu", "'device'"),
        ("run.device=gpu", "cuda:N"),
        ("run.name=../evil", "letters, digits"),
        ("workload.size=huge", "tiny, mini, small, medium, guide, auto"),
        ("run.seed=-1", "≥ 0"),
        ("workload.dropout=1.0", "< 1"),
        ("run.epochs=" + "1" * 18, "≤ 1000000000"),
        ("checkpoint.every_minutes=1e300", "≤ 1e+06"),
        ("log.profile_every_s=1e-300", "0, or 1 to 86400"),
        ("loader.timeout_s=1e300", "≤ 86400"),
        ("log.headless_s=1e-300", "≥ 0.1"),
        ("batch.micro=1.5", "an integer"),
        ("batch.micro=true", "an integer"),
        ("batch.micro={a=1}", "an integer"),
        ('optimizer.lr="0.1"', "a number"),
        ("loader.pin_memory=1", "true or false"),
        ("loader.pin_memory=yes", "true or false"),
        ("workload.data=3", "a string"),
        ("optimizer.betas=0.9", "a list"),
    ],
)
def test_a_wrong_value_names_what_is_allowed(item: str, allowed: str) -> None:
    found = only(sets=(item,))
    assert found.key == item.partition("=")[0] and allowed in str(found)


@pytest.mark.parametrize("section", ["batch", "workload"])
def test_a_section_given_as_a_value(toml: Path, section: str) -> None:
    toml.write_text(f"{section} = 3\n")
    assert (only(toml).where, only(toml).key) == (f"{toml} line 1", section)


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (("loader.prefetch=2",), "prefetch"),
        (("loader.persistent=true",), "persistent"),
        (("loader.eval_prefetch=2",), "loader.eval_workers"),
        (("loader.eval_persistent=true",), "eval_persistent"),
        (("loader.placement=device", "loader.workers=2"), "workers"),
        (("speed.cudnn_benchmark=true", "speed.deterministic=true"), "deterministic"),
        (("run.preset=reproducible", "speed.cudnn_benchmark=true"), "cudnn_benchmark"),
        (("speed.cuda_graph=true", "speed.compile=reduce-overhead"), "cuda_graph"),
        (("workload.heads=5",), "heads 5"),
        (("workload.tie_weights=true", "workload.objective=diffusion"), "tie_weights"),
        (("schedule.kind=cosine", "schedule.min_lr=0.9"), "schedule.min_lr 0.9"),
        (("optimizer.momentum=0.9",), 'momentum is not used by "adamw"'),
        (("optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"), 'betas is not used by "sgd"'),
        (("optimizer.name=sgd", "optimizer.eps=1e-6"), 'eps is not used by "sgd"'),
        (("evaluate.min_delta=0.1",), "min_delta is not used without patience"),
        (("workload.name=eeg", "workload.model=lstm", "workload.hidden=[3,4]"), "[3, 4]"),
        (("workload.name=antispoof", "workload.augment=true", "loader.cache=true"), "cache"),
        (("batch.micro=12", "batch.effective=32"), "12, but batch.effective is 32"),
        (("batch.micro=8", "batch.accumulation=3", "batch.effective=32"), "24, but batch.effective is 32"),
        (("batch.micro=8", "batch.effective=32", "parallel.ranks=3"), "24, but batch.effective is 32"),
    ],
)
def test_impossible_combinations_say_which(sets: tuple[str, ...], named: str) -> None:
    sets = sets if sets[0].startswith("workload.name") else ("workload.size=tiny", *sets)
    text = str(only(sets=sets))
    assert named in text and "Value error" not in text


def test_a_mistake_of_the_whole_is_placed_in_the_file_not_on_the_command_line(toml: Path) -> None:
    toml.write_text('[schedule]\nkind = "cosine"\nmin_lr = 0.9\n')
    assert only(toml).where == str(toml)


def test_an_unknown_workload_suggests_and_still_checks_the_rest(toml: Path) -> None:
    toml.write_text('[workload]\nname = "chartxt"\n[batch]\nmicro = 0\n')
    first, second = problems(toml)
    assert (first.where, first.key, first.found) == (f"{toml} line 2", "workload.name", '"chartxt"')
    assert "package.module:factory" in (first.allowed or "") and "chartext" in (first.suggestion or "")
    assert second.key == "batch.micro"


def test_size_auto_is_refused_where_nothing_says_how_to_decide_it() -> None:
    found = only(sets=("workload.name=eeg", "workload.size=auto"))
    assert found.key == "workload.size" and found.allowed == "guide, large, lstm, gru"


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.weight_decay", "clip.max_norm", "loader.timeout_s"]
)
def test_numbers_have_to_be_finite(key: str, value: str) -> None:
    assert only(sets=(f"{key}={value}",)).key == key


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().resolve().batch.micro = 3


@pytest.mark.parametrize("item", ["batch.micro", "=3", "micro=3", ".micro=3", "batch.=3", "", "batch={}"])
def test_a_set_that_cannot_be_read_shows_how_it_is_written(item: str) -> None:
    assert "section.key=value" in str(only(sets=(item,)))
    # A key as a value and as a section.
    assert "batch.micro" in str(only(sets=("batch.micro=3", "batch.micro.x=4")))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[run]\nepochs = 3\nseed = = 4\n", "line 3, column 8"),
        (b"[run]\nepochs = 3\nepochs = 4\n", "TOML"),
        (b"\x7fELF\x02\x01\xff\xfe\x00", "byte 6"),
        (b"#" * 1_000_001, "1,000,000"),
    ],
    ids=["syntax", "a key twice", "binary", "long"],
)
def test_what_is_no_toml_file_is_one_mistake(toml: Path, content: bytes, named: str) -> None:
    toml.write_bytes(content)
    assert only(toml).where == str(toml) and named in only(toml).message


def test_a_missing_file_and_a_folder_say_why(tmp_path: Path) -> None:
    missing = only(tmp_path / "none.toml")
    assert missing.where == str(tmp_path / "none.toml") and os.strerror(errno.ENOENT) in missing.message
    assert os.strerror(errno.EISDIR) in only(tmp_path).message


def test_foreign_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mb.toml"
    path.write_text(
        '[run]\ndevice = "\\u001b]0;title\\u0007"\n"bad\\u001b[2Jkey" = 1\n[workload]\nname = "x\\u009b31m"\n'
    )
    found = problems(path, ("optimizer.name=\x1b[1m", "\x1b[5mnothing", "\x07.x=1"))
    assert len(found) >= 6
    for problem in found:
        text = str(problem)
        assert all(char.isprintable() for char in text), repr(text)
    assert "\\x1b]0;title\\x07" in str(ConfigError(found))


def test_a_very_long_value_is_cut() -> None:
    assert len(str(only(sets=(f"run.device={'x' * 5000}",)))) < 300


def test_a_problem_of_the_workload_gets_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[workload]\nname = "a:b"\n[workload.options]\nchannels = "24"\n', encoding="utf-8")
    draft = read(path, ["run.epochs=1"])
    with pytest.raises(ConfigError) as caught, draft.locating():
        key = "workload.options.channels"
        raise ConfigError(
            [Problem("workload", key, "the factory needs another type", '"24"'), Problem("x", "y", "z")]
        )
    first, second = caught.value.problems
    assert first.where == f"{path} line 4" and second.where == "x"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("9223372036854775808", "64"),
        ("9" * 5000, "64"),
        ("0x" + "f" * 5000, "64"),
        ("[" * 50 + "]" * 50, "20 levels"),
        ("{a=" * 450 + "1" + "}" * 450, "20 levels"),
        ('"\\u0000"', "NUL"),
        ('"\udcff"', "UTF-8"),
    ],
    ids=["large", "digits", "hexadecimal", "lists", "tables", "nul", "bytes"],
)
def test_what_no_configuration_contains_is_one_short_error(value: str, named: str, toml: Path) -> None:
    found = str(only(sets=(f"run.seed={value}",)))
    assert "run.seed" in found and named in found and len(found) < 200
    if named != "UTF-8":
        toml.write_text(f"[run]\nseed = {value}\n")
        assert named in str(only(toml))


def test_a_file_of_mistakes_is_not_printed_whole(toml: Path) -> None:
    toml.write_text("[run]\n" + "\n".join(f"k{index} = 1" for index in range(3000)))
    assert len(problems(toml)) == 41
