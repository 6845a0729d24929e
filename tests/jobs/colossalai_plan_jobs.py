"""Jobs that measure hardware on several ranks, which differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nnx_colossalai.device import HostDevice
from nnx_colossalai.plan.hardware import hardware


def hardware_of_ranks(cache: Path) -> dict[str, Any]:
    """Budgets that fall with the rank, and rates measured by each and by all."""
    os.environ["NNX_CACHE_DIR"] = str(cache)
    rank = dist.get_rank()
    device = HostDevice(capacity=10_000_000 - rank)
    found, rates = hardware(device, host_bytes=5_000 - rank, group=dist.group.WORLD)
    again, same = hardware(device, host_bytes=7_000, group=dist.group.WORLD)
    return {
        "budgets": (found.device_bytes, found.host_bytes, again.host_bytes),
        "rates": rates,
        "kept": same == rates,
        "files": len(list(cache.rglob("*.json"))),
    }
