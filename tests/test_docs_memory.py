"""The memory table of docs/choosing.md is what the planner counts; ``NNX_UPDATE_DOCS=1`` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import nnx
from nnx_core.planning.estimate import Estimate
from nnx_test_helpers.generated_docs import expect_block

PAGE = Path(__file__).parents[1] / "docs" / "choosing.md"
TABLE = re.compile(
    r"(<!-- memory between steps: [^\n]* -->\n).*?(<!-- end of memory between steps -->)", re.DOTALL
)
RANKS = 8
LAYERS, WIDTH = 16, 512
BYTES = 4 * LAYERS * WIDTH**2
"""The size of all parameters."""
STATES = ("parameters", "gradients", "optimizer", "communication")


def row(estimate: Estimate) -> tuple[str, ...]:
    """Return the state between two steps in units of all parameters: by kind, in sum, and in host memory."""
    (saved,) = (phase for phase in estimate.phases if phase.name == "save")
    sizes = [saved.kinds[kind] for kind in STATES]
    return tuple(f"{size / BYTES:.2f}" for size in (*sizes, sum(sizes), saved.host))


def table() -> str:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plan = nnx.plan(model, torch.zeros(1, WIDTH), devices=RANKS)
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in plan.rows:
        if each.estimate is not None:
            groups.setdefault(row(each.estimate), []).append(f"`{each.strategy}`")
    lines = [
        f"| strategy | {' | '.join(STATES)} | sum on the device | host |",
        "|" + "---|" * (len(STATES) + 3),
        *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in groups.items()),
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def test_the_memory_table_is_what_the_planner_counts() -> None:
    expect_block(PAGE, TABLE, table(), test=__file__)
