"""Hold the memory of FSDP2 units, and cast parameters that FSDP2 cannot shard.

Every rank holds a full replica of a parameter that cannot be sharded. In a step the modules have a copy in
the working dtype instead. Autograd records the cast, so gradients reach the masters in the masters' dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from nnx_colossalai._torch_compat import (
    Gathered,
    ShardedParameter,
)
from nnx_colossalai.device import Device
from nnx_colossalai.plan.spec import Tier
from nnx_core._torch_compat import when_backward_ends


class CastParameters:
    """Shows modules their unsharded float32 parameters in another dtype for a while.

    Args:
        modules: The modules of the model; their sharded parameters are left alone.
        dtype: The dtype to show; None disables the casts.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> casts = CastParameters([layer], torch.bfloat16)
        >>> casts.show()
        >>> layer.weight.dtype
        torch.bfloat16
        >>> casts.hide()
        >>> layer.weight.dtype
        torch.float32
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._are_shown = self._is_queued = False
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        if dtype is not None:
            self._places = [
                (module, name, parameter)
                for module in modules
                for name, parameter in module._parameters.items()
                if parameter is not None
                and not isinstance(parameter, DTensor)
                and parameter.dtype is torch.float32
            ]
        self._handles: list[RemovableHandle] = []
        owners: list[Any] = list(dict.fromkeys(module for module, _, _ in self._places))
        # A state dict must hold the masters, and must load into them.
        for module in owners:
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: self.hide()))
            self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: self.hide()))

    def show(self) -> None:
        """Show working copies of the masters' present values."""
        if self._are_shown or not self._places:
            return
        self._are_shown = True
        # One cast for all modules that share a parameter.
        casts: dict[nn.Parameter, Tensor] = {}
        for module, name, parameter in self._places:
            if parameter not in casts:
                casts[parameter] = parameter.to(self._dtype)
            cast(dict[str, Any], module._parameters)[name] = casts[parameter]

    def hide(self) -> None:
        """Show the masters again."""
        self._is_queued = False
        if self._are_shown:
            self._are_shown = False
            for module, name, parameter in self._places:
                module._parameters[name] = parameter

    def remove(self) -> None:
        """Show the masters for good."""
        self.hide()
        for handle in self._handles:
            handle.remove()
        self._handles, self._places = [], []

    def when_backward_has_ended(self) -> None:
        """Hide the copies once the running backward ends."""
        if self._are_shown and not self._is_queued:
            self._is_queued = True
            when_backward_ends(self.hide)


def sharded_segments(
    gathered: Iterable[Gathered], device: Device[Any], working_dtype: torch.dtype | None
) -> list[ShardedSegment]:
    """Return the parameters of a unit by dtype, in FSDP2's order."""
    by_dtype: dict[torch.dtype, list[ShardedParameter]] = defaultdict(list)
    for group in gathered:
        for parameter in group.parameters:
            by_dtype[parameter.parameter.dtype].append(parameter)
    return [
        ShardedSegment(
            parameters, device, working_dtype if dtype.is_floating_point and working_dtype else dtype
        )
        for dtype, parameters in by_dtype.items()
    ]


class ShardedSegment:
    """The memory of one FSDP2 unit's parameters of one dtype.

    The masters are one flat buffer; the DTensors of the module and the optimizers are views of it. FSDP2
    gathers masters on the device directly, and masters in host memory through a copy in the working dtype.

    Args:
        parameters: FSDP2's parameters.
        device: The device that allocates and copies.
        working_dtype: The dtype that forward and backward compute with.
    """

    def __init__(
        self, parameters: list[ShardedParameter], device: Device[Any], working_dtype: torch.dtype
    ) -> None:
        self._parameters, self._device, self._working_dtype = parameters, device, working_dtype
        self._world_size = cast(DTensor, parameters[0].parameter).device_mesh.size()
        self._masters = torch.empty(0)
        self._working: Tensor | None = None
        self._copied_version = -1
        self._is_laid_out = False
        self._on_host = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameter objects of the module and the optimizers."""
        return [parameter.parameter for parameter in self._parameters]

    @property
    def version(self) -> int:
        """A number that changes with every in-place change of the masters."""
        # A change through a DTensor counts in the DTensor only, a change of a local shard in the buffer only.
        return self._masters._version + sum(parameter._version for parameter in self.parameters)

    @property
    def is_copied(self) -> bool:
        """True if the working copy has the masters' values, or none is needed."""
        return self._working is None or self._copied_version == self.version

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the local shards that FSDP2 gathers from."""
        gathered = self._masters if self._working is None else self._working
        return gathered.numel() * gathered.element_size()

    @property
    def complete_bytes(self) -> int:
        """The bytes of the gathered weights on the device."""
        return self._world_size * self._masters.numel() * self._working_dtype.itemsize

    @torch.no_grad()
    def place(self, tier: Tier) -> dict[nn.Parameter, nn.Parameter]:
        """Move the masters and the working copy to the memory of a tier.

        Returns:
            The new parameter of each replaced one.
        """
        replaced = {}
        if not self._is_laid_out or tier.steps_on_host != self._on_host:
            replaced = self._place_masters(on_host=tier.steps_on_host)
        self._place_working(tier)
        return replaced

    def _place_masters(self, *, on_host: bool) -> dict[nn.Parameter, nn.Parameter]:
        numel = sum(parameter.numel for parameter in self._parameters)
        make = self._device.host_empty if on_host else self._device.empty
        masters = make(numel, self._parameters[0].parameter.dtype)
        pinned = self._device.torch_device.type == "cuda"
        replaced = {}
        offset = 0
        for parameter in self._parameters:
            end = offset + parameter.numel
            before = self._masters[offset:end] if self._is_laid_out else parameter.data
            masters[offset:end].copy_(before)
            old, new = parameter.hold(masters[offset:end], on_host=on_host, pinned=pinned)
            if old is not new:
                replaced[old] = new
            offset = end
        self._masters, self._on_host, self._is_laid_out = masters, on_host, True
        return replaced

    def _place_working(self, tier: Tier) -> None:
        self._working = self._new_working(tier)
        self._copied_version = -1
        gathered = self._masters if self._working is None else self._working
        offset = 0
        for parameter in self._parameters:
            parameter.gather_from(gathered[offset : offset + parameter.numel])
            offset += parameter.numel

    def _new_working(self, tier: Tier) -> Tensor | None:
        if tier is Tier.OFFLOADED:
            return self._device.empty(self._masters.numel(), self._working_dtype)
        # Equal dtypes need no copy: FSDP2 reads the masters from host memory at each gather.
        if tier is Tier.STREAMED and self._working_dtype != self._masters.dtype:
            return self._device.host_empty(self._masters.numel(), self._working_dtype)
        return None

    @torch.no_grad()
    def copy(self, tier: Tier) -> Any:
        """Copy the masters to the working copy.

        Returns:
            The event to wait for; None if the copy is complete.
        """
        if self._working is None:
            return None
        # Before the copy: a change during it makes the copy stale.
        self._copied_version = self.version
        if tier is Tier.OFFLOADED:
            return self._device.copy(self._working, self._masters)
        self._working.copy_(self._masters)
        return None

    def let_go(self) -> None:
        """Drop all memory after FSDP2 has left the module, even if references to this object remain."""
        self._masters, self._working = torch.empty(0), None
        for parameter in self._parameters:
            parameter.let_go()
        self._parameters = []
