"""Use the private names of torch's FSDP2.

`PRIVATE_NAMES` lists them with the torch versions that have them; tests/test_private_names.py checks them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.utils import _apply_to_tensors
from torch.utils.hooks import RemovableHandle

from nnx_base._torch_compat import IMPORT, Private
from nnx_core._torch_compat import param_groups, state_of, tree_leaves, when_backward_ends
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import in_guarded_mode, local_mode, part_of

_SETUP = "setting a model up raises AttributeError"
_STEP = "the first step raises AttributeError"
PRIVATE_NAMES = {
    "torch._C._current_graph_task_id": Private("any step by hand raises AttributeError"),
    "torch._C._functorch.TransformType": Private(IMPORT),
    "torch._C._functorch.get_interpreter_stack": Private(IMPORT),
    "torch.distributed._composable.contract.REGISTRY_KEY": Private(IMPORT),
    "torch.distributed._composable.contract.STATE_KEY": Private(IMPORT),
    "torch.distributed._composable_state": Private(IMPORT),
    "torch.distributed._composable_state._module_state_mapping": Private("taking FSDP2 off a module raises"),
    "torch.distributed.utils._apply_to_tensors": Private(IMPORT),
    "FSDPModule._is_fsdp_managed_module": Private("nothing: nnx takes the mark off where there is one"),
    "FSDPModule._fsdp_use_orig_params": Private("nothing: nnx takes the mark off where there is one"),
    "FSDPParam._module_info": Private(_SETUP),
    "FSDPParam._post_load_hook_handle": Private("taking FSDP2 off a module raises AttributeError"),
    "FSDPParam._setattr_on_modules": Private("nnx's own is not called: the test of weights fails"),
    "FSDPParam._unsharded_param": Private("gradients are not found: the tests of numbers fail"),
    "FSDPParamGroup._all_gather_process_group": Private(_STEP),
    "FSDPParamGroup._all_gather_result": Private(_STEP),
    "FSDPParamGroup._module_to_pre_load_state_dict_hook_handle": Private("taking FSDP2 off a module raises"),
    "FSDPParamGroup._module_to_pre_save_state_dict_hook_handle": Private("taking FSDP2 off a module raises"),
    "FSDPParamGroup._training_state": Private(_STEP),
    "FSDPState._lazy_init": Private(_SETUP),
    "FSDPState._mp_policy": Private("calling a part of a module raises AttributeError"),
    "FSDPState._post_forward_hook_handle": Private("taking FSDP2 off a module raises AttributeError"),
    "FSDPState._pre_backward": Private("calling a part of a module raises AttributeError"),
    "FSDPState._pre_forward_hook_handle": Private("taking FSDP2 off a module raises AttributeError"),
    "FSDPState._register_root_post_backward_final_callback": Private(_SETUP),
    "FSDPState._state_ctx": Private(_STEP),
    "Module._parameters": Private(_SETUP),
    "CompiledFunction._torchdynamo_orig_callable": Private("copying a compiled model is not refused"),
}
"""The private names of torch that this module uses, each with its effect if torch lacks it."""

SHARDS_INTEGERS = torch.__version__ >= "2.12"  # TorchVersion compares by version, not by letters
"""True if FSDP2 can shard integer parameters. Torch 2.11 sets `requires_grad`, which integers refuse."""

# FSDP2 registers its own parameter objects under fixed names, never copies the gathered weights back into the
# shards, and frees them after every backward. No public option changes this.


class GatheredWeight(nn.Parameter):
    """The gathered parameter that a module holds while a step computes with it.

    It is no guard, because a guard sends every operator of a forward through Python: an `F.linear` of 8 by 8
    took twice as long. So only ``data`` and ``grad`` are properties, and torch functions are unchanged.

    Attributes:
        _part: The part of the sharded parameter. It is marked when user code takes ``data``.
    """

    @property
    def data(self) -> Tensor:
        """The data, as of any tensor; the part then copies writes into the shards."""
        part = vars(self).get("_part")
        if part is not None:
            part.may_be_written = True
        return cast(Tensor, _DATA.__get__(self))

    @data.setter
    def data(self, data: Tensor) -> None:
        part = vars(self).get("_part")
        if part is None:
            _DATA.__set__(self, data)
        else:
            part.may_be_written = True
            _DATA.__get__(self).copy_(data)

    @property
    def grad(self) -> Tensor | None:
        """The unreduced gradient. Without one, user code gets the shard's gradient, unsharded."""
        own = _GRAD.__get__(self)
        part: Any = vars(self).get("_part")
        if own is None and _is_for_user(part):
            own = part.gradient_shown()
        return cast("Tensor | None", own)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        part: Any = vars(self).get("_part")
        if not _is_for_user(part):
            _GRAD.__set__(self, gradient)
            return
        part.gradient_given(gradient)


