"""Ranks with different parameters in one step give the numbers of one process, or one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.used_jobs import ExpertsInBlocks, Swapped, refuse, train
from nnx_conformance.checks.user_patterns.rank_dependent import ExpertsInModuleList, Routed, SkippedBlocks
from nnx_conformance.comparing import expect_same_run
from nnx_conformance.pool import WorkerPool
from nnx_conformance.task import Block
from nnx_fsdp.options import MixedPrecision

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


@pytest.mark.quick(every=6)
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
        assert 'by_choice=["left", "right"]' in message


@pytest.mark.full
def test_listed_experts_are_refused_with_the_option_and_equal_with_it(pool: WorkerPool) -> None:
    for message in pool.run(refuse, "fsdp_auto", {"min_num_params": 100}, ExpertsInModuleList, world_size=2):
        assert "came to the gather of listed." in message
        assert 'pass by_choice=["listed"]' in message
    expect_equal(pool, ExpertsInModuleList, by_choice=["listed"])


def test_blocks_that_a_rank_skips_are_refused_with_the_option_and_equal_with_it(pool: WorkerPool) -> None:
    for message in pool.run(refuse, "fsdp_auto", {"min_num_params": 100}, SkippedBlocks, world_size=2):
        assert "rank 0 came to the gather of blocks.1; rank 1 came to the gather of blocks.0" in message
        assert 'pass by_choice=["blocks"]' in message
    expect_equal(pool, SkippedBlocks, by_choice="Block")


def test_experts_inside_repeated_blocks_need_no_option(pool: WorkerPool) -> None:
    expect_equal(pool, ExpertsInBlocks)


def expect_equal(pool: WorkerPool, model: type[Routed], **options: Any) -> None:
    """Compare two ranks with one process."""
    alone = pool.run(train, "auto", {}, model, world_size=1)[0]
    ranks = pool.run(train, "fsdp_auto", {"min_num_params": 100, **options}, model, world_size=2)
    expect_same_run(ranks, alone, tolerance=1e-5)
