"""Every private name of torch's FSDP2 that this package uses.

Checked against torch 2.11 and 2.13. FSDP2 has no public inverse of ``fully_shard``; without one a
module could not be deep-copied, trained a second time or handed back under its own class. Nor has it a
public way to begin and end what hangs on the root's forward where that is not called (see `backend`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from nnx_core._fsdp_compat import begin_anew, param_groups, state_of, states_of
from nnx_core.errors import UnsupportedError

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
    state = state_of(module)
    for handle in _hook_handles(state):
        handle.remove()
    for group in param_groups(state):
        group._module_to_pre_save_state_dict_hook_handle.clear()
        group._module_to_pre_load_state_dict_hook_handle.clear()
    for submodule in module.modules():
        for mark in _MARKS:
            submodule.__dict__.pop(mark, None)
    module.__dict__.pop(STATE_KEY, None)
    module.__dict__.pop(REGISTRY_KEY, None)
    _composable_state._module_state_mapping.pop(module, None)
    module.__class__ = _without_fsdp(type(module))


def _hook_handles(state: Any) -> Iterator[RemovableHandle]:
    """Those of all hooks that FSDP2 has on one module and what belongs to it."""
    yield state._pre_forward_hook_handle
    yield state._post_forward_hook_handle
    for group in param_groups(state):
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()
        for parameter in group.fsdp_params:
            yield parameter._post_load_hook_handle


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy without FSDP2; its parameters are whole where they are guarded. Collective."""
    if any(hasattr(part.forward, "_torchdynamo_orig_callable") for part in module.modules()):
        raise UnsupportedError(
            f"a {type(module).__name__} whose layers are compiled is deep-copied while it is sharded.",
            remedy="Copy its weights, `{n: w.detach().clone() for n, w in self.named_parameters()}`, or "
            "train without compile=True.",
        )
    own = {handle.id for handle in _hook_handles(state_of(module))}
    made: Any = object.__new__(_without_fsdp(type(module)))
    memo[id(module)] = made
    pickled: Any = module.__reduce_ex__(4)
    content = {n: value for n, value in pickled[2].items() if n not in (STATE_KEY, REGISTRY_KEY, *_MARKS)}
    for name, hooks in content.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            content[name] = OrderedDict((key, hook) for key, hook in hooks.items() if key not in own)
    made.__setstate__(copy.deepcopy(content, memo))
    return cast(nn.Module, made)


def _without_fsdp(cls: type[Any]) -> type[Any]:
    """A class without FSDP2's prefix: [FSDP<Class>, FSDPModule, Class, ...], or one made of that since.

    ``torch.nn.utils.parametrize`` derives a class when a parametrization is registered in a hook.
    """
    mro = cls.__mro__
    prefix = mro.index(FSDPModule)
    own: type[Any] = mro[prefix + 1]
    for derived in reversed(mro[: prefix - 1]):
        members = {k: v for k, v in vars(derived).items() if k not in ("__dict__", "__weakref__")}
        own = type(derived.__name__, (own,), members)
    return own


def name_as_before(module: nn.Module) -> None:
    """Let the class that ``fully_shard`` made for a module have the name of its own, and deep copies."""
    made: Any = type(module)
    made.__deepcopy__ = _copied
    made.__name__, made.__qualname__ = made.__mro__[2].__name__, made.__mro__[2].__qualname__


def prepare_root(root: FSDPModule) -> None:
    """Make a module the root of its units before one of them runs by itself."""
    state_of(root)._lazy_init()


def before_part(root: FSDPModule, args: Any, kwargs: Any) -> Any:
    """What the root's forward would do first: gather its parameters, and cast inputs as its policy says."""
    root.unshard()
    return state_of(root)._cast_forward_inputs(args, kwargs)


def finish_after_backward(root: FSDPModule, output: Any) -> None:
    """When backward reaches the output, let FSDP2 reduce and reshard the root's part at its end."""
    if not torch.is_grad_enabled():
        return
    state = state_of(root)
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


