"""`python -m tests.versions [PYTHON…]`: one pass over the observed scripts with other versions of Python and torch.

Each version gets an environment of its own beside this one, with the torch that is named here. A PYTHON that is given
is another environment's, and used as it is. The pass: all subjects of the observer, and of each kind of scripts that
must not notice it, the first ones. What cannot run here is skipped, with the reason. Status 1 if a test failed or
nothing ran.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Python -> what is installed for it: the lowest versions that are promised, and the newest.
PROMISED = {"3.9": ("torch==2.1.*", "numpy<2"), "3.13": ("torch",)}
# Tests and the marks of those that run.
PASS = (("tests/observe/test_subjects.py", "slow or not slow"), ("tests/same", "promise"))
HEADER = ("Python", "torch", "passed", "failed", "skipped")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


@dataclass
class Passed:
    """Of one version. counts: of tests by their outcome. why: why it did not run."""

    python: str
    torch: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        if self.why:
            return self.python, self.torch, "skipped:", self.why, ""
        return self.python, self.torch, *(str(self.counts[name]) for name in HEADER[2:])


def interpreter(version: str) -> str | None:
    """A Python of this version, on PATH or of pyenv."""
    folders = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*"), reverse=True)
    for candidate in (
        shutil.which(f"python{version}"),
        *(str(folder / "bin" / "python") for folder in folders),
    ):
        # The shim of pyenv is there also where the version is not.
        if (
            candidate is not None
            and _said(candidate, "import sys; print('%d.%d' % sys.version_info[:2])") == version
        ):
            return candidate
    return None


def environment(version: str, packages: tuple[str, ...], folder: Path) -> tuple[str, str]:
    """(its Python, why there is none)."""
    python = folder / "bin" / "python"
    if not _said(str(python), _VERSIONS):
        base = interpreter(version)
        if base is None:
            return "", f"there is no Python {version} here"
        for command in (
            [base, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no word"]
                return "", f"{' '.join(packages)} cannot be installed: {lines[-1]}"
    said = _said(str(python), _VERSIONS)
    return (str(python), "") if said else ("", f"the torch of {folder} cannot be imported")


def passed(python: str, tests: tuple[tuple[str, str], ...] = PASS) -> Passed:
    """Run the tests with the scripts of this Python."""
    said = _said(python, _VERSIONS)
    if not said:
        return Passed(python, why="it has no torch that can be imported")
    found = Passed(*said.split())
    for path, marks in tests:
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1800", "-m", marks, path]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "NDD_TEST_PYTHON": python}, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        print(done.stdout, flush=True)
        counts = _COUNT.findall((done.stdout.strip().splitlines() or [""])[-1])
        found.counts.update(
            {"failed" if name.startswith("error") else name: int(count) for count, name in counts}
        )
        # It may have ended before its first test.
        found.counts["failed"] += bool(
            done.returncode and not any(name.startswith(("f", "e")) for _, name in counts)
        )
    return found


def results(given: list[str], folder: str) -> Iterator[Passed]:
    """Of all versions; then of other environments."""
    for version, packages in PROMISED.items():
        python, why = environment(version, packages, Path(f"{folder}-{version}").absolute())
        yield Passed(version, " ".join(packages), why=why) if why else passed(python)
    for python in given:
        # A link to another Python stays one: it is how an environment is found.
        yield passed(os.path.abspath(python))  # noqa: PTH100


def _said(python: str, code: str) -> str:
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(words: list[str] | None = None) -> int:
    """Prints the table of the results, with their date."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="of another environment with torch")
    parser.add_argument("--folder", default=".venv-versions", help="begin of the names of environments")
    options = parser.parse_args(words)
    found = list(results(options.pythons, options.folder))
    print(f"{datetime.now(UTC):%Y-%m-%d}\n")
    for row in (HEADER, ("---",) * len(HEADER), *(one.cells() for one in found)):
        print(f"| {' | '.join(row)} |")
    ran = [one for one in found if not one.why]
    return int(not ran or any(one.counts["failed"] for one in ran))


if __name__ == "__main__":
    sys.exit(main())
