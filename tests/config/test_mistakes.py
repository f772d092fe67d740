"""All mistakes in a configuration are reported at once, with location, value found and allowed values."""

from __future__ import annotations

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


def only(path: Path | None = None, sets: tuple[str, ...] = ()) -> str:
    """The message of the only mistake."""
    found = problems(path, sets)
    assert len(found) == 1, [str(problem) for problem in found]
    return str(found[0])


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_all_mistakes_come_at_once_each_with_file_and_line(toml: Path) -> None:
    toml.write_text(
        "[run]\n"
        "epochs = 0\n"
        "sead = 3\n"
        "[batch]\n"
        'micro = "many"\n'
        "[loader]\n"
        "prefetch = 4\n"
        "[precision]\n"
        'amp = "fp8"\n'
        "[optimizer]\n"
        "betas = [0.9, 2.0]\n"
        "[workload]\n"
        "hiden = 3\n"
    )
    found = problems(toml, ("batch.accumulation=0", "clip.norm=1.0"))
    told = {problem.key: problem for problem in found}
    lines = {key: problem.where for key, problem in told.items()}
    assert lines == {
        "run.epochs": f"{toml} line 2",
        "run.sead": f"{toml} line 3",
        "batch.micro": f"{toml} line 5",
        "loader": f"{toml} line 6",
        "precision.amp": f"{toml} line 9",
        "optimizer.betas.1": f"{toml} line 11",
        "workload.hiden": f"{toml} line 13",
        "batch.accumulation": "--set",
        "clip.norm": "--set",
    }
    assert told["run.sead"].suggestion == "did you mean seed?"
    assert told["clip.norm"].suggestion == "did you mean max_norm?"
    assert (told["batch.micro"].found, told["batch.micro"].allowed) == ('"many"', "an integer")
    assert told["run.epochs"].allowed == "≥ 1"
    text = str(ConfigError(found))
    assert len(text.splitlines()) == len(found)


def test_a_mistake_names_file_line_key_found_and_allowed(toml: Path) -> None:
    toml.write_text('[workload]\nsize = "tiny"\n[batch]\nmicro = 0\n')
    assert only(toml) == f"{toml} line 4: batch.micro = 0: is out of range; allowed: ≥ 1"


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (
            "batch.mikro=4",
            [
                "batch.mikro = 4",
                "unknown key",
                "did you mean micro?",
                "accumulation, effective, micro, sequence",
            ],
        ),
        ("bacth.micro=4", ["bacth", "unknown key", "did you mean batch?"]),
        ("optimizer.warmup_steps=4", ["unknown key", "it is a key of [schedule]"]),
        ("workload.nmae=4", ["unknown key", "did you mean name?"]),
        ("workload.hidden=[3]", ["unknown key"]),  # a key of the other workload
        ("optimizer.name=adamm", ['"adamm"', "is not a valid choice", "'adamw'"]),
        ("run.device=gpu", ["is not a valid value", "auto, cpu, cuda or cuda:N"]),
        ("run.name=../evil", ["is not a valid value", "letters, digits"]),
        ("run.seed=-1", ["is out of range", "≥ 0"]),
        ("run.seed=9223372036854775808", ["is not a 64-bit integer"]),
        ("workload.dropout=1.0", ["is out of range", "< 1"]),
        ("workload.size=huge", ['"huge"', "there is no such size", "tiny, mini, small, medium, guide, auto"]),
    ],
)
def test_what_is_wrong_and_what_would_be_right(item: str, parts: list[str]) -> None:
    text = only(sets=(item,))
    assert text.startswith("--set: ")
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("batch.micro=1.5", "an integer"),
        ("batch.micro=true", "an integer"),
        ('optimizer.lr="0.1"', "a number"),
        ("loader.pin_memory=1", "true or false"),
        ("loader.pin_memory=yes", "true or false"),
        ("workload.data=3", "a string"),
        ("optimizer.betas=0.9", "a list"),
        ("batch={}", None),
        ("batch.micro={a=1}", "an integer"),
    ],
)
def test_wrong_types_name_the_type_that_is_wanted(item: str, expected: str | None) -> None:
    text = only(sets=(item,))
    if expected is None:
        assert "section.key=value" in text
    else:
        assert f"has the wrong type; allowed: {expected}" in text


def test_a_section_given_as_a_value(toml: Path) -> None:
    toml.write_text("batch = 3\n")
    assert only(toml) == f"{toml} line 1: batch = 3: has the wrong type; allowed: a table of keys"


def test_the_workload_given_as_a_value_is_one_message(toml: Path) -> None:
    toml.write_text("workload = 3\n")
    (problem,) = problems(toml)
    assert problem.where == f"{toml} line 1"
    assert problem.key == "workload"


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (("loader.prefetch=2",), "prefetch needs workers"),
        (("loader.persistent=true",), "persistent needs workers"),
        (("speed.cudnn_benchmark=true", "speed.deterministic=true"), "are mutually exclusive"),
        (("workload.heads=5",), "width 32 is not divisible by heads 5"),
        (
            ("workload.tie_weights=true", "workload.objective=diffusion"),
            "tie_weights requires objective autoregressive",
        ),
        (
            ("workload.name=eeg", "workload.model=lstm", "workload.hidden=[3,4]"),
            "exactly one hidden size, found [3, 4]",
        ),
        (("schedule.min_lr=0.9",), "schedule.min_lr 0.9 is greater than optimizer.lr"),
    ],
)
def test_impossible_combinations_say_which_two(sets: tuple[str, ...], part: str) -> None:
    sets = sets if "workload.name=eeg" in sets else ("workload.size=tiny", *sets)
    text = only(sets=sets)
    assert part in text
    assert "Value error" not in text