class GatheredParameter:
    """One parameter as FSDP2 holds it: complete while its unit computes, this rank's part otherwise.

    Args:
        inner: FSDP2's own description of it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def has_gradient(self) -> bool:
        """Whether this rank has a gradient of the complete parameter that is not reduced yet."""
        whole = getattr(self._inner, "_unsharded_param", None)
        accumulated = self._inner.unsharded_accumulated_grad is not None
        return accumulated or (whole is not None and whole.grad is not None)

    @property
    def has_reduced_gradient(self) -> bool:
        """Whether this rank's part has a gradient, of earlier backwards."""
        return self._inner.sharded_param.grad is not None

    @property
    def is_trained(self) -> bool:
        """Whether it wants a gradient, and can be given one as it was complete before."""
        return self._inner.sharded_param.requires_grad and hasattr(self._inner, "_unsharded_param")

    def fill(self) -> None:
        """Give the complete parameter a gradient of zeros."""
        whole = self._inner._unsharded_param
        zeros = torch.zeros_like(whole, requires_grad=False)
        cast(Any, torch.Tensor.grad).__set__(whole, zeros)  # `whole` compares what user code gives it

    def drop_reduced_gradient(self) -> None:
        """Leave this rank's part without a gradient."""
        self._inner.sharded_param.grad = None


class ParameterGroup:
    """The parameters that FSDP2 gathers, and whose gradients it reduces, together.

    Args:
        inner: FSDP2's own group of them.

    Attributes:
        parameters: The parameters in FSDP2's order.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.parameters: Sequence[GatheredParameter] = [GatheredParameter(p) for p in inner.fsdp_params]

    def watch(self, before_gather: Callable[[], None], before_reduction: Callable[[], None]) -> None:
        """Call functions before a gather is launched, and before the group looks which gradients it has."""
        inner, unshard, post_backward = self._inner, self._inner.unshard, self._inner.post_backward

        def unshard_watched(async_op: bool = False) -> None:
            if self._will_gather():
                before_gather()
            unshard(async_op)

        def post_backward_watched(*unused: Any) -> None:
            if inner.reduce_grads:
                before_reduction()
            post_backward(*unused)

        inner.unshard, inner.post_backward = unshard_watched, post_backward_watched

    def _will_gather(self) -> bool:
        inner = self._inner
        if inner._all_gather_result is not None or inner.is_unsharded:
            return False
        skipped = not inner.unshard_in_backward and inner._training_state.name == "PRE_BACKWARD"
        return not skipped and inner._all_gather_process_group.size() > 1

    def unify_gradients(self) -> None:
        """Give all gradients one dtype, as some may be accumulated and others new."""
        inner = [parameter for parameter in self._inner.fsdp_params if hasattr(parameter, "_unsharded_param")]
        for parameter in inner:
            parameter.accumulate_unsharded_grad_if_needed()
        if any(parameter.unsharded_accumulated_grad is not None for parameter in inner):
            for parameter in inner:
                parameter.to_accumulated_grad_if_needed()


def groups_of(module: FSDPModule) -> list[ParameterGroup]:
    """What FSDP2 gathers for one module; nothing where it has no parameters of its own."""
    return [ParameterGroup(group) for group in param_groups(state_of(module))]


def when_backward_ends(then: Callable[[], None]) -> None:
    """Within a backward: call a function at its end, after those that were given before."""
    Variable._execution_engine.queue_callback(then)


def at_end_of_backward(
    module: FSDPModule, begin: Callable[[], bool], before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Call functions around what FSDP2 does when a backward that reached its units ends.

    Args:
        module: One that ``fully_shard`` was called on.
        begin: Called when a backward reaches the first unit of a root; whether `before` is to be called.
        before: Called at the end, before FSDP2 reduces what is left.
        after: Called at the end, after that.
    """
    state = state_of(module)
    register = state._register_root_post_backward_final_callback

    def registered() -> None:
        if state._state_ctx.post_backward_final_callback_queued:
            return
        if begin():
            when_backward_ends(before)
        register()
        when_backward_ends(after)

    state._register_root_post_backward_final_callback = registered


def recover(root: nn.Module) -> None:
    """After an error in a step: let every unit begin anew with its part; accumulated gradients stay."""
    begin_anew(states_of(root))
