"""Memory and copies of the device that a rank computes on."""

from __future__ import annotations

from typing import Any

from nnx_colossalai.device.device import Device, HostDevice, Traffic
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError

__all__ = ["Device", "HostDevice", "Traffic", "make_device"]


def make_device(context: ParallelContext, *, capacity: int | None = None) -> Device[Any]:
    """The device of a rank.

    Args:
        context: The place of the rank in the world.
        capacity: Bytes that it may use there; None: what there is, or most of it on a card.

    Raises:
        UnsupportedError: There is no engine for that kind of device.
    """
    kind = context.device.type
    if kind == "cpu":
        return HostDevice(capacity, local_world_size=context.local_world_size)
    if kind == "cuda":
        from nnx_colossalai.device.cuda import CudaDevice

        return CudaDevice(context.device, capacity, world_size=context.world_size)
    raise UnsupportedError(
        f"colossalai cannot hold chunks on device {str(context.device)!r}.",
        remedy="Train with accelerator='cpu' or accelerator='cuda'.",
    )
