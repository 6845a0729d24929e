"""Private names of torch that the core and several engines use. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# torch 2.13 calls them all_gather_single and reduce_scatter_single, and warns about the names that 2.11 has.
_new: Any = dist
all_gather_into = getattr(_new, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(_new, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def versions_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Afterwards torch's counts of writes into tensors are what they were.

    Args:
        tensors: The tensors, none of which was made in inference mode.
    """
    kept: AbstractContextManager[None] = _unsafe_preserve_version_counter(tuple(tensors))
    return kept


def exchange_in_transforms(kind: type, exchange: Callable[[Any], Any]) -> None:
    """Exchange tensors that ``torch.func.grad``, ``vjp``, ``jvp`` and their like are given and would wrap.

    Args:
        kind: The kind of the tensors.
        exchange: From each to what takes its place. It runs outside of all transforms.
    """
    wrap = eager_transforms._wrap_tensor_for_grad

    def wrap_exchanged(argument: Any, level: int) -> Any:
        if isinstance(argument, kind):
            with temporarily_clear_interpreter_stack():
                argument = exchange(argument)
        return wrap(argument, level)

    eager_transforms._wrap_tensor_for_grad = wrap_exchanged  # type: ignore[assignment] # of any type


def when_backward_ends(then: Callable[[], None]) -> None:
    """Within a backward: call a function when it has ended well, after those that were given before."""
    Variable._execution_engine.queue_callback(then)


def run_step_hooks(
    optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any], *, before: bool
) -> None:
    """Do what torch does around the step of an optimizer that does not run on this rank.

    Args:
        optimizer: Whose hooks are called; its schedulers see that it was stepped.
        args: The arguments of the step.
        kwargs: The keyword arguments of the step.
        before: True for the hooks before the step, False for those after it.
    """
    hooks = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    for hook in tuple(hooks.values()):
        hook(optimizer, tuple(args), dict(kwargs))
    optimizer._opt_called = True  # type: ignore[attr-defined] # what a scheduler asks for


_HOOKS_OF_OPTIMIZERS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def shadow_of(
    optimizer: OptimizerT, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None = None
) -> OptimizerT:
    """An optimizer of the same class and settings over other groups and state, without the user's hooks."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    for wrapped in ("step", "zero_grad"):  # what schedulers and strategies put on the user's object
        vars(shadow).pop(wrapped, None)
    vars(shadow).update({hooks: OrderedDict() for hooks in _HOOKS_OF_OPTIMIZERS})
    shadow.param_groups, shadow.state = groups, defaultdict(dict, state or {})
    return shadow


def storage_users(tensor: Tensor) -> int:
    """How many tensors and others hold the storage of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# --- FSDP2 ----------------------------------------------------------------------------------------


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
        getattr(state._comm_ctx, "post_forward_order", []).clear()  # made by FSDP2's first forward
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in param_groups(state):
            group._training_state = idle
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group._to_sharded()


def forget_dtensors() -> None:
    """Empty what torch keeps of operations on DTensors, which holds meshes of worlds that were destroyed.

    Their groups stay with them, with threads and sockets. What is asked for again is worked out anew.
    """
    from torch.distributed.tensor import _redistribute, debug

    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    clear: Callable[[], None] = debug._clear_sharding_prop_cache
    clear()
