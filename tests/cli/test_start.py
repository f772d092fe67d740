"""Start-up: help, lists and errors import neither torch nor the screen library; Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

from .program import call, environment

pytestmark = pytest.mark.long


def executed(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


# Without torch and Textual; `--help` and `--version` without pydantic, too.
IMPORTS = """
import sys
from ndd_console.__main__ import status_of
for line in ("--help", "--version", "train --help", "runs", "check nope.toml", "run --headless -- true"):
    status_of(line.split())
    assert not {"torch", "textual"} & set(sys.modules), line
    assert "pydantic" not in sys.modules or not line.startswith("--"), line
assert "pydantic" in sys.modules
"""


@pytest.mark.promise
def test_no_torch(tmp_path: Path) -> None:
    done = executed(tmp_path, sys.executable, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.promise
def test_both_entry_points_and_completion(tmp_path: Path) -> None:
    module = executed(tmp_path, sys.executable, "-m", "ndd_console", "--version")
    script = executed(tmp_path, str(Path(sys.executable).with_name("ndd-console")), "--version")
    assert (module.returncode, script.returncode) == (0, 0)
    assert module.stdout == script.stdout != ""
    for shell in ("bash", "zsh", "fish"):
        done = call("completion", shell, folder=tmp_path)
        assert done.returncode == 0 and "_NDD_CONSOLE_COMPLETE" in done.stdout


# Modules that Windows does not have fail on import, as they would there.
WINDOWS = """
import runpy, sys
sys.platform = "win32"
for name in ("fcntl", "termios", "pwd", "grp", "resource", "tty", "pty"):
    sys.modules[name] = None
for command in ("", "train", "--help"):
    sys.argv = ["ndd-console", *command.split()]
    try:
        {start}
        raise SystemExit("it goes on")
    except SystemExit as exit:
        assert exit.code == 2
    assert not {{"torch", "click"}} & set(sys.modules)
"""


@pytest.mark.promise
@pytest.mark.parametrize(
    "start",
    [
        "from ndd_console.__main__ import main; main()",
        "runpy.run_module('ndd_console', run_name='__main__', alter_sys=True)",
    ],
)
def test_on_windows_there_is_one_clear_message(tmp_path: Path, start: str) -> None:
    done = executed(tmp_path, sys.executable, "-c", WINDOWS.format(start=start))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (message,) = set(done.stderr.splitlines())
    assert len(done.stderr.splitlines()) == 3 and "WSL2" in message
