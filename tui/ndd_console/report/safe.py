"""Foreign text made safe: control characters escaped, one line, bounded length. The templates escape markup."""

from __future__ import annotations

from ndd_console.view.rows import foreign

# Bound of one recorded text: enough for any message a person reads.
LONGEST = 2000


def safe(text: object) -> str:
    """The text on one line, without control characters, up to LONGEST characters."""
    return clip(foreign(text), LONGEST)


def clip(text: str, length: int) -> str:
    """The first `length` characters, with "…" where the text was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"
