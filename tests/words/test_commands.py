"""What the commands print: comparisons and memory snapshots in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_console.render.text import lines
from ndd_console.words.blocks import Facts, Table, Text
from ndd_console.words.comparison import two_compared
from ndd_console.words.trace import memory_blocks
from ndd_engine.recordings.snapshots import examine
from ndd_engine.trial.compare import compare
from tests.recordings.snapshots import MIB, History, frame, written
from tests.trial.written_runs import steady, windows, write_run


@pytest.mark.parametrize(
    ("ratio", "more", "words"),
    [
        (3.0, {}, "B is slower"),
        (1 / 3, {}, "B is faster"),
        (1.0, {}, "inconclusive; compare longer runs, or measure the change with ndd-console try"),
        (3.0, {"workload": "eeg"}, "no verdict: the runs train different workloads or models"),
    ],
)
def test_the_verdict_of_a_comparison(
    tmp_path: Path, ratio: float, more: dict[str, object], words: str
) -> None:
    a = write_run(tmp_path / "a", windows(steady(60, 1.0)))
    b = write_run(tmp_path / "b", windows(steady(60, ratio, seed=1)), **more)
    facts, figures = two_compared(compare(a, b))
    assert isinstance(facts, Facts) and dict(facts.rows)["speed"].endswith(words)
    assert isinstance(figures, Table) and figures.columns == ("", "A", "B", "B / A")


@pytest.mark.long
def test_a_memory_snapshot_names_the_owner_and_the_failure(tmp_path: Path) -> None:
    history = History(cap=100 * MIB)
    history.alloc(60 * MIB, [frame("/home/me/train.py", 7, "build")])
    history.alloc(60 * MIB)
    blocks = list(memory_blocks(examine(written(tmp_path, history))))
    tables = [block for block in blocks if isinstance(block, Table)]
    facts = [block for block in blocks if isinstance(block, Facts)]
    assert [block.title for block in facts] == ["GPU 0", "Out of memory at entry 2"]
    assert dict(facts[0].rows)["retries"] == "none"
    assert dict(facts[1].rows)["request"] == "60.0 MiB requested, 40.0 MiB free on the GPU"
    assert tables[0].rows == (("60.0 MiB", "100 %", "1x", "me/train.py:7 build"),)
    assert all(all(table.columns) for table in tables)
    assert tables[-1].note.startswith(
        "Error on this recording +0.0%, every segment as recorded. Replayed with a limit"
    )


def test_lines_wrap_only_on_a_terminal_and_have_no_colour_on_a_pipe() -> None:
    blocks = [Text("a warning " * 20, "warn"), Table("", ("", "name"), (("1", "x" * 90),), frozenset({0}))]
    assert len(lines(blocks)) == 4
    assert max(map(len, lines(blocks, 40))) <= 40
    assert "\x1b" not in "".join(lines(blocks)) and "\x1b[33m" in "".join(lines(blocks, colour=True))
