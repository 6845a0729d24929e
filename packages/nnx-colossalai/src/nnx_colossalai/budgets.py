"""Find memory budgets from options or the machine, and rates from its measured figures.

`nnx_core.machine.calibration` measures the figures once for the machine. All ranks use rank zero's figures
and the smallest of their budgets, so that they make the same plan.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nnx_base.ranks import all_gather_object, control_group
from nnx_colossalai.device import Device, HostDevice, host_memory
from nnx_colossalai.plan.spec import RankResources, Rates
from nnx_core.communicator import GroupCommunicator
from nnx_core.machine.calibration import calibrated
from nnx_core.machine.hardware import Hardware, sent_share

_HOST_SHARE = 0.9


_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resources(
    device: Device[Any],
    *,
    host_bytes: int | None = None,
    local_world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    rates: Rates | None = None,
) -> RankResources:
    """Return the budgets and rates of this world. Collective.

    Args:
        device: The device of this rank; its capacity is the budget.
        host_bytes: The host memory budget of this rank; None takes its share of the free memory.
        local_world_size: The number of ranks that share the host.
        dtype: The dtype that forward and backward compute in.
        group: The group of all ranks; None in a single process.
        rates: The rates to use instead of measuring.
    """
    control = control_group() if group is not None else None
    if rates is None:
        # A simulated device is not measured: its copies are not the machine's, and its plans must repeat.
        real = isinstance(device, HostDevice) or device.torch_device.type != "cpu"
        rates = _measured(device, dtype, group, control) if real else Rates()
    host = available_host_bytes(local_world_size) if host_bytes is None else host_bytes
    budgets = all_gather_object((device.capacity, host), control)
    return RankResources(
        device_bytes=min(one for one, _ in budgets),
        host_bytes=min(other for _, other in budgets),
        **asdict(rates),
    )


def _measured(
    device: Device[Any],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    control: dist.ProcessGroup | None,
) -> Rates:
    figures = calibrated(
        GroupCommunicator(group),
        device.torch_device,
        group=control,
        room=None if device.torch_device.type == "cpu" else max(device.capacity - device.used, 0) // 4,
    )
    return rates_of(figures, dtype, ranks=1 if group is None else dist.get_world_size(group))


def rates_of(figures: Hardware, dtype: torch.dtype, *, ranks: int) -> Rates:
    """Return the rates of a plan.

    Args:
        figures: The figures of the machine.
        dtype: The dtype that forward and backward compute in.
        ranks: The number of ranks.
    """
    # A single rank gathers nothing, so it keeps the default.
    collective = Rates().collective
    if ranks > 1:
        collective = sent_share("all_gather", ranks) / figures.link(ranks).throughput("all_gather", ranks)
    return Rates(
        to_device=figures.to_device,
        to_host=figures.to_host,
        host_step=1 / figures.host_update,
        device_step=1 / figures.fused_update,
        collective=collective,
        flops=figures.flops(str(dtype).removeprefix("torch.")),
    )


def available_host_bytes(local_world_size: int = 1) -> int:
    """Return a rank's share of nine tenths of the free host memory.

    Memory that caches files counts as free, and the limit of a container as the size of the machine.

    Example:
        >>> 0 < available_host_bytes(2) < available_host_bytes()
        True
    """
    free = min(_free_of_machine(), _free_of_container(), host_memory())
    return max(int(free * _HOST_SHARE) // local_world_size, 1)


def _free_of_machine() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()


def _free_of_container() -> int:
    for limit, used in _CGROUP:
        # The file may be missing, and the limit may be the text "max".
        with suppress(OSError, ValueError):
            return max(int(Path(limit).read_text()) - int(Path(used).read_text()), 1)
    return host_memory()
