"""Ranks that use different parameters in one step: one process's numbers, or one error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.used_jobs import Swapped, refuse, train
from nnx_conformance.comparing import expect_same_run
from nnx_conformance.pool import WorkerPool
from nnx_conformance.task import Block
from nnx_fsdp.options import MixedPrecision
from nnx_fsdp.units import choose_units

OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "accumulating": ("fsdp_auto", {"min_num_params": 100}, {"accumulate": 2}),
    "offloaded": ("fsdp_offload", {}, {}),
    "replicated": ("fsdp_hybrid", {"replicate_size": 2}, {}),
    "reduced in another dtype": (
        "fsdp_auto",
        {"mixed_precision": MixedPrecision(reduce_dtype="float64")},
        {"accumulate": 2},
    ),
}


@pytest.mark.parametrize(("strategy", "options", "settings"), OPTIONS.values(), ids=list(OPTIONS))
def test_each_rank_may_use_parameters_of_its_own(
    pool: WorkerPool, strategy: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    alone = pool.run(train_swapped, "auto", {}, settings, world_size=1)[0]
    ranks = pool.run(train_swapped, strategy, options, settings, world_size=2)
    expect_same_run(ranks, alone, tolerance=1e-5)


def train_swapped(strategy: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The job with its settings."""
    return train(strategy, options, Swapped, **settings)


def test_units_of_one_rank_are_refused_by_name_on_every_rank(pool: WorkerPool) -> None:
    for message in pool.run(refuse, "fsdp_auto", {"auto_wrap_policy": Block}, world_size=2):
        assert "rank 0 came to the gather of left" in message
        assert "rank 1 came to the gather of right" in message
        assert "auto_wrap_policy" in message


class Blocks(nn.Module):
    """Four layers, and what a forward of a derived class does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.depth = 4


class InOrder(Blocks):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = torch.utils.checkpoint.checkpoint(layer, x) if self.training else layer(x)
        return x


class ByNumber(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.depth):
            x = self.layers[index](x)
        return x


class IfAny(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if (x[:, 0] == index).any():
                x = layer(x)
        return x


class UnlessNone(Blocks):
    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            rows = torch.where(route == index)[0]
            if rows.numel() == 0:
                continue
            x = x.index_add(0, rows, layer(x[rows]))
        return x


class ByIndexOfData(Blocks):
    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        for index in route.unique():
            x = x + self.layers[int(index)](x)
        return x


class GivenAway(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return sum(call(layer, x) for layer in self.layers)  # type: ignore[return-value]


def call(layer: nn.Module, x: Tensor) -> Tensor:
    """A reader of the forward above does not know when."""
    return layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [InOrder, ByNumber])
def test_layers_that_are_called_in_order_are_units(model: type[nn.Module]) -> None:
    assert len(choose_units(model(), min_num_params=1).units) == 4


@pytest.mark.parametrize("model", [IfAny, UnlessNone, ByIndexOfData, GivenAway])
def test_layers_that_a_forward_chooses_between_are_no_units(model: type[nn.Module]) -> None:
    choice = choose_units(model(), min_num_params=1)
    assert choice.units == ()
    assert "called by choice" in choice.reason
