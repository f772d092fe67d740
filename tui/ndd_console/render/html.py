"""The report as one HTML file: style and plots inline, no script, no network, all foreign text escaped."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ndd_console.words.blocks import COMMAND, PLACE, Page, clip, safe
from ndd_console.words.figures import interval_text, times

from .plots import WIDTH, IntervalsPlot, LinesPlot, SpansPlot, StackPlot


def render(page: Page) -> str:
    """The whole document."""
    return _environment().get_template("page.html").render(page=page)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ndd_console.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_final,
    )
    environment.filters.update(kind=lambda block: type(block).__name__.lower(), clip=clip)
    environment.globals.update(
        COMMAND=COMMAND, PLACE=PLACE, WIDTH=WIDTH, times=times, interval_text=interval_text,
        lines_plot=LinesPlot, stack_plot=StackPlot, spans_plot=SpansPlot, intervals_plot=IntervalsPlot,
    )  # fmt: skip
    return environment


def _final(value: object) -> object:
    """The value of an expression in a template: pixels with one digit, text without control characters."""
    if isinstance(value, float):
        return f"{value:.1f}"
    return value if isinstance(value, (Markup, int)) else safe(value)
