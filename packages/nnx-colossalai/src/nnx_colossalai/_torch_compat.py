"""Private names of torch that this package uses.

`PRIVATE_NAMES` lists them, with the versions they were seen in; tests/test_private_names.py looks them up.
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
"""The private names of torch that this module uses, and what happens where torch lacks one."""


# Running a model on tensors without memory has no public entry point but ``torch.export``, which does not
# say what a backward keeps.


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating point operations of one call; 0 for operators that are not matrix products of some kind."""
    count = flop_registry.get(operator._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


# What torch's optimizers call themselves.


def has_hooks_that_see_the_result(optimizer: Optimizer) -> bool:
    """Return True if something runs after the step, or around every optimizer's step."""
    after = optimizer._optimizer_step_post_hooks or base._global_optimizer_post_hooks
    before_all = base._global_optimizer_pre_hooks.values()
    return bool(after) or any(hook is not refuse_unreduced_step for hook in before_all)


@contextmanager
def without_guards() -> Iterator[None]:
    """Within it, parameters whose step is pending are taken as they are, without waiting."""
    with local_mode():
        yield


# FSDP2 gathers a parameter from one tensor and steps another view of the same memory; chunks need the two
# apart (16-bit weights here, float32 masters there), which no public option allows. It also has no public
# way to learn that a unit is about to be gathered for its backward.


class ShardedParameter:
    """One parameter as FSDP2 holds it.

    Args:
        inner: FSDP2's own description of it.

    Attributes:
        numel: Elements of this rank's part, with padding: all ranks' parts are equally long.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.numel = int(inner._sharded_param_data.numel())
        # It would take the masters for what is to be gathered whenever a state dict is loaded.
        inner._post_load_hook_handle.remove()

    @property
    def parameter(self) -> nn.Parameter:
        """What the module and the optimizers hold."""
        return cast(nn.Parameter, self._inner.sharded_param)

    @property
    def data(self) -> Tensor:
        """What is gathered: this rank's part, flat and padded."""
        return cast(Tensor, self._inner._sharded_param_data)

    @property
    def has_gradient(self) -> bool:
        """True if a backward has left a gradient of the complete parameter."""
        return has_unreduced_gradient(self._inner)

    def hold(self, master: Tensor, *, on_host: bool, pinned: bool) -> tuple[nn.Parameter, nn.Parameter]:
        """Let the parameter's elements be those of `master`, and gradients go where it lies.

        Args:
            master: Flat and padded.
            on_host: True if it lies in host memory.
            pinned: True if copies to host memory may be asynchronous.

        Returns:
            The parameter as it was, and what took its place: itself, unless it came from another device.
        """
        inner, before = self._inner, self.parameter
        size = inner.sharded_size
        local = master[: size.numel()].view(size)
        inner.offload_to_cpu, inner.pin_memory = on_host, on_host and pinned
        if before.device == master.device:
            before._local_tensor = local  # type: ignore[attr-defined]
            return before, before
        after = nn.Parameter(inner.to_sharded_dtensor(local), requires_grad=before.requires_grad)
        vars(after).update(vars(before))
        if before.grad is not None:
            after.grad = inner.to_sharded_dtensor(cast(DTensor, before.grad).to_local().to(master.device))
        inner.sharded_param = after
        inner._setattr_on_modules(after)
        return before, after

    def gather_from(self, source: Tensor) -> None:
        """Let what is gathered be `source`: flat, padded, of the working dtype or to be converted to it."""
        self._inner._sharded_param_data = source

    def let_go(self) -> None:
        """When FSDP2 is off the module: its objects, which refer to each other, hold no memory meanwhile."""
        self._inner._sharded_param_data = self._inner.sharded_param = None


class Gathered:
    """The parameters of one module that FSDP2 gathers together.

    Args:
        module: The module.
        inner: FSDP2's own group of them.

    Attributes:
        parameters: The parameters in the order of FSDP2.
    """

    def __init__(self, module: FSDPModule, inner: Any) -> None:
        self._module, self._inner = module, inner
        self.parameters = [ShardedParameter(parameter) for parameter in inner.fsdp_params]
        self._read: Any = None
        inner._reset_sharded_params = True  # as `ShardedParameter` says of state dicts, at the first forward

    @property
    def is_complete(self) -> bool:
        """True if the complete weights are there."""
        return bool(self._inner.is_unsharded)

    @property
    def is_in_backward(self) -> bool:
        """True if a backward is what wants the weights."""
        return self._inner._training_state.name in ("PRE_BACKWARD", "POST_BACKWARD")

    def _is_gathering(self) -> bool:
        return self._inner._all_gather_result is not None

    def keep(self, complete: bool) -> None:
        """Return True if the complete weights stay from a forward to its backward."""
        self._module.set_reshard_after_forward(not complete, recurse=False)

    def forget(self) -> None:
        """Free the complete weights, as they are not those of the masters any more."""
        self._inner._to_sharded()

    def watch(self, before_gather: Callable[[], None], gathering: Callable[[], None]) -> None:
        """Call functions whenever the weights are wanted, in a forward, a backward or ahead of one.

        Args:
            before_gather: Before FSDP2 looks whether they are there, and reads this rank's part.
            gathering: After it has begun to collect them.
        """
        inner, unshard = self._inner, self._inner.unshard

        def watched(async_op: bool = False) -> None:
            if self._is_gathering():
                return  # begun ahead, and not waited for yet
            before_gather()
            unshard(async_op)
            if self._is_gathering():
                self._read = inner._all_gather_result.all_gather_event
                gathering()

        inner.unshard = watched

    def wait_until_read(self) -> None:
        """Wait until FSDP2 has read this rank's part, which a card copies in its own time."""
        event, self._read = self._read, None
        if event is not None:  # on the host there is none
            event.synchronize()

    def watch_backward(self, ending: Callable[[], None], reduced: Callable[[int], None]) -> None:
        """Call functions when a backward is done with the weights.

        Args:
            ending: Within the backward, before its end; see `nnx_core._torch_compat.when_backward_ends`.
            reduced: With the elements of this rank's part of the gradients, when they were reduced.
        """
        inner, post_backward = self._inner, self._inner.post_backward

        def watched(*unused: Any) -> None:
            ending()
            numel = sum(parameter.numel for parameter in self.parameters if parameter.has_gradient)
            post_backward(*unused)
            if numel and inner.reduce_grads:
                reduced(numel)

        inner.post_backward = watched


def gathered_together(module: FSDPModule) -> list[Gathered]:
    """What FSDP2 gathers for one module; nothing where it has no parameters of its own."""
    return [Gathered(module, group) for group in param_groups(state_of(module))]


def is_under_way(root: nn.Module) -> bool:
    """Whether a forward or a backward has begun and not ended; between steps: an error kept it from that."""
    return any(
        state._state_ctx.post_backward_final_callback_queued or state._state_ctx.iter_forward_root is not None
        for state in states_of(root)
    )


def recover(root: nn.Module) -> None:
    """After an error in a step: let every unit begin anew, with its part of the weights only."""
    begin_anew(states_of(root))
    for state in states_of(root):
        for group in param_groups(state):
            for parameter in group.fsdp_params:
                drop_unreduced_gradient(parameter)


def collectives_issued() -> int:
    """Collectives of the world's group that this rank has begun, complete or not."""
    return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr] # of ranks only


