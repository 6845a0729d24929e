"""Impossible requests raise an error with the bytes and the option on every rank; possible ones train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import nnx
from jobs.colossalai_bad_input_jobs import ENOUGH, fit
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import OptionError

BYTES = re.compile(r"\d+(\.\d+)? ([KMG]iB|bytes)")
MOVED = re.compile(r"^\S.* (sharded|offloaded|streamed) +[\d,]+ ", re.MULTILINE)
"""A row of the table whose chunk is no longer gathered; with several ranks the next tier is "sharded"."""


def failures(pool: WorkerPool, options: Mapping[str, Any], devices: int, **more: Any) -> dict[int, str]:
    """Return the error of each rank. (No rank may fail by waiting for the others.)"""
    with pytest.raises(JobError) as caught:
        pool.run(fit_with, options, devices, more, world_size=devices, timeout=60, end_after=3)
    return caught.value.failures


def fit_with(options: Mapping[str, Any], devices: int, more: Mapping[str, Any]) -> dict[str, Any]:
    return fit(options, devices, **more)


def fitted(pool: WorkerPool, options: Mapping[str, Any], devices: int, **more: Any) -> list[dict[str, Any]]:
    """Return the report of each rank."""
    return pool.run(fit_with, options, devices, more, world_size=devices)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"placement_policy": "gpu"}, ["placement_policy='gpu'", "'cuda'", "'cpu'", "'auto'"]),
        ({"placement_policy": "static"}, ["'static'", "offload_fraction"]),
        ({"offload_fraction": 1.5}, ["offload_fraction=1.5", "0 to 1"]),
        ({"use_chunk": False}, ["use_chunk=False", "auto_wrap_policy"]),
        ({"device_memory": "24 bananas"}, ["device_memory='24 bananas'", "'24GiB'"]),
        ({"placement_polcy": "cpu"}, ["placement_polcy", "placement_policy"]),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_starts(
    options: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        nnx.strategy("colossalai", **options)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"offload_fraction": 0.2, "stream_fraction": 0.5},
            ["offload_fraction", "0.2", "stream_fraction", "0.5"],
        ),
        ({"placement_policy": "cuda", "offload_fraction": 0.5}, ["cuda", "offload_fraction"]),
        ({"placement_policy": "gathered", "tiers": {"blocks.0": "streamed"}}, ["gathered", "blocks.0"]),
        ({"tiers": {"blocks.9": "streamed"}}, ["blocks.9", "blocks.0"]),
    ],
)
def test_constraints_that_contradict_each_other_or_the_model_are_named_together(
    pool: WorkerPool, options: dict[str, Any], named: list[str], devices: int
) -> None:
    found = failures(pool, options, devices)
    assert sorted(found) == list(range(devices))
    for failure in found.values():
        last = failure.strip().splitlines()[-1]
        assert "Error" in last
        for text in named:
            assert text in last


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_too_small_for_the_largest_layer_is_named_with_bytes_and_knob(
    pool: WorkerPool, devices: int
) -> None:
    found = failures(pool, {"device_memory": 1000}, devices)
    assert sorted(found) == list(range(devices))
    for failure in found.values():
        last = failure.strip().splitlines()[-1]
        assert "PlanError" in last
        assert "blocks." in last, "the largest layer is not named"
        assert len(BYTES.findall(last)) >= 2, "needed and allowed bytes are not named"
        assert "device_memory" in last


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_host_too_small_for_what_the_device_cannot_hold_is_named_too(
    pool: WorkerPool, devices: int
) -> None:
    found = failures(pool, {"device_memory": 32_000, "host_memory": 2000}, devices)
    assert sorted(found) == list(range(devices))
    for failure in found.values():
        last = failure.strip().splitlines()[-1]
        assert "PlanError" in last
        assert "host_memory" in last
        assert BYTES.search(last)


# --- out of memory in a step ----------------------------------------------------------------------


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
def test_out_of_memory_in_a_step_moves_the_plan_down_and_changes_no_number(
    pool: WorkerPool, devices: int
) -> None:
    expected = fitted(pool, {}, devices)[0]
    ranks = fitted(pool, {}, devices, exhausted=(2, 1, None), capacity=ENOUGH)
    for seen in ranks:
        assert seen["losses"] == expected["losses"]
        assert seen["digest"] == expected["digest"]
    (told,) = [line for line in ranks[0]["log"] if "out of memory" in line.lower()]
    assert "Moved chunks to lower tiers" in told
    assert MOVED.search(told)
    assert BYTES.search(told)


def test_a_device_that_shrinks_while_training_moves_the_plan_down(pool: WorkerPool) -> None:
    expected = fitted(pool, {}, 1)[0]
    (seen,) = fitted(pool, {}, 1, capacity=ENOUGH, shrink=(2, 24_000))
    assert seen["losses"] == expected["losses"]
    assert seen["digest"] == expected["digest"]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
def test_out_of_memory_that_no_plan_avoids_says_so_on_every_rank(pool: WorkerPool, devices: int) -> None:
    found = failures(pool, {}, devices, exhausted=(2, 100, None), capacity=ENOUGH)
    assert sorted(found) == list(range(devices))
    for failure in found.values():
        last = failure.strip().splitlines()[-1]
        assert "DeviceMemoryError" in last
        assert "device_memory" in last
        assert BYTES.search(last)


def test_out_of_memory_while_micro_batches_are_accumulated_moves_down_or_says_why_not(
    pool: WorkerPool,
) -> None:
    found = failures(pool, {}, 1, exhausted=(2, 100, None), capacity=ENOUGH, accumulate=2)
    assert "DeviceMemoryError" in found[0].strip().splitlines()[-1]


@pytest.mark.full
def test_out_of_memory_on_one_rank_hangs_none_of_the_others(pool: WorkerPool) -> None:
    found = failures(pool, {}, 2, exhausted=(2, 100, 1), capacity=ENOUGH)
    assert 1 in found
    assert "DeviceMemoryError" in found[1].strip().splitlines()[-1]
