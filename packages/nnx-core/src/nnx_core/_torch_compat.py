"""Private names of torch that the core and several engines use.

`PRIVATE_NAMES` lists them, with the versions they were seen in; tests/test_private_names.py looks them up.
"""

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from nnx_base._torch_compat import IMPORT, Private

__all__ = [
    "NO_BACKWARD",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "IncompatibleKeys",
    "TorchDispatchMode",
    "all_gather_into",
    "begin_anew",
    "current_backward",
    "end_of_backward",
    "exchange_in_transforms",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div",
    "foreach_mul_",
    "foreach_norm",
    "foreach_pow",
    "forget_dtensors",
    "guarded_mode",
    "in_guarded_mode",
    "param_groups",
    "pytree",
    "reduce_scatter_into",
    "run_step_hooks",
    "shadow_of",
    "state_of",
    "states_of",
    "storage_key",
    "storage_users",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "users_of_storage",
    "versions_kept",
    "when_backward_ends",
    "will_execute",
]

_STEP = "the first step under an engine raises AttributeError"
_ERROR = "after an error in a step of FSDP2 the next one raises AttributeError"
PRIVATE_NAMES = {
    "torch._C._EnableTorchFunction": Private(IMPORT),
    "torch._C._current_graph_task_id": Private("the first step of an engine raises AttributeError"),
    "torch._C._is_torch_function_enabled": Private(IMPORT),
    "torch._C._storage_Use_Count": Private(_STEP),
    "torch._C._will_engine_execute_node": Private("the first backward of DeepSpeed raises AttributeError"),
    "torch._foreach_clamp_max_": Private(IMPORT),
    "torch._foreach_clamp_min_": Private(IMPORT),
    "torch._foreach_copy_": Private(IMPORT),
    "torch._foreach_div": Private(IMPORT),
    "torch._foreach_mul_": Private(IMPORT),
    "torch._foreach_norm": Private(IMPORT),
    "torch._foreach_pow": Private(IMPORT),
    "torch._functorch.eager_transforms": Private(IMPORT),
    "torch._functorch.eager_transforms._wrap_tensor_for_grad": Private(
        "training with guards raises AttributeError"
    ),
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": Private(IMPORT),
    "torch._subclasses.fake_tensor.FakeTensor": Private(IMPORT),
    "torch._subclasses.fake_tensor.FakeTensorMode": Private(IMPORT),
    "torch.autograd.Variable._execution_engine": Private("the first backward raises AttributeError"),
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": Private(IMPORT),
    "torch.autograd.graph._get_grad_fn_or_grad_acc": Private(IMPORT),
    "torch.distributed.tensor._redistribute": Private("the end of an FSDP2 run raises ImportError"),
    "torch.distributed.tensor._redistribute._gen_transform_infos": Private("the end of an FSDP2 run raises"),
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": Private("the end of an FSDP2 run raises"),
    "torch.nn.modules.module._IncompatibleKeys": Private(IMPORT),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(IMPORT),
    "torch.utils._pytree": Private(IMPORT),
    "torch.utils._pytree.tree_flatten": Private(IMPORT),
    "torch.utils._pytree.tree_leaves": Private(IMPORT),
    "torch.utils._pytree.tree_map": Private(IMPORT),
    "torch.utils._pytree.tree_map_only": Private(IMPORT),
    "FSDPParamGroup._all_gather_result": Private(_ERROR),
    "FSDPParamGroup._post_forward_indices": Private(_ERROR),
    "FSDPParamGroup._to_sharded": Private(_ERROR),
    "FSDPParamGroup._training_state": Private(_ERROR),
    "FSDPState._comm_ctx": Private(_ERROR),
    "FSDPState._fsdp_param_group": Private("the name for several is taken", last="2.11"),
    "FSDPState._fsdp_param_groups": Private("the name for a single one is taken", first="2.12"),
    "FSDPState._is_root": Private(_ERROR),
    "FSDPState._reset_iter_state": Private("nnx resets the same by itself", first="2.13"),
    "FSDPState._state_ctx": Private(_ERROR),
    "FSDPState._training_state": Private(_ERROR),
    "Optimizer._opt_called": Private("nothing: nnx sets it for schedulers, which would not ask for it"),
    "Optimizer._optimizer_load_state_dict_post_hooks": Private("nothing: nnx sets it on a copy"),
    "Optimizer._optimizer_load_state_dict_pre_hooks": Private("nothing: nnx sets it on a copy"),
    "Optimizer._optimizer_state_dict_post_hooks": Private("nothing: nnx sets it on a copy"),
    "Optimizer._optimizer_state_dict_pre_hooks": Private("nothing: nnx sets it on a copy"),
    "Optimizer._optimizer_step_post_hooks": Private("the first step on a rank that owns no part raises"),
    "Optimizer._optimizer_step_pre_hooks": Private("the first step on a rank that owns no part raises"),
    "UntypedStorage._cdata": Private(_STEP),
}
"""The private names of torch that this module uses, and the effect of a missing one."""

