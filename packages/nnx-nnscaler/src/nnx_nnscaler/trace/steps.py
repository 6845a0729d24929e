"""Flatten an exported program to one list of calls.

torch puts code under another grad mode or autocast into a graph of its own, a region. This module inlines
regions; each step carries the modes of its region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from nnx_core._torch_compat import pytree
from nnx_nnscaler._torch_compat import HigherOrderOperator
from nnx_nnscaler.ir.graph import Argument, Graph, Op, refs_in
from nnx_nnscaler.trace.export import PREFIX

__all__ = [
    "Emitter",
    "Functional",
    "Step",
    "UnknownCallError",
    "UnsupportedViewError",
    "Views",
    "flatten",
    "functional",
    "is_check",
    "is_float",
    "is_random",
    "makes_gradients",
    "module_of",
    "nodes_in",
    "notes_of",
    "prune",
    "same_as",
    "simplified",
    "tensor_of",
    "writes_buffers",
    "written_argument",
]


class UnknownCallError(Exception):
    """The trace has a call that is no tensor operator.

    Attributes:
        node: The node of the call.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.target} cannot be part of a graph")
        self.node = node


@dataclass
class Step:
    """One call.

    Attributes:
        node: torch's node, with its target, value and notes.
        args: The positional arguments; nodes in them belong to other steps or to the program's inputs.
        kwargs: The keyword arguments, likewise.
        frozen: True if autograd does not follow it.
        context: The autocast region around it, as Python code; empty outside of regions.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frozen: bool
    context: str

    @property
    def target(self) -> Any:
        """The called function."""
        return self.node.target

    @property
    def value(self) -> Any:
        """The result for the sample: a fake tensor, a list of them, a number or None."""
        return self.node.meta.get("val")


@dataclass
class _Region:
    frozen: bool
    context: str


def flatten(graph_module: fx.GraphModule, *, frozen: bool = False) -> tuple[list[Step], list[Any]]:
    """Return every call in order, and the program's outputs; `frozen` means that gradients are off."""
    meanings: dict[fx.Node, Any] = {}
    steps: list[Step] = []
    outputs = _walk(graph_module, meanings, steps, _Region(frozen=frozen, context=""))
    return steps, outputs


def _walk(
    owner: fx.GraphModule, meanings: dict[fx.Node, Any], steps: list[Step], region: _Region
) -> list[Any]:
    def meaning(node: fx.Node) -> Any:
        return meanings.get(node, node)

    for node in owner.graph.nodes:
        if node.op == "get_attr":
            meanings[node] = getattr(owner, node.target)
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], meaning))
        elif node.op == "call_function":
            args, kwargs = fx.map_arg(node.args, meaning), fx.map_arg(node.kwargs, meaning)
            inner = _region_of(node, args, region)
            if inner is not None:
                submodule, given, its_region = inner
                places = [place for place in submodule.graph.nodes if place.op == "placeholder"]
                meanings.update(zip(places, given, strict=True))
                meanings[node] = _walk(submodule, meanings, steps, its_region)
            elif node.target is operator.getitem and isinstance(args[0], list):
                meanings[node] = args[0][args[1]]
            else:
                steps.append(Step(node, args, kwargs, region.frozen, region.context))
        elif node.op != "placeholder":
            raise UnknownCallError(node)
    return []


def _region_of(
    node: fx.Node, args: Any, region: _Region
) -> tuple[fx.GraphModule, tuple[Any, ...], _Region] | None:
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        enabled, submodule, *given = args
        return submodule, tuple(given), _Region(frozen=not enabled, context=region.context)
    if name == "wrap_with_autocast":
        kind, dtype, enabled, _, submodule, *given = args
        wanted = f", dtype={dtype}" if enabled and dtype is not None else ""
        context = f'torch.autocast("{kind}"{wanted}, enabled={bool(enabled)})'
        return submodule, tuple(given), _Region(frozen=region.frozen, context=context)
    if isinstance(node.target, HigherOrderOperator):
        raise UnknownCallError(node)
    return None


