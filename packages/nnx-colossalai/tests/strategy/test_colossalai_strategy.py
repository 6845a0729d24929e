"""`ColossalAIStrategy`: the constructor of lightning-colossalai, with the present Trainer."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

import nnx
from nnx_colossalai import ColossalAIPrecision, ColossalAIStrategy
from nnx_core.errors import OptionError

HISTORICAL = (
    "use_chunk", "chunk_size", "enable_distributed_storage", "placement_policy", "force_outputs_fp32",
    "gpu_margin_mem_ratio", "chunk_search_range", "chunk_search_n_grids", "min_chunk_size", "initial_scale",
    "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale",
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
)  # fmt: skip


def test_the_arguments_are_those_of_the_original_in_its_order() -> None:
    names = list(inspect.signature(ColossalAIStrategy.__init__).parameters)
    assert tuple(names[1:-1]) == HISTORICAL


def test_the_original_constructor_makes_a_strategy_of_the_trainer_in_use() -> None:
    precision = ColossalAIPrecision()
    io = nnx.CheckpointIO()
    strategy = ColossalAIStrategy(
        chunk_size=1000,
        placement_policy="cpu",
        force_outputs_fp32=True,
        chunk_search_n_grids=4096,
        min_chunk_size=32,
        initial_scale=32,
        hysteresis=4,
        checkpoint_io=io,
        precision_plugin=precision,
        overlap="none",
        timeout=60,
    )
    assert isinstance(strategy, ColossalAIStrategy) and isinstance(strategy, Strategy)
    options = strategy.backend.options
    assert (options.chunk_size, options.placement_policy, options.force_outputs_fp32) == (1000, "cpu", True)
    assert (options.initial_scale, options.hysteresis, options.overlap) == (32, 4, "none")
    assert strategy.common.timeout == 60
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy is strategy
    assert trainer.precision_plugin is precision
    assert trainer.strategy.checkpoint_io is io


def test_every_argument_has_a_default_and_they_are_those_of_the_options() -> None:
    from nnx_colossalai.options import ColossalAIOptions

    assert ColossalAIStrategy().backend.options == ColossalAIOptions()


def test_a_subclass_is_one_of_the_strategy() -> None:
    class Mine(ColossalAIStrategy):
        own = True

    strategy = Mine(placement_policy="cuda")
    assert isinstance(strategy, Mine) and isinstance(strategy, Strategy) and strategy.own


@pytest.mark.full
def test_it_is_of_the_copy_of_lightning_that_is_in_use() -> None:
    code = (
        "import pytorch_lightning as pl; from nnx_colossalai import ColossalAIStrategy;"
        "assert isinstance(ColossalAIStrategy(), pl.strategies.Strategy);"
        "pl.Trainer(strategy=ColossalAIStrategy(), accelerator='cpu', devices=2, logger=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement_policy": "gpu"}, r"placement_policy='gpu' is unknown"),
        ({"use_chunk": False}, r"use_chunk=False"),
        ({"chunk_sise": 3}, r"'colossalai' has no option 'chunk_sise'\. Did you mean 'chunk_size'"),
    ],
)
def test_arguments_that_are_not_taken_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ColossalAIStrategy(**arguments)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("colossalai", "auto"),
        ("colossalai_auto", "auto"),
        ("colossalai_cuda", "cuda"),
        ("colossalai_cpu", "cpu"),
    ],
)
def test_the_names_serve_trainer_and_fabric_with_their_policy(name: str, policy: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
    for strategy in (trainer.strategy, fabric.strategy):
        assert strategy.name == name
        assert strategy.backend.options.placement_policy == policy


def test_no_name_is_exported_that_is_not_there() -> None:
    import nnx_colossalai

    for name in nnx_colossalai.__all__:
        assert getattr(nnx_colossalai, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'HybridSGD'"):
        nnx_colossalai.HybridSGD  # noqa: B018
