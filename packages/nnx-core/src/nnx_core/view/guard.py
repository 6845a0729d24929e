"""Tensors that a rank stores in part, and that everyone else sees whole.

A parameter that an engine has sharded gets a subclass of its own class, a *guard*. In *local mode* (the
optimizer's step, the engine's code, checkpoints) it is what the engine made of it: this rank's part.
Anywhere else torch functions see the whole tensor, gathered and differentiable, and what is changed in
place is written back in part. So a weight penalty, a callback or a submodule called on its own gets a right
number, never a part's. All ranks must do the same.

This module owns the guard: which torch function is answered with what. What is known of one tensor, and how
the whole comes about, is the engine's: it implements `Part`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from nnx_base._torch_compat import local_mode
from nnx_base.ranks import is_distributed
from nnx_core._torch_compat import (
    exchange_in_transforms,
    guarded_mode,
    in_guarded_mode,
)
from nnx_core.errors import UnsupportedError
from nnx_core.view.torch_functions import STORAGES, Sees, is_random, what_it_sees

__all__ = [
    "Guard",
    "HeldByTensor",
    "Part",
    "as_stored",
    "attributes_of",
    "can_be_guarded",
    "guard",
    "guarded_class",
    "guarded_mode",
    "in_guarded_mode",
    "is_guarded",
    "local_mode",
    "part_of",
    "show_plain",
    "show_whole",
    "unguard",
]


def as_stored(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Within it sharded tensors are not shown whole: for code that makes others which lie like them.

    An average of the weights does so, and an optimizer that makes its state when it is built.

    Args:
        *tensors: Those concerned. Nothing changes without a DTensor or a `Part.is_copied_as_stored`.
    """
    return local_mode() if any(_is_copied_as_stored(tensor) for tensor in tensors) else nullcontext()


def _is_copied_as_stored(tensor: Tensor) -> bool:
    part = part_of(tensor)
    return isinstance(tensor, DTensor) or (part is not None and part.is_copied_as_stored)


class Part(ABC):
    """Reads, writes and gradients of one guarded tensor."""

    tensor: Tensor
    """What this rank stores of it."""
    is_copied_as_stored = False
    """Whether `as_stored` shows what this rank stores of it, as of a DTensor."""
    is_complete = False
    """Whether this rank stores all of it: then the whole is the tensor itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        """Itself: a tensor that is copied in local mode has it among its attributes."""
        return self

    @property
    def is_gone(self) -> bool:
        """True if nobody has the tensor any more, so that there is nothing to write to."""
        return False

    @property
    @abstractmethod
    def description(self) -> Tensor:
        """A tensor of the logical shape and strides, without storage."""

    @abstractmethod
    def whole(self) -> Tensor:
        """The whole, differentiable where gradients are recorded and wanted. Collective."""

    @abstractmethod
    def value(self) -> Tensor:
        """The whole, without gradient; changing it in place changes the tensor. Collective."""

    @abstractmethod
    def flush(self) -> None:
        """Write back changes in place, since the tensor was gathered."""

    @abstractmethod
    def assign(self, whole: Tensor) -> None:
        """Take over another tensor's values, as ``tensor.data = whole`` does."""

    @abstractmethod
    def gradient_shown(self) -> Tensor | None:
        """Return the gradient for a reader of ``tensor.grad``."""

    @abstractmethod
    def gradient_given(self, gradient: Any) -> None:
        """Take over what somebody assigned to ``tensor.grad``; None for none."""

    @abstractmethod
    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        """Register a hook on the gradient, which it sees whole."""

    def differentiated(self) -> list[Tensor]:
        """The tensors that a loss hangs on where it depends on this one, for ``torch.autograd.grad``."""
        return [self.whole()]

    def detached(self) -> Tensor:
        """The answer to ``detach()`` and ``data``."""
        return self.value().detach()

    def attributes(self) -> dict[str, Any]:
        """Return the attributes for a copy of the tensor: those that user code has set."""
        return attributes_of(self.tensor)

    def randomized(self) -> None:  # noqa: B027 # nothing to do where ranks draw alike
        """The whole was filled with random numbers, which need not be equal on all ranks."""

    def in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Do a change in place on this rank's part alone, where that is the same; whether it was done.

        Args:
            func: A torch function that changes its first argument.
            args: Its arguments, the first of which is this tensor, or a list with it.
            kwargs: Its keyword arguments.
        """
        return False

    def takes_behind(self, part: Part) -> bool:
        """Whether a part that is to take this one's place answers only after this one, which keeps it."""
        return False


