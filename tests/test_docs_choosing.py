"""docs/choosing.md has the questions of `nnx choose` and the limits of each strategy.

``NNX_UPDATE_DOCS=1`` rewrites both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from nnx_conformance.check import all_checks
from nnx_core.cli.choose import CHOICES, QUESTIONS
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import Capabilities
from nnx_test_helpers.generated_docs import expect_block

PAGE = Path(__file__).parents[1] / "docs" / "choosing.md"
TABLE = re.compile(
    r"(<!-- what each cannot do: [^\n]* -->\n).*?(<!-- end of what each cannot do -->)", re.DOTALL
)
DECISION = re.compile(r"(<!-- nnx choose: [^\n]* -->\n).*?(<!-- end of nnx choose -->)", re.DOTALL)
FAMILIES = {
    "nnx-fsdp": "`fsdp_*`",
    "nnx-nnscaler": "`nnscaler*`",
    "nnx-colossalai": "`colossalai*`",
    "nnx-deepspeed": "`nnx_deepspeed_*`",
    "nnx-fairscale": "`fairscale_*`",
}
FLAGS = {
    "tensor_parallel": "split single operators",
    "pipeline": "put layers on different ranks, in stages",
    "offload": "keep states in host memory",
    "meta_initialization": "build a model on the meta device",
    "multiple_optimizers": "several optimizers",
    "added_parameter_groups": "add parameters to an optimizer while training",
    "exact": "the numbers of one process",
    "repeated_closures": "optimizers that evaluate their closure again",
    "unused_parameters": "parameters that take no part in a loss",
    "freezing_while_training": "freeze and unfreeze while training",
    "mixed_dtypes": "trained parameters of several dtypes",
    "fabric": "Fabric",
    "leaves_no_files": "leave no file behind but checkpoints",
}
Keeps = Callable[[Capabilities], bool]


def declared() -> dict[str, dict[str, Capabilities]]:
    """Return the capabilities of each strategy, by name within its family."""
    found: dict[str, dict[str, Capabilities]] = {owner: {} for owner in FAMILIES}
    for name in StrategyRegistry.names():
        owner = StrategyRegistry.owner(name).split()[0]
        if owner in found:
            found[owner][name] = StrategyRegistry.get(name).capabilities
    return found


def rows(strategies: dict[str, dict[str, Capabilities]]) -> Iterable[tuple[str, Keeps]]:
    """Yield the name of each row, and a function that is true for strategies with this capability."""
    for flag, words in FLAGS.items():
        yield words, lambda capabilities, flag=flag: getattr(capabilities, flag)
    refused = {name for family in strategies.values() for one in family.values() for name in one.refuses}
    for check in all_checks():
        if check.name in refused:
            words = f"`{check.name}`: {check.promise.rstrip('.')}"
            yield words, lambda capabilities, name=check.name: name not in capabilities.refuses


def cell(family: dict[str, Capabilities], keeps: Keeps) -> str:
    able = [name for name, capabilities in family.items() if keeps(capabilities)]
    unable = [name for name in family if name not in able]
    if not unable or not able:
        return "no" if unable else "yes"
    fewer, word = (able, "") if len(able) <= len(unable) else (unable, "not ")
    return word + ", ".join(f"`{name}`" for name in fewer)


def table() -> str:
    strategies = declared()
    lines = [f"| | {' | '.join(FAMILIES.values())} |", "|" + "---|" * (len(FAMILIES) + 1)]
    for words, keeps in rows(strategies):
        cells = [cell(strategies[owner], keeps) for owner in FAMILIES]
        if set(cells) != {"yes"}:
            lines.append(f"| {' | '.join([words, *cells])} |")
    return "\n" + "\n".join(lines) + "\n\n"


def decision() -> str:
    """The questions of `nnx choose` as a list, and its choices as a table."""
    lines = []
    for number, question in enumerate(QUESTIONS, start=1):
        lines += [f"{number}. **{question.text}** (`--{question.name}`)", ""]
        lines += [f"    - `{word}`: {meaning}" for word, meaning in question.answers.items()] + [""]
    lines += [
        "The first row whose answers are yours decides:",
        "",
        "| answers | strategy | reason |",
        "|---|---|---|",
    ]
    for choice in CHOICES:
        when = ", ".join(f"{name} `{answer}`" for name, answer in choice.when.items())
        more = f" with `{choice.extra or choice.trainer}`" if choice.extra or choice.trainer else ""
        lines.append(f"| {when} | `{choice.strategy}`{more} | {choice.reason} |")
    return "\n" + "\n".join(lines) + "\n\n"


@pytest.mark.parametrize(
    ("block", "written"), [(TABLE, table), (DECISION, decision)], ids=["limits", "choose"]
)
def test_a_block_of_the_page_is_what_the_code_says(
    block: re.Pattern[str], written: Callable[[], str]
) -> None:
    expect_block(PAGE, block, written(), test=__file__)


def test_a_cell_names_the_fewer_of_those_that_can_and_those_that_cannot() -> None:
    family = {name: Capabilities(fabric=name in "abc") for name in "abcd"}
    assert cell(family, lambda one: one.fabric) == "not `d`"
    assert cell(family, lambda one: not one.fabric) == "`d`"
    assert cell(family, lambda one: one.trainer) == "yes"
    assert cell(family, lambda one: one.pipeline) == "no"
