"""Private names of torch's FSDP2 that several engines use. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def state_of(module: Any) -> Any:
    """What FSDP2 knows of a module that ``fully_shard`` was called on."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def states_of(root: nn.Module) -> Iterator[Any]:
    """That of each such module, the root first."""
    return (state_of(module) for module in root.modules() if issubclass(type(module), FSDPModule))


def param_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers together; nothing where a module has no parameters of its own."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch before 2.12


def begin_anew(states: Iterable[Any]) -> None:
    """After an error in a step: let every unit begin anew with its part; accumulated gradients stay.

    Args:
        states: The states of all units of a root.
    """
    states = list(states)
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
    for state in states:  # the rest is for torch before it had the above
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in param_groups(state):
            group._training_state = idle
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group._to_sharded()
