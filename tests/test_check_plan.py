"""`check_plan=True` (docs/planning.md) logs predicted beside measured memory, and changes no number."""

from __future__ import annotations

import re

import pytest

import nnx
from jobs.check_plan_jobs import fit
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import OptionError

LINE = re.compile(r"plan: (\w+) +predicted +([\d.]+) MiB, measured +([\d.]+) MiB \(([+-][\d.]+) %\)")


@pytest.mark.parametrize(
    "strategy",
    ["fsdp_auto", *(pytest.param(name, marks=pytest.mark.full) for name in ("nnscaler_zero", "colossalai"))],
)
def test_the_measured_peak_is_the_predicted_one(pool: WorkerPool, strategy: str) -> None:
    (lines, losses), (others, _) = pool.run(fit, strategy, 2, world_size=2)
    assert others == []
    found = [match.groups() for line in lines if (match := LINE.match(line))]
    assert [phase for phase, *_ in found] == ["forward", "backward", "step"]
    peak = max(found, key=lambda one: float(one[2]))
    assert abs(float(peak[3])) <= 3.0  # a thread of gloo may free a buffer late
    assert lines[0].startswith(f"plan: predicted peak {peak[1]} MiB a rank, in the {peak[0]}")
    assert losses == pool.run(fit, strategy, 2, False, world_size=2)[0][1]


def test_a_short_run_says_that_nothing_was_measured(pool: WorkerPool) -> None:
    ((lines, losses),) = pool.run(fit, "fsdp_auto", 1, True, 2, world_size=1)
    assert lines[-1] == "plan: nothing measured, because training ended before its third step"
    assert len(losses) == 2


@pytest.mark.full
def test_a_step_that_cannot_be_traced_trains_and_says_so(pool: WorkerPool) -> None:
    ((lines, losses),) = pool.run(fit, "fsdp_auto", 1, True, 4, True, world_size=1)
    assert any("the step could not be traced" in line for line in lines)
    assert len(losses) == 4


def test_fabric_is_refused() -> None:
    with pytest.raises(OptionError, match="check_plan=True needs a Trainer"):
        nnx.strategy("fsdp_auto", check_plan=True, namespace="lightning.fabric")
