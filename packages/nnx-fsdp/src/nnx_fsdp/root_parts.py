"""Call submodules of a sharded root alone, in a step of manual optimization.

FSDP2 gathers the parameters of the root when the root's forward begins. It reduces their gradients after a
backward from the root's output. A step that calls ``self.generator`` and ``self.discriminator``, twice, runs
neither: without `PartsOfRoot` it would silently train nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from nnx_fsdp._torch_compat import before_part, finish_after_backward, prepare_root


class PartsOfRoot:
    """Hooks that let user code call every submodule that is sharded with the root.

    Args:
        root: The module that ``fully_shard`` was called on last.
        opaque: Submodules that get no hooks inside, such as compiled ones.
    """

    def __init__(self, root: FSDPModule, *, opaque: Collection[nn.Module] = ()) -> None:
        self._root = root
        self._active = False
        self._handles: list[RemovableHandle] = []
        for part in _parts(root, opaque):  # type: ignore[arg-type] # an FSDPModule is a Module as well
            self._handles.append(part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._after))

    @contextmanager
    def callable(self) -> Iterator[None]:
        """Context manager in which submodules may be called alone; outside of it the hooks do nothing."""
        prepare_root(self._root)
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        return before_part(self._root, args, kwargs) if self._active else None

    def _after(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._active:
            finish_after_backward(self._root, output)


def _parts(module: nn.Module, opaque: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, FSDPModule):
            continue  # FSDP2's own hooks handle a unit
        yield child
        if child not in opaque:
            yield from _parts(child, opaque)