class WaitingDTensor(DTensor):
    """A DTensor whose elements must be waited for: whatever wants them asks for its local tensor first.

    It is no `Part` such as `nnx_core.view.pending.Pending`: a guard answers nothing in local mode, where the
    optimizer's step, the checkpoint and FSDP2 read the local tensor.

    Attributes:
        _nnx_wait: Waits, and gives the tensor its own class back.
    """

    __slots__ = ()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override] # a slot in the class above
        vars(self)["_nnx_wait"]()
        return cast(Tensor, _SLOT.__get__(self))


_SLOT = cast(Any, DTensor._local_tensor)


def accumulator_of(tensor: Tensor) -> Any:
    """The node that a tensor's gradient ends in, or comes from."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def will_run(node: Any) -> bool | None:
    """Return True if the backward that this thread is in comes by a node; None: it does not tell.

    It does not for the gradients that ``torch.autograd.grad`` was asked for.
    """
    try:
        return will_execute(node)
    except RuntimeError:
        return None


def make_last(handle: RemovableHandle) -> None:
    """Make a hook that sees an accumulated gradient the last of its parameter's."""
    hooks = handle.hooks_dict_ref()
    if hooks and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        # The engine goes by the order of insertion.
        hooks[handle.id] = hooks.pop(handle.id)


def makes_cuda_graphs(module: nn.Module) -> bool:
    """Return True if a module was compiled in a mode that records CUDA graphs."""
    configs = (getattr(one, "get_compiler_config", None) for one in (module, module._compiled_call_impl))
    return any(config is not None and (config() or {}).get("triton.cudagraphs", False) for config in configs)


def has_memory_alone(tensor: Tensor) -> bool:
    """Return True if nothing refers to a tensor's memory but the tensor."""
    storage = tensor.untyped_storage()
    return users_of_storage(storage) <= 2  # the tensor, and what is called storage here


class Silenced:
    """Hooks that are not called for a while.

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
        """Let them be called again, after all others or, with `are_first`, before them."""
        for hooks, number, hook in self._taken:
            hooks[number] = hook
            if are_first and len(hooks) > 1:
                hooks.move_to_end(number, last=False)
        self._taken.clear()
