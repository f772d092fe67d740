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
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts, problems

MakeConfig = Callable[..., Config]


def told(make_config: MakeConfig, name: str, data: Path | str, **batch: int) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    config = make_config({"name": name, "data": str(data)}, **{"micro": 4, "sequence": 16, **batch})
    return refused(config)


WITHOUT_TORCH = """
import sys
from ndd_engine.config import read
from ndd_engine.workloads.interface import facts
for name in ("chartext", "eeg", "finetune", "summarise", "antispoof"):
    assert facts(read(None, [f"workload.name={name}"]).resolve()).train_items
sys.exit("torch" in sys.modules)
"""


@pytest.mark.long
def test_facts_are_known_without_torch() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False).returncode == 0


@pytest.mark.parametrize("name", ["chartext", "eeg"])
def test_missing_file_and_directory(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    for suffix in ("csv", "txt"):
        (tmp_path / f"recording.{suffix}").touch()
    assert f"did you mean {tmp_path / 'recording.csv'}?" in told(make_config, name, tmp_path / "recordin.csv")
    assert str(tmp_path / "no") in told(make_config, name, tmp_path / "no" / "x.csv")
    assert '"builtin"' in told(make_config, name, "bultin")
    assert "a directory" in told(make_config, name, tmp_path)


def test_unreadable_and_odd_files(make_config: MakeConfig, tmp_path: Path) -> None:
    secret, pipe = tmp_path / "secret.txt", tmp_path / "pipe.txt"
    secret.write_text("x" * 1000)
    secret.chmod(0)
    os.mkfifo(pipe)
    for path in (pipe, "x" * 5000, *([] if os.access(secret, os.R_OK) else [secret])):
        assert "workload.data" in told(make_config, "chartext", path)
    assert "\\x00b" in told(make_config, "chartext", "a\0b")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"abc\n" * 10 + b"\0", "offset 40"),
        (b"abc\n" * 10 + b"\xe9t\xe9", "0xe9 at offset 40 (line 11)"),
        (b"\xef\xbb\xbfabc\xff", "0xff at offset 6 (line 1)"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"aaaaaa" * 100, "one distinct"),
    ],
)
def test_files_that_are_not_text(make_config: MakeConfig, tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    assert named in told(make_config, "chartext", path)


@pytest.mark.parametrize(
    ("batch", "key", "figures"),
    [
        ({"sequence": 2000}, "batch.sequence", ["1,000", "at most 49"]),
        ({"sequence": 950}, "batch.sequence", ["950", "951"]),
        ({"sequence": 100, "micro": 64}, "batch.sequence", ["50", "101", "at most 49", "0.101"]),
        ({"sequence": 100, "micro": 64}, "batch.micro", ["64", "at most 9"]),
        ({"sequence": 10, "micro": 8, "accumulation": 50}, "batch.accumulation", ["400", "at most 94"]),
    ],
)
def test_text_shorter_than_its_windows(
    make_config: MakeConfig, tmp_path: Path, batch: dict[str, int], key: str, figures: list[str]
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)  # 950 characters to train on, 50 to evaluate
    text = told(make_config, "chartext", path, **batch)
    assert key in text and all(figure in text for figure in figures)
    config = make_config({"name": "chartext", "data": str(path)}, micro=2, accumulation=47, sequence=10)
    assert problems(config, "run.toml") == []


def test_text_that_is_too_short_for_a_step_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    sets = ("batch.sequence=10", "batch.micro=8", "batch.accumulation=5", "parallel.ranks=4", "run.epochs=1")
    config = read(None, ["workload.name=chartext", f"workload.data={path}", *sets]).resolve()
    (problem,) = problems(config, "run.toml")
    assert (problem.key, problem.found) == ("parallel.ranks", "4")
    assert "160" in problem.message and "94" in str(problem.allowed)


def test_longest_sequence_that_is_allowed_is_accepted(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("ab" * 500)
    config = make_config(
        {"name": "chartext", "data": str(path), "layers": 1, "width": 8, "heads": 1}, micro=1, sequence=49
    )
    assert problems(config, "run.toml") == []
    assert facts(config).eval_items == 1
    assert len(prepare(config).eval_data) == 1  # type: ignore[arg-type]


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
        (HEAD, ["no samples"]),
        (HEAD.replace("@data\n", ""), ["@data"]),
        (HEAD.replace("numeric", "string") + "x,y,0\n", ["a, b, class"]),
        (HEAD + "1,2,0\n?,2,0\n1,nan,0\n", ["2 cells", "line 7", "column 'a'"]),
        (HEAD + "{0 1, 1 2}\n", ["line 6", "sparse"]),
        (HEAD + "1,2\n" * 9, ["line 10: 2 cells", "4 more lines"]),
        ("@relation r\n@attribute a\nhello\n@data\n1\n", ["line 2", "line 3", "@relation"]),
        ("a,b\n1,2\n", ["line 1", "@relation", "line 2"]),
        (HEAD + "1,2\n" + "1,x,0\n" + "?,1,0\n", ["line 6: 2 cells", "line 7: 'x'", "1 cell"]),
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
        ("\n\n", "no samples"),
        ("a,b\n", "no samples"),
        ("a,b\nx,y\n", "no numeric"),
        ("label\n1\n0\n", "no numeric"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells"),
        ("a;b\n1;2\n1;x\n", "line 3: 'x' in column 'b'"),
        ("a,b\n1,2\n1,\n", "line 3, column 'b'"),
        ("1,2\n3,\x1b[31m\n", "\\x1b[31m"),
        ('a,b\n1,"' + "x" * 200_000 + '"\n', "field larger"),
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
    assert all(kind in told(make_config, "eeg", path) for kind in (".arff", ".csv", ".tsv"))
