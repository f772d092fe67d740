"""The page as one HTML file: style and plots inside, no script, nothing fetched, every foreign text escaped."""

from __future__ import annotations

from collections.abc import Sequence

from . import plots
from .axis import written
from .blocks import Bars, Block, Card, Facts, Intervals, Lines, Page, Section, Spans, Stack, Table, Text
from .look import style
from .safe import escape

# Even if a text found a way through, nothing would run and nothing would be fetched.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(page: Page) -> str:
    """The whole document."""
    word, tone = page.status
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in page.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(page.name)}: report</title><style>{style()}</style></head>\n<body><header>"
        f"<h1>{escape(page.name)}</h1>"
        f'<p class="sub"><span class="badge {tone}">{escape(word)}</span>{escape(page.subtitle)}</p>'
        f'<nav aria-label="Parts of this report">{links}</nav></header>\n<main>'
        + "\n".join(_section(section) for section in page.sections)
        + f"</main>\n<footer><p>ndd-console report, {escape(page.made)}.</p></footer></body></html>\n"
    )


def _section(section: Section) -> str:
    body = "\n".join(_block(block) for block in section.blocks)
    return f'<section id="{section.key}"><h2>{escape(section.title)}</h2>\n{body}</section>'


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return (
            f'<p class="{block.tone}">{escape(block.text)}</p>'
            if block.tone
            else f"<p>{escape(block.text)}</p>"
        )
    if isinstance(block, Facts):
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.rows)
        return f"<dl>{rows}</dl>"
    if isinstance(block, Card):
        return _card(block)
    if isinstance(block, Table):
        heading = f"<h3>{escape(block.title)}</h3>" if block.title else ""
        return heading + _table(block.columns, block.rows, block.right, block.wide) + _note(block.note)
    if isinstance(block, Bars):
        return _bars(block)
    if isinstance(block, Lines):
        return _figure(block.title, plots.lines_plot(block), _lines_table(block), block.note)
    if isinstance(block, Stack):
        return _figure(block.title, plots.stack_plot(block), _stack_table(block), block.note)
    if isinstance(block, Spans):
        return _figure(block.title, plots.spans_plot(block), "", "")
    assert isinstance(block, Intervals)
    return _figure(block.title, plots.intervals_plot(block), "", block.note)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _figure(title: str, plot: str, table: str, note: str) -> str:
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f'<h3>{escape(title)}</h3><figure><div class="wide">{plot}</div>{table}{caption}</figure>'


def _card(block: Card) -> str:
    badges = "".join(
        f'<span class="badge{" gain" if "at most" in badge else ""}">{escape(badge)}</span>'
        for badge in block.badges
    )
    rows = "".join(
        f"<dt>{escape(label)}</dt><dd>{_code(text) if label == 'measure it' else escape(text)}</dd>"
        for label, text in block.rows
    )
    kind = f"card {block.tone}{' first' if block.verdict else ''}"
    body = f"<dl>{rows}</dl>" if rows else ""
    return f'<article class="{kind}"><h3>{escape(block.title)}</h3>{badges}{body}</article>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int], wide: int) -> str:
    last = len(columns) - 1
    wide = last if wide < 0 else wide

    def kind(index: int) -> str:
        return ' class="r"' if index in right else ' class="w"' if index == wide and last > 1 else ""

    head = "".join(f'<th scope="col"{kind(index)}>{escape(name)}</th>' for index, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(index)}>{escape(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _keyed(rows: Sequence[tuple[str, str, Sequence[str]]], columns: Sequence[str]) -> str:
    """A table that is a plot's key too: (colour, name, figures) a row."""
    head = '<th scope="col"></th>' + "".join(
        f'<th scope="col" class="r">{escape(name)}</th>' for name in columns
    )
    body = "".join(
        f'<tr><th scope="row"><span class="swatch b-{tint}"></span>{escape(name)}</th>'
        + "".join(f'<td class="r">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for tint, name, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


LINE_COLUMNS = ("first", "lowest", "mean", "highest", "last")


def line_figures(block: Lines) -> list[tuple[str, str, tuple[str, ...]]]:
    """(colour, name, figures of LINE_COLUMNS) of every line: what the plot shows, in words."""
    say = written(block.kind, "")
    unit = f" ({block.unit})" if block.unit else ""
    out = []
    for line in block.lines:
        values = [value for _, value in line.points]
        if not values:
            continue
        lows = [low for band in line.bands for _, low, _ in band] or values
        highs = [high for band in line.bands for _, _, high in band] or values
        figures = (values[0], min(lows), line.mean, max(highs), values[-1])
        out.append((line.colour, line.name + unit, tuple(say(value) for value in figures)))
    return out


def _lines_table(block: Lines) -> str:
    return _keyed(line_figures(block), LINE_COLUMNS)


STACK_COLUMNS = ("whole record", "first quarter", "last quarter")


def stack_figures(block: Stack) -> list[tuple[str, str, tuple[str, ...]]]:
    """(colour, name, figures of STACK_COLUMNS) of every layer."""
    say = written("share", "")
    quarter = max(len(block.columns) // 4, 1)

    def mean(values: dict[int, float], columns: Sequence[int]) -> str:
        return (
            say(sum(values.get(column, 0.0) for column in columns) / len(columns)) if columns else say(None)
        )

    return [
        (
            layer.colour,
            layer.name,
            (
                say(layer.share),
                mean(layer.values, block.columns[:quarter]),
                mean(layer.values, block.columns[-quarter:]),
            ),
        )
        for layer in block.layers
    ]


def _stack_table(block: Stack) -> str:
    return _keyed(stack_figures(block), STACK_COLUMNS)


def _bars(block: Bars) -> str:
    rows = "".join(
        f'<div class="bar"><span>{escape(name)}</span>'
        f'<i><b class="b-{tint}" style="width:{min(max(share, 0.0), 1.0) * 100:.1f}%"></b></i>'
        f"<span>{escape(text)}</span></div>"
        for name, share, text, tint in block.rows
    )
    return (
        f"<h3>{escape(block.title)}</h3><figure>{rows}<figcaption>{escape(block.note)}</figcaption></figure>"
    )
