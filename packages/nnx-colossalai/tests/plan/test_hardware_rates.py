"""Budgets and rates: measured once, kept for the machine, alike on all ranks."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from jobs.colossalai_plan_jobs import hardware_of_ranks
from jobs.simulated_device import SimDevice
from nnx_colossalai.device import HostDevice
from nnx_colossalai.plan import hardware as module
from nnx_colossalai.plan.hardware import (
    Rates,
    available_host_bytes,
    gathered_part,
    hardware,
    measure,
    measured,
    stepped_elements,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def device(capacity: int = 2**22) -> HostDevice:
    return HostDevice(capacity=capacity)


@pytest.fixture
def counted(monkeypatch):
    """How often it was measured, each time with other rates."""
    calls: list[Rates] = []

    def fake(*_, **__) -> Rates:
        calls.append(Rates(flops=1e9 + len(calls)))
        return calls[-1]

    monkeypatch.setattr(module, "measure", fake)
    return calls


def test_all_rates_are_measured_and_the_device_is_as_before() -> None:
    own = device()
    own.traffic.to_device = 7
    rates = measure(own)
    assert (own.traffic.to_device, own.traffic.to_host, own.used) == (7, 0, 0)
    assert all(value > 1e6 for value in asdict(rates).values())
    assert rates.collective == Rates().collective  # there is nobody to gather with


def test_a_slow_bus_is_measured_as_slow_within_a_small_budget() -> None:
    slow = SimDevice(capacity=2**20, to_device=2e7, to_host=1e7)
    try:
        rates = measure(slow)
    finally:
        slow.close()
    assert 1e6 < rates.to_device <= 2e7
    assert 5e5 < rates.to_host <= 1e7


def test_a_card_is_measured_at_sizes_at_which_launching_kernels_takes_no_share() -> None:
    large = 80 * 2**30
    assert stepped_elements("cuda", large) == 2**27
    assert 4 * 8 * gathered_part("cuda", large, 8) == 256 * 2**20
    assert (stepped_elements("cpu", large), gathered_part("cpu", large, 8)) == (2**21, 2**20)


@pytest.mark.parametrize("room", [2**20, 2**30, 3 * 2**30])
def test_measuring_a_small_card_leaves_most_of_it_free(room: int) -> None:
    assert 16 * stepped_elements("cuda", room) <= room // 4
    assert 4 * 8 * gathered_part("cuda", room, 8) <= room // 4


@pytest.mark.parametrize("room", [-5, 0, 7])
def test_a_full_card_is_measured_with_what_little_there_is(room: int) -> None:
    assert stepped_elements("cuda", room) == gathered_part("cuda", room, 8) == 1


def test_what_was_measured_is_kept_and_read_again(cache, counted) -> None:
    first = measured(device())
    assert measured(device()) == first
    assert len(counted) == 1
    assert measured(device(), fresh=True) != first
    assert measured(device(), dtype=torch.bfloat16) != first  # other operands
    assert len(counted) == 3


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"rates": {}}', '{"key": 1, "rates": {"to_device": 1}}'],
)
def test_a_broken_file_is_measured_anew_and_replaced(cache, counted, content: str) -> None:
    measured(device())
    (file,) = cache.rglob("*.json")
    file.write_text(content)
    again = measured(device())
    assert len(counted) == 2 and again == counted[1]
    assert json.loads(file.read_text())["rates"] == asdict(again)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
def test_rates_that_are_no_rates_are_measured_anew(cache, counted, value: object) -> None:
    measured(device())
    (file,) = cache.rglob("*.json")
    kept = json.loads(file.read_text())
    kept["rates"]["to_host"] = value
    file.write_text(json.dumps(kept))
    measured(device())
    assert len(counted) == 2


def test_a_file_of_another_machine_is_not_believed(cache, counted) -> None:
    measured(device())
    (file,) = cache.rglob("*.json")
    kept = json.loads(file.read_text())
    kept["key"]["hosts"] = ["elsewhere"]
    file.write_text(json.dumps(kept))
    measured(device())
    assert len(counted) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, counted) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "file"))
    measured(device())
    measured(device())
    assert len(counted) == 2


def test_no_partial_file_is_left(cache, counted) -> None:
    measured(device())
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".json"]


def test_a_simulated_device_is_not_measured_so_that_its_plans_repeat(cache, counted) -> None:
    simulated = SimDevice(capacity=1000)
    try:
        found, rates = hardware(simulated, host_bytes=50)
    finally:
        simulated.close()
    assert not counted and not cache.exists()
    assert (found.device_bytes, found.host_bytes, found.host_step) == (1000, 50, Rates().host_step)
    assert rates == Rates()


def test_rates_that_are_given_are_not_measured(counted) -> None:
    found, _ = hardware(device(123), rates=Rates(to_host=5.0))
    assert not counted
    assert (found.to_host, found.device_bytes) == (5.0, 123)


def test_the_host_budget_is_the_ranks_share_of_what_is_free() -> None:
    assert 2**20 < available_host_bytes(2) <= available_host_bytes() < module.host_memory()


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("1000\n")
    used.write_text("400\n")
    monkeypatch.setattr(module, "_CGROUP", ((str(tmp_path / "none"), ""), (str(limit), str(used))))
    assert available_host_bytes() == 540
    assert available_host_bytes(4) == 135
    limit.write_text("max\n")
    assert available_host_bytes() > 2**20


def test_ranks_use_the_first_ones_rates_and_the_least_budgets(pool, tmp_path) -> None:
    results = pool.run(hardware_of_ranks, tmp_path, world_size=2, init="gloo")
    assert [result["budgets"] for result in results] == [(9_999_999, 4_999, 7_000)] * 2
    assert results[0]["rates"] == results[1]["rates"]
    assert all(result["kept"] and result["files"] == 1 for result in results)
    assert results[0]["rates"].collective != Rates().collective
