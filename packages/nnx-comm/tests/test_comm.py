"""The strategies for slow links: exact errors, equal replicas, resume on any number of ranks, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nnx_checkpoint as storage
from jobs.comm_jobs import Run, run_ahead, send, train, train_with
from nnx_comm import QAdam
from nnx_comm.averaging import divide, peer_of
from nnx_comm.options import (
    AsyncOptions,
    BaguaOptions,
    DecentralizedOptions,
    DiLoCoOptions,
    LocalSGDOptions,
    PowerSGDOptions,
)
from nnx_comm.wire import largest
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import OptionError

POWERSGD = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1, "min_compression_rate": 1.0}
STRATEGIES = {
    "bagua": Run(strategy="bagua"),
    "bf16": Run(strategy="bagua", options={"codec": "bf16"}),
    "topk": Run(strategy="bagua", options={"codec": "topk", "density": 0.1}),
    "bytegrad": Run(strategy="bagua_bytegrad"),
    "powersgd": Run(strategy="powersgd", options=POWERSGD),
    "localsgd": Run(strategy="localsgd", options={"interval": 2, "replicas": "each"}),
    "shift_one": Run(
        strategy="bagua_decentralized", options={"peer_selection_mode": "shift_one", "replicas": "each"}
    ),
    "hybrid": Run(
        strategy="fsdp_hybrid_compressed",
        options={"replicate_size": 2, "codec": "int8", "min_num_params": 100},
    ),
    "qadam": Run(strategy="bagua_qadam", optimizer="qadam"),
    "low_precision": Run(strategy="bagua_low_precision_decentralized", options={"replicas": "each"}),
    "async": Run(strategy="bagua_async", options={"interval": 2, "staleness": 2, "replicas": "each"}),
    "diloco": Run(strategy="diloco", options={"interval": 2, "replicas": "each"}),
    "streaming": Run(
        strategy="diloco_streaming",
        options={"interval": 2, "fragments": 2, "codec": "int8", "replicas": "each"},
    ),
}


def assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "topk"])
def test_an_error_is_what_the_mean_lacks_and_the_payload_is_the_formula(
    pool: WorkerPool, codec: str, ranks: int
) -> None:
    within = {"none": 1e-15, "fp16": 5e-3, "bf16": 5e-2, "int8": 5e-2, "topk": 5.0}[codec]
    for results in pool.run(send, codec, [1, 5, 1000, 1_200_000], world_size=ranks, init="gloo"):
        for lost, off, payload, formula in results:
            assert lost < 1e-14
            assert off < within
            assert payload == formula


def test_without_a_codec_every_bit_is_that_of_ddp(pool: WorkerPool) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    run = Run(strategy="bagua", settings=settings)
    for ours, theirs in zip(pool.run(train, run), pool.run(train, replace(run, strategy="ddp")), strict=True):
        assert ours["losses"] == theirs["losses"]
        assert_equal(ours["weights"], theirs["weights"])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_ranks_end_equal_and_a_resumed_run_is_the_uninterrupted_one(
    pool: WorkerPool, name: str, tmp_path: Path
) -> None:
    run = replace(STRATEGIES[name], save_at=3, path=str(tmp_path / "checkpoint"))
    whole = pool.run(train, run)
    assert_equal(whole[0]["weights"], whole[1]["weights"])
    assert whole[0]["metrics"]["payload_bytes_total"] > 0
    for ours, theirs in zip(pool.run(train, replace(run, resume=True)), whole, strict=True):
        assert ours["losses"] == theirs["losses"][3:]
        assert_equal(ours["weights"], theirs["weights"])


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (2, 3, 4))])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_other_numbers_of_ranks_resume_and_keep_the_sum_of_the_errors(
    pool: WorkerPool, name: str, ranks: int, tmp_path: Path
) -> None:
    if name == "shift_one" and ranks == 3:
        pytest.skip("pairs need an even number of ranks")
    options = {key: value for key, value in STRATEGIES[name].options.items() if key != "replicas"}
    run = replace(STRATEGIES[name], options=options, save_at=3, path=str(tmp_path / "checkpoint"))
    if name == "hybrid":
        options = {**options, "replicate_size": {1: 1, 2: 2, 3: 3, 4: 2}[ranks]}
    saved = [result["errors"]["batch 2"] for result in pool.run(train, run)]
    expected = {parameter: sum(errors[parameter] for errors in saved) for parameter in saved[0]}
    if name in ("bf16", "topk", "bytegrad", "powersgd", "hybrid", "qadam", "streaming"):
        assert any(float(torch.as_tensor(error).abs().max()) > 0 for error in expected.values())
    resumed = pool.run(train, replace(run, options=options, resume=True), world_size=ranks)
    for parameter, error in expected.items():
        total = sum(result["errors"]["start"][parameter] for result in resumed)
        torch.testing.assert_close(total, error, atol=1e-6, rtol=0)
    assert_equal(resumed[0]["weights"], resumed[-1]["weights"])
    other = pool.run(train, replace(run, strategy="ddp", options={}, resume=True), world_size=1)[0]
    for result in resumed:
        assert_equal(result["start"], other["start"])


@pytest.mark.full
def test_shards_of_two_nodes_are_averaged_and_their_errors_resume(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"replicate_size": 2, "min_num_params": 100}
    exact = Run(strategy="fsdp_hybrid", options=options, settings={"gradient_clip_val": 0.1})
    ours = replace(exact, strategy="fsdp_hybrid_compressed", options={**options, "codec": "none"})
    expected = pool.run(train, exact, world_size=4)[0]
    for result in pool.run(train, ours, world_size=4):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], atol=1e-6, rtol=1e-5)
    run = replace(STRATEGIES["hybrid"], save_at=3, path=str(tmp_path / "checkpoint"))
    whole = pool.run(train, run, world_size=4)
    assert [each["losses"] for each in pool.run(train, replace(run, resume=True), world_size=4)] == [
        each["losses"][3:] for each in whole
    ]
    resumed = pool.run(train, replace(run, resume=True), world_size=2)
    for name in whole[0]["errors"]["batch 2"]:
        error = sum(result["errors"]["batch 2"][name] for result in whole)
        total = sum(result["errors"]["start"][name] for result in resumed)
        assert float(error.abs().max()) > 0
        torch.testing.assert_close(total, error, atol=1e-6, rtol=0)


@pytest.mark.full
def test_an_algorithm_of_another_kind_does_not_read_the_errors(pool: WorkerPool, tmp_path: Path) -> None:
    run = replace(STRATEGIES["bytegrad"], save_at=3, path=str(tmp_path / "checkpoint"))
    pool.run(train, run)
    for strategy, options, are_read in (
        ("bagua", {"codec": "bf16"}, True),
        ("diloco", {"interval": 2, "codec": "int8"}, False),
    ):
        result = pool.run(train, replace(run, strategy=strategy, options=options, resume=True))[0]
        assert bool(result["errors"]["start"]) == are_read


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_neighbours_on_the_ring_have_equal_copies(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(train, STRATEGIES["low_precision"], world_size=ranks)
    count = sum(value.numel() for value in results[0]["weights"].values())
    for rank, result in enumerate(results):
        assert_equal(result["copies"]["left"], results[rank - 1]["copies"]["here"])
        assert_equal(result["copies"]["right"], results[(rank + 1) % ranks]["copies"]["here"])
        assert result["metrics"]["payload_bytes"] == pytest.approx((ranks - 1) * count * 1.008, rel=0.4)
    here = results[0]["copies"]["here"]
    assert any(not torch.equal(value, results[1]["copies"]["here"][name]) for name, value in here.items())


def test_a_rank_runs_ahead_by_the_staleness_and_adds_what_the_others_had(
    pool: WorkerPool, tmp_path: Path
) -> None:
    results = pool.run(run_ahead, str(tmp_path / "rank 0 is ahead"), 8, init="gloo")
    # After four steps the weights are 4 and 8, and their average is 6. After seven each adds its change.
    assert results == [[1, 2, 3, 4, 5, 6, 9, 10], [2, 4, 6, 8, 10, 12, 12, 14]]


@pytest.mark.full
def test_a_rank_lost_in_bagua_async_is_one_error(pool: WorkerPool) -> None:
    run = Run(strategy="bagua_async", options={"interval": 2, "staleness": 2}, steps=16, dies_at=11)
    with pytest.raises(JobError) as raised:
        pool.run(train, run)
    message = "RankLostError: a rank was lost while the average of bagua_async travelled"
    assert message in raised.value.failures[0]


def test_qadam_is_adam_in_its_warm_up_and_keeps_the_second_moment_after_it() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    ours = QAdam(weights[:1], lr=0.1, weight_decay=0.1, warmup_steps=4)
    theirs = torch.optim.Adam(weights[1:], lr=0.1, weight_decay=0.1)
    for step in range(1, 7):
        for weight in weights:
            weight.grad = torch.sin(torch.arange(5.0) * step)
        before = ours.state.get(weights[0], {}).get("exp_avg_sq", torch.zeros(5)).clone()
        ours.step()
        theirs.step()
        same = torch.allclose(weights[0], weights[1], atol=1e-6)
        assert same == (step <= 4), step
        assert torch.equal(before, ours.state[weights[0]]["exp_avg_sq"]) == (step > 4)


@pytest.mark.full
@pytest.mark.parametrize(("codec", "within"), [("none", 1e-5), ("int8", 0.05)])
def test_averaged_momenta_train_as_in_one_process(pool: WorkerPool, codec: str, within: float) -> None:
    run = Run(strategy="bagua_qadam", options={"codec": codec}, steps=16, optimizer="qadam", warmup=4)
    alone = pool.run(train, replace(run, strategy="auto", options={}), world_size=1)[0]
    for result in pool.run(train, run):
        assert result["losses"] == pytest.approx(alone["losses"], rel=within)
        assert (result["losses"] == alone["losses"]) is False


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", ["bytegrad", "powersgd", "localsgd", "diloco"])
@pytest.mark.parametrize("other", ["ddp", "fsdp_auto"])
def test_other_strategies_resume_and_the_state_survives_them(
    pool: WorkerPool, name: str, other: str, tmp_path: Path
) -> None:
    options = {key: value for key, value in STRATEGIES[name].options.items() if key != "replicas"}
    path, later = str(tmp_path / "checkpoint"), str(tmp_path / "later")
    run = replace(STRATEGIES[name], options=options, save_at=3, path=path)
    pool.run(train, run)
    assert any(".comm." in key for key in storage.open_checkpoint(path).tensors)
    there = pool.run(train, Run(strategy=other, path=path, resume=True, save_at=5, save_to=later))
    back = pool.run(train, replace(run, resume=True))
    assert back[0]["losses"][0] == pytest.approx(there[0]["losses"][0], abs=1e-5)
    again = pool.run(train, replace(run, path=later, resume=True))
    assert again[0]["losses"] == pytest.approx(there[0]["losses"][2:], abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize("name", ["bytegrad", "hybrid", "qadam"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_keeps_the_errors(
    pool: WorkerPool, name: str, precision: str
) -> None:
    run = replace(STRATEGIES[name], overflow_at=3, scales=precision == "16-mixed")
    results = pool.run(train, run)
    for result in results:
        before, after = result["errors"]["batch 2"], result["errors"]["batch 3"]
        assert before
        assert max(float(error.abs().max()) for error in before.values()) < 0.1  # without the loss scale
        assert_equal(before, after)
        assert all(bool(value.isfinite().all()) for value in result["weights"].values())
        assert result["scale"] == {"16-mixed": 2.0**15, "32-true": 1.0}[precision]
    assert_equal(results[0]["weights"], results[1]["weights"])


@pytest.mark.full
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_algorithm_survives_an_overflow(pool: WorkerPool, name: str) -> None:
    results = pool.run(train, replace(STRATEGIES[name], overflow_at=3, scales=True))
    assert_equal(results[0]["weights"], results[1]["weights"])
    for result in results:
        assert all(bool(value.isfinite().all()) for value in result["weights"].values())
        assert result["scale"] == 2.0**15


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("localsgd", {"interval": 4}),
        ("diloco", {"interval": 4}),
        ("low_precision", {}),
        ("async", {"interval": 4, "staleness": 2}),
    ],
)
def test_evaluation_sees_the_average_and_changes_nothing(
    pool: WorkerPool, name: str, options: dict[str, Any]
) -> None:
    run = replace(STRATEGIES[name], options=options, optimizer="sgd")
    without = pool.run(train, run)
    with_it = pool.run(train, replace(run, validate=True))
    assert with_it[0]["evaluated"] == with_it[1]["evaluated"]
    assert len({value for value, _ in with_it[0]["evaluated"]}) == len(with_it[0]["evaluated"])
    for ours, theirs in zip(with_it, without, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert_equal(ours["weights"], theirs["weights"])


@pytest.mark.full
def test_bytes_are_logged_and_are_those_of_the_formula(pool: WorkerPool) -> None:
    weights = pool.run(train, Run(strategy="bagua"))[0]["weights"].values()
    count = sum(value.numel() for value in weights)
    for name, expected in {"bagua": (count + len(weights)) * 4, "bf16": count * 2}.items():
        metrics = pool.run(train, STRATEGIES[name])[0]["metrics"]
        assert metrics["payload_bytes"] == pytest.approx(expected, abs=4)
        assert metrics["payload_bytes_total"] == 5 * metrics["payload_bytes"]  # of the steps before the last


def test_one_rank_trains_as_one_process(pool: WorkerPool) -> None:
    alone = pool.run(train, Run(strategy="auto"), world_size=1)[0]
    for name in ("bytegrad", "diloco"):
        result = pool.run(train, STRATEGIES[name], world_size=1)[0]
        assert result["losses"] == alone["losses"]
        assert "it trains as one process" in pool.output[0]


@pytest.mark.parametrize(
    ("strategy", "options", "ranks", "message"),
    [
        ("localsgd", {"interval": 7}, 2, "interval=7 is longer than this run of 6 steps"),
        ("bagua_decentralized", {"peer_selection_mode": "shift_one"}, 3, "there are 3 ranks"),
        (
            "bagua_async",
            {"interval": 5, "staleness": 2},
            2,
            r"interval \+ staleness=7 is longer than this run",
        ),
        ("bagua_qadam", {}, 2, "momentum of nnx_comm.QAdam, and the optimizer is AdamW"),
    ],
)
def test_runs_that_cannot_be(
    pool: WorkerPool, strategy: str, options: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        pool.run(train, Run(strategy=strategy, options=options), world_size=ranks)


def test_ranks_with_other_options_are_told_which(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match=r"rank 1 has interval=3 and rank 0 has interval=2"):
        pool.run(train_with, [{"interval": 2}, {"interval": 3}], "localsgd")


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            BaguaOptions,
            {"algorithm": "qadam"},
            "'qadam' is a strategy of its own. Pass strategy='bagua_qadam'",
        ),
        (AsyncOptions, {"staleness": 3, "interval": 2}, "two averages would travel at once"),
        (BaguaOptions, {"algorithm": "gradient_alreduce"}, "is not allowed"),
        (BaguaOptions, {"algorithm": "bytegrad", "codec": "fp16"}, "contradicts algorithm='bytegrad'"),
        (BaguaOptions, {"codec": "int4"}, "codec='int4' is not allowed"),
        (BaguaOptions, {"density": 0.0}, "density=0.0 is no share"),
        (PowerSGDOptions, {"start_powerSGD_iter": 1}, "not a whole number of at least 2"),
        (LocalSGDOptions, {"interval": 0}, "interval=0 is not a whole number"),
        (DecentralizedOptions, {"communication_interval": True}, "communication_interval=True"),
        (DiLoCoOptions, {"interval": 2, "fragments": 3}, "fragments=3 do not fit"),
        (DiLoCoOptions, {"outer_momentum": 1.0}, "do not converge"),
    ],
)
def test_options_that_are_refused(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**given)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_every_rank_of_one_half_meets_every_rank_of_the_other(ranks: int) -> None:
    for rank in range(ranks):
        peers = [peer_of(rank, ranks, number) for number in range(ranks // 2)]
        assert len(set(peers)) == ranks // 2
        assert all(peer_of(peer, ranks, number) == rank for number, peer in enumerate(peers))


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (100, 100), (10_000, 100), (10_000, 6000)])
def test_the_largest_values_are_those_that_topk_finds(size: int, count: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).abs()
    for given in (values, torch.zeros(size), values.sort().values, values.repeat_interleave(2)[:size]):
        found = largest(given, count)
        assert len(set(found.tolist())) == count
        assert torch.equal(given[found].sort().values, given.topk(count).values.sort().values)


def test_fragments_hold_all_weights_once() -> None:
    weights = {torch.nn.Parameter(torch.zeros(size)): torch.zeros(size) for size in (4, 1, 3, 8, 2)}
    fragments = divide(weights, 3)
    assert [parameter for fragment in fragments for parameter in fragment] == list(weights)
    assert all(fragments)
