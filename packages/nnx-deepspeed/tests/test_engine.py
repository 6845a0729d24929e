"""Unsupported requests are refused on every rank; masters are exact and follow writes to parameters."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.deepspeed_jobs import (
    SHORT,
    clamp,
    leave_parameters_out,
    masters,
    refused,
    refused_without_a_compiler,
    run_host_adam,
    step_after_fit,
    train_in_other_orders,
    train_twice,
)
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_deepspeed import engine, partitions
from nnx_deepspeed._operators_compat import prepare_operators
from nnx_deepspeed.config import refuse_unfit, with_fitting_buckets
from nnx_deepspeed.unused import allows_gaps
from nnx_test_helpers.engine_resume_jobs import run_and_save, tensors_of
from nnx_test_helpers.training import Run

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PARTS = {"persistence_threshold": 0}
STAGES = [("nnx_deepspeed_1", {}), ("nnx_deepspeed_2", {}), ("nnx_deepspeed_3", PARTS)]
WHOLE = ("nnx_deepspeed_3", {})
HOST = ("nnx_deepspeed_3_cpu", PARTS)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lbfgs", "LBFGS cannot work on DeepSpeed's flat partitions"),
        ("adafactor", "Adafactor cannot work on DeepSpeed's flat partitions"),
        ("sparse adam", "SparseAdam cannot work on DeepSpeed's flat partitions"),
        ("adagrad in groups", "DeepSpeed rebuilds Adagrad with one param group; this one has 2"),
        ("two optimizers", "DeepSpeed trains one module with one optimizer; there are 2"),
        ("a group added", "a param group was added while training"),
        ("another order", "nothing has stepped with them"),
        ("another order later", "in the backward before this one the gradients had another order on one"),
        ("another order at the end", "in the last backward the gradients had another order on one rank"),
        ("frozen in mid-run", "embed.weight was frozen while training"),
        (
            "gradients of its own",
            "the gradient of embed.weight was assigned, and no backward of the strategy",
        ),
        ("state dropped", "`optimizer.state` was read or written while training"),
        ("used again", "sometimes.weight is used in this step and was not used in an earlier one"),
        ("no closure", "takes no closure, and DeepSpeed's own step runs in one"),
        ("arguments of backward", "takes a loss and `retain_graph`, nothing else"),
        ("mixed dtypes", "DeepSpeed trains float32 parameters; embed.weight is float64"),
        ("64-true", "DeepSpeed keeps float32 masters; precision='64-true' needs another dtype"),
        ("untested", "DeepSpeed has not tested SGD with ZeRO, and zero_allow_untested_optimizer is False"),
        (
            "forced",
            "the config forces DeepSpeed's own optimizers where they are offloaded; this one is AdamW",
        ),
    ],
)
def test_what_deepspeed_cannot_train_is_refused_on_every_rank(
    pool: WorkerPool, kind: str, message: str
) -> None:
    for error in pool.run(refused, kind, world_size=2):
        assert message in error
        assert error.startswith("UnsupportedError")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another stage", "the DeepSpeed config says stage=3, expected 2"),
        ("clipping twice", "the DeepSpeed config says gradient_clipping=1.0, expected 0"),
        ("misspelt", "DeepSpeed refuses its config: reduce_bucket_sise: Extra inputs are not permitted"),
    ],
)
def test_a_config_that_cannot_be_is_refused_on_every_rank(pool: WorkerPool, kind: str, message: str) -> None:
    for error in pool.run(refused, kind, world_size=2):
        assert message in error
        assert error.startswith("OptionError")


@pytest.mark.full
def test_an_operator_that_cannot_be_compiled_is_named_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    for error in pool.run(refused_without_a_compiler, str(tmp_path), world_size=2):
        assert error.startswith("UnsupportedError: DeepSpeed's operator 'cpu_adam' could not be compiled")
        assert "c++ cannot be found" in error
        assert "or use an optimizer that needs no compiler, such as" in error


def test_where_ninja_is_missing_too_both_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    prepare_operators()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match=r"ninja and c\+\+ cannot be found"):
        CPUAdamBuilder().jit_load(verbose=False)


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Stands for DeepSpeed's, which only its name tells apart, and which needs a compiler."""


