"""The help page: the keys of a screen, and the glossary."""

from __future__ import annotations

from .glossary import GLOSSARY
from .keys import Key
from .rows import BLANK, labelled, rule
from .style import Row

_INDENT = 18


def help_lines(width: int, keys: tuple[Key, ...]) -> list[Row]:
    """The keys, then the glossary in groups."""
    shown = [(key.shown, key.help) for key in keys if key.help]
    lines = [row for key, text in shown for row in labelled(key, text, width, _INDENT, label_style="key")]
    for title, terms in GLOSSARY:
        lines += [BLANK, rule(title, width)]
        lines += [row for term, text in terms for row in labelled(term, text, width, _INDENT)]
    return lines
