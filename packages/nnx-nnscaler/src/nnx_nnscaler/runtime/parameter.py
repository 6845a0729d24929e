"""Parameters in parts: whole for everyone who looks at them, local for those who know.

The user's parameter objects stay. One that this rank stores in part gets a subclass of its own class: in
*local mode* (inside emitted programs, the optimizer's step, the engine's code) it is a plain tensor, the
local part. Anywhere else every torch function sees the whole, gathered from the other ranks of the unit and
differentiable; what is changed in place is written back in part. So a weight penalty, a callback or a
submodule called on its own gets a right number, never a local one. All ranks must do the same.

This module owns the guard and what it hands out. Where parts are stored is `storage`'s, ZeRO's rows `zero`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from nnx.errors import UnsupportedError
from nnx_nnscaler.runtime.conversions import Conversions
from nnx_nnscaler.runtime.functions_of_tensors import Sees, what_it_sees
from nnx_nnscaler.runtime.layout import ParameterLayout

__all__ = [
    "LocalPart",
    "Part",
    "UnitPart",
    "can_be_guarded",
    "guard",
    "guarded_mode",
    "local_mode",
    "part_of",
    "show_plain",
    "show_whole",
    "unguard",
]

local_mode = torch._C.DisableTorchFunctionSubclass
"""Context in which parameters in parts are plain local tensors, on this thread."""
guarded_mode = torch._C._EnableTorchFunction
"""Context, within local mode, in which the user's code sees whole parameters again."""


class UnitPart(Protocol):
    """Where a rank finds its part, within the unit, of one parameter. Used in local mode only."""

    def value(self) -> Tensor:
        """It, without gradient."""

    def differentiable(self) -> Tensor:
        """It, so that gradients reach the parameter."""

    def write(self, value: Tensor) -> None:
        """Take over other values, which every rank of the axis passes alike."""

    def replace(self, value: Tensor) -> None:
        """Take over values that may be of another dtype or on another device."""


