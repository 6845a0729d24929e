"""Parameters in parts: whole for everyone who looks at them, local for those who know.

The user's parameter objects stay. One that this rank stores in part gets a subclass of its own class: in
*local mode* (inside emitted programs, the optimizer's step, the engine's code) it is a plain tensor, the
local part. Anywhere else every torch function sees the whole, gathered from the other ranks of the unit and
differentiable; what is changed in place is written back in part. So a weight penalty, a callback or a
submodule called on its own gets a right number, never a local one. All ranks must do the same.

Its gradient is shown the same way: `parameter.grad` is a stand-in that answers as the whole gradient would,
and gathers it only when a value is asked for; in local mode it is the gradient of the local part.

This module owns the guard. What is known of a part, and its whole, is `part`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from nnx.errors import UnsupportedError
from nnx_nnscaler.runtime.functions_of_tensors import Sees, what_it_sees
from nnx_nnscaler.runtime.part import LocalPart, Part, guarded_mode, local_mode

__all__ = [
    "LocalPart",
    "Part",
    "can_be_guarded",
    "guard",
    "guarded_mode",
    "local_mode",
    "part_of",
    "show_plain",
    "show_whole",
    "unguard",
]


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
        sees = what_it_sees(func)
        if sees is Sees.GRADIENT:  # first, because optimizers do this to every parameter in every step
            return _shown_gradient(args[0]._part)
        if sees is Sees.ASSIGNS_GRADIENT:
            return _assign_gradient(args[0]._part, *args[1:])
        first = args[0] if args else None
        if sees is not Sees.WHOLE and isinstance(first, _Guard):
            return _seen(sees, func, first, args[1:], kwargs or {})
        return _on_wholes(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor, whole."""
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        made = _plain_copy(self)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(_attributes(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor, whole."""
        made = _plain_copy(self)
        vars(made).update(_attributes(self))
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(_plain_copy(self))


class _Shown(_Guard, Tensor):  # type: ignore[misc] # their __repr__ differ
    """Stands for the gradient of a guarded parameter, whole; it shares memory with the local one.

    Attributes:
        _of: The parameter's part.
        _local: The gradient of the local part.
    """

    _of: Part
    _local: Tensor

    @cached_property
    def _part(self) -> Part:  # type: ignore[override]
        with local_mode():
            return self._of.gradient(self._local)


_OWN_ATTRIBUTES = frozenset({"_part", "_of", "_local"})


def _attributes(guarded: _Guard) -> dict[str, Any]:
    """What the user has attached."""
    return {name: value for name, value in vars(guarded).items() if name not in _OWN_ATTRIBUTES}


def _plain_copy(guarded: _Guard) -> Tensor:
    part = guarded._part
    with local_mode(), torch.no_grad():
        value = part.value().clone()
        if isinstance(guarded, _Shown):
            return value
        made = nn.Parameter(value, requires_grad=part.tensor.requires_grad)
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
    if sees is Sees.HOOK:
        return _hook(func, guarded, *args, **kwargs)
    if torch.is_grad_enabled() and part.tensor.requires_grad:
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


# --- gradients ----------------------------------------------------------------------------------


def _shown_gradient(part: Part) -> Tensor | None:
    """What whoever reads the gradient of a parameter gets; nothing is gathered yet."""
    with local_mode():
        gradient = part.tensor.grad
        if gradient is None or part.gradients is None or part.gradients.are_whole():
            part.shown = None
            return gradient
        if part.shown is None or part.shown._local is not gradient:
            part.shown = _show(part, gradient)
        return cast(Tensor, part.shown)


def _show(part: Part, gradient: Tensor) -> _Shown:
    shown: Any = gradient.view_as(gradient) if gradient.requires_grad else gradient.detach()
    shown.__class__ = _Shown
    shown._of, shown._local = part, gradient
    return cast(_Shown, shown)


def _assign_gradient(part: Part, value: Any = None) -> None:
    """Let a parameter have another gradient, of which it gets its part; None for none."""
    with local_mode():
        if value is None:
            part.tensor.grad = part.shown = None
            return
        if isinstance(value, _Shown):
            value._part.flush()
            if value._of is part:
                part.tensor.grad = value._local
                return
            value = value._part.value().clone()
        part.shown = None
        if not isinstance(value, Tensor):
            part.tensor.grad = value
            return
        if tuple(value.shape) != part.layout.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(value.shape)} is given to a parameter of shape "
                f"{part.layout.shape}."
            )
        if not part.layout.is_whole:
            value = part.layout.local_part(value.to_dense() if value.is_sparse else value).clone()
        part.tensor.grad = value
        if part.gradients is not None:
            part.gradients.assigned()


def _hook(register: Callable[..., Any], guarded: _Guard, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook that sees the whole gradient, and whose answer counts in part."""
    part = guarded._part

    def heard(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        with local_mode():
            shown = _show(part, gradient)
            shown._part = share = part.share(gradient)
            with guarded_mode():
                answer = hook(shown)
            share.flush()
            if answer is None or answer is shown:
                return None
            whole = answer._part.value() if isinstance(answer, _Guard) else answer
            changed = share.layout.unit_part(whole)
            return changed / part.unit_size if part.synchronized else changed

    with local_mode():
        return register(guarded, heard)


# --- classes ------------------------------------------------------------------------------------


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
    parameter = cast(nn.Parameter, part.tensor)
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
