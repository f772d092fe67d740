"""Start-up: help, lists and errors import neither torch nor the screen library; Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .program import environment, run

pytestmark = pytest.mark.long


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


@pytest.mark.promise
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["runs"], ["check", "nope.toml"]]
)
def test_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    modules = imported(tmp_path, *arguments)
    assert "ndd_console.cli" in modules
    assert "torch" not in modules and "textual" not in modules
    if arguments[0].startswith("--"):
        assert "pydantic" not in modules


@pytest.mark.promise
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


def completed(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """What bash is offered for the last of the words."""
    return subprocess.run(
        [sys.executable, "-m", "ndd_console"],
        cwd=folder,
        env=environment(
            _NDD_CONSOLE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1)
        ),
        capture_output=True,
        text=True,
        check=False,
    )


def test_completion_offers_commands_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    (tmp_path / "runs" / "my-run" / "events.jsonl").touch()
    for words, expected in (("ndd-console at", "attach"), ("ndd-console attach my", "my-run")):
        assert expected in completed(tmp_path, words).stdout


@pytest.mark.promise
@pytest.mark.parametrize("command", ["", "train", "--help"])
def test_on_windows_there_is_one_clear_message(tmp_path: Path, command: str) -> None:
    # Modules that Windows does not have fail on import, as they would there.
    code = (
        "import sys, runpy\n"
        "sys.platform = 'win32'\n"
        "for name in ('fcntl', 'termios', 'pwd', 'grp', 'resource', 'tty', 'pty'): sys.modules[name] = None\n"
        f"sys.argv = ['ndd-console', *{command.split()!r}]\n"
        "try:\n"
        "    {start}\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules and 'click' not in sys.modules\n"
    )
    for start in (
        "from ndd_console.__main__ import main; main()",
        "runpy.run_module('ndd_console', run_name='__main__', alter_sys=True)",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("{start}", start)],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert "needs Linux or macOS" in done.stderr and "WSL2" in done.stderr
