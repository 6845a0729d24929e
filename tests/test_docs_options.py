"""The tables of options on the pages are what the dataclasses say; ``NNX_UPDATE_DOCS=1`` rewrites them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnx.cli import _application
from nnx.options import CommonOptions
from nnx_colossalai import ColossalAIOptions
from nnx_fsdp import FSDPOptions
from nnx_nnscaler import NnScalerOptions

DOCS = Path(__file__).parents[1] / "docs"
COMMON = [item.name for item in fields(CommonOptions)]
PAGES = {
    "options.md": ("tiny", CommonOptions),
    "backends/fsdp.md": ("fsdp_auto", FSDPOptions),
    "backends/nnscaler.md": ("nnscaler", NnScalerOptions),
    "backends/colossalai.md": ("colossalai", ColossalAIOptions),
}
TABLE = re.compile(r"(<!-- options of (\w+): [^\n]* -->\n).*?(<!-- end of options -->)", re.DOTALL)


def shown(strategy: str) -> list[dict[str, str]]:
    """The options as `nnx show` has them."""
    arguments = ["show", strategy, "--json"]
    result = CliRunner().invoke(_application(arguments), arguments)
    options: list[dict[str, str]] = json.loads(result.output)["options"]
    return options


def table(strategy: str, wanted: list[str]) -> str:
    rows = [row(option) for option in shown(strategy) if option["name"] in wanted]
    return "\n".join(["", "| option | type | default | meaning |", "|---|---|---|---|", *rows, "", ""])


def row(option: dict[str, str]) -> str:
    name, kind, default, meaning = option.values()
    cells = (f"`{name}`", f"`{kind}`", f"`{default}`" if default else "", meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_lists_every_option_as_nnx_show_does(page: str) -> None:
    strategy, schema = PAGES[page]
    names = [item.name for item in fields(schema)]
    text = (DOCS / page).read_text(encoding="utf-8")
    expected, found = TABLE.subn(lambda match: match[1] + table(match[2], names) + match[3], text)
    assert found == 1
    assert f"<!-- options of {strategy}:" in text
    if os.environ.get("NNX_UPDATE_DOCS"):
        (DOCS / page).write_text(expected, encoding="utf-8")
    assert expected == text or os.environ.get("NNX_UPDATE_DOCS"), (
        f"run: NNX_UPDATE_DOCS=1 pytest {Path(__file__).name}"
    )


@pytest.mark.parametrize("page", PAGES)
def test_nnx_show_has_every_field_of_the_dataclass(page: str) -> None:
    strategy, schema = PAGES[page]
    names = {option["name"] for option in shown(strategy)}
    assert {item.name for item in fields(schema)} | set(COMMON) <= names