def _is_for_user(part: Any) -> bool:
    """Return True if user code, not FSDP2, reads a gathered parameter."""
    return part is not None and in_guarded_mode()


def refuse_split_backward() -> None:
    """Make torch's pipelining raise an error if it would lose gradients of sharded weights.

    Its zero-bubble schedules compute gradients of weights apart from those of inputs. They search the graph
    of the outputs for the weights that the module holds at that moment. FSDP2 exchanges these before and
    after each forward and backward, so that gradients would be lost without an error.
    """
    stage: Any = import_module("torch.distributed.pipelining.stage")
    if not hasattr(stage.stage_backward_input, "__wrapped__"):
        stage.stage_backward_input = _refusing_parts(stage.stage_backward_input)


def _refusing_parts(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def stage_backward_input(
        outputs: Any, gradients: Any, inputs: Any, weights: Iterator[nn.Parameter]
    ) -> Any:
        found = list(weights)
        for weight in found:
            part: Any = part_of(weight) or vars(weight).get("_part")
            if part is not None:
                raise UnsupportedError(
                    f"a schedule of torch.distributed.pipelining computes the gradient of {part.name!r} "
                    "apart from those of inputs. It would lose this gradient, because FSDP2 gathers and "
                    "frees weights in between.",
                    remedy="Use Schedule1F1B or ScheduleInterleaved1F1B, or strategy 'nnscaler_pp' with "
                    "pipeline_scheduler='zero_bubble'.",
                )
        return own(outputs, gradients, inputs, iter(found))

    return stage_backward_input


_DATA, _GRAD = cast(Any, Tensor.data), cast(Any, Tensor.grad)


def has_unreduced_gradient(inner: Any) -> bool:
    """Return True if a backward left a gradient of the complete parameter on this rank.

    Args:
        inner: FSDP2's own description of the parameter.
    """
    gathered = getattr(inner, "_unsharded_param", None)
    left = gathered is not None and _GRAD.__get__(gathered) is not None
    return left or inner.unsharded_accumulated_grad is not None


def drop_unreduced_gradient(inner: Any) -> None:
    """Drop this rank's unreduced gradient of a parameter; the reduced gradient stays.

    Args:
        inner: FSDP2's own description of the parameter.
    """
    inner.unsharded_accumulated_grad = None
    if hasattr(inner, "_unsharded_param"):
        _GRAD.__set__(inner._unsharded_param, None)


class HeldParameter:
    """One parameter in the hands of FSDP2.

    Args:
        inner: FSDP2's own description of the parameter.
    """

    def __init__(self, inner: Any) -> None:
        self._inner: Any = inner
        info = inner._module_info
        names = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.places: list[tuple[nn.Module, str]] = [(info.module, info.param_name), *names]
        self.gathered_version = 0
        self.gathered_sum: Tensor | None = None
        self._put_last: Any = inner.sharded_param
        inner._setattr_on_modules = self._put

    @property
    def sharded(self) -> nn.Parameter:
        """The parameter that the module holds between steps."""
        return cast(nn.Parameter, self._inner.sharded_param)

    @property
    def gathered(self) -> nn.Parameter | None:
        """The parameter that the module holds while a step computes with it; None before the first gather."""
        return getattr(self._inner, "_unsharded_param", None)

    @property
    def is_gathered(self) -> bool:
        """True if the module's attribute is the gathered parameter."""
        return bool(self._inner.sharded_state.name == "UNSHARDED")

    @property
    def has_gradient(self) -> bool:
        """True if this rank has an unreduced gradient of the complete parameter."""
        return has_unreduced_gradient(self._inner)

    @property
    def gradient_left(self) -> Tensor | None:
        """This rank's gradient of the complete parameter that no earlier backward has left there."""
        gathered = self.gathered
        return None if gathered is None else cast("Tensor | None", _GRAD.__get__(gathered))

    @property
    def has_gradient_left(self) -> bool:
        """True if the gathered parameter received a gradient after its unit had reduced the others."""
        return self.gradient_left is not None

    @property
    def has_reduced_gradient(self) -> bool:
        """True if this rank's shard has a gradient from earlier backwards."""
        return self.sharded.grad is not None

    @property
    def is_trained(self) -> bool:
        """True if the parameter requires a gradient and was gathered before, so that `fill` works."""
        return self.sharded.requires_grad and self.gathered is not None

    def fill(self) -> None:
        """Give the complete parameter a gradient of zeros."""
        gathered = self._inner._unsharded_param
        _GRAD.__set__(gathered, torch.zeros_like(gathered, requires_grad=False))  # `grad` may be a property

    def drop_unreduced_gradient(self) -> None:
        """Drop this rank's unreduced gradient of the complete parameter."""
        drop_unreduced_gradient(self._inner)

    def drop_reduced_gradient(self) -> None:
        """Drop the gradient of this rank's shard."""
        self.sharded.grad = None

    def is_in_place(self) -> bool:
        """Return True if the module still holds this parameter under all of its names."""
        sharded, put = self.sharded, self._put_last
        for module, name in self.places:
            found = module._parameters.get(name)
            if found is not sharded and found is not put:
                return False
        return True

    def _put(self, parameter: nn.Parameter) -> None:
        """Register another object for this parameter, unless user code has registered its own."""
        last, sharded, gathered = self._put_last, self.sharded, self.gathered
        for module, name in self.places:
            held = module._parameters
            found = held.get(name)
            if found is last or found is sharded or found is gathered:
                held[name] = parameter
        self._put_last = parameter

    def share_attributes(self, *, watch_data: bool) -> None:
        """Share the attributes of the sharded parameter with the gathered one, now and later."""
        gathered = self.gathered
        if gathered is None or type(gathered) is not nn.Parameter:
            return
        gathered.__dict__ = vars(self.sharded)
        if watch_data:
            gathered.__class__ = GatheredWeight

    def release(self) -> None:
        """Drop all references, after FSDP2 was removed from the module."""
        vars(self._inner).pop("_setattr_on_modules", None)
        self.places = []
        self._inner = self._put_last = None


class Unit:
    """The parameters that FSDP2 gathers, frees and reduces together.

    Args:
        group: FSDP2's own description of the parameters.
        module: The module that ``fully_shard`` was called on.

    Attributes:
        parameters: The parameters in FSDP2's order.
    """

    def __init__(self, group: Any, module: nn.Module) -> None:
        self._group: Any = group
        self.module = module
        self.parameters = [HeldParameter(inner) for inner in group.fsdp_params]
        self._is_kept = False

    @property
    def is_gathered(self) -> bool:
        """True if the modules hold unsharded weights."""
        return bool(self._group.is_unsharded)

    def watch_collectives(
        self, *, before_gather: Callable[[], None], before_reduction: Callable[[], None]
    ) -> None:
        """Call functions before a gather starts, and before FSDP2 checks which parameters have gradients."""
        unshard = self._group.unshard

        def watched_unshard(async_op: bool = False) -> None:
            if self._will_gather():
                before_gather()
            unshard(async_op)

        self._group.unshard = watched_unshard
        self.before_reduction(before_reduction)

    def before_reduction(self, call: Callable[[], None]) -> None:
        """Call a function before FSDP2 checks which parameters have gradients, if it reduces them then."""
        group, post_backward = self._group, self._group.post_backward

        def watched_post_backward(*unused: Any) -> None:
            if group.reduce_grads:
                call()
            post_backward(*unused)

        group.post_backward = watched_post_backward

    def _will_gather(self) -> bool:
        group = self._group
        if group._all_gather_result is not None or group.is_unsharded:
            return False
        skipped = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
        return not skipped and group._all_gather_process_group.size() > 1

    def unify_gradients(self) -> None:
        """Convert all gradients to one dtype; accumulated ones can have another dtype than new ones."""
        inner = [parameter for parameter in self._group.fsdp_params if hasattr(parameter, "_unsharded_param")]
        for parameter in inner:
            parameter.accumulate_unsharded_grad_if_needed()
        if any(parameter.unsharded_accumulated_grad is not None for parameter in inner):
            for parameter in inner:
                parameter.to_accumulated_grad_if_needed()

    def watch_weights(
        self,
        *,
        gathering: Callable[[Unit], None],
        gathered: Callable[[Unit], None],
        freeing: Callable[[Unit], None],
    ) -> None:
        """Call functions before and after a gather, and before the weights are freed."""
        group = self._group
        unshard, wait, reshard = group.unshard, group.wait_for_unshard, group.reshard

        # FSDP2 reads the attributes of each parameter several times in a step. Local mode shows it DTensors,
        # because a guard would answer with the unsharded tensor.
        def watched_unshard(async_op: bool = False) -> None:
            gathering(self)
            with local_mode():
                unshard(async_op)

        def watched_wait() -> None:
            with local_mode():
                wait()
            if self.is_gathered:
                gathered(self)

        def watched_reshard() -> None:
            if self.is_gathered:
                freeing(self)
            reshard()
            if not self.is_gathered:
                for held in self.parameters:
                    held.gathered_sum = None

        group.unshard = watched_unshard
        group.wait_for_unshard, group.reshard = watched_wait, watched_reshard
        self._keep_between_nested_forwards()

    def _keep_between_nested_forwards(self) -> None:
        """Let ``reshard_after_forward`` count for a root whose step calls the root's forward.

        The end of the inner forward ends FSDP2's state of the outer one, which then reshards in any case.
        """
        group, post_forward = self._group, self._group.post_forward

        def post_forward_of_outer(*args: Any) -> Any:
            if group._training_state.name == "IDLE":
                group._training_state = type(group._training_state).FORWARD
            return post_forward(*args)

        group.post_forward = post_forward_of_outer

    def keep_when(self, wanted: Callable[[], bool]) -> None:
        """Keep the weights after a backward if `wanted` returns True, until `end_keeping`."""
        group, post_backward = self._group, self._group.post_backward

        def watched(*unused: Any) -> None:
            if group.reshard_after_backward and wanted():
                group.reshard_after_backward = False
                self._is_kept = True
            with local_mode():
                post_backward(*unused)

        group.post_backward = watched

    def end_keeping(self) -> bool:
        """Let the next backward free the weights; return True if they were kept."""
        kept, self._is_kept = self._is_kept, False
        if kept:
            self._group.reshard_after_backward = True
        return kept

    def free(self) -> None:
        """Keep only this rank's shards of the weights."""
        self._group.reshard()

    def reduce_rest(self) -> None:
        """Reduce the gradients that arrived after the unit had reduced the others. Collective."""
        self._group.post_backward()
        self._group.finalize_backward()
        self._group._training_state = type(self._group._training_state).IDLE

    def release(self) -> None:
        """Drop all references, after FSDP2 was removed from the module."""
        for name in ("unshard", "wait_for_unshard", "reshard", "post_forward", "post_backward"):
            vars(self._group).pop(name, None)
        self.parameters = []
        self._group = None

    @property
    def reduces(self) -> bool:
        """True if backward reduces gradients now; False if it accumulates them on this rank."""
        return bool(self._group.reduce_grads)


def units_of(root: nn.Module) -> list[Unit]:
    """Return all FSDP units of a module. Use one list only, because `Unit` replaces methods of groups."""
    modules = [module for module in root.modules() if issubclass(type(module), FSDPModule)]
    return [Unit(group, module) for module in modules for group in param_groups(state_of(module))]


def has_failed_backward(module: Any) -> bool:
    """Return True if an error interrupted the last backward, so that FSDP2 still waits for its end.

    Args:
        module: A module that ``fully_shard`` was called on.
    """
    queued = state_of(module)._state_ctx.post_backward_final_callback_queued
    return bool(queued) and torch._C._current_graph_task_id() == -1  # inside a task, backward still runs


def is_in_transform() -> bool:
    """Return True inside a differentiating transform of ``torch.func``, where no unit can gather."""
    stack = get_interpreter_stack()
    return bool(stack) and any(one.key() in (TransformType.Grad, TransformType.Jvp) for one in stack)


# FSDP2 has no public inverse of ``fully_shard``. Without one nobody could deep-copy a module, train it a
# second time or get its own class back. FSDP2 also has no public way to run the hooks of the root's forward
# if a step does not call that forward (see `backend`).


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def can_be_sharded(module: nn.Module) -> bool:
    """Return True if ``fully_shard`` can put its class in front of the module's own.

    It cannot if that changes the memory layout, as with ``class Model(Generic[T], nn.Module)``.
    """
    own = type(module)
    try:
        module.__class__ = type(own.__name__, (FSDPModule, own), {})
    except TypeError:
        return False
    module.__class__ = own
    return True


def remove_fully_shard(module: nn.Module) -> None:
    """Undo ``fully_shard`` on one module: remove hooks, registries and class. DTensor parameters stay.

    Args:
        module: A module that ``fully_shard`` was called on. It must hold its sharded parameters.
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
    """Yield the handles of all hooks that FSDP2 has on one module and on its parameter groups."""
    yield state._pre_forward_hook_handle
    yield state._post_forward_hook_handle
    for group in param_groups(state):
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()
        for parameter in group.fsdp_params:
            yield parameter._post_load_hook_handle


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy without FSDP2, whose guarded parameters are unsharded. Collective."""
    if any(hasattr(part.forward, "_torchdynamo_orig_callable") for part in module.modules()):
        raise UnsupportedError(
            f"a {type(module).__name__} with compiled layers cannot be deep-copied while it is sharded.",
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
    """Return a class without FSDP2's prefix. The MRO is [FSDP<Class>, FSDPModule, Class, ...].

    Classes derived from it since are derived again from the user's class: ``torch.nn.utils.parametrize``
    derives a class if a hook registers a parametrization.
    """
    mro = cls.__mro__
    prefix = mro.index(FSDPModule)
    own: type[Any] = mro[prefix + 1]
    for derived in reversed(mro[: prefix - 1]):
        members = {k: v for k, v in vars(derived).items() if k not in ("__dict__", "__weakref__")}
        own = type(derived.__name__, (own,), members)
    return own


def name_as_before(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` made the name of the module's own class, and a deep copy."""
    made: Any = type(module)
    made.__deepcopy__ = _copied
    made.__name__, made.__qualname__ = made.__mro__[2].__name__, made.__mro__[2].__qualname__


def prepare_root(root: FSDPModule) -> None:
    """Initialize a root before any of its units runs alone."""
    state_of(root)._lazy_init()


def before_part(root: FSDPModule, args: Any, kwargs: Any) -> Any:
    """Do the first work of the root's forward: gather its parameters, and cast inputs by its policy."""
    root.unshard()
    policy = state_of(root)._mp_policy
    if not (policy.cast_forward_inputs and policy.param_dtype):
        return args, kwargs

    def cast_input(value: Tensor) -> Tensor:
        return value.to(policy.param_dtype) if value.is_floating_point() else value

    return _apply_to_tensors(cast_input, (args, kwargs))


def finish_after_backward(root: FSDPModule, output: Any) -> None:
    """Reduce and reshard the root's own parameters at the end of the backward that reaches the output."""
    if not torch.is_grad_enabled():
        return
    state = state_of(root)
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


def at_end_of_backward(
    module: FSDPModule, begin: Callable[[], bool], before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Call functions before and after FSDP2's own work at the end of a backward.

    Args:
        module: A module that ``fully_shard`` was called on.
        begin: A function for the first unit of a root that a backward reaches. It returns True if `before` is
            to run.
        before: A function to call before FSDP2 reduces the remaining gradients.
        after: A function to call after FSDP2 has reduced them.
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