class HeldByTensor:
    """Comes before the `Part` of a tensor that lasts for a step, such as a gradient.

    The tensor holds its part; if the part held the tensor as well, both would form a circle, whose memory
    lasts until Python's collector looks for it.
    """

    _tensor: TensorWeakRef

    @property
    def tensor(self) -> Tensor:
        """What this rank stores of it."""
        tensor = self._tensor()
        if tensor is None:
            raise ReferenceError("the tensor that this part belongs to is gone.")
        return cast(Tensor, tensor)

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self._tensor = TensorWeakRef(tensor)

    @property
    def is_gone(self) -> bool:
        """True if nobody has the tensor any more."""
        return self._tensor() is None


class Guard:
    """Comes before a class of tensors and answers torch functions with the whole."""

    __slots__ = ()
    _part: Part
    _plain: type[Tensor]

    @property
    def grad(self) -> Tensor | None:
        """As `__torch_function__` would, and faster: optimizers ask each parameter in each step."""
        if in_guarded_mode():
            return self._part.gradient_shown()
        return cast("Tensor | None", _GRAD.__get__(self))

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if in_guarded_mode():
            self._part.gradient_given(gradient)
        else:
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        sees = what_it_sees(func)
        first = args[0] if args else None
        if isinstance(first, Guard):
            if sees is Sees.GRADIENT:
                return first._part.gradient_shown()
            if sees is Sees.ASSIGNS_GRADIENT:
                return first._part.gradient_given(*args[1:] or (None,))
            if sees is not Sees.WHOLE:
                return _seen(sees, func, first, args[1:], kwargs or {})
        if sees is Sees.IN_PLACE and _in_place_of_list(func, args, kwargs or {}):
            return None
        if func is torch.autograd.grad:
            return _differentiate(args, kwargs or {})
        if func in _BACKWARDS and kwargs and _is_any_sharded(kwargs.get("inputs")):
            raise UnsupportedError(
                "`backward(inputs=...)` is asked for gradients of a parameter that is stored in parts.",
                remedy="Use `torch.autograd.grad`, or set `requires_grad` of the other parameters to False.",
            )
        return _on_wholes(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor, whole."""
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        part, made = self._part, plain_copy(self)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(part.attributes(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor, whole; refused among several ranks, of which one alone may pickle."""
        part = self._part
        if is_distributed() and not part.is_complete:
            raise _only_gathered(self, "is pickled, as `torch.save` does")
        made = plain_copy(self)
        vars(made).update(part.attributes())
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(plain_copy(self))


def _is_any_sharded(inputs: Any) -> bool:
    """Whether there is a tensor in the ``inputs`` of a backward of which this rank has a shard only."""
    found = [part_of(x) for x in ([inputs] if isinstance(inputs, Tensor) else inputs or ())]
    return any(part is not None and not part.is_complete for part in found)


_GRAD: Any = Tensor.grad
_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward})
_OWN_ATTRIBUTES = frozenset({"_part", "_of", "_local", "_is_param"})


