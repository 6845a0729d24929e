"""Every flag of the old constructor keeps its meaning, or raises an error with the replacement."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.fabric.accelerators as fabric_accelerators
import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.accelerators as trainer_accelerators
import lightning.pytorch.strategies as trainer_strategies
import pytest
import torch
from lightning.fabric.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import plugins as trainer_plugins

import nnx
from nnx_core.errors import NnxError, OptionError, StrategyNotFoundError, UnsupportedError
from nnx_core.lightning.fabric import FabricAdapter
from nnx_lite import DeepSpeedPlugin, LightningLite, Lite
from nnx_lite.flags import fabric_arguments
from nnx_lite.hardware import choose_hardware
from nnx_lite.strategies import RECIPES, fabric_strategy

mirror = pytest.importorskip("pytorch_lightning")
mirror_fabric = pytest.importorskip("lightning_fabric")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what this machine has")


def refused(**flags: Any) -> NnxError:
    with pytest.raises(NnxError) as caught:
        fabric_arguments(**flags)
    assert caught.value.remedy
    return caught.value


# --- accelerator, devices, gpus, tpu_cores ---------------------------------------------------------


@pytest.mark.parametrize("accelerator", [None, "cpu", "CPU", fabric_accelerators.CPUAccelerator()])
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, "auto"),
        (0, 1),
        ("0", 1),
        ([], 1),
        (2, 2),
        ("2", 2),
        (-1, "auto"),
        ("-1", "auto"),
        ("auto", "auto"),
    ],
)
def test_devices_count_processes_on_the_cpu_and_none_is_one(
    accelerator: Any, devices: Any, expected: Any
) -> None:
    flags = fabric_arguments(accelerator=accelerator, devices=devices)
    assert (flags["accelerator"], flags["devices"]) == ("cpu", expected)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([1, 4], [1, 4]), ((0,), [0]), ("1, 4", [1, 4]), ("1,", [1]), (2, 2), (-1, "auto"), ("-1", "auto")],
)
@pytest.mark.parametrize("shorthand", ["devices", "gpus"])
def test_devices_and_gpus_choose_gpus(
    monkeypatch: pytest.MonkeyPatch, shorthand: str, devices: Any, expected: Any
) -> None:
    monkeypatch.setattr(fabric_accelerators.CUDAAccelerator, "is_available", staticmethod(lambda: True))
    accelerator = "gpu" if shorthand == "devices" else None
    chosen = choose_hardware(accelerator, **{"devices": None, shorthand: devices})
    assert (chosen.accelerator, chosen.devices) == ("gpu", expected)


def test_shorthands_agree_with_the_flags_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in ("CUDAAccelerator", "XLAAccelerator"):
        monkeypatch.setattr(getattr(fabric_accelerators, cls), "is_available", staticmethod(lambda: True))
    assert choose_hardware("gpu", 2, gpus=2).devices == 2
    assert choose_hardware("cuda", None, gpus="1, 3").accelerator == "cuda"
    assert choose_hardware(None, None, tpu_cores=8).accelerator == "tpu"
    assert choose_hardware(None, 2, gpus=0, tpu_cores=0).accelerator == "cpu"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 2, "tpu_cores": 8}, "gpus=2 and tpu_cores=8 request two accelerators."),
        ({"gpus": 2, "accelerator": "cpu"}, "gpus=2 contradicts accelerator='cpu'."),
        ({"tpu_cores": 8, "accelerator": "gpu"}, "tpu_cores=8 contradicts accelerator='gpu'."),
        ({"gpus": 2, "devices": 4}, "gpus=2 contradicts devices=4."),
        ({"devices": 0, "accelerator": "gpu"}, "devices=0 requests no device of accelerator='gpu'."),
        ({"devices": [1, 4]}, "devices=[1, 4] are indices of devices, and the accelerator is the CPU."),
        ({"devices": "two"}, "devices='two' is neither a number of devices nor indices of devices."),
        ({"devices": ","}, "devices=',' is neither a number of devices nor indices of devices."),
        ({"devices": -2}, "devices=-2 is neither a number of devices nor indices of devices."),
        ({"devices": True}, "devices=True is neither a number of devices nor indices of devices."),
        ({"gpus": [0, -1]}, "gpus=[0, -1] is neither a number of devices nor indices of devices."),
        ({"num_nodes": 0}, "num_nodes=0 is not a number of nodes."),
        ({"num_nodes": "2"}, "num_nodes='2' is not a number of nodes."),
        ({"accelerator": "gqu"}, "accelerator='gqu' is unknown."),
        ({"accelerator": "ipu"}, "accelerator='ipu': Graphcore's IPUs are no longer supported by Lightning."),
        ({"accelerator": "hpu"}, "accelerator='hpu': Intel Gaudi moved to the package lightning-habana."),
        ({"accelerator": 2}, "accelerator=2 is not an accelerator of Fabric."),
        ({"strategy": 2}, "strategy=2 is neither a name nor a strategy."),
        ({"precision": 8}, "precision=8 is unknown."),
        ({"precision": "bf-16"}, "precision='bf-16' is unknown."),
        ({"precision": True}, "precision=True is unknown."),
    ],
)
def test_a_value_that_means_nothing_or_contradicts_another_is_one_clear_error(
    flags: dict[str, Any], message: str
) -> None:
    error = refused(**flags)
    assert isinstance(error, OptionError) and error.message == message


def test_positional_slips_are_told_apart() -> None:
    assert "so pass `strategy='ddp'`" in refused(accelerator="ddp").remedy
    assert "so pass `strategy='ddp_sharded'`" in refused(accelerator="ddp_sharded").remedy
    assert "Did you mean `devices=2`? The first argument is the accelerator." in refused(accelerator=2).remedy
    assert "Did you mean `devices=[0, 1]`?" in refused(strategy=[0, 1]).remedy
    assert "Did you mean 'gpu'?" in refused(accelerator="gqu").remedy
    assert "Did you mean 'bf16'?" in refused(precision="bf-16").remedy
    with pytest.raises(OptionError, match=r"^accelerator='ddp' is unknown\. It is a strategy"):
        Lite("ddp")


def test_flags_are_accepted_by_position_in_the_old_order() -> None:
    lite = Lite("cpu", "ddp", 2, 1, 64, None, None, None)
    assert isinstance(lite.strategy, fabric_strategies.DDPStrategy)
    assert (lite.strategy.num_processes, lite._precision.precision) == (2, "64-true")
    assert [*inspect.signature(Lite).parameters][:8] == [
        *("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "gpus", "tpu_cores")
    ]


@needs_no_gpu
@pytest.mark.parametrize(
    "flags",
    [{"accelerator": "gpu"}, {"accelerator": "cuda", "strategy": "ddp"}, {"gpus": 2}, {"accelerator": "tpu"},
     {"tpu_cores": 8}, {"accelerator": "mps"}],
)  # fmt: skip
def test_hardware_that_is_not_there_is_an_error_before_any_process_starts(flags: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="torch finds none on this machine; it finds cpu") as caught:
        Lite(**flags)
    assert "accelerator='auto'" in caught.value.remedy


def test_accelerator_objects_of_trainer_and_fabric_count_as_their_names() -> None:
    for module in (trainer_accelerators, fabric_accelerators, mirror.accelerators):
        assert fabric_arguments(accelerator=module.CPUAccelerator())["accelerator"] == "cpu"

    class Own(fabric_accelerators.CPUAccelerator):
        pass

    own = Own()
    assert fabric_arguments(accelerator=own)["accelerator"] is own

    class Trainers(trainer_accelerators.CPUAccelerator):
        pass

    assert "is not an accelerator of Fabric" in refused(accelerator=Trainers()).message


# --- strategy --------------------------------------------------------------------------------------


def test_every_strategy_that_nnx_registers_can_be_built_by_lite_and_by_fabric() -> None:
    from lightning.fabric import Fabric

    specs = [nnx.StrategyRegistry.get(name) for name in nnx.StrategyRegistry.names()]
    names = [spec.name for spec in specs if spec.capabilities.fabric]
    assert {"fsdp_auto", "nnscaler", "colossalai"} <= {*names} or not names
    for name in names:
        for made in (Lite(strategy=name, devices=2), Fabric(strategy=name, devices=2, accelerator="cpu")):
            assert isinstance(made.strategy, FabricAdapter) and made.strategy.name == name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("DDP", "ddp"),
        ("ddp_spawn", "ddp_spawn"),
        ("dp", "dp"),
        ("deepspeed", "deepspeed"),
        ("tpu_spawn", "xla"),
        ("ddp_sharded", "fsdp_auto"),
    ],
)
def test_strategy_names_of_old_become_what_the_catalog_says(given: Any, expected: str) -> None:
    assert fabric_arguments(strategy=given)["strategy"] == expected


def test_the_spawning_variant_of_a_name_of_old_still_spawns() -> None:
    pytest.importorskip("nnx_fsdp")
    made = fabric_arguments(strategy="ddp_sharded_spawn")["strategy"]
    assert (made.name, made.common.start_method) == ("fsdp_auto", "spawn")


@pytest.mark.parametrize(
    ("name", "says"),
    [("dddp", "ddp"), ("horovod", "Horovod"), ("collaborative", "Hivemind"), ("hpu_parallel", "Gaudi")],
)
def test_unknown_and_historical_strategies_are_explained(name: str, says: str) -> None:
    with pytest.raises(StrategyNotFoundError, match=says) as caught:
        Lite(strategy=name)
    assert caught.value.remedy


@pytest.mark.parametrize("space", [trainer_strategies, mirror.strategies, mirror_fabric.strategies])
def test_ddp_objects_of_trainer_and_of_the_other_copy_become_fabrics(space: Any) -> None:
    given = space.DDPStrategy(
        start_method="spawn", find_unused_parameters=True, process_group_backend="gloo",
        cluster_environment=mirror_fabric.plugins.environments.LightningEnvironment(),
    )  # fmt: skip
    lite = Lite(strategy=given, devices=2)
    assert type(lite.strategy) is fabric_strategies.DDPStrategy
    assert lite.strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert (lite.strategy._start_method, lite.strategy._process_group_backend) == ("spawn", "gloo")
    assert lite.strategy.cluster_environment.world_size() == 2


def test_fsdp_and_single_device_objects_keep_their_options() -> None:
    given = trainer_strategies.FSDPStrategy(
        sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded",
        activation_checkpointing_policy={torch.nn.Linear},
    )  # fmt: skip
    made = fabric_strategy(given)
    assert type(made) is fabric_strategies.FSDPStrategy and made.sharding_strategy.name == "SHARD_GRAD_OP"
    assert made._state_dict_type == "sharded" and made._fsdp_kwargs == given.kwargs
    assert made._activation_checkpointing_kwargs == given._activation_checkpointing_kwargs
    lite = Lite(strategy=trainer_strategies.SingleDeviceStrategy("cpu"), accelerator="auto")
    assert type(lite.strategy) is fabric_strategies.SingleDeviceStrategy
    assert lite.device == torch.device("cpu")


def test_recipes_name_what_trainer_keeps_and_fabric_takes() -> None:
    for name, recipe in RECIPES.items():
        takes = inspect.signature(getattr(fabric_strategies, name)).parameters
        for space in (trainer_strategies, fabric_strategies):
            classes = getattr(space, name).__mro__ if hasattr(space, name) else ()
            source = "".join(inspect.getsource(cls) for cls in classes if cls.__name__.endswith("Strategy"))
            for keyword, attributes in recipe.arguments.items():
                assert keyword in takes, (name, keyword)
                assert not source or any(f"self.{a}" in source for a in attributes), (space, name, attributes)
            for attribute in recipe.copied:
                assert f"self.{attribute}" in source


@pytest.mark.parametrize(
    "cls", ["nnx_nnscaler.strategy:NnScalerStrategy", "nnx_colossalai.strategy:ColossalAIStrategy"]
)
def test_strategies_of_nnx_for_trainer_are_built_for_fabric_with_their_options(cls: str) -> None:
    module, _, name = cls.partition(":")
    made = getattr(pytest.importorskip(module), name)(timeout=77.0)
    lite = Lite(strategy=made, devices=2)
    assert isinstance(lite.strategy, FabricAdapter) and lite.strategy.root == "lightning.fabric"
    assert lite.strategy.backend.options == made.backend.options and lite.strategy.common.timeout == 77.0
    assert lite.strategy.backend is not made.backend


@pytest.mark.parametrize("space", ["lightning.pytorch", "pytorch_lightning", "lightning_fabric"])
def test_nnx_strategy_of_any_tree_is_accepted(space: str) -> None:
    pytest.importorskip("nnx_fsdp")
    made = fabric_strategy(nnx.strategy("fsdp_auto", namespace=space, reshard_after_forward=False))
    assert (made.root, made.backend.options.reshard_after_forward) == ("lightning.fabric", False)


def test_strategy_objects_that_cannot_be_translated_say_why() -> None:
    class Mine(trainer_strategies.DDPStrategy):
        pass

    error = refused(strategy=Mine())
    assert error.message == (
        "strategy=Mine() is a subclass of lightning.pytorch.strategies.ddp.DDPStrategy; Fabric never calls "
        "its overrides."
    )
    hooked = trainer_strategies.DDPStrategy(ddp_comm_hook=print)
    assert refused(strategy=hooked).message == (
        "strategy=DDPStrategy(ddp_comm_hook=...): Fabric has no such option."
    )
    parallel = refused(strategy=trainer_strategies.ModelParallelStrategy())
    assert "has no counterpart in Fabric" in parallel.message and "parallelize_fn" in parallel.remedy
    own = fabric_strategies.DDPStrategy(accelerator=fabric_accelerators.CPUAccelerator())
    assert refused(strategy=own, accelerator="auto", precision=3).message == "precision=3 is unknown."


@needs_no_gpu
def test_a_strategy_object_that_brings_its_devices_decides_the_accelerator() -> None:
    devices = [torch.device("cpu")] * 2
    lite = Lite(strategy=trainer_strategies.DDPStrategy(parallel_devices=devices))
    assert lite.strategy.num_processes == 2
    error = refused(strategy=trainer_strategies.DDPStrategy(parallel_devices=devices), accelerator="gpu")
    assert error.message == "accelerator='gpu' contradicts the 'cpu' of strategy=DDPStrategy()."


def test_the_old_name_of_the_deepspeed_strategy_can_be_imported() -> None:
    assert DeepSpeedPlugin is fabric_strategies.DeepSpeedStrategy and LightningLite is Lite is nnx.Lite
    pytest.importorskip("deepspeed")
    assert DeepSpeedPlugin(stage=2).config["zero_optimization"]["stage"] == 2


# --- precision and plugins -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [(16, "bf16-mixed"), ("16", "bf16-mixed"), (32, "32-true"), ("32", "32-true"), (64, "64-true"),
     ("bf16", "bf16-mixed"), ("BF16", "bf16-mixed"), ("16-true", "16-true"), (None, "32-true")],
)  # fmt: skip
def test_precision_keeps_its_meaning_and_float16_becomes_bfloat16_on_the_cpu_as_then(
    given: Any, expected: str
) -> None:
    assert Lite(precision=given)._precision.precision == expected


@pytest.mark.parametrize("space", [trainer_plugins, mirror.plugins, mirror_fabric.plugins])
def test_precision_plugins_of_trainer_and_of_the_other_copy_become_fabrics(space: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    cases = [
        (space.MixedPrecision("16-mixed", "cpu", scaler), MixedPrecision),
        (space.HalfPrecision("bf16-true"), HalfPrecision),
        (space.DoublePrecision(), DoublePrecision),
        (space.Precision(), Precision),
    ]
    for plugin, expected in cases:
        lite = Lite(plugins=plugin)
        assert type(lite._precision) is expected and lite._precision.precision == plugin.precision
        assert getattr(lite._precision, "scaler", None) is getattr(plugin, "scaler", None)


@pytest.mark.parametrize(
    "name", ["nnx_nnscaler.strategy:NnScalerPrecision", "nnx_colossalai.loss_scale:ColossalAIPrecision"]
)
def test_precision_plugins_of_nnx_become_fabrics(name: str) -> None:
    module, _, cls = name.partition(":")
    made = Lite(plugins=[getattr(pytest.importorskip(module), cls)("16-mixed")])._precision
    assert type(made) is MixedPrecision and (made.precision, made.device) == ("16-mixed", "cpu")


def test_environments_and_checkpoint_ios_of_any_copy_are_taken() -> None:
    class Cluster(mirror_fabric.plugins.environments.LightningEnvironment):
        main_port = 4711

    class Files(mirror_fabric.plugins.io.TorchCheckpointIO):
        pass

    io = Files()
    lite = Lite(strategy="ddp", devices=2, plugins=[Cluster(), io])
    environment = lite.strategy.cluster_environment
    assert (environment.main_port, environment.world_size(), environment.local_rank()) == (4711, 2, 0)
    assert environment.creates_processes_externally is False and environment.node_rank() == 0
    assert lite.strategy.checkpoint_io.inner is io
    for plugin in (LightningEnvironment(), TorchCheckpointIO(), nnx.CheckpointIO()):
        assert plugin in fabric_arguments(plugins=plugin)["plugins"]


@pytest.mark.parametrize(
    ("plugin", "message", "remedy"),
    [
        (
            "ddp_sharded",
            "plugins='ddp_sharded' is a strategy, which the first LightningLite accepted as",
            "strategy=",
        ),
        (trainer_strategies.DDPStrategy(), "plugins='DDPStrategy' is a strategy, which", "strategy="),
        (
            trainer_plugins.TorchSyncBatchNorm(),
            "plugins='TorchSyncBatchNorm' changes the layers",
            "convert_sync",
        ),
        (
            trainer_plugins.AsyncCheckpointIO(),
            "plugins=AsyncCheckpointIO() wraps the checkpoint IO",
            "async_save",
        ),
        (object(), "plugins='object' is not a kind that Lite knows.", "ClusterEnvironment"),
    ],
)
def test_plugins_that_only_trainer_or_the_first_lite_knew_are_refused(
    plugin: Any, message: str, remedy: str
) -> None:
    error = refused(plugins=plugin)
    assert message in error.message and remedy in error.remedy


def test_precision_is_chosen_once() -> None:
    class Mine(trainer_plugins.MixedPrecision):
        pass

    error = refused(plugins=Mine("bf16-mixed", "cpu"))
    assert error.message.startswith("plugins=Mine(precision='bf16-mixed') is a plugin of Trainer without")
    error = refused(plugins=MixedPrecision("bf16-mixed", "cpu"), precision=64)
    assert error.message == "precision=64 contradicts the MixedPrecision object that you passed."
    strategy = trainer_strategies.DDPStrategy(precision_plugin=trainer_plugins.HalfPrecision("bf16-true"))
    assert Lite(strategy=strategy)._precision.precision == "bf16-true"
