"""Colours of phases and causes, and the layers of stacked plots."""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Layer

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


def colour(names: Mapping[str, str], name: str, index: int) -> str:
    """The colour assigned to a name, or one by its index."""
    return names.get(name) or COLOURS[index % len(COLOURS)]


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