def attributes_of(tensor: Any) -> dict[str, Any]:
    """Return the attributes that user code has set on a tensor, guarded or not."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def _only_gathered(guarded: Guard, what: str) -> UnsupportedError:
    """The error of code that would write the memory of one rank into a file."""
    return UnsupportedError(
        f"a sharded tensor of shape {tuple(guarded._part.description.shape)} {what}. To gather it takes all "
        "ranks, and rank zero often saves alone. The file that was begun is incomplete.",
        remedy="Gather on all ranks, `weights = {name: value.detach().cpu().clone() for name, value "
        "in model.state_dict().items()}`, and save `weights` on rank zero.",
    )


def plain_copy(guarded: Guard) -> Tensor:
    """The whole as a plain tensor of its own: a parameter of a parameter. Collective."""
    part = guarded._part
    if not isinstance(guarded, nn.Parameter):
        with local_mode(), torch.no_grad():
            return part.value().clone()
    plain = guarded._plain  # first: an engine may show the plain class from `value` on
    with local_mode(), torch.no_grad():
        made = nn.Parameter(part.value().clone(), requires_grad=part.tensor.requires_grad)
    if issubclass(plain, nn.Parameter):
        made.__class__ = plain
    return made


def _seen(
    sees: Sees, func: Callable[..., Any], guarded: Guard, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answer a function that does not need the whole with gradients."""
    part = guarded._part
    if sees is Sees.IN_PLACE:
        return _change(func, guarded, args, kwargs)
    if sees is Sees.MEMORY and part.is_complete:
        return func(part.whole(), *args, **kwargs)
    if sees is Sees.MEMORY and func.__name__ in STORAGES and is_distributed():
        raise _only_gathered(guarded, "is asked for its storage, as `safetensors` does")
    if sees is Sees.LOCAL or sees is Sees.MEMORY:
        with local_mode():
            return func(part.tensor, *args, **kwargs)
    answers: dict[Sees, Callable[[], Any]] = {
        Sees.SHAPE: lambda: func(part.description, *args, **kwargs),
        Sees.DATA: part.detached,
        Sees.ASSIGNS: lambda: part.assign(args[0]),
        Sees.HOOK: lambda: part.hook(func, *args, **kwargs),
    }
    return answers[sees]()


def _change(func: Callable[..., Any], guarded: Guard, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let a function change a tensor in place."""
    part = guarded._part
    if torch.is_grad_enabled() and part.tensor.requires_grad:
        raise RuntimeError(
            "a parameter that requires gradients is changed in place while gradients are recorded. Do it "
            "under `torch.no_grad()`."
        )
    if part.in_place(func, (guarded, *args), kwargs):
        return guarded
    return _on_wholes(func, (guarded, *args), kwargs)


def _in_place_of_list(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Let the engine do what ``torch._foreach_mul_`` and its like do to a list of tensors."""
    first = args[0] if args else None
    if not isinstance(first, (list, tuple)) or not first or not isinstance(first[0], Guard):
        return False
    return first[0]._part.in_place(func, args, kwargs)


def _on_wholes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on unsharded tensors, and write its changes back."""
    wholes: Wanted = {}
    plain_args = [_unguarded(argument, wholes) for argument in args]
    plain_kwargs = {name: _unguarded(argument, wholes) for name, argument in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for guarded, part, whole in wholes.values():
        if is_random(func):
            part.randomized()
        part.flush()
        if result is whole:
            result = guarded
    return result


Wanted: TypeAlias = dict[int, tuple[Guard, Part, Tensor]]
"""The guarded tensors among arguments, each with its part (which asking may take off) and its whole."""


def _unguarded(argument: Any, wholes: Wanted) -> Any:
    """An argument with every guarded tensor in it exchanged for the whole."""
    if isinstance(argument, Guard):
        if id(argument) not in wholes:
            part = argument._part
            wholes[id(argument)] = argument, part, part.whole()
        return wholes[id(argument)][2]
    if isinstance(argument, DTensor):
        return argument.full_tensor()
    if isinstance(argument, (list, tuple)):
        items = [_unguarded(item, wholes) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    if isinstance(argument, dict):
        return {key: _unguarded(value, wholes) for key, value in argument.items()}
    return argument


def _differentiate(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad`` with respect to the tensors that stand for guarded ones in the graph."""
    given = dict(
        zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False)
    )
    given |= kwargs
    outputs, inputs = _unguarded(given.pop("outputs"), {}), given.pop("inputs")
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    unused, zeros = given.pop("allow_unused", None), given.pop("materialize_grads", False)
    standing = [part.differentiated() if (part := part_of(x)) is not None else [x] for x in inputs]
    flat = [tensor for tensors in standing for tensor in tensors]
    found = iter(torch.autograd.grad(outputs, flat, **given, allow_unused=True) if flat else ())
    answers: list[Tensor | None] = []
    for position, (tensor, tensors) in enumerate(zip(inputs, standing, strict=True)):
        own = [gradient for _ in tensors if (gradient := next(found)) is not None]
        answer = sum(own[1:], own[0]) if own else None
        if answer is None and zeros:
            answer = torch.zeros_like(tensor)
        elif answer is None and not unused and part_of(tensor) is not None:
            raise UnsupportedError(
                f"the graph does not lead to the differentiated tensor at index {position}, which is stored "
                "in parts: it was not used, or it was gathered once more since.",
                remedy="Set `allow_unused=True` if it was not used; else differentiate before the next "
                "forward, or call `self.manual_backward(loss)` and read `p.grad`.",
            )
        elif answer is None and not unused:
            raise RuntimeError(
                f"the differentiated tensor at index {position} was not used in the graph. Set "
                "`allow_unused=True` if this is meant."
            )
        answers.append(answer)
    return tuple(answers)


