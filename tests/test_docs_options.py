"""The tables of options on the pages match the dataclasses; ``NNX_UPDATE_DOCS=1`` rewrites them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nnx_checkpoint.cli.command import _application
from nnx_colossalai import ColossalAIOptions
from nnx_comm import (
    AsyncOptions,
    BaguaOptions,
    DecentralizedOptions,
    DiLoCoOptions,
    LocalSGDOptions,
    LowPrecisionOptions,
    PowerSGDOptions,
)
from nnx_core.options import CommonOptions
from nnx_deepspeed.options import DeepSpeedOptions
from nnx_fairscale.options import FairscaleFSDPOptions, OSSOptions, ShardedOptions
from nnx_fsdp import FSDPOptions
from nnx_hivemind import HivemindOptions
from nnx_nnscaler import NnScalerOptions
from nnx_test_helpers.generated_docs import expect_block
from nnx_torchft.options import ElasticOptions

DOCS = Path(__file__).parents[1] / "docs"
COMMON = [item.name for item in fields(CommonOptions)]
TABLES = [
    ("options.md", "tiny", CommonOptions),
    ("backends/fsdp.md", "fsdp_auto", FSDPOptions),
    ("backends/nnscaler.md", "nnscaler", NnScalerOptions),
    ("backends/colossalai.md", "colossalai", ColossalAIOptions),
    ("backends/deepspeed.md", "nnx_deepspeed_2", DeepSpeedOptions),
    ("backends/fairscale.md", "fairscale_fsdp", FairscaleFSDPOptions),
    ("backends/fairscale.md", "fairscale_oss", OSSOptions),
    ("backends/fairscale.md", "fairscale_sharded", ShardedOptions),
    ("elastic.md", "torchft_ddp", ElasticOptions),
    ("backends/slow-links.md", "bagua", BaguaOptions),
    ("backends/slow-links.md", "powersgd", PowerSGDOptions),
    ("backends/slow-links.md", "localsgd", LocalSGDOptions),
    ("backends/slow-links.md", "bagua_decentralized", DecentralizedOptions),
    ("backends/slow-links.md", "bagua_low_precision_decentralized", LowPrecisionOptions),
    ("backends/slow-links.md", "bagua_async", AsyncOptions),
    ("backends/slow-links.md", "diloco", DiLoCoOptions),
    ("backends/hivemind.md", "hivemind", HivemindOptions),
]
each_table = pytest.mark.parametrize(("page", "strategy", "schema"), TABLES)
START = "<!-- options of {}: written by NNX_UPDATE_DOCS=1 pytest tests/test_docs_options.py -->\n"


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


@each_table
def test_the_page_lists_every_option_as_nnx_show_does(page: str, strategy: str, schema: Any) -> None:
    names = [item.name for item in fields(schema)]
    pattern = re.compile(f"({re.escape(START.format(strategy))}).*?(<!-- end of options -->)", re.DOTALL)
    expect_block(DOCS / page, pattern, table(strategy, names), test=__file__)


@each_table
def test_nnx_show_has_every_field_of_the_dataclass(page: str, strategy: str, schema: Any) -> None:
    names = {option["name"] for option in shown(strategy)}
    assert {item.name for item in fields(schema)} | set(COMMON) <= names


def test_no_page_has_a_table_of_options_that_is_not_compared() -> None:
    every = [
        match
        for page in DOCS.rglob("*.md")
        for match in re.findall(r"<!-- options of (\w+):", page.read_text())
    ]
    assert sorted(every) == sorted(strategy for _, strategy, _ in TABLES)
