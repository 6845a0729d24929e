"""Programs written for lightning-fairscale train, and each of its arguments has its old effect."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from jobs.fairscale_seed_jobs import LAYER, settings_of, train_program
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import OptionError

pytest.importorskip("fairscale", reason="fairscale is not installed")

from nnx_fairscale.strategies import DDPFullyShardedStrategy, DDPShardedStrategy, DDPSpawnShardedStrategy

ORIGINAL = (
    *("accelerator", "cpu_offload", "flatten_parameters", "reshard_after_forward", "move_grads_to_cpu"),
    *("fp32_reduce_scatter", "compute_dtype", "bucket_cap_mb", "min_num_params", "state_dict_to_cpu"),
    *("parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    "process_group_backend",
)
"""The arguments of lightning-fairscale's DDPFullyShardedStrategy, in order."""

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("boring", {}),
    "offloaded": ("boring", {"cpu_offload": True, "move_grads_to_cpu": True, "state_dict_to_cpu": False}),
    "units by size": ("boring", {"min_num_params": 10, "bucket_cap_mb": 0}),
    "wrapped by hand": ("wrapped", {}),
    "wrapped and recomputed": ("wrapped", {"activation_checkpointing": nn.Linear}),
    "wrapped, several classes": ("wrapped", {"activation_checkpointing": [nn.Linear, nn.ReLU]}),
    "wrapped, by parameter": ("wrapped", {"flatten_parameters": False, "reshard_after_forward": False}),
}

LAYERS = {"auto_wrap_policy": LAYER}
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reshard_after_forward": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    "fp32_reduce_scatter": (
        {"fp32_reduce_scatter": True},
        {"fp32_reduce_scatter": True, "mixed_precision": True, "compute_dtype": "torch.float16"},
    ),
    "compute_dtype": (
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": "torch.bfloat16", "mixed_precision": True, "fp32_reduce_scatter": False},
    ),
    "bucket_cap_mb": ({"bucket_cap_mb": 3}, {"bucket_cap_mb": 3}),
    "min_num_params": (
        {"auto_wrap_policy": None, "min_num_params": 50},
        {"units": ["Linear", "Linear", "Linear", "Net"]},
    ),
    "auto_wrap": (
        {"auto_wrap_policy": None, "auto_wrap": False},
        {"units": ["Net"], "reshard_after_forward": False},
    ),
    "activation_checkpointing": ({"activation_checkpointing": LAYER}, {"calls of a layer": 2}),
}
"""The effect of each option on units that are the layers."""


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("case", PROGRAMS)
def test_an_old_program_trains_exactly_as_under_ddp(pool: WorkerPool, case: str) -> None:
    program, arguments = PROGRAMS[case]
    expected = pool.run(train_program, program, None, world_size=2)[0]
    for found in pool.run(train_program, program, arguments, world_size=2):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_precision_16_trains_as_under_ddp(pool: WorkerPool) -> None:
    expected = pool.run(train_program, "boring", None, 16, world_size=2)[0]
    found = pool.run(train_program, "boring", {}, 16, world_size=2)[0]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("case", EFFECTS)
def test_an_argument_reaches_fairscale(pool: WorkerPool, case: str) -> None:
    options, expected = EFFECTS[case]
    unset = pool.run(settings_of, LAYERS, world_size=1)[0]
    assert unset["units"] == ["Layer", "Layer", "Layer", "Net"]
    assert pool.run(settings_of, {**LAYERS, **options}, world_size=1)[0] == {**unset, **expected}
    assert all(unset[name] != value for name, value in expected.items() if name != "fp32_reduce_scatter")


def test_parameters_are_flattened_whatever_is_asked_for(pool: WorkerPool) -> None:
    unset = pool.run(settings_of, LAYERS, world_size=1)[0]
    assert unset["flatten_parameters"] is True
    assert pool.run(settings_of, {**LAYERS, "flatten_parameters": False}, world_size=1)[0] == unset


def test_the_arguments_are_the_original_ones_in_order() -> None:
    parameters = inspect.signature(DDPFullyShardedStrategy.__init__).parameters
    assert tuple(parameters)[1:-1] == ORIGINAL


def test_lightning_gets_what_is_its_own() -> None:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.plugins.environments import LightningEnvironment

    environment, precision = LightningEnvironment(), MixedPrecision("bf16-mixed", "cpu")
    given: dict[str, Any] = {"cluster_environment": environment, "precision_plugin": precision}
    for cls in (DDPFullyShardedStrategy, DDPShardedStrategy, DDPSpawnShardedStrategy):
        made: Any = cls(parallel_devices=[torch.device("cpu")] * 2, process_group_backend="gloo", **given)
        assert made.cluster_environment is environment and made.precision_plugin is precision
        assert made.num_processes == 2 and made.common.process_group_backend == "gloo"


@pytest.mark.parametrize("name", ["broadcast_buffers", "sync_models_at_startup", "auto_refresh_trainable"])
def test_an_argument_that_nnx_decides_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"has no option '{name}'"):
        DDPShardedStrategy(**{name: True})
