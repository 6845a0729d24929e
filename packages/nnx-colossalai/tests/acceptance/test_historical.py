"""The nine tests of lightning-ColossalAI, each with a numerical reference and without its restriction.

In the order of `shared/facts/colossalai.md` §1b. The reference is a plain loop over float32 masters.
By default the torch optimizers meet two policies each, and each policy two of them, and so do precisions and
clipping modes: every policy clips and steps the same float32 masters, as the bitwise test of tier mixes
shows. The other pairs are marked `full`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

import nnx
from jobs.colossalai_historical_jobs import (
    Training,
    around_a_checkpoint,
    evaluate_checkpoint,
    evaluate_only,
    fit_and_test,
    train,
    train_by_hand,
    untrained_by_hand,
)
from nnx_conformance.pool import WorkerPool

POLICIES = ("auto", "cuda", "cpu", "offloaded")
"""The three of the historical strategy, and the tier between them."""
OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop")
PRECISIONS = ("32-true", "16-mixed")
MIXED = ("16-mixed", "bf16-mixed")
CLIPPED = {"value": 0.01, "norm": 0.1}


def pairs(rows: tuple[str, ...], columns: tuple[str, ...]) -> list[Any]:
    """Return all pairs, every other one marked `full`: the default run tries each row and each column."""
    numbered = product(enumerate(rows), enumerate(columns))
    return [
        pytest.param(row, column, marks=pytest.mark.full if (i + j) % 2 else ())
        for (i, row), (j, column) in numbered
    ]


@cache
def by_hand(**changes: Any) -> dict[str, Any]:
    """The reference, computed once for all strategies that are compared with it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the sums of a product depend on it
    try:
        return train_by_hand(Training(**changes))
    finally:
        torch.set_num_threads(threads)


@cache
def trained(pool: WorkerPool, policy: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the report of each rank of a training, which runs once for all tests."""
    training = Training(options={"placement_policy": policy}, **changes)
    return pool.run(train, training, world_size=training.devices)


def expect_the_same(seen: dict[str, Any], expected: dict[str, Any], *, exact: bool = True) -> None:
    """Weights and losses of a rank are those of the reference."""
    assert seen["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        close = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 1e-6, "rtol": 1e-5}
        torch.testing.assert_close(seen["weights"][name], value, **close)
    assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)


# --- test_invalid_colossalai ----------------------------------------------------------------------


@pytest.mark.full  # `test_names_without_plugins.py` of the core reads the same message in its own process
def test_without_the_package_every_name_says_what_to_install() -> None:
    script = """
        import importlib.metadata
        importlib.metadata.EntryPoints.select = lambda self, **_: ()  # as on a machine without plugins
        import nnx
        from lightning.pytorch import Trainer
        for name in ("colossalai", "colossalai_auto", "colossalai_cuda", "colossalai_cpu"):
            for build in (nnx.strategy, lambda name: Trainer(strategy=name, accelerator="cpu")):
                try:
                    build(name)
                except ImportError as error:
                    assert "Run `pip install nnx-colossalai`." in str(error), error
                else:
                    raise AssertionError(f"{name} was built")
        print("all refused")
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all refused\n"), done.stderr


# --- test_colossalai_strategy_with_trainer --------------------------------------------------------


@pytest.mark.parametrize("name", ["colossalai", "colossalai_auto", "colossalai_cuda", "colossalai_cpu"])
def test_the_strategy_is_given_by_its_name(name: str) -> None:
    plugin = MixedPrecision("16-mixed", "cpu")
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, plugins=[plugin], logger=False)
    assert type(trainer.strategy) is type(nnx.strategy(name))
    assert trainer.strategy.name == name
    assert trainer.precision_plugin is plugin


def test_the_strategy_is_given_as_an_object_with_any_precision() -> None:
    from nnx_colossalai import ColossalAIStrategy

    strategy = ColossalAIStrategy(placement_policy="cpu", initial_scale=32)
    trainer = Trainer(strategy=strategy, accelerator="cpu", precision="bf16-mixed", logger=False)
    assert trainer.strategy is strategy
    assert trainer.precision_plugin.precision == "bf16-mixed"


# --- test_gradient_clip_algorithm_error -----------------------------------------------------------


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(("algorithm", "policy"), pairs(tuple(CLIPPED), POLICIES))
def test_gradients_are_clipped_by_value_and_by_norm(pool: WorkerPool, policy: str, algorithm: str) -> None:
    settings = {"clip": CLIPPED[algorithm], "clip_algorithm": algorithm}
    expected = by_hand(**settings)
    assert expected["losses"] != pytest.approx(by_hand()["losses"], abs=1e-4), "nothing was clipped"
    for seen in trained(pool, policy, **settings):
        # The norm is a sum over all elements, which torch's own function adds up in another order.
        expect_the_same(seen, expected, exact=algorithm == "value")


