"""Every FSDP strategy and option trains like one process, and shards the model as documented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jobs.fsdp_jobs import (
    count_calls,
    count_compilations,
    counting_compiler,
    evaluate_everything,
    fit_error,
    init_differently,
    norms_of_copies,
    train_and_look,
    train_twice,
)
from nnx_conformance.pool import WorkerPool
from nnx_fsdp.options import MixedPrecision
from nnx_test_helpers.training import Block, Outcome, Run, train

BLOCKS = {"min_num_params": 100}
UNITS = ["", "blocks.0", "blocks.1", "blocks.2"]
TIED = ["back.weight"]


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> Outcome:
    """One plain process."""
    return pool.run(train, Run(strategy="auto", devices=1, steps=4), world_size=1)[0]


def _check(
    pool: WorkerPool, expected: Outcome, run: Run, *, devices: int = 2, atol: float = 1e-5
) -> dict[str, Any]:
    results = pool.run(train_and_look, replace(run, devices=devices, steps=4), world_size=devices)
    for outcome, _ in results:
        assert outcome.losses == pytest.approx(expected.losses, abs=atol)
    return results[0][1]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_fsdp_auto_shards_the_repeated_blocks_and_the_root(
    pool: WorkerPool, expected: Outcome, devices: int
) -> None:
    seen = _check(pool, expected, Run(options=BLOCKS), devices=devices)
    assert seen["units"] == UNITS
    assert seen["plain"] == []
    assert seen["mesh"] == {(devices,)}
    assert seen["local"] < seen["total"] / devices + 100


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_the_last_block_and_the_root_stay_gathered_for_the_backward(
    pool: WorkerPool, expected: Outcome, reshard: bool | None
) -> None:
    seen = _check(pool, expected, Run(options={**BLOCKS, "reshard_after_forward": reshard}))
    assert seen["gathered"] == {None: ["", UNITS[-1]], True: [], False: UNITS}[reshard]


def test_names_of_parameters_do_not_change(pool: WorkerPool, expected: Outcome) -> None:
    options = {**BLOCKS, "activation_checkpointing": Block, "compile": {"backend": "eager"}}
    seen = _check(pool, expected, Run(options=options))
    assert [name for name in expected.weights if name not in ("scale", *TIED)] == seen["names"]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("model", ["wrapped", "sharded"])
def test_manual_wrapping_shards_what_is_wrapped_and_leaves_the_rest_to_the_root(
    pool: WorkerPool, model: str
) -> None:
    run = Run(strategy="fsdp_manual", model=model)
    alone = replace(run, strategy="auto", devices=1, steps=4)
    expected = pool.run(train_and_look, alone, world_size=1)[0][0]
    assert _check(pool, expected, run)["units"] == UNITS


@pytest.mark.full
def test_wrap_does_nothing_under_other_strategies(pool: WorkerPool, expected: Outcome) -> None:
    assert _check(pool, expected, Run(strategy="ddp", model="wrapped"))["units"] == []
    assert _check(pool, expected, Run(strategy="fsdp_auto", model="wrapped"))["units"] == [""]


def test_offload_keeps_the_optimizer_state_on_the_host(pool: WorkerPool, expected: Outcome) -> None:
    seen = _check(pool, expected, Run(strategy="fsdp_offload", options=BLOCKS))
    assert seen["state_devices"] == {"cpu"}
    assert seen["units"] == UNITS


@pytest.mark.full
def test_hybrid_sharding_replicates_over_groups(pool: WorkerPool, expected: Outcome) -> None:
    seen = _check(
        pool, expected, Run(strategy="fsdp_hybrid", options={**BLOCKS, "replicate_size": 2}), devices=4
    )
    assert seen["mesh"] == {(2, 2)}
    clipped = Run(strategy="fsdp_hybrid", options={**BLOCKS, "replicate_size": 2}, steps=4, clip=0.05)
    alone = pool.run(train, replace(clipped, strategy="auto", options={}, devices=1), world_size=1)[0]
    for outcome in pool.run(train, replace(clipped, devices=4), world_size=4):
        assert outcome.losses == pytest.approx(alone.losses, abs=1e-5)


@pytest.mark.full
def test_hybrid_on_one_node_is_plain_sharding(pool: WorkerPool, expected: Outcome) -> None:
    assert _check(pool, expected, Run(strategy="fsdp_hybrid", options=BLOCKS))["mesh"] == {(1, 2)}


@pytest.mark.full  # the check `activation_checkpointing` tries it
@pytest.mark.parametrize("classes", [Block, [Block], [Block, torch.nn.Linear]], ids=["one", "list", "two"])
def test_activation_checkpointing_runs_the_forwards_again_and_changes_no_number(
    pool: WorkerPool, expected: Outcome, classes: Any
) -> None:
    run = Run(options={**BLOCKS, "activation_checkpointing": classes}, steps=4)
    outcome, calls = pool.run(count_calls, run, world_size=2)[0]
    _, plain_calls = pool.run(count_calls, replace(run, options=BLOCKS), world_size=2)[0]
    assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
    assert calls >= 2 * plain_calls == 2 * 4 * 3


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", [BLOCKS, {}], ids=["units", "one unit"])
def test_compiled_units_train_alike(pool: WorkerPool, expected: Outcome, options: dict[str, Any]) -> None:
    compiled = {**options, "compile": {"backend": counting_compiler}}
    for outcome, graphs in pool.run(count_compilations, Run(options=compiled, steps=4), world_size=2):
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        assert graphs > 0


@pytest.mark.full
@pytest.mark.parametrize("policy", [Block, [Block], {Block}, lambda module: isinstance(module, Block)])
def test_the_user_may_name_the_units(pool: WorkerPool, expected: Outcome, policy: Any) -> None:
    if callable(policy) and not isinstance(policy, type):
        policy = is_block
    assert _check(pool, expected, Run(options={"auto_wrap_policy": policy}))["units"] == UNITS


def is_block(module: torch.nn.Module) -> bool:
    """A policy that can be sent to the workers."""
    return isinstance(module, Block)


@pytest.mark.full
def test_a_class_that_cannot_be_extended_is_trained_with_replicated_leftovers(
    pool: WorkerPool, expected: Outcome
) -> None:
    seen = _check(pool, expected, Run(options=BLOCKS, model="generic"))
    assert "" not in seen["units"]


@pytest.mark.full
def test_a_scalar_parameter_is_replicated_and_accumulates_like_the_others(pool: WorkerPool) -> None:
    run = Run(options=BLOCKS, model="scalar", accumulate=2, clip=0.05, steps=4)
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(train_and_look, alone, world_size=1)[0][0]
    results = pool.run(train_and_look, run, world_size=2)
    assert results[0][1]["plain"] == ["temperature"]
    for outcome, _ in results:
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        torch.testing.assert_close(outcome.weights["temperature"], expected.weights["temperature"])


@pytest.mark.full
def test_a_parameter_without_elements_is_replicated(pool: WorkerPool) -> None:
    run = Run(options=BLOCKS, model="empty", clip=0.05)
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(train_and_look, alone, world_size=1)[0][0]
    for outcome, seen in pool.run(train_and_look, run, world_size=2):
        assert seen["plain"] == ["nothing"]
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        assert outcome.weights["nothing"].shape == (0, 3)


@pytest.mark.full
def test_a_second_dtype_is_replicated_and_strides_come_back(pool: WorkerPool) -> None:
    run = Run(options=BLOCKS, model="mixed", accumulate=2, clip=0.05, steps=4)
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(train_and_look, alone, world_size=1)[0][0]
    for outcome, seen in pool.run(train_and_look, run, world_size=2):
        assert seen["plain"] == ["scale"]
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        for name in ("scale", "turned"):
            torch.testing.assert_close(outcome.weights[name], expected.weights[name], check_stride=True)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["fsdp_auto", "fsdp_manual"])
def test_a_model_built_on_the_meta_device_is_materialised_alike_on_all_ranks(
    pool: WorkerPool, strategy: str
) -> None:
    run = Run(strategy=strategy, model="late", steps=4)
    results = pool.run(train_and_look, run, world_size=2)
    assert len({outcome.digest for outcome, _ in results}) == 1
    assert all(torch.isfinite(torch.tensor(outcome.losses)).all() for outcome, _ in results)
    assert results[0][0].losses[-1] < results[0][0].losses[0]


def test_mixed_precision_of_fsdp_computes_in_bfloat16_and_keeps_float32_shards(
    pool: WorkerPool, expected: Outcome
) -> None:
    options = {**BLOCKS, "mixed_precision": MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")}
    results = pool.run(train, Run(options=options, steps=4), world_size=2)
    assert results[0].losses == pytest.approx(expected.losses, rel=0.05)
    assert results[0].losses != pytest.approx(expected.losses, abs=1e-5)
    assert results[0].weights["embed.weight"].dtype == torch.float32


@pytest.mark.full  # the check `fit_again_with_new_trainer` tries it
def test_a_second_fit_continues_and_the_module_is_plain_in_between(pool: WorkerPool) -> None:
    run = Run(options={**BLOCKS, "activation_checkpointing": Block}, steps=3)
    expected = pool.run(train_twice, replace(run, strategy="auto", options={}, devices=1), world_size=1)[0]
    for report in pool.run(train_twice, run, world_size=2):
        assert report["class"] and report["plain"] and report["same objects"] and report["copy"]
        assert report["hooks"] == 0
        assert report["first"] == pytest.approx(expected["first"], abs=1e-5)
        assert report["second"] == pytest.approx(expected["second"], abs=1e-5)


def test_every_rank_starts_from_rank_0s_weights(pool: WorkerPool) -> None:
    run = Run(options=BLOCKS, steps=1)
    same = pool.run(init_differently, run, False, world_size=2)
    different = pool.run(init_differently, run, True, world_size=2)
    assert set(same) == set(different) and len(set(same)) == 1


@pytest.mark.full
def test_evaluation_in_every_order_equals_one_process(pool: WorkerPool) -> None:
    run = Run(options=BLOCKS, steps=3, validate_every=2)
    expected = pool.run(
        evaluate_everything, replace(run, strategy="auto", options={}, devices=1), world_size=1
    )[0]
    reports = pool.run(evaluate_everything, run, world_size=2)
    for report in reports:
        for key in ("before", "after", "test", "losses"):
            assert report[key] == pytest.approx(expected[key], abs=1e-5), key
    assert sum(report["predict"] for report in reports) == pytest.approx(expected["predict"], rel=1e-4)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            Run(strategy="fsdp_hybrid", options={"replicate_size": 3}),
            "OptionError: replicate_size=3 does not divide the world size 2. Choose a divisor",
        ),
        (
            Run(options={"auto_wrap_policy": torch.nn.Conv2d}),
            "OptionError: auto_wrap_policy matches no module of Net with at least 0 parameters.",
        ),
        (
            Run(options={"auto_wrap_policy": 3}),
            "OptionError: auto_wrap_policy holds 3, which is not a module class.",
        ),
        (
            Run(options={"activation_checkpointing": "Blok"}),
            "OptionError: activation_checkpointing names 'Blok'",
        ),
        (
            Run(strategy="fsdp_manual", model="wrapped_tied"),
            "UnsupportedError: a unit shares parameters with modules outside of it: back.weight.",
        ),
    ],
    ids=["replicate", "no match", "policy type", "no such class", "tied"],
)
def test_wrong_options_give_one_clear_error_on_every_rank(pool: WorkerPool, run: Run, message: str) -> None:
    for error in pool.run(fit_error, run, world_size=2):
        assert error.startswith(message)


@pytest.mark.full
def test_a_policy_leaves_tied_layers_to_the_root(pool: WorkerPool, expected: Outcome) -> None:
    units = _check(pool, expected, Run(options={"auto_wrap_policy": torch.nn.Linear}))["units"]
    assert "embed" in units and "blocks.0.up" in units
    assert "head" not in units and "back" not in units


@pytest.mark.full
def test_a_module_can_be_copied_while_it_is_sharded(pool: WorkerPool) -> None:
    run = Run(strategy="fsdp_auto", options={"min_num_params": 100}, devices=2, steps=2)
    (expected,) = pool.run(
        norms_of_copies, replace(run, strategy="auto", options={}, devices=1), world_size=1
    )
    for norms in pool.run(norms_of_copies, run, world_size=2):
        assert norms == pytest.approx(expected, abs=1e-4)
