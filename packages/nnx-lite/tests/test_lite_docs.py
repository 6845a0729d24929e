"""``docs/lite.md`` lists every flag value and method, and each row matches the code."""

from __future__ import annotations

from typing import Any

import lightning.fabric as lightning_fabric_module
import lightning.fabric.plugins as fabric_plugins
import lightning.pytorch.plugins as trainer_plugins
import lightning.pytorch.strategies as trainer_strategies
import pytest
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator, XLAAccelerator
from lightning.fabric.plugins.environments import LightningEnvironment

import nnx
from nnx_core.errors import NnxError
from nnx_core.names.catalog import historical
from nnx_lite import Lite
from nnx_lite.flags import FLAGS, TRANSLATED, fabric_arguments
from nnx_lite.hardware import ACCELERATORS, GONE_ACCELERATORS
from nnx_lite.precision import OLD_PRECISIONS, PRECISIONS
from nnx_test_helpers.repository import from_repository

PAGE = from_repository(__file__, "docs/lite.md")
OLD_METHODS = {
    *(
        "run",
        "setup",
        "setup_dataloaders",
        "backward",
        "to_device",
        "seed_everything",
        "autocast",
        "print",
        "save",
    ),
    *(
        "load",
        "barrier",
        "all_gather",
        "broadcast",
        "reduce",
        "reduce_decision",
        "cast",
        "device",
        "world_size",
    ),
    *("global_rank", "local_rank", "node_rank", "is_global_zero"),
}
"""Of LightningLite from its first version to its last."""


def rows() -> list[list[str]]:
    """The cells of every row with a verdict."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


FLAG_ROWS = [row for row in rows() if "=" in row[0]]
METHOD_ROWS = [row for row in rows() if "=" not in row[0]]
NAMES: dict[str, Any] = {
    "nnx": nnx,
    "trainer": trainer_strategies,
    "fabric": type(
        "fabric",
        (),
        {**vars(lightning_fabric_module.strategies), **vars(lightning_fabric_module.accelerators)},
    ),
    "trainer_plugins": trainer_plugins,
    "fabric_plugins": fabric_plugins,
    "LightningEnvironment": LightningEnvironment,
}


def given(cell: str) -> dict[str, Any]:
    flags: dict[str, Any] = eval(f"dict({cell.strip('`')})", NAMES)  # our own page
    return flags


def verdict(flags: dict[str, Any]) -> str:
    """Return the code's reaction to the first flag of a row."""
    try:
        arguments = fabric_arguments(**flags)
        name = arguments["strategy"]
        if isinstance(name, str) and name in historical() and name not in ("dp", *nnx.StrategyRegistry):
            return "refused"
    except NnxError:
        return "refused"
    flag, value = next(iter(flags.items()))
    expected = [value] if flag == "plugins" and not isinstance(value, list) else value
    return "works" if arguments.get(flag) == expected else "translated"


@pytest.fixture
def every_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (CUDAAccelerator, MPSAccelerator, XLAAccelerator):
        monkeypatch.setattr(cls, "is_available", staticmethod(lambda: True))


@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize("row", FLAG_ROWS, ids=lambda row: row[0])
def test_each_row_about_a_flag_says_what_the_code_does(row: list[str]) -> None:
    assert len(row) == 3 and row[1] == verdict(given(row[0])) and row[2]


def test_every_flag_and_every_value_that_the_code_names_has_a_row() -> None:
    flags = [given(row[0]) for row in FLAG_ROWS]
    assert {name for each in flags for name in each} == {*FLAGS}

    def values(flag: str) -> set[Any]:
        return {each[flag] for each in flags if flag in each and isinstance(each[flag], (str, int))}

    assert {*ACCELERATORS, *GONE_ACCELERATORS} <= values("accelerator")
    assert {"dp", "ddp", "ddp_spawn", "deepspeed", *TRANSLATED} <= values("strategy")
    assert {*OLD_PRECISIONS, *PRECISIONS} <= values("precision")
    assert {0, 2, -1, "auto", "1, 4", "-1"} <= values("devices")


def test_every_method_and_property_has_a_row_that_says_what_it_is() -> None:
    assert {row[0].strip("`") for row in METHOD_ROWS} == OLD_METHODS
    for name, says, meaning in METHOD_ROWS:
        own, theirs = getattr(Lite, name.strip("`"), None), getattr(Fabric, name.strip("`"), None)
        assert says in ("works", "translated", "refused") and meaning
        assert (says == "refused") == (own is None)
        if says == "translated":
            assert own is not theirs