def nodes_in(*arguments: Any) -> Iterator[fx.Node]:
    """Yield the nodes within nested arguments, in order."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, fx.Node):
            yield leaf


def tensor_of(node: Any) -> Tensor | None:
    """Return the fake tensor of a node; None if it is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def module_of(node: fx.Node) -> str:
    """Return the fully qualified name of a step's submodule."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "").partition("@")[0]
    return str(path).removeprefix(PREFIX).removeprefix(".") if str(path).startswith(PREFIX) else ""


def notes_of(step: Step) -> str | None:
    """Torch's note of the place of a step's call."""
    return step.node.meta.get("stack_trace")


def is_float(value: Any) -> bool:
    """Return True if a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


# `Views` tracks which values of a trace share memory, and how others see a change of one. A graph has no
# writes. A write to a view becomes a new base with the changed elements, and the other views are taken again.
# This section knows torch's view operators, and adds operators through the given builder.


_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
_SAME = ("detach", "alias", "contiguous", "to", "dropout", "lift_fresh", "lift_fresh_copy", "clone")


class UnsupportedViewError(Exception):
    """A write through a view cannot be expressed without a write.

    Attributes:
        step: The view, or the write.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(f"it writes in place through {step.target}")
        self.step = step


class Emitter(Protocol):
    """The builder's interface."""

    def emit(self, step: Step, target: str, args: Sequence[Argument], like: Tensor) -> Argument:
        """Add an operator whose result is like a tensor of the trace; `step` is its origin."""

    def argument(self, value: Any) -> Argument:
        """Convert an argument of the trace to one of the graph."""

    def shape(self, tensor: Tensor) -> list[Argument]:
        """Return a shape as an argument."""


class _View(NamedTuple):
    """The origin of a view: a step, and the index for one of several results."""

    parent: fx.Node
    step: Step
    number: int | None


def written_argument(step: Step) -> int | None:
    """Return the position of the argument that an operator writes to; None if it writes nothing.

    Raises:
        UnsupportedViewError: It writes to another argument than its first, or changes a shape in place.
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
    """The values of one program that share memory.

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
        """Return the value that owns the memory."""
        while node in self._views:
            node = self._views[node].parent
        return node

    def value(self, node: fx.Node, emitter: Emitter) -> Argument:
        """Return the current node of a value."""
        if node in self._stale:
            self._stale.discard(node)
            view = self._views[node]
            parent = self.value(view.parent, emitter)
            self.values[node] = _take(view, node, parent, emitter)
        return self.values[node]

    def written(self, step: Step, node: fx.Node, new: Argument, emitter: Emitter) -> None:
        """Replace a written value by a new one, and all values that share its memory."""
        tensor = tensor_of(node)
        assert tensor is not None  # a write changes tensors only
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
    """Return one of several results as a select or a slice: its name and arguments."""
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
    """Take a view again."""
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
    """Return a base whose elements in a view are replaced."""
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
    """Return True if a view shows all of the memory in the same order."""
    if _name(step).endswith("_"):  # a write returns the tensor that it wrote to
        return True
    known = (*_SAME, "slice", "expand", "view", "reshape")
    return _name(step) in known and part.shape == whole.shape and part.stride() == whole.stride()


# Facts about torch's operators for tracing: those that draw, that write, and that do nothing.


_NO_GRADIENT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "bernoulli", "detach", "detach_", "multinomial",
}  # fmt: skip
_CHECKS = ("_assert", "sym_constrain_range")
# Position of the flag that lets a normalization update its running statistics; the schema does not show it.
_STATISTICS = {"batch_norm": 5, "instance_norm": 5}
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def name_of(target: Any) -> str:
    """Return an operator's name without namespace and overload.

    Example:
        >>> name_of(torch.ops.aten.add.Tensor)
        'add'
    """
    return str(target).split(".")[1]


def is_check(step: Step) -> bool:
    """Return True if a step only checks something that the trace has settled."""
    return str(step.target).startswith(tuple(f"aten.{name}" for name in _CHECKS))


