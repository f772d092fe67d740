"""No sentence that a person reads has more than 40 words: in the documentation, in help texts and in docstrings.

A piece of code counts as one word; a table cell and a list item stand alone.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ndd_console.cli import cli as main

ROOT = Path(__file__).parents[2]
LONGEST = 40
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("engine", "tui", "profiles", "docs", "screenshots", "benchmarks", "qa", "tests")

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
    return [sentence for sentence in sentences if len(re.findall(r"\S*\w\S*", sentence)) > LONGEST]


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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


@pytest.mark.parametrize(
    ("text", "long"),
    [
        ("word " * 40 + "end.", 1),
        ("word " * 39 + "end. Another one.", 0),
        ("word " * 30 + "`a piece of code`\n" + "word " * 8 + "end.", 0),
        ("- " + "word " * 30 + "\n- " + "word " * 30, 0),
        ("| " + "word " * 30 + "| " + "word " * 30 + "|", 0),
        ("```\n" + "word " * 50 + "\n```\n", 0),
        ("name: " + "word " * 30 + ". other_name: " + "word " * 30, 0),
    ],
)
def test_sentences_are_counted(text: str, long: int) -> None:
    assert len(long_sentences(text)) == long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    assert not long_sentences(page.read_text("utf-8"))


def test_no_sentence_of_a_help_text_is_long() -> None:
    texts = list(help_texts(main, click.Context(main)))
    assert len(texts) > 100
    assert not [sentence for text in texts for sentence in long_sentences(text)]


@pytest.mark.long
@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if (ROOT / folder).is_dir()])
def test_no_sentence_of_a_docstring_is_long(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): long
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (long := [sentence for text in docstrings(path) for sentence in long_sentences(text)])
    }
    assert not found
