"""Tensors without memory in place of a module's own, for a run that must leave nothing behind.

Owns the exchange and its undoing: parameters, buffers, attributes, hooks and random states are as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nnx.random_state import forked
from nnx_colossalai.plan._torch_compat import tree_map

__all__ = ["inputs_of", "restored", "stand_in_weights"]

_MOST_ENTRIES = 10_000
"""Containers of more are data sets rather than what a forward keeps; copying them would take long."""

_LOGGERS = ("log", "log_dict")
"""Of a LightningModule."""


@contextmanager
def restored(root: nn.Module) -> Iterator[None]:
    """Put back what a run changes: attributes of modules, lists and dicts in them, and random states.

    What the run logs is dropped, for Trainer would keep it outside of the module.
    """
    saved: dict[int, _Saved] = {}
    for module in root.modules():
        _save(vars(module), saved)
        if all(callable(getattr(type(module), name, None)) for name in _LOGGERS):
            vars(module).update(dict.fromkeys(_LOGGERS, _ignore))
    with forked():
        try:
            yield
        finally:
            for container in saved.values():
                container.restore()


class _Saved:
    """What was in a dict, list or set.

    Args:
        container: To be put back as it is now.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self.items = list(container.items() if isinstance(container, dict) else container)

    def restore(self) -> None:
        now = list(self.container.items() if isinstance(self.container, dict) else self.container)
        if len(now) == len(self.items) and all(map(_same, now, self.items)):
            return
        self.container.clear()
        if isinstance(self.container, list):
            self.container.extend(self.items)
        else:
            self.container.update(self.items)


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(first is second for first, second in zip(one, other, strict=True))
    return one is other


def _save(container: Any, saved: dict[int, _Saved]) -> None:
    if id(container) in saved or len(container) > _MOST_ENTRIES:
        return
    saved[id(container)] = _Saved(container)
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, (dict, list, set)):
            _save(value, saved)


def stand_in_weights(
    root: nn.Module, device: torch.device, *, parameters: torch.dtype | None, buffers: torch.dtype | None
) -> dict[int, nn.Parameter]:
    """Exchange every parameter and buffer for one without memory. Call it within `restored` and a fake mode.

    Args:
        root: The module.
        device: Where they are said to be.
        parameters: Dtype of floating parameters; None keeps theirs.
        buffers: Dtype of floating buffers.

    Returns:
        The new parameters, by the id of the old ones.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = _empty_like(parameter, device, parameters)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _empty_like(buffer, device, buffers)
        if isinstance(module, nn.RNNBase):  # they are in a list too
            names = [name for names in module._all_weights for name in names]
            vars(module)["_flat_weights"] = [module._parameters.get(name) for name in names]
    return made


def inputs_of(values: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Tensors without memory in place of those in a structure of arguments."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _empty_like(value, device, dtype).requires_grad_(value.requires_grad)

    return tree_map(stand_in, values)


def _empty_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=wanted, device=device)