class LocalPart:
    """A part that this rank stores completely."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def value(self) -> Tensor:  # noqa: D102 # as the protocol says
        return self._parameter.detach()

    def differentiable(self) -> Tensor:  # noqa: D102
        return self._parameter

    def write(self, value: Tensor) -> None:  # noqa: D102
        if value.data_ptr() != self._parameter.data_ptr():
            with torch.no_grad():
                self._parameter.copy_(value)

    def replace(self, value: Tensor) -> None:  # noqa: D102
        self._parameter.data = value.contiguous()


class Part:
    """What is known of one guarded parameter, and its whole while someone uses it.

    Args:
        parameter: Of which this rank stores a part.
        layout: Which part.
        unit: Collectives of the plan unit.
        source: Where its part within the unit comes from.
        synchronized: Whether the reducer sums its gradients over the unit.
        in_use: Where it puts itself while it keeps the whole.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        layout: ParameterLayout,
        *,
        unit: Conversions,
        source: UnitPart,
        synchronized: bool = False,
        in_use: set[Part] | None = None,
    ) -> None:
        self._in_use = set() if in_use is None else in_use
        self.parameter = parameter
        self.layout = layout
        self.source = source
        self.synchronized = synchronized
        self.in_programs = False  # whether one has used it, so that the whole is not all that a loss hangs on
        self._unit = unit
        self._value: Tensor | None = None
        self._node: Tensor | None = None
        self._made_of: tuple[int, int] = (0, 0)  # version and address of the local tensor
        self._version = 0  # of the whole when it was last equal to the parts

    @property
    def description(self) -> Tensor:
        """A tensor of the logical shape and no storage."""
        return torch.empty(self.layout.shape, dtype=self.parameter.dtype, device="meta")

    def whole(self) -> Tensor:
        """The whole, differentiable where gradients are recorded and wanted. Collective."""
        with local_mode():
            value = self._gathered()
            if not (torch.is_grad_enabled() and self.parameter.requires_grad):
                return value
            if self._node is None:
                self._node = self._differentiable(value)
            return self._node

    def value(self) -> Tensor:
        """The whole, without gradient; changing it in place changes the parameter. Collective."""
        with local_mode():
            return self._gathered()

    def flush(self) -> None:
        """Write back what was changed in place since."""
        with local_mode():
            if self._value is not None and self._value._version != self._version:
                self._write(self._value)

    def assign(self, whole: Tensor) -> None:
        """Take over a tensor of the logical shape, as ``parameter.data = whole`` does."""
        if tuple(whole.shape) != self.layout.shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} cannot become the data of a parameter of shape "
                f"{self.layout.shape} that is stored in parts."
            )
        with local_mode(), torch.no_grad():
            local = self.parameter
            if (whole.dtype, whole.device) == (local.dtype, local.device):
                self._write(whole.detach())
            else:
                self.source.replace(self.layout.unit_part(whole.detach()))
                self._forget()

    def release(self) -> None:
        """Free the whole; who still needs it for a backward keeps it."""
        self.flush()
        self._forget()

    def _forget(self) -> None:
        self._value = self._node = None
        self._in_use.discard(self)

    def _gathered(self) -> Tensor:
        self.flush()
        if self._value is None or self._made_of != self._local_state():
            self._forget()
            with torch.inference_mode(False), torch.no_grad():
                value = self.source.value()
                if self.layout.placement.is_shard:
                    value = self._unit.whole(value, self.layout.placement.dim, self.layout.placement.groups)
                self._value = value
            self._in_use.add(self)
            self._made_of, self._version = self._local_state(), value._version
        return self._value

    def _local_state(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()

    def _differentiable(self, value: Tensor) -> Tensor:
        """The same values, with the way of gradients back to the parameter."""
        inside = self.source.differentiable()
        if self.layout.placement.is_shard:
            placement = self.layout.placement
            return _whole(inside, value, lambda g: self._unit.part(g, placement.dim, placement.groups))
        if self.synchronized:
            size = self._unit.size
            return _whole(inside, value, lambda g: g / size)
        return inside

    def _write(self, whole: Tensor) -> None:
        self.source.write(self.layout.unit_part(whole))
        if whole is not self._value:
            self._forget()
            return
        self._made_of, self._version = self._local_state(), whole._version


class _Whole(torch.autograd.Function):
    """The gathered value in place of the part; the gradient's way back is given."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = backward
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(gradient), None, None


def _whole(part: Tensor, value: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Whole.apply(part, value, backward)  # type: ignore[no-untyped-call]
    return result


# --- the guard ----------------------------------------------------------------------------------


class _Guard:
    """Comes before a class of parameters and answers torch functions with the whole."""

    __slots__ = ()
    _part: Part
    _plain: type[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        sees = what_it_sees(func)
        first = args[0] if args else None
        if sees is not Sees.WHOLE and isinstance(first, _Guard):
            return _seen(sees, func, first, args[1:], kwargs)
        return _on_wholes(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter, whole."""
        if id(self) in memo:
            return cast(nn.Parameter, memo[id(self)])
        made = _plain_copy(self)
        memo[id(self)] = made
        attributes = {k: v for k, v in vars(self).items() if k != "_part"}
        vars(made).update(copy.deepcopy(attributes, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain parameter, whole."""
        made = _plain_copy(self)
        vars(made).update({k: v for k, v in vars(self).items() if k != "_part"})
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(_plain_copy(self))


def _plain_copy(guarded: _Guard) -> nn.Parameter:
    part = guarded._part
    with local_mode(), torch.no_grad():
        made = nn.Parameter(part.value().clone(), requires_grad=part.parameter.requires_grad)
    made.__class__ = guarded._plain
    return made


def _seen(
    sees: Sees, func: Callable[..., Any], guarded: _Guard, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answer a function that does not need the whole with gradients."""
    part = guarded._part
    if sees is Sees.LOCAL:
        with local_mode():
            return func(guarded, *args, **kwargs)
    if sees is Sees.SHAPE:
        return func(part.description, *args, **kwargs)
    if sees is Sees.DATA:
        return part.value().detach()
    if sees is Sees.ASSIGNS:
        return part.assign(_unguarded(args[0], {}))
    if torch.is_grad_enabled() and part.parameter.requires_grad:
        raise RuntimeError(
            "a parameter that requires gradients is changed in place while gradients are recorded. Do it "
            "under `torch.no_grad()`."
        )
    return _on_wholes(func, (guarded, *args), kwargs)


def _on_wholes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on whole parameters, and write back what it changed."""
    wholes: dict[int, tuple[_Guard, Tensor]] = {}
    plain_args = [_unguarded(argument, wholes) for argument in args]
    plain_kwargs = {name: _unguarded(argument, wholes) for name, argument in kwargs.items()}
    if func is torch.autograd.grad and any(guarded._part.in_programs for guarded, _ in wholes.values()):
        raise UnsupportedError(
            "`torch.autograd.grad` is asked for gradients of a parameter that programs use in parts.",
            remedy="Call `backward` and read `.grad`, or use strategy 'nnscaler_dp'.",
        )
    result = func(*plain_args, **plain_kwargs)
    for guarded, whole in wholes.values():
        guarded._part.flush()
        if result is whole:
            result = guarded
    return result


def _unguarded(argument: Any, wholes: dict[int, tuple[_Guard, Tensor]]) -> Any:
    """An argument with every guarded parameter in it exchanged for the whole."""
    if isinstance(argument, _Guard):
        if id(argument) not in wholes:
            wholes[id(argument)] = argument, argument._part.whole()
        return wholes[id(argument)][1]
    if isinstance(argument, (list, tuple)):
        items = [_unguarded(item, wholes) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    if isinstance(argument, dict):
        return {key: _unguarded(value, wholes) for key, value in argument.items()}
    return argument


@cache
def _guarded_class(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass that parameters of a class get."""
    attributes = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_plain": plain}
    made = type(plain)(plain.__name__, (_Guard, plain), attributes)  # type: ignore[misc]
    return cast("type[nn.Parameter]", made)


def can_be_guarded(parameter: nn.Parameter) -> bool:
    """Whether a parameter can be stored in part: its class leaves torch functions alone, it has values.

    Example:
        >>> can_be_guarded(nn.Parameter(torch.zeros(2)))
        True
    """
    own = type(parameter).__torch_function__ is not nn.Parameter.__torch_function__
    return isinstance(parameter, _Guard) or not (own or nn.parameter.is_lazy(parameter))


def guard(part: Part) -> None:
    """Make a parameter, whose data is its local part by now, look whole."""
    parameter = part.parameter
    parameter._part = part  # type: ignore[attr-defined]
    parameter.__class__ = _guarded_class(type(parameter))


def unguard(parameter: nn.Parameter) -> None:
    """Give a parameter its own class back; its data stays what it is."""
    if isinstance(parameter, _Guard):
        del parameter._part
        parameter.__class__ = parameter._plain  # type: ignore[assignment]


def part_of(parameter: Tensor) -> Part | None:
    """What is known of a guarded parameter; None for any other tensor."""
    return parameter._part if isinstance(parameter, _Guard) else None


def show_plain(parameter: nn.Parameter) -> None:
    """Make a guarded parameter a plain local one for a while, for code that looks at the class."""
    if isinstance(parameter, _Guard):
        parameter.__class__ = parameter._plain  # type: ignore[assignment]


def show_whole(parameter: nn.Parameter) -> None:
    """End `show_plain`."""
    if not isinstance(parameter, _Guard):
        parameter.__class__ = _guarded_class(type(parameter))