def test_an_optimizer_of_the_host_is_refused_where_the_state_is_on_a_device() -> None:
    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    refuse_unfit(optimizer, config=offloaded, device=torch.device("cuda", 0))
    refuse_unfit(optimizer, config={}, device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"DeepSpeedCPUAdam steps on the host.*is on cuda:0"):
        refuse_unfit(optimizer, config={}, device=torch.device("cuda", 0))


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("strategy", "options"), [*STAGES, WHOLE, HOST])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_written_through_data_count_from_then_on(
    pool: WorkerPool, strategy: str, options: dict[str, int], precision: str
) -> None:
    run = Run(steps=3, precision=precision)
    alone = pool.run(clamp, replace(run, strategy="auto", devices=1), world_size=1)[0]
    tolerance = 1e-5 if precision == "32-true" else 0.02
    for losses, largest in pool.run(clamp, replace(run, strategy=strategy, options=options), world_size=2):
        assert losses == pytest.approx(alone[0], abs=tolerance)
        assert largest <= 0.1004  # 0.1 as bfloat16


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("strategy", "options"), STAGES)
def test_the_optimizer_steps_by_hand_after_fit(
    pool: WorkerPool, strategy: str, options: dict[str, int]
) -> None:
    run = Run(steps=2)
    alone = pool.run(step_after_fit, replace(run, strategy="auto", devices=1), world_size=1)[0]
    for weights in pool.run(step_after_fit, replace(run, strategy=strategy, options=options), world_size=2):
        for mine, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=0)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("strategy", "options"), STAGES)
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("32-true", "adamw"), ("bf16-mixed", "adamw"), ("32-true", "sgd")]
)
def test_what_a_step_does_not_use_stays_as_it_is(
    pool: WorkerPool, strategy: str, options: dict[str, int], precision: str, optimizer: str
) -> None:
    run = Run(steps=3, precision=precision, optimizer=optimizer)
    plain = replace(run, strategy="auto", devices=1)
    seen, weights, with_state = pool.run(leave_parameters_out, plain, world_size=1)[0]
    assert seen == [True, False, optimizer == "sgd"]
    tolerance = 2e-5 if precision == "32-true" else 0.1
    mine = replace(run, strategy=strategy, options=options)
    for others, found, found_state in pool.run(leave_parameters_out, mine, world_size=2):
        assert others == seen
        assert found_state == with_state
        for name, weight in found.items():
            torch.testing.assert_close(weight, weights[name], atol=tolerance, rtol=0, msg=name)
        assert torch.equal(found["frozen.weight"], weights["frozen.weight"])
        assert torch.equal(found["pooler.weight"], weights["pooler.weight"])


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("strategy", "options"), [*STAGES[:2], WHOLE])
def test_layers_called_in_an_order_of_each_ranks_own_train_as_under_ddp(
    pool: WorkerPool, strategy: str, options: dict[str, int]
) -> None:
    expected = pool.run(train_in_other_orders, replace(SHORT, strategy="ddp"), world_size=2)[0]
    run = replace(SHORT, strategy=strategy, options=options)
    for found in pool.run(train_in_other_orders, run, world_size=2):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


def test_whether_a_parameter_may_miss_steps_is_found_out_by_trying() -> None:
    allowed = [
        allows_gaps(kind([torch.nn.Parameter(torch.zeros(2))], **settings))
        for kind, settings in (
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
            (torch.optim.RMSprop, {}),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
            (torch.optim.AdamW, {}),
            (torch.optim.Rprop, {}),
        )
    ]
    assert allowed == [True, True, False, False, False]


def test_buckets_are_no_larger_than_what_is_reduced() -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 200_000_000}}
    fitting = with_fitting_buckets(config, torch.nn.Linear(3, 2))
    assert fitting["zero_optimization"]["reduce_bucket_size"] == 8
    assert config["zero_optimization"]["reduce_bucket_size"] == 200_000_000


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("strategy", "options"), [*STAGES, HOST])
def test_masters_of_16_bit_weights_begin_exact(
    pool: WorkerPool, strategy: str, options: dict[str, int]
) -> None:
    run = replace(SHORT, strategy=strategy, options=options, precision="bf16-mixed")
    assert pool.run(masters, run, world_size=2) == [(True, True)] * 2


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("strategy", "options"), [*STAGES, HOST])
def test_a_resumed_run_with_16_bit_weights_goes_on_as_if_it_had_not_stopped(
    pool: WorkerPool, tmp_path: Path, strategy: str, options: dict[str, int]
) -> None:
    run = Run(strategy=strategy, options=options, steps=4, precision="bf16-mixed")
    first, second = f"{tmp_path}/first.ckpt", f"{tmp_path}/second.ckpt"
    whole = pool.run(run_and_save, run, 2, first, world_size=2)
    resumed = pool.run(run_and_save, replace(run, resume=first), 2, second, world_size=2)
    assert [seen.losses for seen in resumed] == [seen.losses[2:] for seen in whole]


