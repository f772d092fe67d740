"""The command line itself: global options, the list of keys, and what the shells complete."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ndd_console.cli import COMMANDS, cli
from ndd_console.cli.completion import Bash
from ndd_engine.config import WORKLOADS, read
from ndd_engine.config.schema import keys
from ndd_engine.record.events import EndEvent, StageEvent
from ndd_engine.record.rundir import RunDir
from tests.records import write
from tests.trial.written_runs import write_run

from .program import call, environment


@pytest.mark.parametrize("arguments", [("runs",), ("runs", "--ascii")])
def test_global_options_work_after_the_command_too_and_the_last_one_wins(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write_run(tmp_path / "elsewhere" / "my-run", [])
    done = call(*arguments, "--runs", str(tmp_path / "elsewhere"), folder=tmp_path)
    assert done.returncode == 0 and "my-run" in done.stdout


def test_only_commands_that_read_runs_have_the_option_for_their_folder(tmp_path: Path) -> None:
    assert "--runs" in call("train", "--help", folder=tmp_path).stdout
    assert "--runs" not in call("scaffold", "--help", folder=tmp_path).stdout


def test_no_text_of_help_is_cut_or_broken_at_80_columns() -> None:
    commands: list[tuple[str, ...]] = [(), *((name,) for name in COMMANDS)]
    for words in commands:
        command: click.Command = cli
        for word in words:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        if isinstance(command, click.Group) and words:
            commands += [(*words, name) for name in command.commands]
        shown = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80).output
        usage, _, further = shown.partition("\n\n")
        assert usage.startswith("Usage: ") and further
        # Nor are names of settings and options broken at their hyphens.
        assert not re.findall(r"[a-z](?:\.\.\.|-)$", further, re.MULTILINE), words


def test_an_empty_folder_is_named_with_its_path_and_the_option(tmp_path: Path) -> None:
    for command in ("runs", "attach", "report"):
        done = call(command, folder=tmp_path)
        assert str(tmp_path / "runs") in done.stderr and "--runs FOLDER" in done.stderr, command


def test_a_run_that_ended_while_it_was_prepared_has_no_steps(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "early"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[workload]\nname = "mine:factory"\n')
    events = StageEvent("prepare", "reading the data"), EndEvent("stopped", "stopped", 0, 0)
    write(RunDir(folder), ((1.0, event) for event in events))
    (row,) = json.loads(call("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert (row["name"], row["workload"], row["status"]) == ("early", "mine:factory", "stopped")
    assert row["started_t"] == 1.0
    assert "0/0" not in call("runs", folder=tmp_path).stdout


def test_every_key_is_listed_with_type_choices_default_and_effect(tmp_path: Path) -> None:
    for workload in (*WORKLOADS, "mine:factory"):
        config = read(None, ["run.epochs=1"], workload).resolve()
        known = {one.name: one for one in keys(workload)}
        for section in type(config).model_fields:
            for name in type(getattr(config, section)).model_fields:
                one = known.pop(f"{section}.{name}")
                assert one.type and one.allowed and one.effect, one
        assert not known
    listed = {one["key"]: one for one in json.loads(call("config", "--json", folder=tmp_path).stdout)["keys"]}
    assert listed["speed.compile"]["choices"][:2] == ["off", "default"]
    assert listed["workload.size"]["choices"][-1] == "auto" and listed["workload.size"]["type"] == "choice"
    assert listed["batch.micro"]["type"] == "integer"
    assert listed["precision.tf32"]["choices"] == ["true", "false"]


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
    done = call("config", *arguments, folder=tmp_path)
    assert done.returncode == 0 and all(word in done.stdout for word in words), done.stdout


LINES = {
    "ndd-console tr": {"train", "trace", "try"},
    "ndd-console attach my": {"my-run"},
    "ndd-console train --set spe": {"speed."},
    "ndd-console train --set speed.comp": {"speed.compile=", "speed.compile_dynamic="},
    "ndd-console train --set speed.compile=de": {"default"},
    "ndd-console train --set precision.tf32=": {"true", "false"},
    "ndd-console train --workload antispoof --set workload.size=": {
        "tiny", "small", "guide", "deep", "auto", "none",
    },
    "ndd-console check mine.toml --set workload.size=gr": {"gru"},
    "ndd-console config speed.comp": {"speed.compile", "speed.compile_dynamic"},
}  # fmt: skip


def split(line: str) -> list[str]:
    """The words of a line as bash has them in a terminal: split at the characters of COMP_WORDBREAKS."""
    return [part for word in line.split(" ") for part in word.replace("=", " = ").rstrip().split(" ")]


@pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=LINES)
def test_commands_runs_keys_and_values_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: set[str]
) -> None:
    (tmp_path / "mine.toml").write_text('[workload]\nname = "eeg"\n')
    write_run(tmp_path / "runs" / "my-run", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_WORDS", " ".join(split(line)))
    monkeypatch.setenv("COMP_CWORD", str(len(split(line)) - 1))
    offered = Bash(cli, {}, "ndd-console", "_NDD_CONSOLE_COMPLETE").complete()
    assert {item.partition(",")[2] for item in offered.splitlines()} == expected


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_value(tmp_path: Path) -> None:
    program = tmp_path / "ndd-console"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ndd_console "$@"\n')
    program.chmod(0o755)
    words = split("ndd-console train --set speed.compile=de")
    script = (
        f'eval "$({program} completion bash)"\n'
        f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}\n"
        "compopt() { :; }\n"
        f"_ndd_console_completion {program}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["default"], done.stderr