def _for_transform(guarded: Guard) -> Tensor:
    """The whole, as transforms wrap what a tensor has stored."""
    part = guarded._part
    with local_mode(), torch.no_grad():
        return part.whole() if part.is_complete else part.value().detach()


exchange_in_transforms(Guard, _for_transform)


@cache
def guarded_class(plain: type[Any]) -> type[Any]:
    """The subclass that guarded tensors of a class get; it has the class's name.

    Args:
        plain: The class of the tensors, which is the subclass's attribute ``_plain``.
    """
    attributes = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__slots__": (),
        "_plain": plain,
    }
    return cast("type[Any]", type(plain)(plain.__name__, (Guard, plain), attributes))  # type: ignore[misc]


def can_be_guarded(parameter: Tensor) -> bool:
    """Return True if a tensor's class leaves torch functions alone, and it has values.

    Example:
        >>> can_be_guarded(nn.Parameter(torch.zeros(2)))
        True
    """
    own = type(parameter).__torch_function__ is not nn.Parameter.__torch_function__
    return isinstance(parameter, Guard) or not (own or nn.parameter.is_lazy(parameter))


def guard(tensor: Any, part: Part) -> None:
    """Make a tensor look whole.

    Args:
        tensor: It keeps its identity; its class becomes a subclass of its own.
        part: Answers for it.
    """
    if is_guarded(tensor) and tensor._part.takes_behind(part):
        return
    tensor._part = part
    if not is_guarded(tensor):
        tensor.__class__ = guarded_class(type(tensor))  # type: ignore[arg-type] # mypy on hashes


def unguard(tensor: Any) -> None:
    """Restore a tensor's own class; its data stays."""
    if is_guarded(tensor):
        del tensor._part
        tensor.__class__ = tensor._plain


def is_guarded(tensor: Any) -> bool:
    """Return True if torch functions see the whole of a tensor."""
    return isinstance(tensor, Guard)


def part_of(tensor: Any) -> Part | None:
    """Return the part of a guarded tensor; None for any other tensor."""
    return tensor._part if isinstance(tensor, Guard) else None


def show_plain(tensor: Any) -> None:
    """Give a guarded tensor its own class for a while, for code that looks at the class."""
    if is_guarded(tensor):
        tensor.__class__ = tensor._plain


def show_whole(tensor: Any) -> None:
    """End `show_plain`."""
    if not is_guarded(tensor):
        tensor.__class__ = guarded_class(type(tensor))  # type: ignore[arg-type] # mypy on hashes
