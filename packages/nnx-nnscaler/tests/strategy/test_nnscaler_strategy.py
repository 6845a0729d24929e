"""`NnScalerStrategy` and the effects of the engine's options with Trainer, in real processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from jobs.nnscaler_strategy_jobs import dtypes_with_masters, interrupted, trained_with_the_class
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import OptionError
from nnx_nnscaler import ComputeConfig, NnScalerPrecision, NnScalerStrategy
from nnx_test_helpers.training import Run, train


def test_the_original_constructor_makes_a_strategy_of_the_trainer_in_use():
    precision = NnScalerPrecision("bf16-true")
    strategy = NnScalerStrategy(
        compute_config=ComputeConfig(2, 2),
        pas_policy="tp",
        gen_savedir=Path("code"),
        reuse="moo",
        instance_name="mine",
        precision_plugin=precision,
        timeout=60,
    )
    assert isinstance(strategy, NnScalerStrategy) and isinstance(strategy, Strategy)
    options = strategy.backend.options
    assert (options.policy, options.plan_ngpus, options.gen_savedir) == ("tp", 2, "code")
    assert (options.reuse, options.instance_name) == ("moo", "mine")
    assert (strategy.common.state_dict_type, strategy.common.timeout) == ("sharded", 60)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy is strategy
    assert trainer.precision_plugin is precision


def test_every_argument_has_a_default():
    strategy = NnScalerStrategy()
    assert strategy.backend.options.policy == "autodist"
    assert strategy.backend.options.reuse == "match"


def test_a_subclass_is_one_of_the_strategy():
    class Mine(NnScalerStrategy):
        own = True

    strategy = Mine(pas_policy="dp")
    assert isinstance(strategy, Mine) and isinstance(strategy, Strategy) and strategy.own


@pytest.mark.full
def test_it_and_its_precision_are_of_the_copy_of_lightning_that_is_in_use():
    code = (
        "import pytorch_lightning as pl; from nnx_nnscaler import NnScalerPrecision, NnScalerStrategy;"
        "assert isinstance(NnScalerPrecision('bf16-true'), pl.plugins.precision.Precision);"
        "assert isinstance(NnScalerStrategy(), pl.strategies.Strategy);"
        "pl.Trainer(strategy=NnScalerStrategy(), accelerator='cpu', devices=2, logger=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_dict_type": "full"}, r"state_dict_type='full' is not allowed"),
        ({"pas_policy": "pq"}, r"policy='pq' is not allowed"),
        ({"gen_savdir": "x"}, r"'nnscaler' has no option 'gen_savdir'\. Did you mean 'gen_savedir'"),
    ],
)
def test_arguments_that_are_not_taken_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        NnScalerStrategy(**arguments)


def test_code_written_for_the_original_trains_saves_and_merges(pool: WorkerPool, tmp_path: Path):
    expected = pool.run(train, Run(strategy="auto", devices=1, steps=4), world_size=1)[0].losses
    for losses, precision, same in pool.run(trained_with_the_class, str(tmp_path), world_size=2):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert precision == "32-true"
        assert same


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [2, 4])
def test_nnscaler_dp_is_bit_equal_to_ddp(pool: WorkerPool, devices: int):
    run = Run(strategy="ddp", devices=devices, groups=2)
    expected = pool.run(train, run, world_size=devices)[0]
    for outcome in pool.run(train, replace(run, strategy="nnscaler_dp"), world_size=devices):
        assert outcome.losses == expected.losses
        assert outcome.digest == expected.digest


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"zero_ngroups": 2}, {"compute_config": {"reducer_bucket_cap_mb": 0.001, "use_zero": True}}]
)
def test_parts_may_be_stored_in_several_copies_and_in_small_buckets(
    pool: WorkerPool, options: dict[str, Any]
):
    run = Run(strategy="nnscaler_zero", options=options, devices=4, steps=4, clip=0.05)
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(train, alone, world_size=1)[0]
    for outcome in pool.run(train, run, world_size=4):
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["nnscaler_dp", "nnscaler_zero"])
def test_with_masters_the_optimizer_works_in_float32_and_everything_else_in_half(
    pool: WorkerPool, strategy: str
):
    run = Run(strategy=strategy, options={"fp32_masters": True}, precision="bf16-true", steps=2)
    for seen in pool.run(dtypes_with_masters, run, world_size=2):
        assert str(seen["parameter"]) == "torch.bfloat16"
        assert str(seen["gradient"]) in ("None", "torch.bfloat16")
        assert str(seen["state"]) == "torch.float32"


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["nnscaler_dp", "nnscaler_zero"])
def test_masters_are_in_the_checkpoint_so_that_a_run_goes_on_exactly(
    pool: WorkerPool, tmp_path: Path, strategy: str
):
    run = Run(strategy=strategy, options={"fp32_masters": True}, precision="bf16-true", steps=6)
    for whole, resumed in pool.run(interrupted, run, str(tmp_path / "last.ckpt"), 3, world_size=2):
        assert resumed == whole


def test_inference_only_refuses_to_train(pool: WorkerPool):
    options = {"compute_config": {"inference_only": True}}
    with pytest.raises(JobError, match=r"inference_only=True, but an optimizer needs training"):
        pool.run(train, Run(strategy="nnscaler_dp", options=options, steps=1), world_size=2)


def test_recomputing_is_refused_where_no_program_could_do_it(pool: WorkerPool):
    run = Run(strategy="nnscaler_dp", options={"recompute": "blocks.*"}, steps=1)
    with pytest.raises(JobError, match=r"recompute has no effect with units of one rank"):
        pool.run(train, run, world_size=2)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("policy", ["tp", "data", "autodist"])
def test_planned_recomputed_verified_and_saved_plans_train_like_one_process(
    pool: WorkerPool, tmp_path: Path, policy: str
):
    plan = str(tmp_path / "plan.json")
    options = {"gen_savedir": str(tmp_path), "policy": policy, "verify": True, "save_plan": plan}
    run = Run(strategy="nnscaler", options=options, steps=4, groups=2, clip=0.05)
    expected = pool.run(train, replace(run, strategy="auto", options={}, devices=1), world_size=1)[0]
    options = {**options, "recompute": "blocks.*"}
    loaded = {"gen_savedir": str(tmp_path / "other"), "load_plan": plan}
    for chosen in (options, loaded):
        for outcome in pool.run(train, replace(run, options=chosen), world_size=2):
            assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
    with pytest.raises(JobError, match=r"is for 2 ranks .* and 4 are running"):
        pool.run(train, replace(run, options=loaded, devices=4), world_size=4)


def test_a_world_that_the_plan_is_not_for_is_refused(pool: WorkerPool):
    options = {"compute_config": {"plan_ngpus": 2, "runtime_ngpus": 8}}
    with pytest.raises(JobError, match=r"runtime_ngpus=8, but 2 ranks are running"):
        pool.run(train, Run(strategy="nnscaler", options=options, steps=1), world_size=2)
