"""Parameters for a trace where the module's own cannot be used: in parts, or on the meta device.

Owns the exchange of entries in modules for a while. Parameter objects are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["can_run", "plain_parameters"]

_PLAIN = (getattr(Tensor.__torch_function__, "__func__", None), nn.Parameter.__torch_function__)


@contextmanager
def plain_parameters(module: nn.Module) -> Iterator[torch.device | None]:
    """Have only plain whole tensors in a module.

    Yields:
        The device that inputs have to be on for a trace; None where they can stay.
    """
    tensors = [*module.parameters(), *module.buffers()]
    guarded = [tensor for tensor in tensors if _is_guarded(tensor)]
    meta = any(tensor.is_meta for tensor in tensors) or any(tensor.device.type != "cpu" for tensor in guarded)
    if not guarded and not meta:
        yield None
        return
    device = torch.device("meta" if meta else "cpu")
    made = {id(tensor): _stand_in(tensor, device) for tensor in tensors if meta or _is_guarded(tensor)}
    saved: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for submodule in module.modules():
        for entries in (submodule._parameters, submodule._buffers):
            for name, tensor in entries.items():
                if tensor is not None and id(tensor) in made:
                    saved.append((entries, name, tensor))  # type: ignore[arg-type]
                    entries[name] = made[id(tensor)]  # type: ignore[assignment]
    try:
        yield device if meta else None
    finally:
        for entries, name, tensor in saved:
            entries[name] = tensor


def can_run(module: nn.Module) -> bool:
    """Whether the forward can be run on a sample, not only traced."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _is_guarded(tensor: Tensor) -> bool:
    """Whether a tensor's class answers torch functions itself: what it shows may not be what it holds."""
    own = type(tensor).__torch_function__
    return getattr(own, "__func__", own) not in _PLAIN


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    made = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and dtype.is_floating_point:
        made.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    return (
        nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    )