def is_random(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator advances the random state, so that it must stay."""
    namespace, name, overload = target.split(".")
    if namespace == "aten" and name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if namespace == "aten" and name in _DROPOUTS:
        return bool(args[2] and args[1])
    if namespace == "aten" and name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return False  # if it has dropout between layers, its result is used anyway
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return any(tag.name == "nondeterministic_seeded" for tag in found.tags)


def makes_gradients(target: str) -> bool:
    """Return True if results of an operator are connected with its operands for autograd."""
    return name_of(target) not in _NO_GRADIENT


def writes_buffers(step: Step) -> bool:
    """Return True if an operator updates buffers although its schema does not say so."""
    flag = _STATISTICS.get(name_of(step.target))
    return flag is not None and step.args[3] is not None and bool(step.args[flag])


def same_as(step: Step, *, differentiable: bool) -> fx.Node | None:
    """Return the operand that a step only passes on; None if it does something."""
    name = name_of(step.target)
    if not step.args or not isinstance(step.args[0], fx.Node):
        return None
    source, made = tensor_of(step.args[0]), tensor_of(step.node)
    if source is None or made is None:
        return None
    if name in ("detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy"):
        same = not (differentiable and name.startswith("detach"))
    elif name in _DROPOUTS:
        same = not (step.args[2] and step.args[1])
    elif name == "to":
        # A conversion to the same floating point dtype may be a real one under autocast.
        integral = source.dtype == made.dtype and not made.dtype.is_floating_point
        same = integral and source.device == made.device and not _asks_for_copy(step)
    else:
        same = name == "slice" and _same_size(source, made)
    return step.args[0] if same else None


def _asks_for_copy(step: Step) -> bool:
    return any(
        argument.name == "copy" and _given(step, position, argument.name)
        for position, argument in enumerate(step.target._schema.arguments)
    )


def _given(step: Step, position: int, name: str) -> Any:
    return step.args[position] if position < len(step.args) else step.kwargs.get(name)


def _same_size(source: Tensor, made: Tensor) -> bool:
    return [str(dim) for dim in source.shape] == [str(dim) for dim in made.shape] and (
        [str(dim) for dim in source.stride()] == [str(dim) for dim in made.stride()]
    )


def simplified(step: Step) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a call without redundant arguments, and conversions as ``aten.to.dtype``."""
    kwargs = {name: value for name, value in step.kwargs.items() if value is not None}
    if kwargs.get("layout") == torch.strided:
        del kwargs["layout"]
    if not kwargs.get("pin_memory", True):
        del kwargs["pin_memory"]
    source, made = tensor_of(step.args[0]) if step.args else None, tensor_of(step.node)
    moved = ("aten.to.dtype_layout", "aten.to.device", "aten.to.other")
    if str(step.target) in moved and source is not None and made is not None and source.device == made.device:
        return "aten.to.dtype", (step.args[0], made.dtype), {}
    return str(step.target), step.args, kwargs


class Functional(NamedTuple):
    """The operator that computes the value after a write.

    Attributes:
        target: The operator.
        args: The arguments; the first is the written tensor, if the operator takes it.
        kwargs: The keyword arguments.
        dtype: The dtype that the result must be converted to; None if it has the dtype already.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None


def functional(step: Step) -> Functional:
    """Return the operator that computes the same value without a write.

    Raises:
        UnsupportedViewError: No such operator is known.
    """
    name = name_of(step.target)[:-1]
    overload = str(step.target).split(".")[2]
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None) or getattr(packet, "default", None)
    if found is None or found._schema.is_mutable:
        raise UnsupportedViewError(step)
    return Functional(str(found), step.args, step.kwargs, _converted(step))


def _converted(step: Step) -> torch.dtype | None:
    """Return the dtype of the written tensor, if other operands would promote it."""
    own = tensor_of(step.args[0])
    others = [tensor_of(arg) for arg in step.args[1:]]
    differs = any(other is not None and own is not None and other.dtype != own.dtype for other in others)
    return own.dtype if own is not None and differs and own.dtype.is_floating_point else None


# Remove unused operators, except those that draw random numbers or change a buffer.


def prune(graph: Graph, lasting: set[str]) -> None:
    """Drop operators with unused results, then unused parameters, buffers and constants.

    Args:
        graph: The graph, changed in place.
        lasting: The names of operators that change a buffer, which stay.
    """
    needed = set(refs_in(graph.outputs))
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in needed or op.name in lasting or op.target == "module" or _draws(op):
            ops.append(op)
            needed |= set(op.operands())
    graph.ops = ops[::-1]
    for values in (graph.parameters, graph.buffers, graph.constants):
        for name in [name for name in values if name not in needed]:
            del values[name]
    inputs = {leaf.name for leaf in graph.inputs}
    for name in [name for name in graph.metas if name not in needed and name not in inputs]:
        del graph.metas[name]


def _draws(op: Op) -> bool:
    return op.target not in ("getitem", "module") and is_random(op.target, op.args, op.kwargs)
