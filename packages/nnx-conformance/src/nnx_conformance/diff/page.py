"""Write a result as one HTML page without a network: the verdict, and a heat map of tensors and steps."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

from nnx_conformance.diff.report import agreement, as_text, heat_map
from nnx_conformance.diff.session import Result

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1c1f; --soft: #5c6570; --line: #d9dee4;
  --low: #e8eef5; --high: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e9ec; --soft: #9aa4ae;
  --line: #2c3238; --low: #1d2530; --high: #c8453a; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid var(--high); padding: .25rem 0 .25rem 1rem; }
.same { border-left-color: #2e8b57; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font: 12px/1.4 ui-monospace, monospace; margin: .25rem 0 1rem; }
summary { cursor: pointer; font-weight: bold; } summary span { font-weight: normal; color: var(--soft); }
th, td { padding: 1px 6px; text-align: right; white-space: nowrap; }
th.name { text-align: left; font-weight: normal; position: sticky; left: 0; background: var(--paper); }
@media (max-width: 40rem) { th.name { max-width: 9rem; white-space: normal; overflow-wrap: anywhere; } }
td { border: 1px solid var(--line); min-width: 2.5rem; background: color-mix(in srgb, var(--high) var(--heat),
  var(--low)); }
td.first { outline: 2px solid var(--ink); outline-offset: -2px; font-weight: bold; }
.soft { color: var(--soft); }
"""


def as_page(result: Result) -> str:
    """Return the page."""
    verdict = result.verdict
    title = f"nnx diff: {result.a.name} and {result.b.name}"
    if verdict is None:
        said = f'<p class="verdict{" same" if result.same else ""}">{_text(agreement(result))}</p>'
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
        f"{_tables(result)}<h2>As text</h2>"
        f"<pre>{_text(as_text(result))}</pre></body></html>\n"
    )


def _tables(result: Result) -> str:
    """Return a table for each kind; those without a difference are closed."""
    tables = []
    for kind, rows in heat_map(result).items():
        odd = sum(any(not worth <= 1 for worth in values.values()) for values in rows.values())
        said = f"{odd} of {len(rows)} differ" if odd else f"{len(rows)} equal"
        tables.append(
            f"<details{' open' if odd else ''}><summary>{_text(kind)} <span>{said}</span></summary>"
            f'<div class="scroll">{_table(result, kind, rows)}</div></details>'
        )
    return "".join(tables)


def _table(result: Result, kind: str, rows: Mapping[str, Mapping[int, float]]) -> str:
    finding = result.compared.finding
    first = None if finding is None else (finding.kind, finding.origin.name, finding.step)
    steps = sorted({step for values in rows.values() for step in values})
    head = "".join(f"<th>{step}</th>" for step in steps)
    lines = [f'<tr><th class="name">step</th>{head}</tr>']
    for name, values in rows.items():
        cells = "".join(_cell(values.get(step), first == (kind, name, step)) for step in steps)
        lines.append(f'<tr><th class="name">{_text(name)}</th>{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def _cell(worth: float | None, is_first: bool) -> str:
    if worth is None:
        return "<td></td>"
    heat = 75 if not math.isfinite(worth) else round(30 + 14 * math.log10(max(worth, 1)))
    shown = f"{worth:.0f}" if worth >= 10 else f"{worth:.2g}"
    style = f'style="--heat: {0 if worth <= 1 else min(75, heat)}%"'
    return f"<td {style}{' class=first' if is_first else ''}>{shown}</td>"


def _text(value: str) -> str:
    return html.escape(value)
