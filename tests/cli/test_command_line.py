"""The command line itself: global options, suggestions, the list of keys, and what the shells complete."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ndd_console.cli.completion import joined
from ndd_engine.config import WORKLOADS, read
from ndd_engine.config.reference import keys

from .program import environment, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "arguments", [("--runs", "{}", "runs"), ("runs", "--runs", "{}"), ("runs", "--ascii", "--runs", "{}")]
)
def test_global_options_work_before_and_after_the_command(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = tmp_path / "elsewhere"
    (folder / "my-run").mkdir(parents=True)
    (folder / "my-run" / "events.jsonl").touch()
    done = run(*(one.format(folder) for one in arguments), folder=tmp_path)
    assert done.returncode == 0 and "my-run" in done.stdout


def test_the_last_one_wins_and_the_help_names_it(tmp_path: Path) -> None:
    done = run("--runs", "one", "runs", "--runs", "two", folder=tmp_path)
    assert str(tmp_path / "two") in done.stderr
    assert "--runs" in run("train", "--help", folder=tmp_path).stdout
    assert "--runs" not in run("scaffold", "--help", folder=tmp_path).stdout


def test_an_empty_folder_is_named_with_its_path_and_the_option(tmp_path: Path) -> None:
    for command in ("runs", "attach", "report"):
        done = run(command, folder=tmp_path)
        assert str(tmp_path / "runs") in done.stderr and "--runs FOLDER" in done.stderr, command
    done = run("attach", "nothing", "--runs", "other", folder=tmp_path)
    assert done.returncode == 2 and str(tmp_path / "other") in done.stderr


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean train?"),
        ("wizzard", "did you mean wizard?"),
        ("run.toml", "ndd-console train run.toml"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(tmp_path: Path, word: str, hint: str) -> None:
    done = run(word, folder=tmp_path)
    assert done.returncode == 2 and hint in done.stderr and f"there is no command '{word}'" in done.stderr


def test_a_run_that_ended_while_it_was_prepared_has_no_steps(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "early"
    folder.mkdir(parents=True)
    lines = [
        {"type": "stage", "t": 1.0, "v": 1, "name": "prepare", "text": "reading the data"},
        {
            "type": "end",
            "t": 2.0,
            "v": 1,
            "status": "stopped",
            "reason": "stopped",
            "step": 0,
            "exit_status": 0,
        },
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("runs", folder=tmp_path)
    assert "early" in done.stdout and "0/0" not in done.stdout


def test_every_key_is_listed_with_type_choices_default_and_effect(tmp_path: Path) -> None:
    for workload in (*WORKLOADS, "mine:factory"):
        config = read(None, ["run.epochs=1"], workload).resolve()
        known = {one.name: one for one in keys(workload)}
        for section in type(config).model_fields:
            for name in type(getattr(config, section)).model_fields:
                one = known.pop(f"{section}.{name}")
                assert one.type and one.allowed and one.effect, one
        assert not known
    done = run("config", "--json", folder=tmp_path)
    listed = {one["key"]: one for one in json.loads(done.stdout)["keys"]}
    assert listed["speed.compile"]["choices"][:2] == ["off", "default"]
    assert listed["workload.size"]["choices"][-1] == "auto" and listed["workload.size"]["type"] == "choice"
    assert listed["batch.micro"]["type"] == "integer" and listed["precision.tf32"]["choices"] == [
        "true",
        "false",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("batch.micro",), ("micro-batch size", "integer", "--set batch.micro=")),
        (("micro",), ("key         batch.micro",)),
        (("[clip]",), ("clip.max_norm",)),
        (("amp", "--workload", "finetune"), ("precision.amp", "bf16")),
        (("epochs", "--workload", "antispoof"), ("10 (workload antispoof)",)),
    ],
)
def test_a_key_a_section_or_the_last_part(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = run("config", *arguments, folder=tmp_path)
    assert done.returncode == 0 and all(word in done.stdout for word in words), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_an_unknown_key_or_workload_gets_a_suggestion(tmp_path: Path) -> None:
    done = run("config", "bacth.micro", folder=tmp_path)
    assert done.returncode == 2 and "did you mean batch.micro?" in done.stderr
    done = run("config", "--workload", "chartxt", folder=tmp_path)
    assert done.returncode == 2 and "did you mean chartext?" in done.stderr


def test_words_that_bash_splits_are_joined() -> None:
    assert joined(["train", "--set", "speed.compile", "=", "de"]) == (
        ["train", "--set", "speed.compile=de"],
        "speed.compile=",
    )
    assert joined(["train", "--set", "speed.compile", "="]) == (
        ["train", "--set", "speed.compile="],
        "speed.compile=",
    )
    assert joined(["train", "--set", "=", "batch.mi"]) == (["train", "--set", "batch.mi"], "")
    assert joined(["train", "--set", "a.b", "=", "1", "x"]) == (["train", "--set", "a.b=1", "x"], "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ndd-console tr", {"train", "trace", "try"}),
        ("ndd-console train --set spe", {"speed."}),
        ("ndd-console train --set speed.comp", {"speed.compile=", "speed.compile_dynamic="}),
        ("ndd-console train --set speed.compile=de", {"default"}),
        ("ndd-console train --set precision.tf32=", {"true", "false"}),
        (
            "ndd-console train --workload antispoof --set workload.size=",
            {"tiny", "small", "guide", "deep", "auto", "none"},
        ),
        ("ndd-console check mine.toml --set workload.size=gr", {"gru"}),
        ("ndd-console config speed.comp", {"speed.compile", "speed.compile_dynamic"}),
    ],
)
def test_bash_completes_keys_and_values(tmp_path: Path, line: str, expected: set[str]) -> None:
    (tmp_path / "mine.toml").write_text('[workload]\nname = "eeg"\n')
    program = tmp_path / "ndd-console"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ndd_console "$@"\n')
    program.chmod(0o755)
    # Bash splits the line as in a terminal: at the characters of COMP_WORDBREAKS.
    words = [part for word in line.split(" ") for part in word.replace("=", " = ").rstrip().split(" ")]
    array = " ".join(f"'{word}'" for word in words)
    script = (
        f'eval "$({program} completion bash)"\n'
        f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n"
        "compopt() { :; }\n"
        f"_ndd_console_completion {program}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == expected, done.stderr
