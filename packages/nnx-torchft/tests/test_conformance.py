"""One group, of two processes or of one, keeps the promises of a strategy.

Some checks give each rank batches of its own, and exact elastic training divides the loader's batch over the
ranks. They run with ``data="drop"``. `test_sharded.py` compares the samples of groups with one process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("nnx_torchft._torchft_compat", reason="torchft is not installed")

from test_elastic import address_of, new_lighthouse

from nnx_conformance import StrategyConformance
from nnx_conformance.runner import select_checks

NOT_OURS = ("batch_size_differs_by_rank", "error_before_first_forward")
"""Checks of batches by rank, and of manual optimization, which is refused."""
AVERAGES = ("weight_averaging", "ema_weight_averaging", "stochastic_weight_averaging")
"""Callbacks that are refused in groups of several processes; see docs/elastic.md."""


@pytest.fixture(scope="class", autouse=True)
def lighthouse(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the lighthouse that all runs of the class meet at."""
    server = new_lighthouse()
    request.cls.options = {**request.cls.options, "lighthouse": address_of(server)}
    yield
    server.shutdown()


@pytest.mark.full
class TestExactData(StrategyConformance):
    """The engine within a group."""

    strategy = "torchft_hsdp"
    options = {"min_num_params": 100}  # noqa: RUF012
    only = tuple(
        check.name
        for check in select_checks(("numbers", "models", "stages", "lifecycle"))
        if check.name not in NOT_OURS
    )


@pytest.mark.full
class TestDataByRank(StrategyConformance):
    """Lightning's API and user code, with batches by rank."""

    strategy = "torchft_hsdp"
    options = {"data": "drop"}  # noqa: RUF012
    only = tuple(
        check.name
        for check in select_checks(("lightning_api", "user_patterns"))
        if check.name not in AVERAGES
    )


@pytest.mark.full
class TestOneProcess(StrategyConformance):
    """A group of one process."""

    strategy = "torchft_ddp"
    one_rank = True
    only = (*TestExactData.only, "converges", "checkpoints")


@pytest.mark.full
class TestOneProcessDataByGroup(StrategyConformance):
    """Lightning's API and user code in a group of one process."""

    strategy = "torchft_ddp"
    options = {"data": "drop"}  # noqa: RUF012
    one_rank = True
    only = ("lightning_api", "user_patterns")
