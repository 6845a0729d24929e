"""Which parameters took part in a backward, on any rank.

Engines that keep gradients in buffers have zeros for a parameter that no loss has used. An optimizer would
still decay it and move it by its momentum, which one process, whose gradient is None, does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx.collective import is_distributed

__all__ = ["Touched", "used_anywhere"]


class Touched:
    """Remembers the parameters that got a gradient.

    Args:
        parameters: Whom to watch; others may be added.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._here: set[Tensor] = set()
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch these as well; they must require gradients."""
        for parameter in parameters:
            if parameter not in self._handles and parameter.requires_grad:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._here.add
                )

    def anywhere(self, parameters: Sequence[nn.Parameter], device: torch.device) -> set[Tensor]:
        """Those of the parameters that got a gradient on any rank since the last call. Collective."""
        flags = used_anywhere([parameter in self._here for parameter in parameters], device)
        self._here.clear()
        return {parameter for parameter, used in zip(parameters, flags, strict=True) if used}

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def used_anywhere(here: Sequence[bool], device: torch.device) -> list[bool]:
    """For each flag, whether it is set on any rank. Collective."""
    if not is_distributed() or not here:
        return list(here)
    flags = torch.tensor(here, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]
