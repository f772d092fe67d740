"""The diagnosis page shows the functions of a profiled step; of old records, stack samples."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ndd_console.render.rows import block_rows
from ndd_console.words.diagnosis import ENGINE, DiagnosisResult, diagnosis_blocks
from ndd_engine.record.events import FunctionsEvent, StacksEvent
from tests.ui.fakes import MEASURED, snapshot

STACKS = StacksEvent(
    4_210, 1_204,
    [["data_wait", "/home/me/clips.py", 41, "load", 690, 1], ["backward", "loop.py", 9, ENGINE, 300, 0]],
)  # fmt: skip


def shown(width: int = 80, config: dict[str, Any] | None = None, **parts: Any) -> str:
    value = snapshot(**parts)
    assert value.run is not None
    value = replace(value, run=replace(value.run, config={**value.run.config, **(config or {})}))
    lines = block_rows(diagnosis_blocks(value, DiagnosisResult(), "a", True), width)
    return "\n".join("".join(text for text, _ in row) for row in lines)


def test_functions_are_shown_with_their_share_time_calls_and_phase() -> None:
    text = shown(100, {"loader": {"workers": 2}}, functions=MEASURED["functions"], stacks=STACKS)
    assert "from step 4,210 under Python's profiler" in text
    assert re.search("58 %  31.4 ms    128  data_wait  clips.py:41 in load +Clips.__getitem__\n", text)
    assert "Functions in the 2 loader workers cannot be seen; loader.workers=0 shows them." in " ".join(
        text.split()
    )
    assert "Stack samples" not in text


def test_an_old_record_shows_its_stack_samples() -> None:
    text = shown(stacks=STACKS)
    assert "Stack samples (1,204" in text and "57 %  data_wait  /home/me/clips.py:41 in load" in text
    assert "all of backward; by module in a profiler capture" in text


@pytest.mark.parametrize(
    ("log", "text"),
    [({}, "no step was profiled yet"), ({"profile_every_s": 0.0}, "off: log.profile_every_s is 0")],
)
def test_without_a_profiled_step_the_reason_is_shown(log: dict[str, Any], text: str) -> None:
    assert text in shown(config={"log": log})


def test_a_step_without_code_of_the_user_says_so() -> None:
    text = shown(functions=FunctionsEvent(9, 10**7, []))
    assert "No function of your code was called." in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_page_shortens_paths_at_their_start(width: int) -> None:
    rows = [["a/very/long/path/to/the/file/clips.py", 41, "load", 1, 10**6, 10**6, "", "data_wait"]]
    text = shown(width, functions=FunctionsEvent(9, 10**7, rows))
    assert "in load" in text or width < 50


def test_where_earlier_events_are_is_said() -> None:
    value = snapshot()
    few, many = (
        block_rows(
            diagnosis_blocks(replace(value, marks=value.marks[:1] * count), DiagnosisResult(), "a", True), 80
        )
        for count in (20, 21)
    )
    assert "Earlier events" not in str(few) and "Earlier events are in the log" in str(many)
