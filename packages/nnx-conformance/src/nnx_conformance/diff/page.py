"""Write a result as one HTML page without a network: the verdict, and a heat map of tensors and steps."""

from __future__ import annotations

import html
import math

from nnx_conformance.diff.report import as_text, heat_map
from nnx_conformance.diff.session import Result

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1c1f; --soft: #5c6570; --line: #d9dee4;
  --low: #e8eef5; --high: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e9ec; --soft: #9aa4ae;
  --line: #2c3238; --low: #1d2530; --high: #ff6b57; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid var(--high); padding: .25rem 0 .25rem 1rem; }
.same { border-left-color: #2e8b57; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font: 12px/1.4 ui-monospace, monospace; }
th, td { padding: 1px 6px; text-align: right; white-space: nowrap; }
th.name { text-align: left; font-weight: normal; } th.kind { text-align: left; padding-top: .75rem; }
td { border: 1px solid var(--line); min-width: 2.5rem; background: color-mix(in srgb, var(--high) var(--heat),
  var(--low)); }
td.none { background: none; } td.first { outline: 2px solid var(--ink); }
.soft { color: var(--soft); }
"""


def as_page(result: Result) -> str:
    """Return the page."""
    verdict = result.verdict
    title = f"nnx diff: {result.a.name} and {result.b.name}"
    if verdict is None:
        said = f'<p class="verdict same">The runs agree in {result.compared.steps} steps, up to rounding.</p>'
    else:
        said = (
            f'<div class="verdict"><strong>{_text(verdict.kind)}</strong>: {_text(str(verdict))}<br>'
            f'<span class="soft">Likely: {_text(verdict.cause)}. '
            f"Look at: {_text(verdict.look_at)}.</span></div>"
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{_text(title)}</h1>{said}<h2>Distance in multiples of the tolerance</h2>"
        f'<p class="soft">Up to 1, rounding explains the distance. The frame marks the first difference.</p>'
        f'<div class="scroll">{_table(result)}</div><h2>As text</h2>'
        f"<pre>{_text(as_text(result))}</pre></body></html>\n"
    )


def _table(result: Result) -> str:
    found, verdict = heat_map(result), result.verdict
    finding = result.compared.finding
    head = "".join(f"<th>{step}</th>" for step in range(found["steps"]))
    rows, last = [f'<tr><th class="name">step</th>{head}</tr>'], ""
    for kind, name, values in found["rows"]:
        if kind != last:
            rows.append(f'<tr><th class="kind" colspan="{found["steps"] + 1}">{_text(kind)}</th></tr>')
            last = kind
        cells = []
        for step in range(found["steps"]):
            first = (
                verdict is not None and finding is not None and (finding.kind, finding.step) == (kind, step)
            )
            cells.append(
                _cell(values.get(step), first and finding is not None and finding.origin.name == name)
            )
        rows.append(f'<tr><th class="name">{_text(name)}</th>{"".join(cells)}</tr>')
    return f"<table>{''.join(rows)}</table>"


def _cell(worth: float | None, is_first: bool) -> str:
    if worth is None:
        return '<td class="none"></td>'
    heat = (
        100 if not math.isfinite(worth) else max(0, min(100, round(30 + 14 * math.log10(max(worth, 1e-9)))))
    )
    heat = 0 if worth <= 1 else max(heat, 30)
    shown = "inf" if math.isinf(worth) else f"{worth:.2g}"
    return f'<td style="--heat: {heat}%"{" class=first" if is_first else ""}>{shown}</td>'


def _text(value: str) -> str:
    return html.escape(value)
