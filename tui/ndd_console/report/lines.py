"""Turns collected data into the lines and layers of plots."""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Layer, Line, Point
from .timeline import Curve

# Wong's and Tol's colours, distinguishable with any colour vision; the style sheet defines them.
PHASE_COLOURS = {
    "data_wait": "orange", "to_device": "vermillion", "forward": "sky", "loss": "indigo", "backward": "blue",
    "clip": "teal", "optimizer": "green", "zero_grad": "wine", "log": "rose", "evaluate": "purple",
    "checkpoint": "yellow", "other": "grey",
}  # fmt: skip
CAUSE_COLOURS = {
    "waiting for data": "orange", "copying": "vermillion", "launch gaps": "sky", "synchronising": "indigo",
    "reading losses": "rose", "evaluation": "purple", "checkpoint": "yellow", "other": "grey",
}  # fmt: skip
COLOURS = (
    "blue", "orange", "green", "vermillion", "purple", "sky", "indigo", "teal", "wine", "yellow", "rose", "grey",
)  # fmt: skip
# Layers below this share of the whole run are drawn as one.
SMALLEST = 0.01
COLUMNS = 256


def colour(names: Mapping[str, str], name: str, index: int) -> str:
    """The colour assigned to a name, or one by its index."""
    return names.get(name) or COLOURS[index % len(COLOURS)]


def line(
    curve: Curve,
    name: str,
    tint: str,
    whole_s: float,
    scale: float = 1.0,
    band: bool = False,
    dots: bool = False,
) -> Line:
    """A curve as a line, its values times `scale`. band: with the lowest and highest value of each point."""
    pieces = curve.pieces(whole_s)
    spread = band and any(point.count > 1 for point in curve.points)
    return Line(
        name,
        tint,
        tuple(tuple((point.x, point.mean * scale) for point in piece) for piece in pieces),
        tuple(tuple((p.x, p.low * scale, p.high * scale) for p in piece) for piece in pieces if spread),
        dots,
        curve.mean * scale if curve.mean is not None else None,
    )


def pieces_of(values: Mapping[int, float], width_s: float) -> tuple[tuple[Point, ...], ...]:
    """Values by column as pieces of a line, cut where more than two columns are missing."""
    out: list[list[Point]] = []
    before = -4
    for index, value in values.items():
        if index - before > 3:
            out.append([])
        out[-1].append(((index + 0.5) * width_s, value))
        before = index
    return tuple(map(tuple, out))


def layers(
    columns: Mapping[int, Mapping[str, float]],
    whole: Mapping[str, float],
    colours: Mapping[str, str],
    rest: str,
) -> tuple[Layer, ...]:
    """Shares by column as layers in the order of `whole`, with the small ones summed in a last layer named `rest`."""
    small = [name for name, share in whole.items() if 0 < share < SMALLEST]
    if len(small) == 1:
        small = []
    large = [name for name, share in whole.items() if share > 0 and name not in small]
    groups = [(name, colour(colours, name, index), [name]) for index, name in enumerate(large)]
    if small:
        groups.append((rest, "faint", small))
    return tuple(
        Layer(
            title,
            tint,
            {index: sum(shares.get(name, 0.0) for name in names) for index, shares in columns.items()},
            sum(whole[name] for name in names),
        )
        for title, tint, names in groups
    )
