"""An exported program as one flat list of calls.

Owns the inlining of regions: torch puts what runs under another grad mode or autocast into a graph of its
own. A step carries what its region said instead.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nnx_nnscaler.trace.export import PREFIX

__all__ = [
    "Step",
    "UnknownCallError",
    "flatten",
    "is_float",
    "module_of",
    "nodes_in",
    "notes_of",
    "tensor_of",
]


class UnknownCallError(Exception):
    """A call in a trace that is no tensor operator.

    Attributes:
        node: Where.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.target} cannot be part of a graph")
        self.node = node


@dataclass
class Step:
    """One call.

    Attributes:
        node: torch's node, for its target, value and notes.
        args: Positional arguments; nodes in them are those of other steps or of the program's inputs.
        kwargs: Keyword arguments likewise.
        frozen: Whether autograd does not follow it.
        context: The autocast region that it is in, as Python code; empty outside of any.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frozen: bool
    context: str

    @property
    def target(self) -> Any:
        """What is called."""
        return self.node.target

    @property
    def value(self) -> Any:
        """What it made for the sample: a fake tensor, a list of them, a number or None."""
        return self.node.meta.get("val")


@dataclass
class _Region:
    frozen: bool
    context: str


def flatten(graph_module: fx.GraphModule, *, frozen: bool = False) -> tuple[list[Step], list[Any]]:
    """Every call in order, and what the program returns; `frozen` says that gradients were not recorded."""
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
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise UnknownCallError(node)
    return None


def nodes_in(*arguments: Any) -> Iterator[fx.Node]:
    """Nodes within nested arguments, in order."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, fx.Node):
            yield leaf


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor that a node stands for; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def module_of(node: fx.Node) -> str:
    """Fully qualified name of the submodule that a step belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "").partition("@")[0]
    return str(path).removeprefix(PREFIX).removeprefix(".") if str(path).startswith(PREFIX) else ""


def notes_of(step: Step) -> str | None:
    """What torch noted of where a step was called."""
    return step.node.meta.get("stack_trace")


def is_float(value: Any) -> bool:
    """Whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
