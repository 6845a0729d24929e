"""Building strategies: accepted options, and the errors for wrong options and wrong targets."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

import nnx
from nnx_core.backend import Backend
from nnx_core.lightning.registration import build
from nnx_core.names.spec import StrategySpec

FSDP = StrategySpec("mine", "nnx_fsdp.backend:FSDPBackend")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"min_num_parms": 5},
            "strategy 'mine' has no option 'min_num_parms'. Did you mean 'min_num_params'?",
        ),
        ({"find_unused_parameters": True}, "strategy 'mine' has no option 'find_unused_parameters'."),
        (
            {"state_dict_type": "full"},
            "state_dict_type='full' is not allowed. Use one of 'deduped', 'sharded'",
        ),
        ({"start_method": "thread"}, "start_method='thread' is not allowed. Use one of 'popen', 'spawn'"),
        ({"opaque_objects": "yes"}, "opaque_objects='yes' is not allowed. Use one of 'error', 'pickle'."),
        ({"timeout": 0}, "timeout=0 is not a positive number of seconds."),
        ({"min_num_params": -1}, "min_num_params=-1 is negative."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("namespace", ["lightning.pytorch", "lightning.fabric"])
def test_wrong_options_are_refused_with_the_remedy(
    options: dict[str, Any], message: str, namespace: str
) -> None:
    with pytest.raises(nnx.OptionError) as caught:
        build(FSDP, namespace=namespace, overrides=options)
    assert str(caught.value).startswith(message)
    if "has no option" in message:
        assert "Its options are activation_checkpointing, auto_wrap, " in str(caught.value)
        assert "and those of every strategy: state_dict_type, " in str(caught.value)
        assert "parallel_devices" not in str(caught.value)


def test_an_option_of_other_strategies_is_said_to_be_theirs() -> None:
    with pytest.raises(nnx.OptionError, match=r"'plan_ngpus'\. It is an option of nnscaler, nnscaler_"):
        nnx.strategy("fsdp_auto", plan_ngpus=2)


def test_options_of_the_caller_win_over_those_of_the_spec() -> None:
    spec = StrategySpec(
        "mine", FSDP.target, init_params={"min_num_params": 5, "timeout": 60.0, "state_dict_type": "sharded"}
    )
    strategy = build(spec, namespace="lightning.pytorch", overrides={"min_num_params": 7})
    assert strategy.backend.options.min_num_params == 7
    assert (strategy.common.timeout, strategy.common.state_dict_type, strategy.name) == (
        60.0,
        "sharded",
        "mine",
    )
    assert strategy.checkpoint_io.state_dict_type == "sharded"


@pytest.mark.parametrize(
    ("namespace", "base"),
    [
        ("lightning.pytorch", "lightning.pytorch.strategies.parallel"),
        ("lightning.fabric", "lightning.fabric.strategies.parallel"),
        ("pytorch_lightning", "pytorch_lightning.strategies.parallel"),
        ("lightning_fabric", "lightning_fabric.strategies.parallel"),
    ],
)
def test_one_spec_builds_for_all_four_trees(namespace: str, base: str) -> None:
    strategy = build(FSDP, namespace=namespace)
    assert pickle.loads(pickle.dumps(type(strategy))) is type(strategy)
    assert base in [parent.__module__ for parent in type(strategy).__mro__]
    assert isinstance(strategy.backend, Backend)
    io = strategy.checkpoint_io
    assert isinstance(io, nnx.CheckpointIO) and strategy.checkpoint_io is io


def test_a_strategy_class_of_another_tree_is_refused_with_the_remedy() -> None:
    spec = StrategySpec("theirs", "lightning.fabric.strategies:DDPStrategy")
    assert type(build(spec, namespace="lightning.fabric")).__name__ == "DDPStrategy"
    with pytest.raises(nnx.OptionError) as caught:
        build(spec, namespace="lightning.pytorch")
    assert str(caught.value).startswith(
        "strategy 'theirs' builds a lightning.fabric.strategies.ddp.DDPStrategy, which is not a "
        "lightning.pytorch strategy. Use the Trainer or Fabric of the package"
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("not_a_module_of_ours:Thing", "No module named 'not_a_module_of_ours'"),
        ("nnx_fsdp.backend:NoSuchThing", "NoSuchThing"),
    ],
)
def test_a_target_that_cannot_be_imported_is_named(target: str, expected: str) -> None:
    with pytest.raises(nnx.PluginError) as caught:
        build(StrategySpec("broken", target), namespace="lightning.pytorch")
    assert "strategy 'broken'" in str(caught.value) and expected in str(caught.value)
    assert "not_a_module_of_ours" not in sys.modules


def test_an_unknown_namespace_is_named() -> None:
    with pytest.raises(nnx.OptionError, match=r"lightning\.pytorch"):
        build(FSDP, namespace="lightning.torch")


def test_a_spec_may_bring_its_own_checkpoint_io() -> None:
    made: list[Any] = []

    def factory() -> nnx.CheckpointIO:
        made.append(nnx.CheckpointIO(state_dict_type="sharded"))
        return made[-1]

    spec = StrategySpec("mine", FSDP.target, checkpoint_io=factory)
    first, second = (build(spec, namespace="lightning.pytorch") for _ in range(2))
    assert [first.checkpoint_io, second.checkpoint_io] == made
