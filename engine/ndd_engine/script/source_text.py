"""Text of Python source that is changed at the places of its syntax nodes."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def parsed(text: str) -> ast.Module | None:
    """The syntax tree; None if it cannot be parsed."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def import_of(tree: ast.Module, name: str) -> tuple[ast.Import, str] | None:
    """(the first import of a module at the top level, its name there)."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == name and isinstance(node, ast.Import):
                return node, alias.asname or name
    return None


def indentation(text: str, statement: ast.stmt) -> str | None:
    """What stands before a statement; None if it does not stand alone, but for a comment behind it."""
    lines = text.splitlines()
    begin = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    last = lines[(statement.end_lineno or statement.lineno) - 1]
    rest = last.encode()[statement.end_col_offset or 0 :].decode().strip()
    return None if begin.strip() or (rest and not rest.startswith("#")) else begin


def with_lines(text: str, after: ast.stmt, added: Sequence[str]) -> str:
    """The text with more lines after a statement."""
    lines = text.splitlines(keepends=True)
    at = after.end_lineno or after.lineno
    if not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    lines[at:at] = [f"{line}\n" for line in added]
    return "".join(lines)


class PlacedText:
    """Text with the places of syntax nodes in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._data = text.encode()

    def end(self, node: ast.expr) -> int:
        """Index of the character after a node."""
        return self._index(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def of(self, node: ast.expr) -> str:
        """The text of a node."""
        return self.text[self._index(node.lineno, node.col_offset) : self.end(node)]

    def replace(self, node: ast.expr, new: str) -> None:
        """Replace a node; call it from the last node to the first one."""
        begin, end = self._index(node.lineno, node.col_offset), self.end(node)
        self.text = self.text[:begin] + new + self.text[end:]

    def _index(self, line: int, column: int) -> int:
        # Columns of syntax nodes count bytes.
        return len(self._data[: self._starts[line - 1] + column].decode())
