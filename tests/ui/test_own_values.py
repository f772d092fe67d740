"""The page of logged values and samples."""

from __future__ import annotations

from dataclasses import replace

from ndd_console.screens.pages import own_values_lines
from ndd_engine.record.events import TextsEvent
from ndd_engine.record.snapshot import Snapshot

from .fakes import snapshot


def logged() -> Snapshot:
    scalars = (("accuracy", ((1, 0.25), (2, 0.5))), ("x" * 70, ((1, 1e-6),)), ("数据\x1b[2J", ()))
    texts = TextsEvent(1200, ["def f(x):\n    return x\x1b[31m", "数" * 90, ""])
    return replace(snapshot(), scalars=scalars, texts=texts)


def test_what_is_shown() -> None:
    text = "\n".join("".join(part for part, _ in row) for row in own_values_lines(logged(), 80))
    assert "accuracy" in text and "0.5000" in text and "1e-06" in text
    assert "at step 1,200" in text
    assert "  return x\\x1b[" in text  # with its indentation
    nothing = "".join(part for row in own_values_lines(snapshot(), 120) for part, _ in row)
    assert "log()" in nothing
