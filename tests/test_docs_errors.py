"""docs/errors.md lists the errors with a remedy, as the sources raise them.

``NNX_UPDATE_DOCS=1`` rewrites it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nnx_test_helpers.generated_docs import expect_block

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
BLOCK = re.compile(r"(<!-- errors: [^\n]* -->\n).*?(<!-- end of errors -->)", re.DOTALL)
ANY = "\u2026"
"""Stands for the part of a message that varies."""


def text_of(node: ast.expr | None) -> str:
    """The text of an expression, with `ANY` for values; empty if it is not written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return ""


def errors_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield class, message and remedy of every error that a source raises with a remedy."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        remedy = next((text_of(word.value) for word in node.keywords if word.arg == "remedy"), "")
        message = text_of(node.args[0])
        if name.endswith("Error") and len(re.sub(rf"{ANY}|\W", "", message)) > 10 and remedy:
            yield name, message, remedy


def cell(text: str) -> str:
    """A text as Markdown: special characters are escaped, but not in code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def written() -> str:
    """The tables of all packages."""
    lines = []
    for package in sorted(ROOT.glob("packages/*/src")):
        found = {error for path in package.rglob("*.py") for error in errors_of(path.read_text())}
        if found:
            lines += [f"## {package.parent.name}", ""]
        for name in sorted({error[0] for error in found}):
            lines += [
                f"### {name} ({package.parent.name})",
                "",
                "| the error says | what to do |",
                "|---|---|",
            ]
            rows = sorted((message, remedy) for kind, message, remedy in found if kind == name)
            lines += [f"| {cell(message)} | {cell(remedy)} |" for message, remedy in rows] + [""]
    return "\n" + "\n".join(lines) + "\n"


def test_the_page_has_every_error_with_its_remedy() -> None:
    expect_block(PAGE, BLOCK, written(), test=__file__)


def test_an_error_is_found_with_the_parts_that_vary_left_out() -> None:
    source = 'raise OptionError(f"{name!r} is not a known mode.", remedy="Use " "one.")\nprint("no error")'
    assert list(errors_of(source)) == [("OptionError", f"{ANY} is not a known mode.", "Use one.")]
    assert cell("a | <b> `[c]`") == "a \\| \\<b\\> `[c]`"
