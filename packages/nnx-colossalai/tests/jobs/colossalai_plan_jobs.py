"""Jobs that measure a different machine on each rank."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_colossalai.budgets import resources
from nnx_colossalai.device import HostDevice
from nnx_colossalai.plan.kept import probe
from nnx_colossalai.plan.spec import RankResources, Rates
from nnx_colossalai.plan.units import find_units


def resources_of_ranks(cache: Path) -> dict[str, Any]:
    """Measure memory limits that fall with the rank, and rates on each rank and on all."""
    os.environ["NNX_CACHE_DIR"] = str(cache)
    rank = dist.get_rank()
    device = HostDevice(capacity=10_000_000 - rank)
    found = resources(device, host_bytes=5_000 - rank, group=dist.group.WORLD)
    again = resources(device, host_bytes=7_000, group=dist.group.WORLD)
    return {
        "budgets": (found.device_bytes, found.host_bytes, again.host_bytes),
        "rates": rates_in(found),
        "kept": rates_in(again) == rates_in(found),
        "files": len(list(cache.rglob("*.json"))),
    }


def rates_in(found: RankResources) -> Rates:
    return Rates(**{field.name: getattr(found, field.name) for field in fields(Rates)})


def probe_a_forward_that_communicates() -> str:
    """Return the probe's report on a forward with an all-reduce."""

    class Summing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            dist.all_reduce(y)
            return y

    model = Summing(3, 3)
    found = probe(find_units(model), model, [torch.ones(2, 3)])
    dist.barrier()
    return found.note
