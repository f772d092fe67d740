"""The moving picture of the README: what it shows, in which time, and that it needs nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "screenshots/tour.svg"


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def seconds(svg: str) -> float:
    (length,) = re.findall(r"animation:play ([\d.]+)s", svg)
    return float(length)


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
