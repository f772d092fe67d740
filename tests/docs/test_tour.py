"""The moving picture of the README: how it is written, and what the committed one shows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pyte
from screenshots import moving

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "screenshots/tour.svg"


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def seconds(svg: str) -> float:
    (length,) = re.findall(r"animation:play ([\d.]+)s", svg)
    return float(length)


def test_frames_follow_each_other() -> None:
    screen = pyte.Screen(20, 3)
    stream = pyte.Stream(screen)
    frames = []
    for t, output in enumerate(("$ ", "\x1b[1;31m<red>\x1b[0m &", "\r\n\x1b[7mback\x1b[0m")):
        stream.feed(output)
        frames.append(moving.Frame(float(t), moving.rows_of(screen)))
    svg = moving.animated(frames, 2.0, "a <title>")
    assert {"$ ", "<red>", " &", "back "} <= set(texts(svg))
    assert seconds(svg) == 4.0 and svg.count("translateY") == 4
    # A row is written once, whatever the number of its frames; with the cursor it is another one.
    assert texts(svg).count("<red>") == 2
    assert "font-weight:bold" in svg and moving.COLOURS["red"] in svg


def test_the_tour_is_the_first_picture_needs_nothing_else_and_shows_all_in_20_seconds() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text("utf-8"))
    assert pictures[0] == "screenshots/tour.svg"
    svg = TOUR.read_text("utf-8")
    assert TOUR.stat().st_size <= 1_500_000 and seconds(svg) < 20
    assert re.findall(r'https?://[^"]*', svg) == ["http://www.w3.org/2000/svg"]
    assert not any(word in svg for word in ("<script", "@font-face", "@import"))
    shown = "\n".join(texts(svg))
    for words in ("python train.py", "input-bound", "faster", "95 % CI", "num_workers", "wrote "):
        assert words in shown
