"""The scripts of docs/walkthroughs.md under the observer: exact steps, batches and main findings."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from benchmarks.walkthroughs import PAGE, STORIES, replaced
from script_help import events, report, run

from ndd_engine.record.events import RunEvent, WindowEvent

SCRIPTS = Path(__file__).parents[2] / "docs" / "walkthroughs"
# One thread more than there are cores.
MANY = len(os.sched_getaffinity(0)) + 1
# Name -> arguments, steps, items of a step, and a finding that is there on any machine: its cause and a word of it.
EXPECTED: dict[str, tuple[str, int, int, str, str]] = {
    "mnist": ("--epochs 2", 188, 64, "data-wait", "__getitem__"),
    "lstm": (f"--epochs 1 --threads {MANY}", 216, 20, "oversubscribed", f"{MANY} threads"),
    "dcgan": ("--niter 1", 256, 16, "", ""),
    "gpt": ("max_iters=600", 601, 16, "evaluation", "evaluating"),
    "imagenet": ("--epochs 1 --width 8", 128, 32, "", ""),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPECTED)
def test_steps_and_the_finding(tmp_path: Path, name: str) -> None:
    arguments, steps, items, cause, word = EXPECTED[name]
    words = ("run", "--headless", "--run", name, "--", sys.executable, str(SCRIPTS / f"{name}.py"))
    # Threads that wait for each other make a busy machine hundreds of times slower.
    run(tmp_path, *words, *arguments.split(), timeout=1200, OMP_NUM_THREADS="1", NDD_WATCH_WINDOW_S="0.5")
    seen = events(tmp_path, name)
    assert sum(event.steps for event in seen if isinstance(event, WindowEvent)) == steps
    assert [event for event in seen if isinstance(event, RunEvent)][-1].items_per_step == items
    findings = {finding["cause"]: json.dumps(finding) for finding in report(tmp_path, name)["findings"]}
    if cause:
        assert word in findings.get(cause, ""), findings.keys()
    # The modules of a script, and both networks of a GAN, are known: little of a step is left over.
    assert "user-code" not in findings


def test_the_page_has_the_blocks_that_are_recorded() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- recorded: (\S+) (\S+) -->", page)
    assert {name for name, _ in blocks} == set(STORIES)
    for name, part in blocks:
        story = STORIES[name]
        parts = {str(number + 1) for number in range(len(story.tries + story.after))}
        assert part in parts | {"live", "diagnosis", "change"}
        assert "\nnew\n```" in replaced(page, f"{name} {part}", ["new"])
