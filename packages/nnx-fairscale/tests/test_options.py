"""Options and strategy classes: contradictions are refused, and the imports of old code work."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from nnx_core.errors import OptionError, UnsupportedError

pytest.importorskip("fairscale", reason="fairscale is not installed")

from nnx_core.view.modules import Layers
from nnx_fairscale.fsdp import FairscaleFSDPBackend, choose_units
from nnx_fairscale.options import FairscaleFSDPOptions, OSSOptions, ShardedOptions
from nnx_fairscale.oss import Ownership
from nnx_fairscale.strategies import DDPFullyShardedStrategy, DDPShardedStrategy, DDPSpawnShardedStrategy


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (FairscaleFSDPOptions, {"min_num_params": -1}, "min_num_params=-1 is negative."),
        (
            FairscaleFSDPOptions,
            {"auto_wrap": False, "auto_wrap_policy": torch.nn.Linear},
            "auto_wrap_policy has no effect with auto_wrap=False.",
        ),
        (FairscaleFSDPOptions, {"compute_dtype": "float64"}, "compute_dtype='float64' is not allowed."),
        (FairscaleFSDPOptions, {"cpu_offload": "yes"}, "cpu_offload='yes' is of type str. Pass bool."),
        (OSSOptions, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not positive."),
        (ShardedOptions, {"reduce_buffer_size": -1}, "reduce_buffer_size=-1 is negative."),
        (
            ShardedOptions,
            {"reduce_fp16": True},
            "reduce_fp16 has no effect with reduce_buffer_size=8388608. Set reduce_buffer_size=0",
        ),
    ],
)
def test_contradictions_and_bad_values_are_named(options: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        options(**given)
    assert str(caught.value).startswith(message)


def test_a_dtype_may_be_given_as_torch_has_it() -> None:
    assert FairscaleFSDPOptions(compute_dtype=torch.bfloat16).compute_dtype == "bfloat16"  # type: ignore[arg-type]


def test_what_is_no_layer_class_is_refused() -> None:
    with pytest.raises(OptionError, match=r"activation_checkpointing holds 3, which is not a module class"):
        Layers([3], option="activation_checkpointing")
    with pytest.raises(OptionError, match=r"activation_checkpointing holds 3, which is not a module class"):
        FairscaleFSDPOptions(activation_checkpointing=3)  # type: ignore[arg-type]


def test_a_policy_that_matches_nothing_is_refused() -> None:
    options = FairscaleFSDPOptions(auto_wrap_policy=torch.nn.Conv2d)
    with pytest.raises(OptionError, match="auto_wrap_policy names Conv2d, but Sequential has no such layer"):
        choose_units(torch.nn.Sequential(torch.nn.Linear(2, 2)), options)
    options = FairscaleFSDPOptions(auto_wrap_policy="Linaer")
    with pytest.raises(
        OptionError, match=r"names 'Linaer', .* Did you mean 'torch\.nn\.modules\.linear\.Linear'"
    ):
        choose_units(torch.nn.Sequential(torch.nn.Linear(2, 2)), options)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_need_more_than_single_elements_are_refused_on_flat_shards(optimizer: Any) -> None:
    backend = FairscaleFSDPBackend(FairscaleFSDPOptions())
    module = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="cannot work on fairscale's flat shards"):
        backend.setup_optimizers(module, [optimizer(module.parameters())])


def test_an_optimizer_that_needs_all_parameters_at_once_has_no_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nnx_fairscale.oss.is_distributed", lambda: True)
    with pytest.raises(UnsupportedError, match="LBFGS computes with all parameters at once"):
        Ownership(torch.optim.LBFGS(torch.nn.Linear(2, 2).parameters()), rank=0)


def test_the_arguments_of_the_original_strategy_are_options_of_the_engine() -> None:
    strategy: Any = DDPFullyShardedStrategy(
        cpu_offload=True,
        flatten_parameters=False,
        reshard_after_forward=False,
        move_grads_to_cpu=True,
        fp32_reduce_scatter=True,
        compute_dtype=torch.float16,
        bucket_cap_mb=3,
        min_num_params=7,
        state_dict_to_cpu=False,
        activation_checkpointing=torch.nn.Linear,
    )
    options = strategy.backend.options
    assert (options.cpu_offload, options.flatten_parameters, options.reshard_after_forward) == (
        True,
        False,
        False,
    )
    assert (options.compute_dtype, options.bucket_cap_mb, options.min_num_params) == ("float16", 3, 7)
    assert options.activation_checkpointing is torch.nn.Linear
    with pytest.raises(OptionError, match=r"has no option 'cpu_ofload'\. Did you mean 'cpu_offload'"):
        DDPFullyShardedStrategy(cpu_ofload=True)


def test_the_classes_are_strategies_of_trainer() -> None:
    from lightning.pytorch.strategies import Strategy

    for cls, name in (
        (DDPFullyShardedStrategy, "fairscale_fsdp"),
        (DDPShardedStrategy, "fairscale_sharded"),
        (DDPSpawnShardedStrategy, "fairscale_sharded"),
    ):
        made: Any = cls()
        assert isinstance(made, cls) and isinstance(made, Strategy) and made.name == name


@pytest.mark.full
def test_importing_lightning_does_not_import_fairscale() -> None:
    code = "import sys, lightning.pytorch as pl, lightning.fabric; import nnx; nnx.StrategyRegistry.names()\n"
    code += "assert 'fairscale_fsdp' in nnx.StrategyRegistry.names(), nnx.StrategyRegistry.names()\n"
    code += "assert not [name for name in sys.modules if name.startswith('fairscale')]\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
