"""Which values of a trace share memory, and how a change of one is seen through the others.

A graph has no writes: a write into a view becomes a new whole with the part put back, and the other views are
taken again. Owns what is known of torch's view operators; emits through the builder that is given.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx

from nnx_nnscaler.ir import Argument
from nnx_nnscaler.trace.steps import Step, nodes_in, tensor_of

__all__ = ["Emitter", "UnsupportedViewError", "Views", "written_argument"]

_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
_SAME = ("detach", "alias", "contiguous", "to", "dropout", "lift_fresh", "lift_fresh_copy", "clone")


class UnsupportedViewError(Exception):
    """A write through a view that cannot be expressed without one.

    Attributes:
        step: The view, or the write.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(f"it writes in place through {step.target}")
        self.step = step


class Emitter(Protocol):
    """What is needed of the builder."""

    def emit(self, step: Step, target: str, args: Sequence[Argument], like: Tensor) -> Argument:
        """Add an operator that makes something like a tensor of the trace; `step` is where it comes from."""

    def argument(self, value: Any) -> Argument:
        """An argument of the trace as one of the graph."""

    def shape(self, tensor: Tensor) -> list[Argument]:
        """A shape as an argument."""


class _View(NamedTuple):
    """How a value was taken from another: a step, and for one of several results which."""

    parent: fx.Node
    step: Step
    number: int | None


def written_argument(step: Step) -> int | None:
    """Position of the argument that an operator writes into; None when it writes nothing.

    Raises:
        UnsupportedViewError: It writes elsewhere than into its first argument, or changes a shape in place.
    """
    schema = getattr(step.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    written = [
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    inplace_view = any(tag.name == "inplace_view" for tag in step.target.tags)
    name = schema.name.partition("::")[2]
    if name == "detach_":
        return None
    if written != [0] or inplace_view or not name.endswith("_"):
        raise UnsupportedViewError(step)
    return 0


class Views:
    """Values of one program that share memory.

    Args:
        steps: Every call.
        placeholders: The program's inputs.
    """

    def __init__(self, steps: Sequence[Step], placeholders: Sequence[fx.Node]) -> None:
        self._views: dict[fx.Node, _View] = {}
        self._groups: dict[int, list[fx.Node]] = {}
        self._makers: dict[fx.Node, Step] = {step.node: step for step in steps}
        for node in (*placeholders, *(step.node for step in steps)):
            tensor = tensor_of(node)
            if tensor is not None:
                self._groups.setdefault(_memory(tensor), []).append(node)
        for step in steps:
            view = self._find(step)
            if view is not None:
                self._views[step.node] = view
        self.values: dict[fx.Node, Argument] = {}
        self._stale: set[fx.Node] = set()

    def _find(self, step: Step) -> _View | None:
        tensor = tensor_of(step.node)
        if tensor is None:
            return None
        index = None
        if step.target is operator.getitem:
            index = step.args[1]
            step = self._makers[step.args[0]]
        for node in nodes_in(step.args, step.kwargs):
            parent = tensor_of(node)
            if parent is not None and _memory(parent) == _memory(tensor):
                return _View(node, step, index)
        return None

    def root(self, node: fx.Node) -> fx.Node:
        """The value that owns the memory."""
        while node in self._views:
            node = self._views[node].parent
        return node

    def value(self, node: fx.Node, emitter: Emitter) -> Argument:
        """What stands for a value now."""
        if node in self._stale:
            self._stale.discard(node)
            view = self._views[node]
            parent = self.value(view.parent, emitter)
            self.values[node] = _take(view, node, parent, emitter)
        return self.values[node]

    def written(self, step: Step, node: fx.Node, new: Argument, emitter: Emitter) -> None:
        """Let a new value stand for one that a step has written into, and for all that share its memory."""
        tensor = tensor_of(node)
        assert tensor is not None  # only tensors are written into
        fresh = {node}
        self.values[node] = new
        while node in self._views:
            view = self._views[node]
            new = _put_back(view, node, self.value(view.parent, emitter), new, emitter)
            node = view.parent
            self.values[node] = new
            fresh.add(node)
        self._stale |= {other for other in self._groups[_memory(tensor)] if other in self.values}
        self._stale -= fresh


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(step: Step) -> str:
    return str(step.target._schema.name).partition("::")[2]


def _part(view: _View) -> tuple[str, tuple[Any, ...]]:
    """One of several results as a select or a slice: its name and arguments."""
    dim = next((arg for arg in view.step.args[2:3]), view.step.kwargs.get("dim", 0))
    index = view.number or 0
    if _name(view.step) == "unbind":
        dim = next((arg for arg in view.step.args[1:2]), view.step.kwargs.get("dim", 0))
        return "select", (dim, index)
    if _name(view.step) not in ("chunk", "split", "split_with_sizes"):
        raise UnsupportedViewError(view.step)
    sizes = [part.shape[dim] for part in view.step.value]
    start = sum(sizes[:index])
    return "slice", (dim, start, start + sizes[index])


def _take(view: _View, node: fx.Node, parent: Argument, emitter: Emitter) -> Argument:
    """A view taken again."""
    step = view.step
    like = tensor_of(node)
    whole = tensor_of(view.parent)
    assert like is not None and whole is not None  # views are of tensors
    if view.number is not None:
        name, args = _part(view)
        target = "aten.select.int" if name == "select" else "aten.slice.Tensor"
        return emitter.emit(step, target, [parent, *map(emitter.argument, args)], like)
    if _is_same(step, like, whole):
        return parent
    rest = [emitter.argument(arg) for arg in step.args[1:]]
    if step.args[:1] != (view.parent,) or step.kwargs:
        raise UnsupportedViewError(step)
    return emitter.emit(step, str(step.target), [parent, *rest], like)


def _put_back(view: _View, node: fx.Node, whole: Argument, part: Argument, emitter: Emitter) -> Argument:
    """A whole with a part of it replaced."""
    step, like, small = view.step, tensor_of(view.parent), tensor_of(node)
    assert like is not None and small is not None  # views are of tensors
    name, args = (_name(step), step.args[1:]) if view.number is None else _part(view)
    given = [emitter.argument(arg) for arg in args]
    if view.number is None and _is_same(step, small, like):
        return part
    if name in ("select", "slice") and not (view.number is None and step.kwargs):
        return emitter.emit(step, f"aten.{name}_scatter.default", [whole, part, *given], like)
    if name in _RESHAPES:
        return emitter.emit(step, "aten.reshape.default", [part, emitter.shape(like)], like)
    if name in ("transpose", "t"):
        return emitter.emit(step, str(step.target), [part, *given], like)
    if name == "permute":
        order = [dim % like.ndim for dim in args[0]]
        return emitter.emit(
            step, "aten.permute.default", [part, [order.index(d) for d in range(like.ndim)]], like
        )
    raise UnsupportedViewError(step)


def _is_same(step: Step, part: Tensor, whole: Tensor) -> bool:
    """Whether a view shows all of the memory in the same order."""
    if _name(step).endswith("_"):  # a write returns what it wrote into
        return True
    known = (*_SAME, "slice", "expand", "view", "reshape")
    return _name(step) in known and part.shape == whole.shape and part.stride() == whole.stride()
