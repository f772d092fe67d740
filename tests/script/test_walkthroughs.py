"""The scripts of docs/walkthroughs.md under the observer: exact steps, batches and main findings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.walkthroughs import PAGE, STORIES, replaced

SCRIPTS = Path(__file__).parents[2] / "docs" / "walkthroughs"
CONSOLE = (sys.executable, "-m", "ndd_console")
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


def output(folder: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [*CONSOLE, *words], cwd=folder, capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "NDD_WATCH_WINDOW_S": "0.5", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPECTED)
def test_steps_and_the_finding(tmp_path: Path, name: str) -> None:
    arguments, steps, items, cause, word = EXPECTED[name]
    words = ("run", "--headless", "--run", name, "--", sys.executable, str(SCRIPTS / f"{name}.py"))
    # Threads that wait for each other make a busy machine hundreds of times slower.
    output(tmp_path, *words, *arguments.split(), OMP_NUM_THREADS="1")
    found: dict[str, Any] = json.loads(output(tmp_path, "report", name, "--json"))
    lines = (tmp_path / "runs" / name / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    windows = [event for event in events if event["type"] == "window"]
    assert sum(window["steps"] for window in windows) == steps
    assert [event for event in events if event["type"] == "run"][-1]["items_per_step"] == items
    findings = {finding["cause"]: json.dumps(finding) for finding in found["findings"]}
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
