"""What must start at once: no torch and no screen library for help, lists and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .program import environment, run


def imported(folder: Path, *arguments: str) -> set[str]:
    code = (
        "import sys; from ndd_console.__main__ import status_of; "
        f"status = status_of({list(arguments)!r}); print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stderr.splitlines())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["runs"], ["check", "nope.toml"]]
)
def test_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    modules = imported(tmp_path, *arguments)
    assert "ndd_console.cli" in modules
    assert "torch" not in modules and "textual" not in modules
    if arguments[0].startswith("--"):
        assert "pydantic" not in modules


def test_both_entry_points_and_completion(tmp_path: Path) -> None:
    version = run("--version", folder=tmp_path)
    script = subprocess.run(
        [str(Path(sys.executable).with_name("ndd-console")), "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout == script.stdout
    for shell in ("bash", "zsh", "fish"):
        done = run("completion", shell, folder=tmp_path)
        assert done.returncode == 0 and "_NDD_CONSOLE_COMPLETE" in done.stdout


def test_completion_offers_commands_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    (tmp_path / "runs" / "my-run" / "events.jsonl").touch()
    for words, expected in (("ndd-console at", "attach"), ("ndd-console attach my", "my-run")):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ndd-console"))],
            cwd=tmp_path,
            env=environment(
                _NDD_CONSOLE_COMPLETE="bash_complete",
                COMP_WORDS=words,
                COMP_CWORD=str(len(words.split()) - 1),
            ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert expected in done.stdout
