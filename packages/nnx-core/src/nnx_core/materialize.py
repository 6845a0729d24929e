"""From the meta device to real weights, one unit at a time, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nnx_checkpoint.collective import broadcast_tensor, is_distributed
from nnx_core.errors import UnsupportedError


def materialize(module: nn.Module, device: torch.device, *, name: str) -> None:
    """Allocate a module's meta tensors on `device` and initialise them with ``reset_parameters``.

    Args:
        module: The module; tensors that are not on the meta device are left alone.
        device: The device to move to.
        name: Its name in the model, for messages.

    Raises:
        UnsupportedError: A submodule has meta tensors and no ``reset_parameters``.
    """
    for submodule_name, submodule in module.named_modules():
        own = [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if not callable(reset):
            where = ".".join(part for part in (name, submodule_name) if part) or "the root module"
            raise UnsupportedError(
                f"{where} ({type(submodule).__name__}) was built on the meta device and has no "
                "`reset_parameters()` to initialise its tensors with.",
                remedy="Give it that method, or build the model without `empty_init=True`.",
            )
        submodule.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that are not sharded yet to the device, in place."""
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            if not isinstance(parameter, DTensor) and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in submodule.named_buffers(recurse=False):
            if buffer.device != device:
                submodule._buffers[name] = buffer.to(device)


def lay_in_order(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Give parameters whose elements lie in another order, as with channels last, the usual one, in place.

    FSDP2, for one, shards no others.

    Returns:
        For each that was changed, an empty tensor on the meta device with the strides that it had.
    """
    strides = {}
    for parameter in parameters:
        if not (isinstance(parameter, DTensor) or parameter.is_contiguous()):
            strides[parameter] = torch.empty_like(parameter, device="meta", requires_grad=False)
            parameter.data = parameter.data.contiguous()
    return strides


def with_strides(value: Tensor, strided: Tensor | None) -> Tensor:
    """Undo `lay_in_order` for a parameter's value.

    Args:
        value: With its elements in order.
        strided: The result of `lay_in_order` for the parameter; None if it was not changed.
    """
    return value if strided is None else torch.empty_like(strided, device=value.device).copy_(value)


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Give every rank rank 0's values of the tensors that are not sharded yet. Collective."""
    if not is_distributed():
        return
    for tensor in _plain_tensors(module):
        broadcast_tensor(tensor)


def _plain_tensors(module: nn.Module) -> Iterable[Tensor]:
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and id(tensor) not in seen and tensor.numel():
            seen.add(id(tensor))
            yield tensor
