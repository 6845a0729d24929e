"""A module's way to its device: one submodule after the other, with the same values on every rank.

Whoever stores each parameter in part as soon as it has arrived never has the whole module on the device. What
becomes of a parameter then is `storage`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from nnx_checkpoint.collective import broadcast_tensor, is_distributed
from nnx_core.modules import materialize, refuse_without_reset

__all__ = ["Arrival"]


class Arrival:
    """Brings a module to a device, with rank 0's values. All of it is collective.

    Args:
        module: The module; what is on the meta device gets its values from ``reset_parameters``.
        device: The device.

    Raises:
        UnsupportedError: A submodule has meta tensors and no ``reset_parameters``.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        refuse_without_reset(module, name="")
        self._module = module
        self._device = device
        self._left = deque(module.named_modules())
        self._reached: set[str] = set()
        self._seen: set[nn.Parameter] = set()
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def is_there(self) -> bool:
        """Whether the whole module is on the device, so that only its values may have to be exchanged."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        return all(tensor.device == self._device for tensor in tensors)

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name, on the device; those have to be asked for in the module's order."""
        owner = name.rpartition(".")[0]
        while owner not in self._reached:
            self._bring_next()
        return self._module.get_parameter(name)

    def finish(self) -> bool:
        """Bring what is left; returns whether there was anything."""
        was_left = bool(self._left)
        while self._left:
            self._bring_next()
        return was_left

    @torch.no_grad()
    def _bring_next(self) -> None:
        name, submodule = self._left.popleft()
        self._reached.add(name)
        self._materialize(submodule, name)
        own = [parameter for parameter in submodule.parameters(recurse=False) if parameter not in self._seen]
        self._seen.update(own)
        for parameter in own:
            if parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)
        for key, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[key] = buffer.to(self._device)
        for tensor in (*own, *submodule.buffers(recurse=False)):
            if is_distributed() and tensor.numel():
                broadcast_tensor(tensor)

    def _materialize(self, submodule: nn.Module, name: str) -> None:
        """Give a submodule's own meta tensors values; tied parameters stay so, with the first's values."""
        before = {key: p for key, p in submodule._parameters.items() if p is not None and p.is_meta}
        materialize(cast(nn.Module, _Alone(submodule)), self._device, name=name)
        for key, parameter in before.items():
            made = cast(nn.Parameter, submodule._parameters[key])
            submodule._parameters[key] = self._replaced.setdefault(parameter, made)


class _Alone:
    """A submodule without its children, for `materialize`."""

    def __init__(self, submodule: nn.Module) -> None:
        self._submodule = submodule

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield "", self._submodule
