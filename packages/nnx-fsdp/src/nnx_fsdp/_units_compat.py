"""Every private name of torch's FSDP2 that what user code sees of weights needs (see `weights`).

Checked against torch 2.11 and 2.13. FSDP2 puts its own parameter objects under fixed names, writes nothing
back from what it has gathered, and frees it after any backward; no public option changes this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack

from nnx_core._fsdp_compat import param_groups, states_of
from nnx_core.watch import refuse_unequal_gradient
from nnx_core.whole import local_mode


class GatheredWeight(nn.Parameter):
    """What a module has as its weight while a step computes with it: whole, and gone after it.

    Attributes:
        _part: The part of the sharded parameter, which hears of writes through ``data``.
    """

    @property
    def data(self) -> Tensor:
        """As of any tensor; what is written into it reaches the shards."""
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
        """As of any tensor; one that user code gives it must be the same on all ranks."""
        return cast("Tensor | None", _GRAD.__get__(self))

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        part = vars(self).get("_part")
        if part is not None and gradient is not None and _GRAD.__get__(self) is None:
            refuse_unequal_gradient(gradient, part.name)
        _GRAD.__set__(self, gradient)


_DATA, _GRAD = cast(Any, Tensor.data), cast(Any, Tensor.grad)


class HeldParameter:
    """One parameter as FSDP2 holds it.

    Args:
        inner: FSDP2's own description of it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner: Any = inner
        info = inner._module_info
        names = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.places: list[tuple[nn.Module, str]] = [(info.module, info.param_name), *names]
        self.gathered_version = 0
        self._put_last: Any = inner.sharded_param
        inner._setattr_on_modules = self._put

    @property
    def sharded(self) -> nn.Parameter:
        """What the module has between steps."""
        return cast(nn.Parameter, self._inner.sharded_param)

    @property
    def gathered(self) -> nn.Parameter | None:
        """What the module has while a step computes with it; None before the first one."""
        return getattr(self._inner, "_unsharded_param", None)

    @property
    def has_gradient_left(self) -> bool:
        """Whether a gradient reached the gathered parameter after its unit had reduced the others."""
        gathered = self.gathered
        return gathered is not None and gathered.grad is not None

    def is_in_place(self) -> bool:
        """Whether the module still has this parameter wherever it had it."""
        sharded, put = self.sharded, self._put_last
        for module, name in self.places:
            found = module._parameters.get(name)
            if found is not sharded and found is not put:
                return False
        return True

    def _put(self, parameter: nn.Parameter) -> None:
        """Give the modules another object for this parameter, unless they have one of the user's."""
        last, sharded, gathered = self._put_last, self.sharded, self.gathered
        for module, name in self.places:
            held = module._parameters
            found = held.get(name)
            if found is last or found is sharded or found is gathered:
                held[name] = parameter
        self._put_last = parameter

    def share_attributes(self, *, watch_data: bool) -> None:
        """Let the gathered parameter have the attributes of the sharded one, now and later."""
        gathered = self.gathered
        if gathered is None or type(gathered) is not nn.Parameter:
            return
        gathered.__dict__ = vars(self.sharded)
        if watch_data:
            gathered.__class__ = GatheredWeight

    def release(self) -> None:
        """When FSDP2 is off the module: hold nothing."""
        vars(self._inner).pop("_setattr_on_modules", None)
        self.places = []
        self._inner = self._put_last = None


class Unit:
    """What FSDP2 gathers and frees together.

    Args:
        group: FSDP2's own description of it.
    """

    def __init__(self, group: Any) -> None:
        self._group: Any = group
        self.parameters = [HeldParameter(inner) for inner in group.fsdp_params]
        self._is_kept = False

    @property
    def is_gathered(self) -> bool:
        """Whether the modules have whole weights."""
        return bool(self._group.is_unsharded)

    def watch(
        self,
        *,
        gathering: Callable[[Unit], None],
        gathered: Callable[[Unit], None],
        freeing: Callable[[Unit], None],
    ) -> None:
        """Call functions before and after weights are gathered, and before they are freed."""
        group = self._group
        unshard, wait, reshard = group.unshard, group.wait_for_unshard, group.reshard

        # FSDP2 looks at each of its parameters several times in a step: at what they are, not through guards.
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

        group.unshard = watched_unshard
        group.wait_for_unshard, group.reshard = watched_wait, watched_reshard

    def keep_when(self, wanted: Callable[[], bool]) -> None:
        """After a backward, keep the weights if they are still wanted, until `end_keeping`."""
        group, post_backward = self._group, self._group.post_backward

        def watched(*unused: Any) -> None:
            if group.reshard_after_backward and wanted():
                group.reshard_after_backward = False
                self._is_kept = True
            with local_mode():
                post_backward(*unused)

        group.post_backward = watched

    def end_keeping(self) -> bool:
        """Let the next backward free the weights; whether they were kept."""
        kept, self._is_kept = self._is_kept, False
        if kept:
            self._group.reshard_after_backward = True
        return kept

    def free(self) -> None:
        """Keep only this rank's part of the weights."""
        self._group.reshard()

    def reduce_rest(self) -> None:
        """Reduce the gradients that came after the others of the unit. Collective."""
        self._group.post_backward()
        self._group.finalize_backward()
        self._group._training_state = type(self._group._training_state).IDLE

    def release(self) -> None:
        """When FSDP2 is off the module: hold nothing."""
        for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
            vars(self._group).pop(name, None)
        self.parameters = []
        self._group = None

    @property
    def reduces(self) -> bool:
        """Whether backward reduces gradients now, as against accumulating them on this rank."""
        return bool(self._group.reduce_grads)


def units_of(root: nn.Module) -> Iterator[Unit]:
    """Everything that FSDP2 gathers of a module."""
    for state in states_of(root):
        yield from map(Unit, param_groups(state))


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` differentiates what is computed now; it lets nobody gather."""
    stack = get_interpreter_stack()
    return bool(stack) and any(one.key() in (TransformType.Grad, TransformType.Jvp) for one in stack)