def _is_compiled(operator: str) -> bool:
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
    return any(Path(folder).expanduser().glob(f"**/{operator}.so"))


needs_cpu_adam = pytest.mark.skipif(
    not _is_compiled("cpu_adam"),
    reason="DeepSpeedCPUAdam is not compiled, which takes minutes: make one with ninja and g++ on the path",
)


@pytest.mark.quick(every=6)
@needs_cpu_adam
@pytest.mark.parametrize(("strategy", "options"), [STAGES[1], STAGES[2], HOST])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.02)])
def test_deepspeeds_adam_on_the_host_trains_like_torchs(
    pool: WorkerPool, strategy: str, options: dict[str, int], precision: str, tolerance: float
) -> None:
    run = Run(strategy=strategy, options=options, steps=3, precision=precision)
    alone = pool.run(train_twice, replace(run, strategy="auto", options={}, devices=1), False, world_size=1)
    for losses in pool.run(train_twice, run, True, world_size=2):
        assert losses == pytest.approx(alone[0], abs=tolerance)


@needs_cpu_adam
def test_torchs_adamw_and_deepspeeds_resume_each_other(pool: WorkerPool, tmp_path: Path) -> None:
    theirs = Run(strategy="nnx_deepspeed_2", steps=4)
    torchs = Run(strategy="fsdp_auto", options={"min_num_params": 100}, steps=4)
    stage_3 = replace(theirs, strategy="nnx_deepspeed_3", options=PARTS)
    for first, save, second, resume in (
        (theirs, run_host_adam, torchs, run_and_save),
        (torchs, run_and_save, stage_3, run_host_adam),
    ):
        saved, again = (tmp_path / f"{first.strategy}-{name}.ckpt" for name in ("saved", "again"))
        whole = pool.run(save, first, 2, str(saved), world_size=2)
        after = pool.run(resume, replace(second, resume=str(saved)), 2, str(again), world_size=2)
        expected, found = tensors_of(saved), tensors_of(again)
        assert any("exp_avg_sq" in name for name in found)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert after[0].losses == pytest.approx(whole[0].losses[2:], abs=1e-5)


def test_stage_3_moves_no_whole_module_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def initialize(model: nn.Module, config: dict[str, Any], **_: Any) -> tuple[str]:
        moved.append(model.to(torch.device("meta")).weight.is_meta)  # as DeepSpeed's engine does
        return ("the engine",)

    monkeypatch.setattr("deepspeed.initialize", initialize)
    for stage in (3, 2):
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters())
        config = {"zero_optimization": {"stage": stage}}
        engine._initialize(module, optimizer, config, device=torch.device("cpu"), local_rank=0)
        assert "to" not in vars(module)
    assert moved == [False, True]


def test_written_weights_are_found_and_taken_over_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_CHUNK", 4)
    masters = torch.randn(11)
    weights = masters.to(torch.bfloat16)
    before = masters.clone()
    same = torch.ones(3)
    assert not partitions.were_written([(weights, masters), (same, same)])
    weights[9] = 7.5
    assert partitions.were_written([(weights, masters), (same, same)])
    partitions.follow(masters, weights)
    assert masters[9] == 7.5
    before[9] = 7.5
    assert torch.equal(masters, before)  # others are as exact as they were


def test_deepspeed_takes_the_trainers_device_and_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def initialize(**given: Any) -> tuple[str]:
        seen.update(given, local_rank=os.environ["LOCAL_RANK"])
        return ("the engine",)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("deepspeed.initialize", initialize)
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    device = torch.device("cuda", 3)
    config = {"zero_optimization": {"stage": 3}}
    monkeypatch.setattr(engine, "move_buffers_to", lambda *_: None)  # there is no such device here
    assert engine._initialize(module, optimizer, config, device=device, local_rank=1) == "the engine"
    assert (seen["args"].device_rank, seen["local_rank"]) == (3, "1")
    assert "LOCAL_RANK" not in os.environ  # or Lightning would start no processes for the next Trainer
