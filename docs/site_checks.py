"""Hooks of mkdocs: no page fetches anything from elsewhere, and bars in code are shown as bars."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

_FETCHES = {
    ".html": re.compile(
        r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
        r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))"""
        r"""[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    ),
    ".css": re.compile(r"""(?:@import\s+|url\()["']?(?:https?:)?//[^"')\s]+"""),
}


def fetches(site: Path) -> list[str]:
    """Return the URLs on other hosts that pages and style sheets would load."""
    return [
        f"{path.relative_to(site)}: {found[0]}"
        for suffix, pattern in _FETCHES.items()
        for path in sorted(site.rglob(f"*{suffix}"))
        for found in pattern.finditer(path.read_text(encoding="utf-8"))
    ]


def on_post_build(config: MkDocsConfig) -> None:
    """Called by mkdocs when everything has been written."""
    found = fetches(Path(config.site_dir))
    if found:
        raise PluginError("the site would fetch from other hosts:\n" + "\n".join(found))


def on_page_content(html: str, **_: object) -> str:
    r"""Show ``a | b`` where a table has to write ``a \| b``; called by mkdocs for each page."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
