"""Parameters that FSDP2 cannot shard, in the working dtype while a step runs.

Every rank holds them whole. In a step the modules have a copy in the working dtype in their place, cast
within autograd: gradients arrive at the masters, in the masters' dtype, by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from nnx_colossalai.chunks._torch_compat import when_backward_has_ended

__all__ = ["CastParameters"]


class CastParameters:
    """Shows modules their plain float32 parameters in another dtype for a while.

    Args:
        modules: With parameters that are sharded, which are left alone, and such that are not.
        dtype: Shown; None: nothing is.

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
        for module in owners:
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: self.hide()))
            self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: self.hide()))

    def show(self) -> None:
        """Show the working copies, made of what the masters are now."""
        if self._are_shown or not self._places:
            return
        self._are_shown = True
        casts: dict[nn.Parameter, Tensor] = {}  # one for all modules that share a parameter
        for module, name, parameter in self._places:
            if parameter not in casts:
                casts[parameter] = parameter.to(self._dtype)
            cast(dict[str, Any], module._parameters)[name] = casts[parameter]

    def hide(self) -> None:
        """Give the modules the masters back."""
        self._is_queued = False
        if self._are_shown:
            self._are_shown = False
            for module, name, parameter in self._places:
                module._parameters[name] = parameter

    def remove(self) -> None:
        """Never show them again."""
        self.hide()
        for handle in self._handles:
            handle.remove()
        self._handles, self._places = [], []

    def when_backward_has_ended(self) -> None:
        """Within a backward: hide them at its end."""
        if self._are_shown and not self._is_queued:
            self._is_queued = True
            when_backward_has_ended(self.hide)