guarded_mode = torch._C._EnableTorchFunction
"""Context inside local mode in which user code reads unsharded tensors again."""
in_guarded_mode = torch._C._is_torch_function_enabled
"""Returns True if guarded tensors read as unsharded here."""
IncompatibleKeys = _IncompatibleKeys
"""The result type of `load_state_dict`."""

foreach_clamp_max_, foreach_clamp_min_ = torch._foreach_clamp_max_, torch._foreach_clamp_min_
foreach_copy_, foreach_mul_ = torch._foreach_copy_, torch._foreach_mul_
foreach_div, foreach_norm, foreach_pow = torch._foreach_div, torch._foreach_norm, torch._foreach_pow

NO_BACKWARD = -1
"""The result of `current_backward` outside of a backward."""

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# torch 2.13 calls them all_gather_single and reduce_scatter_single, and warns about the names that 2.11 has.
_new: Any = dist
all_gather_into = getattr(_new, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(_new, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def versions_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Restore the version counters of tensors at the end of a context.

    Args:
        tensors: The tensors, none of which was made in inference mode.
    """
    kept: AbstractContextManager[None] = _unsafe_preserve_version_counter(tuple(tensors))
    return kept


def exchange_in_transforms(kind: type, exchange: Callable[[Any], Any]) -> None:
    """Replace tensors in the arguments of ``torch.func.grad``, ``vjp``, ``jvp`` and the like.

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
    """Call a function at the end of the current backward (if it succeeds), after earlier ones."""
    Variable._execution_engine.queue_callback(then)


def run_step_hooks(
    optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any], *, before: bool
) -> None:
    """Run torch's hooks around the step of an optimizer that runs on another rank.

    Args:
        optimizer: The optimizer with the hooks; its schedulers see that it was stepped.
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


def complete_optimizer(optimizer: Optimizer) -> None:
    """Add the hook attributes to an optimizer whose class does not call `Optimizer.__init__`.

    Those that wrap another optimizer, such as Lookahead as it is often copied, do not.
    """
    own = {name: vars(optimizer).get(name) for name in _HOOKS_OF_OPTIMIZERS}
    if all(isinstance(hooks, OrderedDict) for hooks in own.values()):
        return
    optimizer.defaults = getattr(optimizer, "defaults", {})
    # torch uses this for pickled optimizers of older versions.
    Optimizer.__setstate__(optimizer, {name: OrderedDict(hooks or {}) for name, hooks in own.items()})


def shadow_of(
    optimizer: OptimizerT, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]] | None = None
) -> OptimizerT:
    """Copy an optimizer, with other groups and state, and without the user's hooks."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    for wrapped in ("step", "zero_grad"):  # what schedulers and strategies put on the user's object
        vars(shadow).pop(wrapped, None)
    vars(shadow).update({hooks: OrderedDict() for hooks in _HOOKS_OF_OPTIMIZERS})
    shadow.param_groups, shadow.state = groups, defaultdict(dict, state or {})
    return shadow


def storage_key(tensor: Tensor) -> int:
    """Return a number that all views of a living storage share; 0 for a tensor without a storage."""
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)


def storage_users(tensor: Tensor) -> int:
    """Return the number of references to the storage of a tensor."""
    return users_of_storage(tensor.untyped_storage())


def users_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def current_backward() -> int:
    """Return the id of the current thread's backward; a nested backward has its own."""
    return int(torch._C._current_graph_task_id())


def end_of_backward(tensor: Tensor) -> Any:
    """Return the last graph node that a backward reaches for a tensor; with gradients enabled."""
    return _get_grad_fn_or_grad_acc(tensor)


def will_execute(node: Any) -> bool:
    """Return True if the current thread's backward reaches a node.

    Raises:
        RuntimeError: The backward does not tell: it is one of ``torch.autograd.grad``.
    """
    return bool(torch._C._will_engine_execute_node(node))


def state_of(module: Any) -> Any:
    """Return FSDP2's state of a module, after ``fully_shard``."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def states_of(root: nn.Module) -> Iterator[Any]:
    """Return FSDP2's state of each module with one, the root first."""
    return (state_of(module) for module in root.modules() if issubclass(type(module), FSDPModule))


def param_groups(state: Any) -> list[Any]:
    """Return the parameters that FSDP2 gathers together; none if a module has no parameters of its own."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch before 2.12


def begin_anew(states: Iterable[Any]) -> None:
    """Reset every unit to its shards after an error in a step; accumulated gradients stay.

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
    """Clear torch's caches of DTensor operations, which keep meshes of destroyed worlds alive.

    Their groups stay with them, with threads and sockets. Later requests compute them again.
    """
    from torch.distributed.tensor import _redistribute, debug

    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    clear: Callable[[], None] = debug._clear_sharding_prop_cache
    clear()
