"""What a person reads: no dead links, no long sentences, no long files; exit statuses; and the README's example runs.

A piece of code counts as one word of a sentence; a table cell and a list item stand alone.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ndd_console.cli import cli as main
from tests.cli.program import call, run

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *(ROOT / "docs").rglob("*.md"),
        *(page for place in (".", "qa", "tests") for page in (ROOT / place).glob("*.md")),
    }
)
FOLDERS = ("engine", "tui", "profiles", "docs", "screenshots", "benchmarks", "qa", "tests")
LINES, WORDS = 700, 40  # of a file, of a sentence
# Names of classes that two modules have: most are the same idea in the observer, the engine or the console.
# Public under one name in two modules, one for each framework.
SHARED = {"NddCallback"}

# Fenced and indented code and comments are no prose.
_NOT_PROSE = re.compile(
    r"^( *)(```|~~~).*?^\1\2|<!--.*?-->|(?<=\n\n)(?:    [^\n]*\n|\n)+", re.MULTILINE | re.DOTALL
)
_CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A block ends at an empty line, and before a list item, a heading, a row of a table (of Markdown, or of words that are
# aligned by spaces) and an indented line of a docstring.
_BLOCK = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*] |\d+\. |#|\||>)|.*\S {2,}\S| {4})")
# The next sentence begins with a capital letter or code, or is that of a field: "name, other: text.".
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_]*[A-Z0-9`]|[a-z0-9_*]+(?:, [a-z0-9_*]+)*: )")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|etc|cf)\.")


_COMMENTS = re.compile(r"(?:^ *# (?!type: |noqa|fmt: ).*\n)+", re.MULTILINE)


def long_sentences(text: str) -> list[str]:
    text = _LINK.sub(r"\1", _CODE.sub("`code`", _NOT_PROSE.sub("\n\n", text)))
    cells = (
        cell
        for block in _BLOCK.split(text)
        for cell in (block.split("|") if block.lstrip().startswith("|") else [block])
    )
    sentences = (
        part for cell in cells for part in _END.split(_ABBREVIATION.sub(r"\1", " ".join(cell.split())))
    )
    return [sentence for sentence in sentences if len(re.findall(r"\S*\w\S*", sentence)) > WORDS]


def prose(path: Path) -> Iterator[str]:
    """The docstrings of a Python file, and the comments of any file: lines that follow one another, and stand alone."""
    text = path.read_text("utf-8")
    yield from (re.sub(r"^ *# ?", "", block, flags=re.MULTILINE) for block in _COMMENTS.findall(text))
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def help_texts(command: click.Command, context: click.Context) -> Iterator[str]:
    yield inspect.cleandoc(command.help or "")
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from help_texts(child, click.Context(child, context))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    assert not long_sentences(page.read_text("utf-8"))


def test_no_sentence_of_a_help_text_is_long() -> None:
    texts = list(help_texts(main, click.Context(main)))
    assert len(texts) > 100
    assert not [sentence for text in texts for sentence in long_sentences(text)]


@pytest.mark.long
def test_no_sentence_of_a_docstring_or_a_comment_is_long() -> None:
    assert long_sentences("word " * WORDS + "end.") and not long_sentences(
        "word " * (WORDS - 1) + "end. Another."
    )
    found = {
        str(path.relative_to(ROOT)): long
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".toml")
        and (long := [sentence for text in prose(path) for sentence in long_sentences(text)])
    }
    assert not found


def test_no_source_file_is_too_long() -> None:
    assert f"at most {LINES} lines" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 500
    assert not {name: lines for name, lines in lengths.items() if lines > LINES}


def test_no_file_name_of_the_engine_occurs_twice() -> None:
    names = Counter(path.name for path in (ROOT / "engine").rglob("*.py"))
    assert len(names) > 100
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


def test_every_part_of_the_observer_is_described() -> None:
    folder = ROOT / "engine" / "ndd_watch"
    parts = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    listed = (folder / "__init__.py").read_text("utf-8").split('"""')[1]
    assert parts <= set(re.findall(r"^    (\w+) ", listed, re.MULTILINE))
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("## The observer")[2]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert parts <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_no_further_class_shares_its_name() -> None:
    names = Counter(
        node.name
        for folder in ("engine", "tui", "profiles")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SHARED


# The README and links


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size < 9_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    relative = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    # The documentation has the screenshots at its own top level.
    folders = [page.parent, ROOT]
    missing = [link for link in relative if not any((folder / link).exists() for folder in folders)]
    assert not missing


def test_the_exit_statuses_are_the_same_everywhere() -> None:
    readme, headless = (ROOT / "README.md").read_text("utf-8"), (ROOT / "docs/headless.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| (\d+) \| ([^;:|]*[^;:| ])", headless, re.MULTILINE))
    listed = " ".join(readme.split("Exit status: ")[1].split(".\n")[0].split())
    shown = " ".join(call("--help", folder=ROOT).stdout.split("Exit status: ")[1].split())
    for status in ("2", "3"):
        assert f"{status} {documented[status]}" in listed
        assert f"{status} {documented[status]}" in shown


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
