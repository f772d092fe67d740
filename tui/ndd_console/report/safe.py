"""Foreign text made safe for a page: no markup, no control characters, no line of endless length."""

from __future__ import annotations

import html

from ndd_console.view.rows import foreign

# Of one recorded text: enough for every message that a person reads, too little to blow up a page.
LONGEST = 2000


def escape(text: object) -> str:
    """The text as HTML or SVG shows it letter by letter, on one line."""
    return html.escape(clip(foreign(text), LONGEST), quote=True)


def clip(text: str, length: int) -> str:
    """At most so many characters, with "…" where it was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"
