"""Guards: sharded tensors that read as unsharded in user code.

A parameter that an engine has sharded gets a subclass of its own class, a *guard*. In *local mode* (the
optimizer's step, the engine's code, checkpoints) it is this rank's shard. Elsewhere torch functions get the
unsharded tensor, gathered and differentiable, and changes in place are written back to the shard. So a weight
penalty, a callback or a direct call of a submodule computes the right number. All ranks must run the same
code.

This module owns the guard, which maps each torch function to an answer. An engine implements `Part`, which
stores the shard of one tensor and gathers it.
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
    "show_unsharded",
    "unguard",
]


def as_stored(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which sharded tensors read as shards, for code that makes others of their layout.

    Examples are an average of the weights, and an optimizer that makes its state in its constructor.

    Args:
        *tensors: The tensors. The context does nothing without a DTensor or a `Part.is_copied_as_stored`.
    """
    return local_mode() if any(_is_copied_as_stored(tensor) for tensor in tensors) else nullcontext()


def _is_copied_as_stored(tensor: Tensor) -> bool:
    part = part_of(tensor)
    return isinstance(tensor, DTensor) or (part is not None and part.is_copied_as_stored)


class Part(ABC):
    """Reads, writes and gradients of one guarded tensor."""

    tensor: Tensor
    """This rank's shard."""
    is_copied_as_stored = False
    """True if `as_stored` shows this rank's shard, as it does of a DTensor."""
    is_complete = False
    """True if this rank stores the unsharded tensor, so that nothing is gathered."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        """Return itself: a tensor that is copied in local mode has the part among its attributes."""
        return self

    @property
    def is_gone(self) -> bool:
        """True if the tensor is freed, so that there is nothing to write to."""
        return False

    @property
    @abstractmethod
    def description(self) -> Tensor:
        """Return a tensor of the logical shape and strides, without storage."""

    @abstractmethod
    def unsharded(self) -> Tensor:
        """Gather the tensor; differentiable if gradients are recorded and required. Collective."""

    @abstractmethod
    def value(self) -> Tensor:
        """Gather the tensor without gradient; `flush` writes changes of it back. Collective."""

    @abstractmethod
    def flush(self) -> None:
        """Write changes in place since the gather back to the shard."""

    @abstractmethod
    def assign(self, values: Tensor) -> None:
        """Take over another tensor's values, as ``tensor.data = values`` does."""

    @abstractmethod
    def gradient_shown(self) -> Tensor | None:
        """Return the gradient for a reader of ``tensor.grad``."""

    @abstractmethod
    def gradient_given(self, gradient: Any) -> None:
        """Take over a gradient that user code assigns to ``tensor.grad``; None removes it."""

    @abstractmethod
    def hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        """Register a hook, which gets the unsharded gradient."""

    def differentiated(self) -> list[Tensor]:
        """Return the tensors that stand for this one in the graph of a loss, for ``torch.autograd.grad``."""
        return [self.unsharded()]

    def detached(self) -> Tensor:
        """Return the answer to ``detach()`` and ``data``."""
        return self.value().detach()

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that a copy of the tensor gets: those that user code has set."""
        return attributes_of(self.tensor)

    def randomized(self) -> None:  # noqa: B027 # nothing to do if all ranks draw the same
        """Handle a fill of the gathered tensor with random numbers, which may differ between ranks."""

    def in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Change this rank's shard in place without a gather, if the result is the same; return True if done.

        Args:
            func: A torch function that changes its first argument.
            args: Its arguments; the first is this tensor, or a list with it.
            kwargs: Its keyword arguments.
        """
        return False

    def takes_behind(self, part: Part) -> bool:
        """Keep a part that would replace this one until this one is done; return True if kept."""
        return False


class HeldByTensor:
    """Mixin for the `Part` of a tensor that lasts for a step, such as a gradient.

    The tensor holds its part. A part that held the tensor would form a reference cycle, whose memory is only
    freed by Python's garbage collector.
    """

    _tensor: TensorWeakRef

    @property
    def tensor(self) -> Tensor:
        """This rank's shard."""
        tensor = self._tensor()
        if tensor is None:
            raise ReferenceError("the tensor that this part belongs to is gone.")
        return cast(Tensor, tensor)

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self._tensor = TensorWeakRef(tensor)

    @property
    def is_gone(self) -> bool:
        """True if the tensor is freed."""
        return self._tensor() is None


