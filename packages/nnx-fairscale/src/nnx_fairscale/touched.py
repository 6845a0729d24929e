"""Which parameters took part in a backward, on any rank.

Engines that keep gradients in buffers have zeros for a parameter that no loss has used. An optimizer would
still decay it and move it by its momentum, which one process, whose gradient is None, does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx_core.used import used_anywhere

__all__ = ["Touched"]


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

    def anywhere(self, parameters: Sequence[nn.Parameter]) -> set[Tensor]:
        """Those of the parameters that got a gradient on any rank since the last call. Collective."""
        flags = used_anywhere([parameter in self._here for parameter in parameters])
        self._here.clear()
        return {parameter for parameter, used in zip(parameters, flags, strict=True) if used}

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
