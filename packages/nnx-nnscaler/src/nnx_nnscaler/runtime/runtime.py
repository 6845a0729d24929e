"""What an emitted program knows as ``rt``: conversions and functions of one rank of a unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nnx_nnscaler.runtime.communicator import Communicator
from nnx_nnscaler.runtime.functions import Functions, Losses, Normalization


class Runtime(Functions, Losses, Normalization):
    """Everything that an emitted program calls besides torch.

    Args:
        communicator: The unit's collectives.
        device: The device of the tensors that the program makes.

    Example:
        >>> from nnx_nnscaler.runtime.communicator import GroupCommunicator
        >>> Runtime(GroupCommunicator(None)).once(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, communicator: Communicator, device: torch.device | str = "cpu") -> None:
        super().__init__(communicator)
        self.device = torch.device(device)

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a submodule that every rank runs whole, as its author wrote it; to it parameters are whole."""
        from nnx_core.whole import guarded_mode

        with guarded_mode():
            return module(*args, **kwargs)

    @staticmethod
    def item(result: Any, key: str) -> Any:
        """What a submodule that ran whole returned under a name."""
        return result[key] if isinstance(result, Mapping) else getattr(result, key)

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the program without keeping its activations; backward calls it once more."""
        if not torch.is_grad_enabled():
            return function(self, *args)
        from torch.utils.checkpoint import checkpoint

        from nnx_core.whole import local_mode

        def called(*args: Any) -> Any:
            with local_mode():  # backward does not run in the program's
                return function(self, *args)

        return checkpoint(called, *args, use_reentrant=False)
