"""Memory limits and rates are measured once for the machine and are equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jobs.colossalai_plan_jobs import resources_of_ranks
from jobs.simulated_device import SimDevice
from nnx_colossalai import budgets as module
from nnx_colossalai.budgets import available_host_bytes, rates_of, resources
from nnx_colossalai.device import HostDevice
from nnx_colossalai.plan.spec import Rates
from nnx_core.machine.hardware import Link, profile


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing may be measured."""
    monkeypatch.setattr(module, "calibrated", lambda *_, **__: pytest.fail("it was measured"))


def test_rates_are_those_of_the_machine() -> None:
    machine = replace(profile("cpu"), to_host=3e9, host_update=1 / 4e8, fused_update=1 / 5e8)
    machine = replace(machine, inside=Link(1e-6, 7e9), across=Link(1e-3, 1e9), ranks_per_node=4)
    alone, of_node, of_two = (rates_of(machine, torch.bfloat16, ranks=ranks) for ranks in (1, 4, 8))
    assert (alone.to_host, alone.host_step, alone.device_step, alone.flops) == pytest.approx(
        (3e9, 4e8, 5e8, machine.matmul["bfloat16"])
    )
    assert alone.collective == Rates().collective  # there is nobody to gather with
    assert (of_node.collective, of_two.collective) == pytest.approx((7e9, 1e9))


def test_a_simulated_device_is_not_measured_so_that_its_plans_repeat(unmeasured) -> None:
    simulated = SimDevice(capacity=1000)
    try:
        found = resources(simulated, host_bytes=50)
    finally:
        simulated.close()
    assert (found.device_bytes, found.host_bytes, found.host_step) == (1000, 50, Rates().host_step)


def test_rates_that_are_given_are_not_measured(unmeasured) -> None:
    found = resources(HostDevice(capacity=123), rates=Rates(to_host=5.0))
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


@pytest.mark.full
def test_ranks_use_the_first_ones_rates_and_the_least_budgets(pool, tmp_path) -> None:
    results = pool.run(resources_of_ranks, tmp_path, world_size=2, init="gloo")
    assert [result["budgets"] for result in results] == [(9_999_999, 4_999, 7_000)] * 2
    assert results[0]["rates"] == results[1]["rates"] != Rates()
    assert all(result["kept"] and result["files"] == 1 for result in results)
    assert results[0]["rates"].collective != Rates().collective