class Guard:
    """Mixin for a class of tensors that answers torch functions with the unsharded tensor."""

    __slots__ = ()
    _part: Part
    _plain: type[Tensor]

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient as `__torch_function__` would, but faster: optimizers read it in each step."""
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
        # Many functions need only metadata or data of their first argument. They must not gather with
        # gradient: that is collective, and keeps the gathered tensor for the backward.
        sees = what_it_sees(func)
        first = args[0] if args else None
        if isinstance(first, Guard):
            if sees is Sees.GRADIENT:
                return first._part.gradient_shown()
            if sees is Sees.ASSIGNS_GRADIENT:
                return first._part.gradient_given(*args[1:] or (None,))
            if sees is not Sees.UNSHARDED:
                return _seen(sees, func, first, args[1:], kwargs or {})
        if sees is Sees.IN_PLACE and _in_place_of_list(func, args, kwargs or {}):
            return None
        if func is torch.autograd.grad:
            return _differentiate(args, kwargs or {})
        if func in _BACKWARDS and kwargs and _is_any_sharded(kwargs.get("inputs")):
            raise UnsupportedError(
                "`backward(inputs=...)` is asked for gradients of a sharded parameter.",
                remedy="Use `torch.autograd.grad`, or set `requires_grad` of the other parameters to False.",
            )
        return _on_unsharded(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy to a plain, unsharded tensor."""
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        part, made = self._part, plain_copy(self)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(part.attributes(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain, unsharded tensor; refused with several ranks, as one alone may pickle."""
        part = self._part
        if is_distributed() and not part.is_complete:
            raise _only_gathered(self, "is pickled, as `torch.save` does")
        made = plain_copy(self)
        vars(made).update(part.attributes())
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(plain_copy(self))


def _is_any_sharded(inputs: Any) -> bool:
    """Return True if the ``inputs`` of a backward contain a tensor of which this rank stores only a shard."""
    found = [part_of(x) for x in ([inputs] if isinstance(inputs, Tensor) else inputs or ())]
    return any(part is not None and not part.is_complete for part in found)


_GRAD: Any = Tensor.grad
_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward})
_OWN_ATTRIBUTES = frozenset({"_part", "_is_param"})


def attributes_of(tensor: Any) -> dict[str, Any]:
    """Return the attributes that user code has set on a tensor, guarded or not."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def _only_gathered(guarded: Guard, what: str) -> UnsupportedError:
    """Return the error for code that would write the memory of one rank into a file."""
    return UnsupportedError(
        f"a sharded tensor of shape {tuple(guarded._part.description.shape)} {what}. Gathering it needs all "
        "ranks, and rank zero often saves alone. The file in progress is incomplete.",
        remedy="Gather on all ranks, `weights = {name: value.detach().cpu().clone() for name, value "
        "in model.state_dict().items()}`, and save `weights` on rank zero.",
    )


def plain_copy(guarded: Guard) -> Tensor:
    """Gather into a plain tensor with memory of its own; a parameter stays a parameter. Collective."""
    part = guarded._part
    if not isinstance(guarded, nn.Parameter):
        with local_mode(), torch.no_grad():
            return part.value().clone()
    plain = guarded._plain  # read first: `value` of an engine may restore the plain class
    with local_mode(), torch.no_grad():
        made = nn.Parameter(part.value().clone(), requires_grad=part.tensor.requires_grad)
    if issubclass(plain, nn.Parameter):
        made.__class__ = plain
    return made


def _seen(
    sees: Sees, func: Callable[..., Any], guarded: Guard, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answer a function that does not need the unsharded tensor with gradient."""
    part = guarded._part
    if sees is Sees.IN_PLACE:
        return _change(func, guarded, args, kwargs)
    if sees is Sees.MEMORY and part.is_complete:
        return func(part.unsharded(), *args, **kwargs)
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
    """Run a function that changes a tensor in place."""
    part = guarded._part
    if torch.is_grad_enabled() and part.tensor.requires_grad:
        raise RuntimeError(
            "a parameter that requires gradients is changed in place while gradients are recorded. Do it "
            "under `torch.no_grad()`."
        )
    if part.in_place(func, (guarded, *args), kwargs):
        return guarded
    return _on_unsharded(func, (guarded, *args), kwargs)


def _in_place_of_list(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Run ``torch._foreach_mul_`` and the like on shards, if the engine can. Return True if it did."""
    first = args[0] if args else None
    if not isinstance(first, (list, tuple)) or not first or not isinstance(first[0], Guard):
        return False
    return first[0]._part.in_place(func, args, kwargs)


def _on_unsharded(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on unsharded tensors, and write its changes back."""
    gathered: Gathered = {}
    plain_args = [_unguarded(argument, gathered) for argument in args]
    plain_kwargs = {name: _unguarded(argument, gathered) for name, argument in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for guarded, part, unsharded in gathered.values():
        if is_random(func):
            part.randomized()
        # At once: the optimizer's step and the engine read the shard, not the gathered tensor.
        part.flush()
        if result is unsharded:
            result = guarded  # in-place functions return their argument, which is the guard for the caller
    return result


Gathered: TypeAlias = dict[int, tuple[Guard, Part, Tensor]]
"""The guarded tensors among arguments, with their parts (a gather may remove them) and unsharded tensors."""


def _unguarded(argument: Any, gathered: Gathered) -> Any:
    """Return an argument with every guarded tensor in it replaced by the unsharded one. Collective."""
    if isinstance(argument, Guard):
        if id(argument) not in gathered:
            part = argument._part
            # Once per tensor, so that `f(w, w)` gets the same tensor twice, as it does without the guard.
            gathered[id(argument)] = argument, part, part.unsharded()
        return gathered[id(argument)][2]
    if isinstance(argument, DTensor):
        return argument.full_tensor()
    if isinstance(argument, (list, tuple)):
        items = [_unguarded(item, gathered) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    if isinstance(argument, dict):
        return {key: _unguarded(value, gathered) for key, value in argument.items()}
    return argument


def _differentiate(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``torch.autograd.grad`` with respect to the tensors that stand for guarded ones in the graph."""
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
                f"the graph does not lead to the differentiated tensor at index {position}, which is "
                "sharded: it was not used, or it was gathered again since.",
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
    """Gather for a functional transform, which wraps the storage of a tensor below `__torch_function__`."""
    part = guarded._part
    with local_mode(), torch.no_grad():
        return part.unsharded() if part.is_complete else part.value().detach()


exchange_in_transforms(Guard, _for_transform)


@cache
def guarded_class(plain: type[Any]) -> type[Any]:
    """Return the subclass for guarded tensors of a class; it has the name of the class.

    Args:
        plain: The class of the tensors; the subclass has it as ``_plain``.
    """
    attributes = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__slots__": (),
        "_plain": plain,
    }
    return cast("type[Any]", type(plain)(plain.__name__, (Guard, plain), attributes))  # type: ignore[misc]


def can_be_guarded(parameter: Tensor) -> bool:
    """Return True if a tensor's class has no `__torch_function__` of its own, and the tensor has values.

    Example:
        >>> can_be_guarded(nn.Parameter(torch.zeros(2)))
        True
    """
    own = type(parameter).__torch_function__ is not nn.Parameter.__torch_function__
    return isinstance(parameter, Guard) or not (own or nn.parameter.is_lazy(parameter))


def guard(tensor: Any, part: Part) -> None:
    """Make a tensor read as unsharded.

    Args:
        tensor: The tensor, which keeps its identity; its class becomes a subclass of its own class.
        part: Answers torch functions for it.
    """
    # Exchanging the class keeps the identity that optimizers, hooks and the user's references depend on.
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
    """Return True if torch functions get the unsharded tensor."""
    return isinstance(tensor, Guard)


def part_of(tensor: Any) -> Part | None:
    """Return the part of a guarded tensor; None for any other tensor."""
    return tensor._part if isinstance(tensor, Guard) else None


def show_plain(tensor: Any) -> None:
    """Restore a guarded tensor's own class until `show_unsharded`, for code that checks the class."""
    if is_guarded(tensor):
        tensor.__class__ = tensor._plain


def show_unsharded(tensor: Any) -> None:
    """End `show_plain`."""
    if not is_guarded(tensor):
        tensor.__class__ = guarded_class(type(tensor))  # type: ignore[arg-type] # mypy on hashes
