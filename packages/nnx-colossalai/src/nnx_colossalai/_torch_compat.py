"""Private names of torch that this package uses.

`PRIVATE_NAMES` lists them with the versions that have them; tests/test_private_names.py looks them up.

``FakeTensorMode`` runs a model on tensors without memory. The public way, ``torch.export``, does not show the
activations that backward keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as base
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from nnx_base._torch_compat import Private, local_mode
from nnx_core._torch_compat import (
    NO_BACKWARD,
    FakeTensorMode,
    TorchDispatchMode,
    begin_anew,
    current_backward,
    param_groups,
    state_of,
    states_of,
    tree_leaves,
    tree_map,
    users_of_storage,
    will_execute,
)
from nnx_core.optimizers.own_optimizers import refuse_unreduced_step
from nnx_fsdp._torch_compat import drop_unreduced_gradient, has_unreduced_gradient

__all__ = [
    "NO_BACKWARD",
    "FakeTensorMode",
    "Gathered",
    "ShardedParameter",
    "Silenced",
    "TorchDispatchMode",
    "WaitingDTensor",
    "accumulator_of",
    "collectives_issued",
    "current_backward",
    "flops_of",
    "gathered_together",
    "has_hooks_that_see_the_result",
    "has_memory_alone",
    "is_under_way",
    "make_last",
    "makes_cuda_graphs",
    "recover",
    "tree_leaves",
    "tree_map",
    "will_run",
    "without_guards",
]


_SETUP = "setting a model up raises AttributeError"
_STEP = "the first step raises AttributeError"
PRIVATE_NAMES = {
    "torch.distributed.group.WORLD._get_sequence_number_for_group": Private("the first step on ranks raises"),
    "torch.distributed.tensor.DTensor._local_tensor": Private("importing the engine raises AttributeError"),
    "torch.optim.optimizer._global_optimizer_post_hooks": Private(_STEP),
    "torch.optim.optimizer._global_optimizer_pre_hooks": Private(_STEP),
    "FSDPParam._post_load_hook_handle": Private(_SETUP),
    "FSDPParam._setattr_on_modules": Private(_SETUP),
    "FSDPParam._sharded_param_data": Private(_SETUP),
    "FSDPParamGroup._all_gather_result": Private(_STEP),
    "FSDPParamGroup._reset_sharded_params": Private("loading a state dict overwrites masters: a test fails"),
    "FSDPParamGroup._to_sharded": Private(_STEP),
    "FSDPParamGroup._training_state": Private(_STEP),
    "FSDPState._state_ctx": Private(_STEP),
    "Module._compiled_call_impl": Private(_SETUP),
    "OpOverload._overloadpacket": Private("planning raises AttributeError"),
    "Optimizer._optimizer_step_post_hooks": Private(_STEP),
}
"""The private names of torch that this module uses, and the failure if torch lacks one."""


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating point operations of one call; 0 unless it is a kind of matrix product."""
    count = flop_registry.get(operator._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def has_hooks_that_see_the_result(optimizer: Optimizer) -> bool:
    """Return True if hooks run after the step, or around every optimizer's step."""
    after = optimizer._optimizer_step_post_hooks or base._global_optimizer_post_hooks
    before_all = base._global_optimizer_pre_hooks.values()
    return bool(after) or any(hook is not refuse_unreduced_step for hook in before_all)


@contextmanager
def without_guards() -> Iterator[None]:
    """Context manager that uses parameters with a pending step as they are, without waiting."""
    with local_mode():
        yield


class ShardedParameter:
    """One parameter of an FSDP2 unit, with masters and gathered shards in separate memory.

    FSDP2 gathers a parameter from the memory that the optimizer steps. Chunks need two memories: 16-bit
    weights to gather, and float32 masters to step. No public option of FSDP2 allows that.

    Args:
        inner: FSDP2's object of the parameter.

    Attributes:
        numel: The elements of the local shard, padded to the same number on all ranks.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.numel = int(inner._sharded_param_data.numel())
        # After loading a state dict, this hook would gather from the masters again.
        inner._post_load_hook_handle.remove()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter object of the module and the optimizers."""
        return cast(nn.Parameter, self._inner.sharded_param)

    @property
    def data(self) -> Tensor:
        """The local shard that FSDP2 gathers from, flat and padded."""
        return cast(Tensor, self._inner._sharded_param_data)

    @property
    def has_gradient(self) -> bool:
        """True if a backward has left an unreduced gradient."""
        return has_unreduced_gradient(self._inner)

    def hold(self, master: Tensor, *, on_host: bool, pinned: bool) -> tuple[nn.Parameter, nn.Parameter]:
        """Make `master` the memory of the parameter, and send gradients to its device.

        Args:
            master: The flat, padded master.
            on_host: True if it is in host memory.
            pinned: True if copies to host memory may be asynchronous.

        Returns:
            The former parameter and the new one, which is the same object unless the device changed.
        """
        inner, before = self._inner, self.parameter
        size = inner.sharded_size
        local = master[: size.numel()].view(size)
        inner.offload_to_cpu, inner.pin_memory = on_host, on_host and pinned
        if before.device == master.device:
            before._local_tensor = local  # type: ignore[attr-defined]
            return before, before
        # A DTensor cannot change its device, so a new parameter takes over attributes and gradient.
        after = nn.Parameter(inner.to_sharded_dtensor(local), requires_grad=before.requires_grad)
        vars(after).update(vars(before))
        if before.grad is not None:
            after.grad = inner.to_sharded_dtensor(cast(DTensor, before.grad).to_local().to(master.device))
        inner.sharded_param = after
        inner._setattr_on_modules(after)
        return before, after

    def gather_from(self, source: Tensor) -> None:
        """Set the flat and padded memory to gather from; FSDP2 converts it to the working dtype."""
        self._inner._sharded_param_data = source

    def let_go(self) -> None:
        """Drop all memory after FSDP2 has left the module."""
        # FSDP2's objects refer to each other, so they live until the next garbage collection.
        self._inner._sharded_param_data = self._inner.sharded_param = None


class Gathered:
    """The parameters of one module that FSDP2 gathers together.

    FSDP2 has no public hook before the gather for a backward, so `watch` wraps its methods.

    Args:
        module: The module.
        inner: FSDP2's parameter group.

    Attributes:
        parameters: The parameters in the order of FSDP2.
    """

    def __init__(self, module: FSDPModule, inner: Any) -> None:
        self._module, self._inner = module, inner
        self.parameters = [ShardedParameter(parameter) for parameter in inner.fsdp_params]
        self._read: Any = None
        # True skips the same reset as the removed hook does, which FSDP2 would run at the first forward.
        inner._reset_sharded_params = True

    @property
    def is_complete(self) -> bool:
        """True if the weights are gathered."""
        return bool(self._inner.is_unsharded)

    @property
    def is_in_backward(self) -> bool:
        """True if a backward needs the weights, not a forward."""
        return self._inner._training_state.name in ("PRE_BACKWARD", "POST_BACKWARD")

    def _is_gathering(self) -> bool:
        return self._inner._all_gather_result is not None

    def keep(self, complete: bool) -> None:
        """Choose whether the gathered weights stay from a forward to its backward."""
        self._module.set_reshard_after_forward(not complete, recurse=False)

    def forget(self) -> None:
        """Free the gathered weights, because the masters have changed."""
        self._inner._to_sharded()

    def watch(self, before_gather: Callable[[], None], gathering: Callable[[], None]) -> None:
        """Call functions around each gather, for a forward, a backward or ahead of one.

        Args:
            before_gather: A function to call before FSDP2 checks for gathered weights and reads the shards.
            gathering: A function to call after the all-gather has begun.
        """
        inner, unshard = self._inner, self._inner.unshard

        def watched(async_op: bool = False) -> None:
            # FSDP2 calls again for an all-gather that was begun ahead and is not waited for yet.
            if self._is_gathering():
                return
            before_gather()
            unshard(async_op)
            if self._is_gathering():
                self._read = inner._all_gather_result.all_gather_event
                gathering()

        inner.unshard = watched

    def wait_until_read(self) -> None:
        """Wait until FSDP2 has read the local shards, before they are overwritten."""
        event, self._read = self._read, None
        # Only the copies of a GPU are asynchronous and have an event.
        if event is not None:
            event.synchronize()

    def watch_backward(self, ending: Callable[[], None], reduced: Callable[[int], None]) -> None:
        """Call functions when a backward has used the weights.

        Args:
            ending: A function to call inside of the backward, where it may use `when_backward_ends`.
            reduced: A function that gets the elements of the local gradient shards after their reduction.
        """
        inner, post_backward = self._inner, self._inner.post_backward

        def watched(*unused: Any) -> None:
            ending()
            # Counted now, because post_backward frees the unreduced gradients.
            numel = sum(parameter.numel for parameter in self.parameters if parameter.has_gradient)
            post_backward(*unused)
            if numel and inner.reduce_grads:
                reduced(numel)

        inner.post_backward = watched


def gathered_together(module: FSDPModule) -> list[Gathered]:
    """Return the parameter groups that FSDP2 gathers for one module; none if it has no own parameters."""
    return [Gathered(module, group) for group in param_groups(state_of(module))]


def is_under_way(root: nn.Module) -> bool:
    """Return True if a forward or a backward has begun and not ended; between steps, because of an error."""
    return any(
        state._state_ctx.post_backward_final_callback_queued or state._state_ctx.iter_forward_root is not None
        for state in states_of(root)
    )


def recover(root: nn.Module) -> None:
    """Reset every FSDP2 unit to its sharded state, after an error in a step."""
    begin_anew(states_of(root))
    for state in states_of(root):
        for group in param_groups(state):
            for parameter in group.fsdp_params:
                drop_unreduced_gradient(parameter)


def collectives_issued() -> int:
    """Return the number of collectives of the default group that this rank has begun."""
    return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr] # of ranks only


