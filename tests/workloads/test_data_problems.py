"""All mistakes in the data are reported at once, by key, quickly and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from problems_help import refused

from ndd_engine.config import read
from ndd_engine.config.schema import Config
from ndd_engine.workloads.facts import facts, problems
from ndd_engine.workloads.registry import prepare

MakeConfig = Callable[..., Config]


def told(make_config: MakeConfig, name: str, data: Path | str, **batch: int) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    config = make_config({"name": name, "data": str(data)}, **{"micro": 4, "sequence": 16, **batch})
    return refused(config)


@pytest.mark.long
def test_facts_import_without_torch() -> None:
    code = "import sys, ndd_engine.workloads.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["chartext", "eeg"])
def test_missing_file_and_directory(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    (tmp_path / "recording.csv").touch()
    (tmp_path / "recording.txt").touch()
    text = told(make_config, name, tmp_path / "recordin.csv")
    assert "there is no such file" in text and f"did you mean {tmp_path / 'recording.csv'}?" in text
    assert 'allowed: "builtin"' in text
    assert "the directory " in told(make_config, name, tmp_path / "no" / "x.csv")
    assert 'did you mean "builtin"?' in told(make_config, name, "bultin")
    text = told(make_config, name, tmp_path)
    assert "this is a directory" in text and "did you mean" in text


def test_unreadable_and_odd_files(make_config: MakeConfig, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x" * 1000)
    secret.chmod(0)
    if not os.access(secret, os.R_OK):
        assert "cannot be read: Permission denied" in told(make_config, "chartext", secret)
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    assert "neither a file nor a directory" in told(make_config, "chartext", pipe)
    assert "\\x00b" in told(
        make_config, "chartext", "a\0b"
    )  # no such file, or no such name: by Python's version
    assert "cannot be read: File name too long" in told(make_config, "chartext", "x" * 5000)


def test_files_that_are_not_text(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    for content, expected in (
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"abc\n" * 10 + b"\0", "a zero byte at offset 40"),
        (b"abc\n" * 10 + b"\xe9t\xe9", "byte 0xe9 at offset 40 (line 11)"),
        (b"\xef\xbb\xbfabc\xff", "byte 0xff at offset 6 (line 1)"),
        ("text".encode("utf-16"), "this is UTF-16 text"),
        (b"aaaaaa" * 100, "one distinct character"),
    ):
        path.write_bytes(content)
        assert expected in told(make_config, "chartext", path)


def test_text_shorter_than_its_windows(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)  # 950 characters to train on, 50 to evaluate
    assert "batch.sequence = 2000: longer than the text of 1,000 characters; allowed: at most 49" in told(
        make_config, "chartext", path, sequence=2000
    )
    assert "the training part has 950 characters, but a window needs 951" in told(
        make_config, "chartext", path, sequence=950
    )
    text = told(make_config, "chartext", path, sequence=100, micro=64)
    assert "the evaluation part has 50 characters, but a window needs 101; allowed: at most 49" in text
    assert "set workload.eval_fraction to 0.101" in text
    assert "batch.micro = 64: one optimizer step takes 64 windows" in text and "of at most 9" in text
    text = told(make_config, "chartext", path, sequence=10, micro=8, accumulation=50)
    assert "batch.accumulation = 50: one optimizer step takes 400 windows" in text and "of at most 94" in text
    config = make_config({"name": "chartext", "data": str(path)}, micro=2, accumulation=47, sequence=10)
    assert problems(config, "run.toml") == []
    path.write_text("abc")
    assert "too short for a single window: 3 characters" in told(make_config, "chartext", path)


def test_text_that_is_too_short_for_a_step_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    sets = ("batch.sequence=10", "batch.micro=8", "batch.accumulation=5", "parallel.ranks=4", "run.epochs=1")
    config = read(None, ["workload.name=chartext", f"workload.data={path}", *sets]).resolve()
    assert [str(problem) for problem in problems(config, "run.toml")] == [
        "run.toml: parallel.ranks = 4: one optimizer step takes 160 windows (micro 8 x accumulation 5 x 4 ranks), but "
        "the training data has only 94; allowed: micro x accumulation x ranks of at most 94"
    ]


def test_longest_sequence_that_is_allowed_is_accepted(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    config = make_config(
        {"name": "chartext", "data": str(path), "layers": 1, "width": 8, "heads": 1}, micro=1, sequence=49
    )
    assert problems(config, "run.toml") == []
    assert facts(config).eval_items == 1
    assert len(prepare(config).eval_data) == 1  # type: ignore[arg-type]


def test_builtin_recording_too_short(make_config: MakeConfig) -> None:
    config = make_config({"name": "eeg", "samples": 64}, micro=64, sequence=16)
    text = "\n".join(map(str, problems(config, "x")))
    assert "the evaluation part has 7 samples, but a window needs 17" in text
    assert "one optimizer step takes 64 windows" in text


def test_batch_normalisation_needs_two_items(make_config: MakeConfig, tmp_path: Path) -> None:
    assert [problem.key for problem in problems(make_config({"name": "eeg"}, micro=1), "x")] == [
        "batch.micro"
    ]
    path = tmp_path / "short.csv"
    path.write_text("1,2\n" * 40)
    found = problems(make_config({"name": "eeg", "data": str(path)}, micro=1, sequence=50), "x")
    assert [problem.key for problem in found] == ["batch.micro", "batch.sequence"]  # both at once
    gru = {"name": "eeg", "model": "gru", "hidden": [4]}
    assert problems(make_config(gru, micro=1), "x") == []


HEAD = "@relation r\n@attribute a numeric\n@attribute b numeric\n@attribute class {0,1}\n@data\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (HEAD, ["has no samples"]),
        (HEAD.replace("@data\n", ""), ["there is no @data line"]),
        (
            HEAD.replace("numeric", "string") + "x,y,0\n",
            ["there are no numeric columns (columns: a, b, class)"],
        ),
        (HEAD + "1,2\n", ["line 6: 2 cells, expected 3"]),
        (HEAD + "1,2,0\n1,x,0\n", ["line 7: 'x' in column 'b' is not a number"]),
        (
            HEAD + "1,2,0\n?,2,0\n1,nan,0\n",
            ["2 cells are missing or not finite, the first one in line 7, column 'a'"],
        ),
        (
            HEAD + "1,2,0\n\n1,inf,0\n",
            ["1 cell is missing or not finite, the first one in line 8, column 'b'"],
        ),
        (HEAD + "{0 1, 1 2}\n", ["line 6: sparse rows"]),
        (HEAD + "1,2\n" * 9, ["line 10: 2 cells", "4 more lines with errors"]),
        (
            "@relation r\n@attribute a\nhello\n@data\n1\n",
            ["line 2: an @attribute", "line 3: expected @relation"],
        ),
        ("a,b\n1,2\n", ["line 1: expected @relation", "line 2"]),
        (HEAD + "1,2\n" + "1,x,0\n" + "?,1,0\n", ["line 6: 2 cells", "line 7: 'x'", "1 cell is missing"]),
    ],
)
def test_arff_mistakes(make_config: MakeConfig, tmp_path: Path, content: str, expected: list[str]) -> None:
    path = tmp_path / "r.arff"
    path.write_text(content)
    text = told(make_config, "eeg", path)
    assert all(part in text for part in expected), text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\n\n", "has no samples"),
        ("a,b\n", "a header but no samples"),
        ("a,b\nx,y\n", "no numeric columns"),
        ("label\n1\n0\n", "no numeric columns"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells, expected 2"),
        ("a;b\n1;2\n1;x\n", "line 3: 'x' in column 'b' is not a number"),
        ("a,b\n1,2\n1,\n", "1 cell is missing or not finite, the first one in line 3, column 'b'"),
        ("1,2\n3,\x1b[31m\n", "\\x1b[31m"),
        ('a,b\n1,"' + "x" * 200_000 + '"\n', "the rows cannot be read: field larger"),
    ],
)
def test_csv_mistakes(make_config: MakeConfig, tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(content)
    text = told(make_config, "eeg", path)
    assert expected in text and "\x1b" not in text


def test_other_kinds_of_recording_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "r.xyz"
    path.write_text("1,2\n")
    assert "allowed: .arff, .csv, .tsv" in told(make_config, "eeg", path)


def test_a_megabyte_of_text_is_nothing_to_complain_about(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 25_000)
    config = make_config({"name": "chartext", "data": str(path)}, micro=4, sequence=64)
    assert problems(config, "x") == []
