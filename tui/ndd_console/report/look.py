"""The style of the HTML page: light and dark, on screens and on paper; nothing is fetched from anywhere."""

from __future__ import annotations

# name: (light, dark).
_COLOURS = {
    "paper": ("#ffffff", "#14171a"),
    "raised": ("#f5f6f8", "#1d2125"),
    "ink": ("#1b1f24", "#e6e8ea"),
    "dim": ("#59626c", "#9aa4ae"),
    "hair": ("#d9dde2", "#343a41"),
    "good": ("#00684c", "#3ec79a"),
    "warn": ("#9a5a00", "#f0b440"),
    "bad": ("#b02a00", "#ff8a5c"),
    "muted": ("#59626c", "#9aa4ae"),
    "orange": ("#e69f00", "#e69f00"),
    "vermillion": ("#d55e00", "#e8702a"),
    "sky": ("#56b4e9", "#56b4e9"),
    "blue": ("#0072b2", "#3d9bd6"),
    "green": ("#009e73", "#1fb88c"),
    "purple": ("#cc79a7", "#cc79a7"),
    "yellow": ("#e3d32e", "#f0e442"),
    "indigo": ("#332288", "#8f86d6"),
    "wine": ("#882255", "#c45a90"),
    "teal": ("#44aa99", "#44aa99"),
    "rose": ("#cc6677", "#d97f8e"),
    "grey": ("#8b929a", "#7d868f"),
    "faint": ("#c3c8ce", "#4b535b"),
}


def _variables(index: int) -> str:
    return "".join(f"--{name}:{pair[index]};" for name, pair in _COLOURS.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main,header,footer{max-width:880px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px;padding-bottom:5px;border-bottom:1px solid var(--hair)}
h3{font-size:15px;margin:24px 0 6px}
p{margin:8px 0;overflow-wrap:anywhere}
nav{margin:14px 0 0;font-size:13.5px;display:flex;flex-wrap:wrap;gap:2px 14px}
a{color:var(--blue)}
a:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
.sub,.note,figcaption,footer{color:var(--dim);font-size:13.5px}
.badge{display:inline-block;border:1px solid currentColor;border-radius:10px;padding:0 9px;
font-size:13px;margin:0 6px 4px 0}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
figure{margin:14px 0 20px}
figcaption{margin-top:4px}
.wide{overflow-x:auto}
svg{display:block;width:100%;min-width:560px;height:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--hair);
overflow-wrap:break-word}
th{color:var(--dim);font-weight:600}
th[scope=row]{color:var(--ink);font-weight:400}
td.r,th.r{text-align:right;white-space:nowrap}
td.w{overflow-wrap:anywhere;min-width:180px}
dl{display:grid;grid-template-columns:minmax(110px,190px) 1fr;gap:3px 16px;margin:10px 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.card{border:1px solid var(--hair);border-left:5px solid var(--muted);border-radius:4px;background:var(--raised);
padding:10px 16px 8px;margin:12px 0}
.card.warn{border-left-color:var(--warn)}.card.good{border-left-color:var(--good)}
.card.warn,.card.good{color:inherit}
.card h3{margin:2px 0 6px}.card.first h3{font-size:20px;line-height:1.3}
.card .badge{color:var(--dim)}.card .badge.gain{color:var(--ink);font-weight:600}
code{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere}
.swatch{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px;vertical-align:-1px}
.bar{display:grid;grid-template-columns:170px 1fr 60px;gap:0 10px;align-items:center;font-size:13.5px;margin:4px 0}
.bar b{display:block;height:14px;border-radius:2px;min-width:2px}
.bar i{display:block;background:var(--raised);outline:1px solid var(--hair);border-radius:2px;font-style:normal}
.bar span:last-child{text-align:right}
text{font-size:11px;fill:var(--ink);font-family:inherit}
text.tick{fill:var(--dim)}text.unit{font-weight:600}text.inside{fill:#111;font-size:12px;paint-order:stroke;
stroke:#fff;stroke-opacity:.6;stroke-width:2.5px}
.grid{stroke:var(--hair);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.one{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:3 3}
.quiet{fill:var(--grey);opacity:.22}.stripe{fill:var(--raised)}
.area{stroke:var(--paper);stroke-width:.6}.band{opacity:.22}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}.dashed{stroke-dasharray:5 4}
.interval{stroke-width:2.4}
.hover{fill:var(--ink);opacity:0}.hover:hover{opacity:.1}
footer{padding-bottom:40px;margin-top:40px}
@media (max-width:560px){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}
.bar{grid-template-columns:110px 1fr 50px}}
@media print{body{font-size:11pt}nav{display:none}main,header,footer{max-width:none;padding:0}
figure,.card,tr,dl>*{break-inside:avoid}h2,h3{break-after:avoid}svg{min-width:0}.wide{overflow:visible}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def style() -> str:
    """The whole style sheet."""
    fills = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in _COLOURS)
    tints = "".join(f".b-{name}{{background:var(--{name})}}" for name in _COLOURS)
    light, dark = _variables(0), _variables(1)
    # Paper is white whatever the screen is.
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}{fills}{tints}"
    )
