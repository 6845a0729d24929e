"""Every private name of torch's FSDP2 that this package uses.

Checked against torch 2.11 and 2.13. FSDP2 has no public inverse of ``fully_shard``; without one a
module could not be deep-copied, trained a second time or handed back under its own class. Nor has it a
public way to begin and end what hangs on the root's forward where that is not called (see `steps`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_leaves

__all__ = ["before_part", "can_be_sharded", "finish_after_backward", "prepare_root", "remove_fully_shard"]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def can_be_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` can put its class in front of the module's own.

    It cannot where the memory layout would change, as with ``class Model(Generic[T], nn.Module)``.
    """
    own = type(module)
    try:
        module.__class__ = type(own.__name__, (FSDPModule, own), {})
    except TypeError:
        return False
    module.__class__ = own
    return True


def remove_fully_shard(module: nn.Module) -> None:
    """Undo ``fully_shard`` on one module: hooks, registries and class; its DTensor parameters stay.

    Args:
        module: A module on which ``fully_shard`` was called; must hold its sharded parameters.
    """
    if not isinstance(module, FSDPModule):
        return
    state = _state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in _param_groups(state):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
            handles.clear()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    for submodule in module.modules():
        for mark in _MARKS:
            submodule.__dict__.pop(mark, None)
    module.__dict__.pop(STATE_KEY, None)
    module.__dict__.pop(REGISTRY_KEY, None)
    _composable_state._module_state_mapping.pop(module, None)
    module.__class__ = type(module).__mro__[2]  # [FSDP<Class>, FSDPModule, Class, ...]


def prepare_root(root: FSDPModule) -> None:
    """Make a module the root of its units before one of them runs by itself."""
    _state(root)._lazy_init()


def before_part(root: FSDPModule, args: Any, kwargs: Any) -> Any:
    """What the root's forward would do first: gather its parameters, and cast inputs as its policy says."""
    root.unshard()
    return _state(root)._cast_forward_inputs(args, kwargs)


def finish_after_backward(root: FSDPModule, output: Any) -> None:
    """When backward reaches the output, let FSDP2 reduce and reshard the root's part at its end."""
    if not torch.is_grad_enabled():
        return
    state = _state(root)
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


def _state(module: Any) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _param_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch before 2.12
