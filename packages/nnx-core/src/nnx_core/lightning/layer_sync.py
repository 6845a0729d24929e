"""``sync_batchnorm=True``: Lightning's layer replacement, undone exactly when a run ends.

Lightning's own way back leaves another class behind; here the user's own layers return, with what their
stand-ins learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["put_back", "synchronize_layers"]


def synchronize_layers(layer_sync: Any, module: nn.Module) -> dict[str, nn.Module]:
    """Apply a ``LayerSync`` plugin of Lightning's in place.

    Args:
        layer_sync: The plugin.
        module: Whose layers are replaced; itself it stays.

    Returns:
        By name, the layers that were replaced.
    """
    before = dict(module.named_modules(remove_duplicate=False))
    layer_sync.apply(module)
    after = dict(module.named_modules(remove_duplicate=False))
    return {name: layer for name, layer in before.items() if after.get(name) is not layer}


def put_back(module: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Put replaced layers back, holding the parameters and buffers of their stand-ins."""
    for name, original in originals.items():
        stand_in = module.get_submodule(name)
        original._parameters.update(stand_in._parameters)
        original._buffers.update(stand_in._buffers)
        original.train(stand_in.training)
        parent, _, child = name.rpartition(".")
        module.get_submodule(parent)._modules[child] = original
