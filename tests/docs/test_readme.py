"""README.md: short, without dead links, and its example trains and resumes. The same for links of the other pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import run

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for folder in (".", "docs", "qa", "tests") for page in (ROOT / folder).glob("*.md"))


def test_it_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size < 9_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    relative = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    # The documentation has the screenshots at its own top level.
    folders = [page.parent, ROOT]
    missing = [link for link in relative if not any((folder / link).exists() for folder in folders)]
    assert not missing


@pytest.mark.long
def test_the_exit_statuses_are_the_same_everywhere() -> None:
    readme, headless = (ROOT / "README.md").read_text("utf-8"), (ROOT / "docs/headless.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| (\d+) \| ([^;:|]*[^;:| ])", headless, re.MULTILINE))
    assert documented["3"] == "insufficient memory or hardware"
    listed = " ".join(readme.split("Exit status: ")[1].split(".\n")[0].split())
    shown = " ".join(run("--help", folder=ROOT).stdout.split("Exit status: ")[1].split())
    for status in ("2", "3"):
        assert f"{status} {documented[status]}" in listed
        assert f"{status} {documented[status]}" in shown


def test_no_page_names_a_command_that_is_gone() -> None:
    renamed = re.compile(r"ndd-console (?:card|ladder)\b|--(?:card|leave|shortest)\b|--effective(?!-batch)\b")
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert not renamed.search(page.read_text("utf-8")), page.name


@pytest.mark.long
@pytest.mark.promise
def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text("utf-8").split("## Your own model")[1].split("\n## ")[0]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 10
    (tmp_path / "my_workload.py").write_text(block[1])
    train, resume = re.findall(r"^    ndd-console (train .*)$", section, re.MULTILINE)
    few = ("--headless", "--json", "--set", "run.threads=1")
    first = run(*shlex.split(train), "--max-steps", "8", *few, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run(*shlex.split(resume), "--max-steps", "16", *few, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    events = [json.loads(line) for line in second.stdout.splitlines()]
    assert next(event for event in events if event["type"] == "run")["resumed_step"] == 8
    end = next(event for event in events if event["type"] == "end")
    assert (end["status"], end["step"]) == ("done", 16)