class WaitingDTensor(DTensor):
    """A DTensor whose local tensor is still being stepped; reading the local tensor waits.

    A guard such as `nnx_core.view.pending.Pending` does not help: it does nothing in local mode, in which
    the optimizer's step, the checkpoint and FSDP2 read the local tensor.

    Attributes:
        _nnx_wait: A function that waits, and restores the tensor's own class.
    """

    __slots__ = ()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override] # a slot in the class above
        vars(self)["_nnx_wait"]()
        return cast(Tensor, _SLOT.__get__(self))


_SLOT = cast(Any, DTensor._local_tensor)


def accumulator_of(tensor: Tensor) -> Any:
    """Return the autograd node that made a tensor, or that accumulates its gradient if it is a leaf."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    # A leaf shows its accumulator only as the next node of an operation on it.
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def will_run(node: Any) -> bool | None:
    """Return True if the running backward will execute a node; None if autograd does not know.

    Autograd does not know it for the inputs of ``torch.autograd.grad``.
    """
    try:
        return will_execute(node)
    except RuntimeError:
        return None


def make_last(handle: RemovableHandle) -> None:
    """Make a post-accumulate-grad hook the last one of its parameter."""
    hooks = handle.hooks_dict_ref()
    if hooks and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        # Autograd calls hooks in the order of insertion.
        hooks[handle.id] = hooks.pop(handle.id)


def makes_cuda_graphs(module: nn.Module) -> bool:
    """Return True if a module was compiled in a mode that records CUDA graphs."""
    configs = (getattr(one, "get_compiler_config", None) for one in (module, module._compiled_call_impl))
    return any(config is not None and (config() or {}).get("triton.cudagraphs", False) for config in configs)


def has_memory_alone(tensor: Tensor) -> bool:
    """Return True if no other tensor refers to a tensor's memory."""
    storage = tensor.untyped_storage()
    # Two users: the tensor and the local variable.
    return users_of_storage(storage) <= 2


class Silenced:
    """Takes hooks out of their dicts until `end`, so that they are not called.

    Args:
        handles: The handles of the hooks.
    """

    __slots__ = ("_taken",)

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._taken = []
        for handle in handles:
            hooks, number = handle.hooks_dict_ref(), handle.id
            if hooks is not None and number in hooks:
                self._taken.append((hooks, number, hooks.pop(number)))

    def end(self, *, are_first: bool = False) -> None:
        """Restore the hooks behind all others or, with `are_first`, before them."""
        for hooks, number, hook in self._taken:
            hooks[number] = hook
            if are_first and len(hooks) > 1:
                hooks.move_to_end(number, last=False)
        self._taken.clear()