# --- test_colossalai_optimizer --------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "policy"), pairs(OPTIMIZERS, POLICIES))
def test_the_optimizers_of_torch_are_accepted(pool: WorkerPool, policy: str, optimizer: str) -> None:
    for seen in trained(pool, policy, optimizer=optimizer):
        # torch has no fused RMSprop, and its loop over tensors rounds by their sizes.
        expect_the_same(seen, by_hand(optimizer=optimizer), exact=optimizer != "RMSprop")


@pytest.mark.full
@pytest.mark.parametrize("policy", ["cuda", "cpu"])
@pytest.mark.parametrize("optimizer", ["HybridAdam", "CPUAdam", "FusedAdam"])
def test_the_optimizers_of_colossalai_keep_their_names(pool: WorkerPool, policy: str, optimizer: str) -> None:
    for seen in trained(pool, policy, optimizer=optimizer):
        expect_the_same(seen, by_hand(optimizer=optimizer))


# --- test_warn_colossalai_ignored -----------------------------------------------------------------


@pytest.mark.full
def test_a_backward_of_the_modules_own_is_called(pool: WorkerPool) -> None:
    for seen in trained(pool, "cpu"):
        assert seen["backwards"] == len(by_hand()["losses"]) == 20


# --- test_configure_sharded_model_hook_not_overridden ---------------------------------------------


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("built", ["eagerly", "configure_model", "configure_sharded_model"])
def test_the_model_is_built_wherever_one_likes(pool: WorkerPool, built: str, devices: int) -> None:
    for seen in trained(pool, "cpu", built=built, devices=devices):
        expect_the_same(seen, by_hand(devices=devices))


# --- test_multi_gpu_checkpointing -----------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_the_test_metrics_are_those_of_the_checkpoint_at_every_world_size(
    pool: WorkerPool, tmp_path: Path, policy: str
) -> None:
    training = Training(options={"placement_policy": policy}, precision="16-mixed", epochs=2)
    ranks = pool.run(around_a_checkpoint, training, str(tmp_path), world_size=2)
    for seen in ranks:
        assert seen["before"] == seen["after"] == ranks[0]["before"]
        assert seen["before"]["test_acc"] > 0.7
    for devices in (1, 4):
        other = replace(training, devices=devices, options={"placement_policy": "offloaded"})
        for (metrics,) in pool.run(evaluate_checkpoint, other, ranks[0]["path"], world_size=devices):
            assert metrics == pytest.approx(ranks[0]["before"], abs=1e-5)


# --- test_run_trainer_test_without_fit ------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("precision", "policy"), pairs(PRECISIONS, POLICIES))
def test_a_model_that_never_trained_is_tested(pool: WorkerPool, policy: str, precision: str) -> None:
    training = Training(options={"placement_policy": policy}, precision=precision)
    expected = untrained_by_hand(training)
    ranks = pool.run(evaluate_only, training, world_size=2)
    assert ranks[0] == ranks[1], "the metrics are not reduced over the ranks"
    assert ranks[0]["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert ranks[0]["test_acc"] == pytest.approx(expected["test_acc"])


# --- test_multi_gpu_model_colossalai_fit_test -----------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_fit_and_test_in_16_bits_learn_as_the_plain_loop_does(pool: WorkerPool, policy: str) -> None:
    settings = {"precision": "16-mixed", "epochs": 2, "initial_scale": 32.0}
    expected = by_hand(**settings)["metrics"]
    training = Training(options={"placement_policy": policy}, **settings)
    ranks = pool.run(fit_and_test, training, world_size=2)
    assert ranks[0] == ranks[1], "the metrics are not reduced over the ranks"
    assert min(ranks[0]["train_acc"], ranks[0]["val_acc"], ranks[0]["test_acc"]) > 0.7
    for name, value in expected.items():
        assert ranks[0][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(("precision", "policy"), pairs(MIXED, POLICIES))
def test_masters_in_mixed_precision_are_those_of_the_plain_loop_to_the_bit(
    pool: WorkerPool, policy: str, precision: str
) -> None:
    for seen in trained(pool, policy, precision=precision):
        expect_the_same(seen, by_hand(precision=precision))


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sanity_check_before_training_is_no_longer_refused(pool: WorkerPool, policy: str) -> None:
    for seen in trained(pool, policy):
        assert seen["checked_before_training"]
        expect_the_same(seen, by_hand())