def test_a_mistake_of_the_whole_is_placed_in_the_file_not_on_the_command_line(toml: Path) -> None:
    toml.write_text("[schedule]\nmin_lr = 0.9\n")
    text = only(toml)
    assert text.startswith(f"{toml}: schedule.min_lr 0.9 is greater than")


def test_an_unknown_workload_suggests_and_still_checks_the_rest(toml: Path) -> None:
    toml.write_text('[workload]\nname = "chartxt"\n[batch]\nmicro = 0\n')
    first, second = problems(toml)
    assert str(first) == (
        f'{toml} line 2: workload.name = "chartxt": there is no such workload; '
        'allowed: antispoof, chartext, eeg, finetune, summarise, or "package.module:factory" for your own model; '
        "did you mean chartext?"
    )
    assert second.key == "batch.micro"


def test_size_auto_is_refused_where_nothing_says_how_to_decide_it() -> None:
    text = only(sets=("workload.name=eeg", "workload.size=auto"))
    assert "there is no such size" in text
    assert "guide, large, lstm, gru" in text


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.weight_decay", "clip.max_norm", "loader.timeout_s"]
)
def test_numbers_have_to_be_finite(key: str, value: str) -> None:
    (problem,) = problems(sets=(f"{key}={value}",))
    assert problem.key == key


@pytest.mark.parametrize("item", ["batch.micro", "=3", "micro=3", ".micro=3", "batch.=3", ""])
def test_a_set_that_cannot_be_read_shows_how_it_is_written(item: str) -> None:
    text = only(sets=(item,))
    assert "cannot parse" in text
    assert "section.key=value, such as batch.micro=64" in text


def test_a_key_as_value_and_as_section() -> None:
    text = only(sets=("batch.micro=3", "batch.micro.x=4"))
    assert "both as a value and as a section" in text


def test_a_syntax_error_names_file_line_and_column(toml: Path) -> None:
    toml.write_text("[run]\nepochs = 3\nseed = = 4\n")
    text = only(toml)
    assert text.startswith(f"{toml}: is not valid TOML: ")
    assert "line 3, column 8" in text


def test_a_key_written_twice_is_a_syntax_error(toml: Path) -> None:
    toml.write_text("[run]\nepochs = 3\nepochs = 4\n")
    assert "is not valid TOML" in only(toml)


def test_a_binary_file_is_not_toml(toml: Path) -> None:
    toml.write_bytes(b"\x7fELF\x02\x01\xff\xfe\x00")
    assert only(toml) == f"{toml}: is not UTF-8 text (byte 6); is this a TOML file?"


def test_a_missing_file_and_a_folder_say_why(tmp_path: Path) -> None:
    assert only(tmp_path / "none.toml") == f"{tmp_path}/none.toml: cannot be read: No such file or directory"
    assert only(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


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
    text = only(sets=(f"run.device={'x' * 5000}",))
    assert len(text) < 300


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
    ("value", "message"),
    [
        ("9" * 5000, "an integer does not have 64 bits"),
        ("0x" + "f" * 5000, "is not a 64-bit integer"),
        ("[" * 50 + "]" * 50, "is nested deeper than 20 levels"),
        ("{a=" * 450 + "1" + "}" * 450, "nested deeper than 20 levels"),
        ('"\\u0000"', "contains a NUL character"),
        ('"\udcff"', "contains bytes that are not UTF-8"),
    ],
    ids=["digits", "hexadecimal", "lists", "tables", "nul", "bytes"],
)
def test_what_no_configuration_contains_is_one_short_error(value: str, message: str, toml: Path) -> None:
    found = only(sets=(f"run.seed={value}",))
    assert "run.seed" in found
    assert message in found
    assert len(found) < 200
    if "bytes that" not in message:
        toml.write_text(f"[run]\nseed = {value}\n")
        assert message in only(toml)


@pytest.mark.parametrize(
    ("item", "allowed"),
    [
        ("run.epochs=" + "1" * 18, "≤ 1000000000"),
        ("checkpoint.every_minutes=1e300", "≤ 1e+06"),
        ("log.profile_every_s=1e-300", "0, or 1 to 86400"),
        ("loader.timeout_s=1e300", "≤ 86400"),
        ("log.headless_s=1e-300", "≥ 0.1"),
    ],
)
def test_values_that_no_clock_or_counter_holds_are_out_of_range(item: str, allowed: str) -> None:
    assert allowed in only(sets=(item,))


def test_a_file_of_mistakes_is_not_printed_whole(toml: Path) -> None:
    toml.write_text("[run]\n" + "\n".join(f"k{index} = 1" for index in range(3000)))
    found = problems(toml)
    assert len(found) == 41
    assert "more problems" in str(found[-1])


def test_a_long_file_is_no_configuration(toml: Path) -> None:
    toml.write_bytes(b"#" * 1_000_001)
    assert "longer than 1,000,000 bytes" in only(toml)
