"""From what was collected to lines and layers: colours, and a curve as a line of a plot."""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Layer, Line
from .timeline import Curve

# Wong's and Tol's colours, told apart with any colour vision; names of the page's style.
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
# Layers that are smaller than this over the whole run are drawn as one.
SMALLEST = 0.01
COLUMNS = 256


def colour(names: Mapping[str, str], name: str, index: int) -> str:
    """A name's own colour, or one by its number."""
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
    """A curve as a line, its values times `scale`. band: with the lowest and highest of each point."""
    pieces = curve.pieces(whole_s)
    spread = band and any(point.count > 1 for point in curve.points)
    return Line(
        name=name,
        colour=tint,
        pieces=tuple(tuple((point.x, point.mean * scale) for point in piece) for piece in pieces),
        bands=tuple(tuple((p.x, p.low * scale, p.high * scale) for p in piece) for piece in pieces)
        if spread
        else (),
        dots=dots,
        mean=curve.mean * scale if curve.mean is not None else None,
    )


def pieces_of(values: Mapping[int, float], width_s: float) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Values by column as pieces of a line, cut where more than a column or two is missing."""
    out: list[list[tuple[float, float]]] = []
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
    """Shares by column as layers in the order of `whole`; the small ones together, as the last one called `rest`."""
    large = [name for name, share in whole.items() if share >= SMALLEST]
    lesser = [name for name, share in whole.items() if 0 < share < SMALLEST]
    if len(lesser) == 1:  # one alone needs no other name
        large, lesser = [name for name in whole if name in large or name in lesser], []
    out = [
        Layer(
            name,
            colour(colours, name, index),
            {number: shares.get(name, 0.0) for number, shares in columns.items()},
            whole[name],
        )
        for index, name in enumerate(large)
    ]
    if lesser:
        values = {number: sum(shares.get(name, 0.0) for name in lesser) for number, shares in columns.items()}
        out.append(Layer(rest, "faint", values, sum(whole[name] for name in lesser)))
    return tuple(out)
