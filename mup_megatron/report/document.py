"""What the HTML pages are made of: one file each, which opens from disk and needs no network.

Plotly draws the figures in the browser; its code is inside the page. Public names: `document`, `write_document`,
`table`, `layout_of`, `curves`.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.report.pictures import COLORS, MARK
from mup_megatron.report.run_data import Curve
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import open_regular, write_whole

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #222; --dim: #666; --line: #ddd; --block: #f6f6f6 }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #ddd; --dim: #aaa; --line: #3a3d44; --block: #23262c }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1240px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em }
h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid var(--line) }
h1, h2, p, li, dd { overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.6em 0 }
th, td { text-align: right; padding: 0.18em 0.8em 0.18em 0; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child, td.text { text-align: left }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page) }
th { color: var(--dim); font-weight: 600 }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 7em; vertical-align: top }
pre { background: var(--block); padding: 0.8em; overflow-x: auto; font-size: 13px }
dl { color: var(--dim) } dt { font-weight: 600; float: left; clear: left; margin-right: 0.5em }
dd { margin: 0.15em 0 }
summary { cursor: pointer; color: #4878a8; margin: 0.6em 0 } li { margin: 0.15em 0 }
img { max-width: 100%; background: #fff }
/* A shade at the edge behind which a table goes on; the cover lies over it where the table ends. */
.wide { overflow-x: auto; background:
  linear-gradient(to left, var(--page) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to left, #8888, transparent) right / 14px 100% no-repeat }
@media (max-width: 700px) { body { font-size: 14px; margin: 1em 0; padding: 0 0.7em } table { font-size: 13px } }
@media print {
  :root { --page: #fff; --text: #000; --dim: #444; --line: #bbb; --block: #fff }
  .wide { overflow: visible; background: none } table { font-size: 10px } td, th { white-space: normal }
  h2 { break-after: avoid } tr, .js-plotly-plot, img { break-inside: avoid } .modebar { display: none }
}
"""


_BEGINS = len("<!doctype html>")
"""Bytes that tell a page, or a notebook, from any other file."""
_GRID = "rgba(128,128,128,0.2)"


def document(name: str, sections: Sequence[str], figures: Mapping[str, dict[str, Any]], plotly: str) -> str:
    """A page as text.

    Args:
        name: title, as text.
        sections: HTML of the body; a figure's place is an element of its id.
        figures: Plotly's data and layout, by id.
        plotly: Plotly's own code.
    """
    script = json.dumps(figures).replace("<", "\\u003c")  # `</script`, and `<!--<script`, which swallows the end
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>'
        f'<link rel="icon" href="data:,"><script>{plotly}</script></head>'
        f"<body>{''.join(sections)}<script>const figures = {script};\n"
        "for (const [id, figure] of Object.entries(figures))\n"
        "  Plotly.newPlot(id, figure.data, figure.layout, {displaylogo: false, responsive: true});\n"
        "</script></body></html>\n"
    )


def write_document(path: Path, text: str) -> Path:
    """Writes a page whole or not at all; returns its path. It takes the place of a page, and of nothing else.

    Raises:
        UserError: a folder or a file that begins otherwise is there, nothing can be written there, or it does not fit.
    """
    content = text.encode("utf-8", "backslashreplace")
    if path.is_dir():
        raise UserError(f"{path}: cannot write the page: it is a folder; expected the name of a file")
    try:
        if path.is_file():
            with open_regular(path) as file:
                begins = file.read(_BEGINS)
            if begins not in (b"", content[:_BEGINS]):
                raise UserError(f"{path}: is there already and is no such page; expected the name of another file")
        with full_disk(path, "the page", lambda: len(content)):
            write_whole(path, content)
    except OSError as error:
        raise UserError(f"{path}: cannot write the page: {error.strerror}") from None
    return path


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "number") -> str:
    """An HTML table, which scrolls by itself where it is wider than the page.

    Args:
        head: names of the columns, as text; none where empty.
        rows: cells, as text.
        kind: number (one line, to the right) or text (to the left, broken where the page ends).
    """
    first = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    lines = ("".join(f'<td class="{kind}">{html.escape(str(cell))}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{first}{body}</table></div>'


def layout_of(x: str, y: str, *, log: bool = False, height: int = 340) -> dict[str, Any]:
    """A figure's layout: axes named `x` and `y`, the legend under the picture, where no toolbar lies over it."""
    return {
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 30, "b": 100},
        "template": "none",
        # Of the page, which may be dark.
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#808080"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#999", "activecolor": "#4878a8"},
        "hovermode": "closest",
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "xaxis": {
            "title": {"text": x, "standoff": 14},
            "type": "log" if log else "-",
            "gridcolor": _GRID,
        },
        "yaxis": {"title": {"text": y}, "gridcolor": _GRID},
    }


def curves(drawn: Sequence[Curve], told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figure of training and evaluation losses over steps.

    Args:
        drawn: the curves.
        told: what a ladder told of the first one's last evaluation (`pictures.marked`); None for nothing.
    """
    data: list[dict[str, Any]] = []
    for curve, color in zip(drawn, itertools.cycle(COLORS)):
        for what, mode, lines, key, drawn_as in (
            ("training", "lines", curve.steps, "loss", {"line": {"color": color, "width": 1}, "opacity": 0.5}),
            ("evaluation", "lines+markers", curve.evaluations, "eval_loss", {"line": {"color": color, "width": 2}}),
        ):
            data.append(
                {
                    "type": "scatter",
                    "mode": mode,
                    "name": f"{curve.name}, {what}",
                    "x": [line["step"] for line in lines],
                    "y": [_number(line[key]) for line in lines],
                    **drawn_as,
                    "hovertemplate": f"step %{{x}}<br>{what} loss %{{y:.4f}}",
                }
            )
    if told is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": told["label"],
                "x": [told["step"]],
                "y": [told["loss"]],
                "error_y": {"type": "data", "array": [told["bar"]], "color": MARK},
                "marker": {"color": MARK, "size": 9, "symbol": "diamond"},
                "hovertemplate": "step %{x}<br>predicted %{y:.4f}",
            }
        )
    return {"data": data, "layout": layout_of("step", "loss (nats per token)", height=400)}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value and abs(value) != float("inf") else None
